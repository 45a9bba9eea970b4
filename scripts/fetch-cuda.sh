#!/bin/bash
# Puts what of CUDA phsa is built with (nvcc, the run time, cuBLASLt) into a folder, from the Python packages of NVIDIA
# that packages/python.txt names "cuda". Does nothing where the folder has an nvcc.
#
#   scripts/fetch-cuda.sh /usr/local/cuda && PATH=/usr/local/cuda/bin:$PATH cmake --preset release -DPHSA_CUDA=ON
set -euo pipefail
cd "$(dirname "$0")/.."

folder=$1
[[ -x $folder/bin/nvcc ]] && exit 0

wanted=()
while read -r package _ only; do
  [[ $only == cuda ]] && wanted+=("$package")
done <packages/python.txt
rm -rf "$folder.part"
python3 -m pip install --disable-pip-version-check --progress-bar off --no-deps --target "$folder.part" "${wanted[@]}" </dev/null
mv "$folder.part"/nvidia/cu13 "$folder"
rm -rf "$folder.part"
# CMake and nvcc look for the libraries here, and link with names that have no version.
ln -sfn lib "$folder/lib64"
for library in cudart cublasLt; do ln -sf "lib$library.so.13" "$folder/lib/lib$library.so"; done
