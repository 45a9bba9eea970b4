#!/bin/bash
# Runs every fuzzer of a build for some seconds, from the seeds in fuzz/corpus. What it finds new stays in the build
# folder; a crash leaves its input there and fails.
#
#   scripts/run-fuzzers.sh build/fuzz 5
set -euo pipefail
cd "$(dirname "$0")/.."

build=$1
seconds=$2
for fuzzer in "$build"/bin/fuzz_*; do
  name=$(basename "$fuzzer")
  found=$build/corpus/${name#fuzz_}
  mkdir -p "$found"
  echo "phsa: $name, $seconds seconds"
  "$fuzzer" -max_total_time="$seconds" -timeout=5 -rss_limit_mb=2048 -verbosity=0 -print_final_stats=1 \
    -artifact_prefix="$build/$name-" "$found" "fuzz/corpus/${name#fuzz_}"
done
