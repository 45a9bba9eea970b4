#!/bin/bash
# Runs every fuzzer of a build for some seconds, from the seeds in fuzz/corpus and what long runs found
# (fuzz/found.tar.gz, minimised), as many at a time as there are cores (or JOBS). What it finds new stays in the build
# folder; a crash leaves its input there, shows its report and fails.
#
#   scripts/run-fuzzers.sh build/asan 5
set -euo pipefail
cd "$(dirname "$0")/.."

export build=$1 seconds=$2
mkdir -p "$build/corpus"
tar -xzf fuzz/found.tar.gz -C "$build/corpus" --strip-components=1
run_one() {
  local name=$1
  local found=$build/corpus/${name#fuzz_} log=$build/$name.log
  mkdir -p "$found"
  if ! "$build/bin/$name" -max_total_time="$seconds" -timeout=5 -rss_limit_mb=2048 -verbosity=0 -print_final_stats=1 \
    -artifact_prefix="$build/$name-" "$found" "fuzz/corpus/${name#fuzz_}" >"$log" 2>&1; then
    echo "phsa: $name failed:"
    cat "$log"
    return 255 # xargs starts no further one
  fi
  echo "phsa: $name, $(sed -n 's/^stat::number_of_executed_units: *//p' "$log") inputs in $seconds seconds"
}
export -f run_one
find "$build/bin" -name 'fuzz_*' -type f -printf '%f\n' | sort | xargs -P "${JOBS:-$(nproc)}" -I{} bash -c 'run_one {}'
