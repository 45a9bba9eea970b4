#!/bin/bash
# A small model answers questions about a long text with dense attention, InfLLM v2 and PHSA, and all three are compared
# on this machine, with the program that was built into the folder given. --model takes another packaged model; more flags
# go to `phsa compare`.
#
#   scripts/demo.sh build/release/bin --quick
#   scripts/demo.sh build/release/bin --model qwen2.5-coder-0.5b --sections answers
set -euo pipefail
cd "$(dirname "$0")/.."

phsa=$1/phsa
shift
model=smollm2-135m
if [[ ${1:-} == --model ]]; then
  model=$2
  shift 2
fi
# Only this model has an adapter that was trained for it.
adapter=()
[[ $model != smollm2-135m ]] || adapter=(--adapter models/smollm2-135m-phsa)
# Short needles and one run of each speed: from nothing to the report it should take minutes.
[[ $# -gt 0 ]] || set -- --niah-lengths 2k --samples 8 --repetitions 1
book=bench/data/from_sand_hill_to_pine.txt
page=bench/data/lighthouse.txt
text=demo/text.txt

"$phsa" models fetch "$model"

# Pages of a novel with a page about a lighthouse among them: its first half lies in the middle, its second at the end.
mkdir -p demo
{
  sed -n 18,50p "$book"
  echo
  head -n 7 "$page"
  echo
  sed -n 51,65p "$book"
  echo
  tail -n 3 "$page"
} >"$text"

compare=("$phsa" compare -m "$model" "${adapter[@]}" --attention "dense,infllm2,phsa" -f "$text"
  -p "Who built the lighthouse?" --expect "Clara Voss"
  -p "In which year was the lighthouse built?" --expect "1868"
  -p "What did the town give to Mary Ellison?" --expect "silver watch"
  --out demo "$@")
echo
echo "== $model reads $(wc -w <"$text") words and answers, three times; then speed, needles, perplexity and recall are measured"
if [[ ${#adapter[@]} -gt 0 ]]; then time="two or three minutes on two cores"; else time="--sections answers asks the questions only"; fi
echo "   ($time; Ctrl-C ends it with a report of what is done)"
printf "\$"
for word in "${compare[@]}"; do
  if [[ $word =~ ^[A-Za-z0-9_./,=-]+$ ]]; then printf " %s" "$word"; else printf " %s" "${word@Q}"; fi
done
printf "\n\n"
"${compare[@]}"

cat <<END

What to make of it: sparse attention reads a small part of the text, and the longer the text the more time that saves.
END
if [[ ${#adapter[@]} -gt 0 ]]; then
  cat <<END
$model has 135 million parameters; what lies far back it would lose most of, had it not learned to read sparsely: the adapter
in ${adapter[1]} was trained with PHSA (docs/training.md). Leave it out of the command above to see the
difference. Larger models lose less without training (docs/results.md).
Three questions and eight needles are a look, not a measurement: the questions were chosen so that this model can answer them with
dense attention, and of ten others about the same page it answers few, sparse or dense. docs/results.md has hundreds of needles.
END
else
  echo "$model was not trained with sparse attention; what it loses shows in needles and perplexity (docs/results.md)."
fi
cat <<END

The report with its plots: demo/report.html
Which blocks it read:      $phsa inspect -m $model ${adapter[*]} -f $text -p "Who built the lighthouse?" --html demo/inspect.html
Talk to it yourself:       $phsa chat -m $model ${adapter[*]}
END
