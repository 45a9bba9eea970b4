"""Times `phsa run` with `--speculate ngram` against plain decoding on questions about documents.

    python bench/speculation.py --model MODEL --data FILE.jsonl [--phsa build/release/bin/phsa] [--questions 8]
        [--tokens 128] [--longest 16000] [--threads 0] [-- FLAGS FOR phsa run]

FILE.jsonl has LongBench's rows (`context`, `input`) or QMSum's (`meeting_transcripts`, `general_query_list`). Documents
of up to `--longest` bytes are taken, evenly over the file; the question asks for a quote, or, with `--ask plain`, is
the row's own. Each question is answered in both ways, in turn; the texts must be the same, byte for byte. Prints a JSON
line a question, then one with the sums: tokens/s of decoding, and how many drafted tokens were right.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

QUOTE = "{} Answer with the sentences of the text that say it, quoted word for word."


def questions(path: str, longest: int) -> list[tuple[str, str]]:
    found = []
    for line in pathlib.Path(path).read_text().splitlines():
        row = json.loads(line)
        if "context" in row:
            found.append((row["context"], row["input"]))
        else:
            text = "\n".join(f"{turn['speaker']}: {turn['content']}" for turn in row["meeting_transcripts"])
            found += [(text, query["query"]) for query in row["general_query_list"] + row["specific_query_list"]]
    return [one for one in found if len(one[0].encode()) <= longest]


def answer(args, document: str, question: str, *flags: str) -> dict:
    command = [args.phsa, "run", "-m", args.model, "-f", document, "-p", question, "-n", str(args.tokens)]
    command += ["--temp", "0", "--json", "--quiet", "-t", str(args.threads), *flags, *args.flags]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"speculation: {' '.join(command)} failed: {done.stderr.strip()}")
    return json.loads(done.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--phsa", default="build/release/bin/phsa")
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--longest", type=int, default=16000)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--ask", choices=["quote", "plain"], default="quote")
    parser.add_argument("flags", nargs="*")
    args = parser.parse_args()
    args.threads = args.threads or len(os.sched_getaffinity(0))
    found = questions(args.data, args.longest)
    if not found:
        sys.exit(f"speculation: {args.data} has no document of up to {args.longest} bytes")
    step = max(1, len(found) // args.questions)
    tokens, seconds = 0, {"none": 0.0, "ngram": 0.0}
    drafted = accepted = 0
    for index, (text, question) in enumerate(found[::step][: args.questions]):
        asked = QUOTE.format(question) if args.ask == "quote" else question
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as document:
            document.write(text)
            document.flush()
            plain = answer(args, document.name, asked)
            fast = answer(args, document.name, asked, "--speculate", "ngram")
        if plain["text"] != fast["text"]:
            sys.exit(f"speculation: question {index} has another answer with --speculate ngram")
        if plain["tokens"] < 2:
            continue
        speeds = {"none": plain["decode_tokens_per_s"], "ngram": fast["decode_tokens_per_s"]}
        row = {"question": index, "prompt_tokens": plain["prompt_tokens"], "tokens": plain["tokens"]}
        row |= {"plain": speeds["none"], "ngram": speeds["ngram"], "ratio": speeds["ngram"] / speeds["none"]}
        row |= {"drafted": fast["drafted_tokens"], "accepted": fast["accepted_tokens"]}
        print(json.dumps(row), flush=True)
        tokens += plain["tokens"] - 1
        for name, speed in speeds.items():
            seconds[name] += (plain["tokens"] - 1) / speed
        drafted += fast["drafted_tokens"]
        accepted += fast["accepted_tokens"]
    total = {name: tokens / s for name, s in seconds.items() if s > 0}
    print(
        json.dumps(
            {
                "tokens": tokens,
                "plain": total.get("none"),
                "ngram": total.get("ngram"),
                "ratio": total["ngram"] / total["none"] if total else None,
                "drafted": drafted,
                "accepted": accepted,
                "same_texts": True,
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
