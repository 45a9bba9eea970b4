"""Are the sources of `phsa ask` right? Needles in essays, and questions about documents, each beside a baseline: BM25
over the same sentences, which knows the question and not the answer.

    python bench/sources_bench.py needles -m smollm2-135m --haystack FILE --tokens 4000 -- --attention dense
    python bench/sources_bench.py questions -m qwen2.5-coder-0.5b --questions multifieldqa_zh.jsonl --tokens 6000

A needle is a sentence with a number of its own, hidden at an even depth; an answer is right where it says the number,
and the first source is right where its text has it. With --needles 10 a text has ten, each with a word of its own,
and is asked for each: the wrong nine look like the right one. A question is one of a LongBench file (`context`,
`input`, `answers`); an answer is right where it has one of the answers, and its sources are where one of the first
three has it. What stands behind -- goes to `phsa ask`. Prints a line for each sample, and the shares at the end.
"""

import argparse
import collections
import json
import math
import pathlib
import random
import re
import subprocess
import sys
import tempfile

KEYS = ["amber", "basalt", "cedar", "dahlia", "ember", "fjord", "garnet", "hazel", "indigo", "juniper", "kestrel"]


def words_of(text):
    """Words, and the pairs of characters of texts without spaces."""
    found = re.findall(r"[a-z0-9]+", text.lower())
    for run in re.findall(r"[\u3400-\u9fff]+", text):
        found += [run[i : i + 2] for i in range(max(1, len(run) - 1))]
    return found


def sentences_of(text):
    parts = re.split(r"(?<=[.!?])\s+(?![a-z])|(?<=[。！？；])|\n\s*\n", text)
    return [part for part in parts if part and part.strip()]


def bm25(question, sentences, k1=1.5, b=0.75):
    """Indices of the sentences, the best first."""
    lists = [words_of(sentence) for sentence in sentences]
    mean = sum(map(len, lists)) / max(1, len(lists))
    within = collections.Counter(word for words in lists for word in set(words))
    scores = []
    for words in lists:
        counts = collections.Counter(words)
        score = 0.0
        for word in set(words_of(question)):
            rarity = math.log(1 + (len(lists) - within[word] + 0.5) / (within[word] + 0.5))
            count = counts[word]
            score += rarity * count * (k1 + 1) / (count + k1 * (1 - b + b * len(words) / max(1.0, mean)))
        scores.append(score)
    return sorted(range(len(sentences)), key=lambda i: -scores[i])


def ask(args, document, question):
    path = pathlib.Path(args.folder) / "document.txt"
    path.write_text(document)
    command = [args.phsa, "ask", "-m", args.model, path, question, "--json", "--temp", 0, "-n", args.answer]
    command += ["--cache-dir", pathlib.Path(args.folder) / "cache", "--cache-size", 1, *args.flags]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"phsa ask failed: {done.stderr.strip()}")
    return json.loads(done.stdout)


def count_tokens(args, text):
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(text)
        file.flush()
        command = [args.phsa, "tokenize", args.model, "-f", file.name, "--ids"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return len(done.stdout.split())


def needle_samples(args):
    essays = pathlib.Path(args.haystack).read_text()
    per_token = 100_000 / count_tokens(args, essays[:100_000]) if len(essays) >= 100_000 else 4.2
    room = int((args.tokens - 120) * per_token)
    chance = random.Random(args.seed)
    for number in range(0, args.samples, args.needles):
        begin = chance.randrange(max(1, len(essays) - room))
        begin = essays.find(" ", begin) + 1
        hay = sentences_of(essays[begin : begin + room])
        keys = chance.sample(KEYS, args.needles)
        values = [str(chance.randrange(1_000_000, 10_000_000)) for _ in keys]
        length = len(hay)
        for i in reversed(range(args.needles)):
            depth = (i + (number / args.needles + 0.5) / (args.samples / args.needles)) / args.needles
            hay.insert(int(depth * length), f"One of the special magic numbers for {keys[i]} is: {values[i]}.")
        for key, value in zip(keys, values, strict=True):
            question = f"What is the special magic number for {key} mentioned in the provided text?"
            yield " ".join(hay), question, [value]


def question_samples(args):
    kept = 0
    for line in pathlib.Path(args.questions).read_text().splitlines():
        row = json.loads(line)
        answers = [answer for answer in row["answers"] if answer in row["context"]]
        if not answers or kept >= args.samples or count_tokens(args, row["context"]) > args.tokens:
            continue
        kept += 1
        yield row["context"], row["input"], answers


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["needles", "questions"])
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--phsa", default="build/release/bin/phsa")
    parser.add_argument("--haystack", default="bench/data/from_sand_hill_to_pine.txt")
    parser.add_argument("--questions")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--needles", type=int, default=1, help="in a text, 1 to 11")
    parser.add_argument("--answer", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("flags", nargs="*", help="for phsa ask, behind --")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as args.folder:
        run(args)


def run(args):
    most = 1 if args.what == "needles" else 3
    right = ours = theirs = all_samples = 0
    seconds = 0.0
    for document, question, answers in needle_samples(args) if args.what == "needles" else question_samples(args):
        found = ask(args, document, question)
        # A model may write 1,234,567.
        answered = any(answer in found["answer"] or answer in found["answer"].replace(",", "") for answer in answers)

        def has(texts, answers=answers):
            return any(answer in " ".join(text.split()) for text in texts for answer in answers)

        sources = [source["text"] for source in found["sources"]]
        sentences = sentences_of(document)
        best = [sentences[i] for i in bm25(question, sentences)[:most]]
        own, baseline = has(sources[:most]), has(best)
        all_samples += 1
        right += answered
        ours += answered and own
        theirs += answered and baseline
        seconds += found["sources_s"]
        weight = found["sources"][0]["weight"] if found["sources"] else 0
        print(
            f"{all_samples:3} {found['prompt_tokens']} tokens: answer {'right' if answered else 'wrong'}, "
            f"source {'right' if own else 'wrong'} ({weight:.2f}), BM25 {'right' if baseline else 'wrong'}",
            flush=True,
        )
        if answered and not own:
            print(f"    {sources[0] if sources else 'none'}"[:300].replace("\n", " "), flush=True)
    share = 100 / max(1, right)
    print(
        f"{args.what}, {args.model}, {' '.join(args.flags) or 'auto'}, {args.tokens} tokens, {args.needles} a text: "
        f"{right} of {all_samples} answers right; of these the first {most} source(s) right in {ours} "
        f"({share * ours:.1f} %), BM25 in {theirs} ({share * theirs:.1f} %); "
        f"{seconds / max(1, all_samples):.2f} s for the sources"
    )


if __name__ == "__main__":
    main()
