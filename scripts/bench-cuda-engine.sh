#!/bin/bash
# Measures the engine on this machine's GPU: speed against transformers, agreement with the CPU, needles in full. What
# docs/results.md has comes from here.
#
#   scripts/bench-cuda-engine.sh --phsa PROGRAM --out FOLDER [--qwen MODEL] [--smollm2 MODEL] [STEP…]
#
# Steps, all of them unless some are named:
#   random       speed of a random-weight model of Qwen3-0.6B's shape, with one text of a million tokens
#   qwen         speed of Qwen2.5-Coder-1.5B                             (--qwen: a .gguf file or a folder)
#   agreement    log-probabilities, answers and chosen blocks, GPU against CPU, of the models given
#   tune         needles on other samples, on which λ is chosen          (--qwen)
#   niah-4k      single_2, 500 samples, every λ                          (--qwen)
#   niah-16k, niah-32k   single_2, 200 samples, every λ                  (--qwen)
#   niah-tasks   the other tasks at 4k, 100 samples each, the chosen λ   (--qwen)
#   niah-small   single_2 at 4k, 500 samples, without and with the adapter   (--smollm2)
#   sanitizer    compute-sanitizer over a short run, where it is installed   (--smollm2)
#   tables       what there is, as text: FOLDER/tables.md
#
# A step that is stopped, also by its --limit (seconds; 3600), goes on where it was when the script is started again.
# --lambdas, --top-ks and --samples (of 16k and 32k) make less of it. --python must have torch and transformers.
# Flags of the program must not be set in the environment (PHSA_OUT and the like).
set -euo pipefail
cd "$(dirname "$0")/.."

phsa='' out='' qwen='' smollm2='' python=python3 device=cuda limit=3600 samples=200
lambdas=0.75,0.9,0.95 top_ks=1,2,4,8,16 million=1048576
all=dense,infllm2,phsa
other_tasks=single_1,single_3,multikey_1,multikey_2,multikey_3,multivalue,multiquery
adapter=models/smollm2-135m-phsa
haystack=../shared/data/haystack_en.txt
steps=()
while [[ $# -gt 0 ]]; do
  case $1 in
    --phsa | --out | --qwen | --smollm2 | --python | --device | --limit | --samples | --lambdas | --top-ks | --million \
      | --adapter | --haystack)
      [[ $# -gt 1 ]] || { echo "$1 needs a value" >&2 && exit 2; }
      name=${1#--}
      printf -v "${name//-/_}" %s "$2"
      shift 2
      ;;
    -*) echo "unknown: $1; the head of $0 says what there is" >&2 && exit 2 ;;
    *) steps+=("$1") && shift ;;
  esac
done
[[ -n $phsa && -n $out ]] || { echo "--phsa and --out are needed" >&2 && exit 2; }
[[ ${#steps[@]} -gt 0 ]] ||
  steps=(random qwen agreement tune niah-4k niah-tasks niah-16k niah-32k niah-small sanitizer tables)
mkdir -p "$out"
failed=()

# attempt STEP COMMAND…: the command under the step's limit; what it prints stays in FOLDER/STEP.log.
attempt() {
  local step=$1 status=0 begin=$SECONDS
  shift
  timeout --kill-after 30 "$limit" "$@" > >(tee "$out/$step.log") 2> >(tee "$out/$step.err" >&2) || status=$?
  echo "$step: status $status after $((SECONDS - begin)) s" | tee -a "$out/steps.log"
  [[ $status = 0 ]] || failed+=("$step")
}

speed() {
  local step=$1
  shift
  attempt "$step" "$python" bench/cuda/engine_bench.py --phsa "$phsa" --out "$out/speed.jsonl" --work "$out" \
    --device "$device" --batches 1,8,16 "$@"
}

# niah STEP MODEL POLICIES λS FLAG…: the file is FOLDER/STEP.jsonl.
niah() {
  local step=$1 model=$2 policies=$3 weights=$4
  shift 4
  [[ -n $model ]] || { echo "$step: skipped, its model was not given" && return; }
  local text=()
  if [[ -e $haystack ]]; then text=(--haystack "$haystack"); else echo "$step: no $haystack, the program's own text"; fi
  attempt "$step" "$phsa" niah -m "$model" --device "$device" --chunk 32768 --out "$out/$step.jsonl" "${text[@]}" \
    --attention "$policies" -K "$top_ks" --lambda "$weights" --punctuation en "$@"
}

# Whether a file has more than its first line, which says how it was made.
has_samples() { [[ -e $out/$1.jsonl && $(wc -l <"$out/$1.jsonl") -gt 1 ]]; }

chosen_lambda() { "$python" bench/niah_tables.py --phsa "$phsa" --tune "$out/tune.jsonl"; }

tables() {
  local sections=() tune=()
  add() { if has_samples "$2"; then sections+=("$1=$out/$2.jsonl"); fi; }
  add "Qwen2.5-Coder-1.5B, 4k" niah-4k
  add "Qwen2.5-Coder-1.5B, 16k" niah-16k
  add "Qwen2.5-Coder-1.5B, 32k" niah-32k
  add "Qwen2.5-Coder-1.5B, other tasks" niah-tasks
  add "SmolLM2-135M" niah-small
  add "SmolLM2-135M with its adapter" niah-small-adapter
  if has_samples tune; then tune=(--tune "$out/tune.jsonl"); fi
  if [[ -s $out/speed.jsonl ]]; then "$python" bench/cuda/engine_bench.py --out "$out/speed.jsonl" --table; fi
  for log in "$out"/agreement-*.log; do
    if [[ -e $log ]]; then echo && grep '^|' "$log"; fi
  done
  echo
  if [[ ${#sections[@]} -gt 0 ]]; then
    "$python" bench/niah_tables.py --phsa "$phsa" --goals "${tune[@]}" "${sections[@]}"
  fi
}

for step in "${steps[@]}"; do
  echo "== $step"
  case $step in
    random) speed random --random --long "$million" ;;
    qwen)
      if [[ -n $qwen ]]; then speed qwen --model "$qwen"; else echo "skipped: no --qwen"; fi
      ;;
    agreement)
      for model in "$smollm2" "$qwen"; do
        [[ -n $model ]] || continue
        attempt "agreement-$(basename "$model")" "$python" bench/cuda/engine_agreement.py --phsa "$phsa" \
          --model "$model" --device "$device"
      done
      ;;
    tune) niah tune "$qwen" phsa "$lambdas" --forced --lengths 4k --samples 200 --seed 2 --batch 32 ;;
    niah-4k) niah "$step" "$qwen" "$all" "$lambdas" --forced --lengths 4k --samples 500 --batch 32 ;;
    niah-16k) niah "$step" "$qwen" "$all" "$lambdas" --forced --lengths 16k --samples "$samples" --batch 8 ;;
    niah-32k) niah "$step" "$qwen" "$all" "$lambdas" --forced --lengths 32k --samples "$samples" --batch 4 ;;
    niah-tasks)
      if ! has_samples tune; then echo "skipped: the step tune chooses its λ" && continue; fi
      weight=$(chosen_lambda)
      niah "$step" "$qwen" "$all" "$weight" --task "$other_tasks" --lengths 4k --samples 100 --batch 100
      ;;
    niah-small)
      small=(--forced --lengths 4k --samples 500 --batch 32)
      niah "$step" "$smollm2" "$all" "$lambdas" "${small[@]}"
      niah "$step-adapter" "$smollm2" "$all" "$lambdas" "${small[@]}" --adapter "$adapter"
      ;;
    sanitizer)
      if [[ -z $smollm2 ]] || ! command -v compute-sanitizer >/dev/null; then
        echo "skipped: no --smollm2, or no compute-sanitizer" && continue
      fi
      attempt sanitizer compute-sanitizer --error-exitcode 1 "$phsa" run -m "$smollm2" --device "$device" --raw \
        -f bench/data/lighthouse.txt -p "The tower is" -n 8 --temp 0 --attention phsa -K 2 --init 16 --local 64
      ;;
    tables) tables >"$out/tables.md" && cat "$out/tables.md" ;;
    *) echo "no such step: $step" >&2 && exit 2 ;;
  esac
done
if [[ ${#failed[@]} -gt 0 ]]; then
  echo "not done: ${failed[*]}; the same command goes on with them" >&2
  exit 1
fi
