#!/bin/bash
# The arena's tables at size, on one GPU (docs/arena.md): who answers at equal tokens.
#
#   bench/arena_gpu.sh --model MODEL --out FOLDER [STEP…]
#
# Steps, all of them unless some are named, in the order of their worth:
#   samples      needles of 4k and 32k (single_2, multikey_2) as tokens  (--phsa PROGRAM, --haystack TEXT; any machine)
#   niah-32k     1, 3 and 10 %, answers by rules over a dense prefill
#   niah-4k      K = 1, 2, 4, 8, 16, the same
#   multikey     multikey_2 at 4k, 3 and 10 %
#   both         PHSA and InfLLM v2 in prefill and answer, 32k; rules for the prefill alone
#   sampler      MagicPIG, whose tables take longest, 32k
#   perplexity   prose and code at 32k, 3 and 10 %                       (--prose FILE, --code FILE)
#   longbench    dense, InfLLM v2, PHSA as the paper has it, PHSA with parts  (--longbench FOLDER)
#   report       FOLDER/report.html and FOLDER/tables.md
#
# What a step was stopped in goes on when it is started again; --limit (seconds, 540) stops a step by itself.
# --calibration is a text that is in no task. --samples is the number of needles (100), --quick a run of minutes on a
# CPU that tries all steps. --python must have torch and transformers, and gguf where MODEL is a .gguf file; which
# tokens are punctuation comes from the needles' files, so that libphsa is not needed.
set -euo pipefail
cd "$(dirname "$0")/.."

model='' out='' phsa='' python=python3 limit=540 samples=100 prose='' code='' longbench='' dtype=bfloat16 device=''
haystack=../shared/data/haystack_en.txt calibration=bench/data/from_sand_hill_to_pine.txt quick=''
steps=()
while [[ $# -gt 0 ]]; do
  case $1 in
    --quick) quick=1 && shift ;;
    --model | --out | --phsa | --python | --limit | --samples | --prose | --code | --longbench | --haystack | --dtype \
      | --calibration | --device)
      [[ $# -gt 1 ]] || { echo "$1 needs a value" >&2 && exit 2; }
      name=${1#--}
      printf -v "$name" %s "$2"
      shift 2
      ;;
    -*) echo "unknown: $1; the head of $0 says what there is" >&2 && exit 2 ;;
    *) steps+=("$1") && shift ;;
  esac
done
[[ -n $model && -n $out ]] || { echo "--model and --out are needed" >&2 && exit 2; }
[[ ${#steps[@]} -gt 0 ]] ||
  steps=(samples niah-32k niah-4k multikey both sampler perplexity longbench report)
mkdir -p "$out"
export PYTHONPATH="python${PYTHONPATH:+:$PYTHONPATH}"

short=4k long=32k length=32768 scored=256 cut=31500 texts=10 rows=() train=(--calibration-tokens 4096)
if [[ -n $quick ]]; then
  short=1k long=1k length=768 scored=32 cut=600 texts=1 samples=1 rows=(--samples 1)
  train=(--calibration-tokens 128 --hash-steps 2)
fi
phsas=phsa,phsa:parts=2,phsa:parts=4,phsa:parts=8,phsa:parts=8:split=narrow,phsa:split=narrow
published=infllm2,infllm2-64,streaming,sepllm,h2o,snapkv,nsa,moba,quest,quest:group=sum
tokens=double-sparsity,clusterkv,hashattention,twilight,oracle,oracle:unit=16
answers=$phsas,$published,$tokens

table() {
  local step=$1 status=0 begin=$SECONDS
  shift
  timeout --signal INT --kill-after 30 "$limit" "$python" -m phsa.arena table --model "$model" --dtype "$dtype" \
    ${device:+--device "$device"} --punctuation-from "$out/single_2-$short.jsonl" --calibration "$calibration" \
    "${train[@]}" --out "$out/$step.jsonl" "$@" \
    > >(tee "$out/$step.log") || status=$?
  echo "$step: status $status after $((SECONDS - begin)) s" | tee -a "$out/steps.log"
}

export_samples() {
  [[ -n $phsa ]] || { echo "samples: --phsa is needed" >&2 && return 1; }
  local task length
  for task in single_2 multikey_2; do
    for length in "$short" "$long"; do
      "$phsa" niah -m "$model" --forced --attention dense,phsa --punctuation en+zh --task "$task" --lengths "$length" \
        --haystack "$haystack" --samples "$samples" --export "$out/$task-$length.jsonl"
    done
  done
}

for step in "${steps[@]}"; do
  case $step in
    samples) export_samples ;;
    niah-32k)
      table niah-32k --niah "$out/single_2-$long.jsonl" --samples "$samples" --budget 0.01,0.03,0.1 \
        --rules "$answers" ;;
    niah-4k)
      table niah-4k --niah "$out/single_2-$short.jsonl" --samples "$samples" -K 1,2,4,8,16 --rules "$answers" ;;
    multikey)
      table multikey --niah "$out/multikey_2-$short.jsonl" --samples "$samples" --budget 0.03,0.1 --rules "$answers" ;;
    both)
      table both --niah "$out/single_2-$long.jsonl" --samples "$samples" --budget 0.03,0.1 --phases both \
        --rules phsa,phsa:parts=8:split=narrow,infllm2,minference,xattention,flexprefill ;;
    sampler)
      table sampler --niah "$out/single_2-$long.jsonl" --samples "$samples" --budget 0.01,0.03,0.1 \
        --rules magicpig,phsa:parts=8 ;;
    perplexity)
      [[ -n $prose && -n $code ]] || { echo "perplexity: --prose and --code are needed" >&2 && continue; }
      table perplexity --perplexity "prose=$prose" --perplexity "code=$code" --length "$length" --scored "$scored" \
        --samples "$texts" --budget 0.03,0.1 --rules "$answers" ;;
    longbench)
      [[ -n $longbench ]] || { echo "longbench: --longbench is needed" >&2 && continue; }
      table longbench --longbench "$longbench" --max-length "$cut" "${rows[@]}" --budget 0.03 --phases both \
        --rules infllm2,phsa,phsa:parts=8:split=narrow ;;
    report)
      files=()
      for step in niah-32k niah-4k multikey both sampler perplexity longbench; do
        [[ ! -s $out/$step.jsonl ]] || files+=("$out/$step.jsonl")
      done
      "$python" -m phsa.arena report "${files[@]}" --html "$out/report.html"
      "$python" -m phsa.arena report "${files[@]}" > "$out/tables.md"
      echo "$out/report.html"
      ;;
    *) echo "no step: $step; the head of $0 says what there is" >&2 && exit 2 ;;
  esac
done
