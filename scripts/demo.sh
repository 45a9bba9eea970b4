#!/bin/bash
# A small model answers questions about a page, with the program that was built into the folder given.
#
#   scripts/demo.sh build/release/bin
set -euo pipefail
cd "$(dirname "$0")/.."

phsa=$1/phsa
model=smollm2-135m
text=bench/data/lighthouse.txt

"$phsa" models fetch "$model"

# Ask QUESTION WORDS: the answer is right where it holds these words.
Ask() {
  echo
  echo "\$ phsa run -m $model -f $text --temp 0 -p \"$1\""
  answer=$("$phsa" run -m "$model" -f "$text" --temp 0 -n 64 -p "$1")
  echo "$answer"
  if [[ $answer == *"$2"* ]]; then echo "  (right: the page says \"$2\")"; else echo "  (wrong: the page says \"$2\")"; fi
}

echo
echo "== $model reads a page of $(wc -w <$text) words and answers"
Ask "How high is the tower?" "41 metres"
Ask "What did the town give to Mary Ellison?" "silver watch"
echo
echo "== The same question over a long text, with three ways to attend"
python3 scripts/demo_compare.py "$phsa" "$model"
echo
echo "Which blocks it read: $phsa inspect -m $model -f $text -p \"How high is the tower?\" --html page.html"
echo "Talk to it yourself: $phsa chat -m $model"
echo
