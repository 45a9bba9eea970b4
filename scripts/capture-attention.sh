#!/bin/sh
# What the CPU engine's attention read and chose in some layers of a model, for tests/cuda/test_agreement.py:
#   scripts/capture-attention.sh MODEL TOKENS LAYERS OUT      e.g. smollm2.gguf 2048 0,15,29 build/captures/smollm2
# writes OUT-LAYER.safetensors. PHSA_BIN_DIR has `phsa` and `capture_of` (default: build/release/bin).
set -eu
cd "$(dirname "$0")/.."
[ $# = 4 ] || { sed -n '2,5s/^# //p' "$0" >&2; exit 2; }
bin=${PHSA_BIN_DIR:-build/release/bin}
mkdir -p "$(dirname "$4")"
{
  "$bin/phsa" punctuation "$1" --set en --ids
  "$bin/phsa" tokenize "$1" -f bench/data/from_sand_hill_to_pine.txt --ids --no-special
} | awk -v tokens="$2" '
  NR == 1 { for (i = 1; i <= NF; ++i) flag[$i] = 1; next }
  { for (i = 1; i <= NF && n < tokens; ++i) { print $i, ($i in flag) ? 1 : 0; ++n } }' |
  "$bin/capture_of" "$1" bf16 bf16 "${PHSA_CHUNK:-512}" "${THREADS:-2}" "$3" 8 16 128 "$4"
