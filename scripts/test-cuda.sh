#!/bin/sh
# Builds the CUDA kernels into one shared library and runs all their tests on this machine's GPU.
#   scripts/test-cuda.sh            build, then test
#   scripts/test-cuda.sh --build    build only
#   scripts/test-cuda.sh --bench    build, test, then time forward, decode and backward against dense attention
# The last line counts all tests: "CUDA tests: N passed, M failed, K skipped".
# PHSA_CAPTURES names a folder of what the CPU engine's attention read and chose (scripts/capture-attention.sh).
# PHSA_BIN_DIR names the folder of a `phsa` with CUDA in it: then the whole engine is tested too, against the CPU.
# PHSA_CUDA_ARCHES names the targets (default: 90a, and 80 as the plain path for other GPUs).
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
nvcc=${NVCC:-nvcc}
build=build/cuda
mkdir -p "$build"

arches=${PHSA_CUDA_ARCHES:-"90a 80"}
targets=
for arch in $arches; do
  targets="$targets -gencode=arch=compute_$arch,code=sm_$arch"
done

# One object per source, several at a time; a source is compiled again only when it or a header is newer.
for source in src/attention/cuda/*.cu src/ops/cuda/*.cu; do
  object=$build/$(basename "$source" .cu).o
  if [ -n "$(find src/attention/cuda src/ops/cuda \( -name '*.cuh' -o -name '*.h' \) -newer "$object" 2>/dev/null)" ] ||
     [ ! -e "$object" ] || [ "$source" -nt "$object" ]; then
    echo "$nvcc -std=c++20 -O3 --expt-relaxed-constexpr $targets -Xcompiler -fPIC,-Wall,-Wextra" \
         "-Iinclude -Isrc -c $source -o $object"
  fi
done | xargs -r -P "${JOBS:-2}" -I{} sh -c '{}'
# shellcheck disable=SC2086
"$nvcc" -shared -o "$build/libphsa_cuda_kernels.so" $(ls "$build"/*.o)
# What takes the GPU away from the engine in its tests.
# shellcheck disable=SC2086
if [ ! -e "$build/libbreak_device.so" ] || [ tests/cuda/break_device.cu -nt "$build/libbreak_device.so" ]; then
  "$nvcc" -std=c++20 -O1 $targets -Xcompiler -fPIC -shared tests/cuda/break_device.cu -o "$build/libbreak_device.so"
fi
[ "${1:-}" = --build ] && exit 0

# The tests are programs too: a GPU machine may have torch and no pytest. All of them run, whatever fails.
export PHSA_CUDA_KERNELS="$build/libphsa_cuda_kernels.so" PHSA_CUDA_LIBRARY="$build/libphsa_cuda_kernels.so"
PHSA_TEST_COUNTS=$(mktemp)
export PHSA_TEST_COUNTS
failed=
for test in tests/cuda/test_*.py; do
  echo "$test"
  before=$(wc -l < "$PHSA_TEST_COUNTS")
  status=0
  "$python" "$test" || status=$?
  [ "$status" = 0 ] || failed="$failed $(basename "$test")"
  # One that ended without counting its tests has failed as a whole.
  [ "$(wc -l < "$PHSA_TEST_COUNTS")" -gt "$before" ] || echo "0 1 0" >> "$PHSA_TEST_COUNTS"
done
awk '{ passed += $1; failed += $2; skipped += $3 }
     END { printf "CUDA tests: %d passed, %d failed, %d skipped\n", passed, failed, skipped }' "$PHSA_TEST_COUNTS"
rm -f "$PHSA_TEST_COUNTS"
if [ -n "$failed" ]; then
  echo "failed:$failed"
  exit 1
fi
if [ "${1:-}" = --bench ]; then
  "$python" bench/cuda/bench_forward.py
  "$python" bench/cuda/bench_decode_backward.py
fi
