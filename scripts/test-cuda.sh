#!/bin/sh
# Builds the CUDA kernels into one shared library and runs all their tests on this machine's GPU.
#   scripts/test-cuda.sh            build, then test
#   scripts/test-cuda.sh --build    build only
#   scripts/test-cuda.sh --sanitize build, then some tests of each kernel under compute-sanitizer (memcheck, racecheck)
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

# One object per source, and per head size where a source is compiled for each; several at a time. What is newer than
# its object, or has a newer header, is compiled again.
dims=$(sed -n 's/^#define PHSA_CUDA_HEAD_DIMS(X)//p' src/attention/cuda/limits.h | tr -cs 0-9 ' ')
compile() {  # source, object, flags
  if [ ! -e "$2" ] || [ -n "$(find "$1" src/attention/blocks.h src/attention/cuda src/ops/cuda \
      \( -samefile "$1" -o -name '*.cuh' -o -name '*.h' \) -newer "$2" 2>/dev/null)" ]; then
    echo "$nvcc -std=c++20 -O3 --expt-relaxed-constexpr $targets -Xcompiler -fPIC,-Wall,-Wextra $3" \
         "-Iinclude -Isrc -c $1 -o $2"
  fi
}
objects=
for source in src/attention/cuda/*.cu src/ops/cuda/*.cu; do
  name=$(basename "$source" .cu)
  if grep -q PHSA_HEAD_DIM "$source"; then
    for dim in $dims; do objects="$objects $build/$name-$dim.o"; done
  else
    objects="$objects $build/$name.o"
  fi
done
for object in $objects; do
  name=$(basename "$object" .o)
  dim=${name##*-}
  flags=
  [ "$dim" = "$name" ] || flags=-DPHSA_HEAD_DIM=$dim
  for source in "src/attention/cuda/${name%-"$dim"}.cu" "src/attention/cuda/$name.cu" "src/ops/cuda/$name.cu"; do
    [ ! -e "$source" ] || compile "$source" "$object" "$flags"
  done
done | xargs -r -P "${JOBS:-2}" -I{} sh -c '{}'
# shellcheck disable=SC2086
"$nvcc" -shared -o "$build/libphsa_cuda_kernels.so" $objects
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
if [ "${1:-}" = --sanitize ]; then
  # Both paths (a test runs for each architecture of the machine), each head size once, a page table, several parts.
  status=0
  sanitized() {  # tool, test, patterns
    tool=$1 test=$2
    shift 2
    echo "compute-sanitizer --tool $tool $test"
    compute-sanitizer --tool "$tool" --error-exitcode 9 "$python" "tests/cuda/$test" "$@" || status=1
  }
  for tool in memcheck racecheck; do
    sanitized $tool test_forward.py 'bfloat16 parts_8_pages' 'bfloat16 parts_8_group_1' 'float16 group_7_parts_2' \
      'bfloat16 dim_80_parts_4' 'bfloat16 dim_96_parts_8' 'bfloat16 dim_256_paper' 'bfloat16 window_of_17' \
      'bfloat16 dense_sinks'
    sanitized $tool test_decode_backward.py 'repeats_its_bits parts_4 ' 'repeats_its_bits parts_8_contiguous' \
      'repeats_its_bits dim_256_parts_2' 'repeats_its_bits window_of_17' 'autograd_and_repeats_its_bits packed' \
      'autograd_and_repeats_its_bits each_head_64' 'plain_backward_matches_autograd packed'
  done
  exit $status
fi

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
