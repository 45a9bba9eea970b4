#!/bin/bash
# Builds the tests of the kernels for 64-bit Arm and runs them under qemu, where they choose NEON.
#
#   scripts/test-neon.sh [a flag of GoogleTest, as --gtest_filter='*Dense*']
#
# The libraries for Arm are Debian's, from the mirrors that apt knows, unpacked into build/neon/sysroot: nothing of
# another architecture is installed on this machine.
set -euo pipefail
cd "$(dirname "$0")/.."

build=build/neon
sysroot=$PWD/$build/sysroot
tests=(reference_test dtype_test ops_test attention_test)
# Of the group build, the libraries.
needed=$(awk '/ build/ && $1 ~ /-dev$/ && $1 != "python3-dev" { print $1 }' packages/debian.txt | paste -sd,)
stamp=$sysroot/phsa-packages-$(sha256sum packages/debian.txt | cut -c1-16)

if ! [[ -e $stamp ]]; then
  echo "phsa: unpacking the libraries for Arm into $build/sysroot"
  rm -rf "$sysroot"
  mkdir -p "$build"
  scripts/debian-root.sh "$sysroot" --variant=extract --architectures=arm64 --include="$needed,libc6-dev,libstdc++-12-dev"
  touch "$stamp"
fi

cmake -G Ninja -S . -B "$build" -DCMAKE_BUILD_TYPE=Release -DPHSA_WERROR=ON -DPHSA_BENCH=OFF \
  -DCMAKE_TOOLCHAIN_FILE=cmake/aarch64.cmake -DPHSA_ARM_SYSROOT="$sysroot"
cmake --build "$build" --target "${tests[@]}"

# Tests run on every target that there is; one that is named and is not there is an error.
export PHSA_TARGET=neon
for test in "${tests[@]}"; do
  echo "== $test, NEON under qemu-aarch64"
  qemu-aarch64 -L "$sysroot" "$build/bin/$test" --gtest_brief=1 "$@"
done
