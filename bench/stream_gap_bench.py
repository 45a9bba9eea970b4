"""How long a stream of `phsa serve` waits for its next token while another client's long prompt is read.

    python bench/stream_gap_bench.py --model MODEL [--phsa build/release/bin/phsa ...] [--prompt 8000] [--alone 40]
        [--serve-args='--attention phsa'] [--threads 0]

One client streams; after --alone tokens another one sends a prompt of about --prompt tokens and asks for one token.
Several --phsa, such as one of before a change, run one after the other, and their streams must say the same (the
tokens that both have): the pieces in which a prompt is read change no bit. Prints a JSON line for each program, then a
table; seconds are the client's. Needs nothing but the standard library. Loopback only.
"""

import argparse
import contextlib
import itertools
import json
import os
import shlex
import sys
import threading
import time

from server_bench import CHARACTERS_PER_TOKEN, TEXT, Peer, free_port

JSON = {"Content-Type": "application/json"}


def stream(connection, most):
    """(seconds, text) of each token, as it comes."""
    body = {"prompt": "Once upon a time", "max_tokens": most, "temperature": 0, "ignore_eos": True, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), JSON)
    for line in connection.getresponse():
        if line.startswith(b"data: {"):
            choices = json.loads(line.removeprefix(b"data: "))["choices"]
            if choices:
                yield time.monotonic(), choices[0]["text"]


def summary(gaps):
    gaps = sorted(gaps)
    at = {"median": 0.5, "p95": 0.95, "longest": 1}
    return {name: round(gaps[min(len(gaps) - 1, int(len(gaps) * share))], 3) for name, share in at.items()}


def measure(program, args):
    port, threads = free_port(), args.threads or os.cpu_count()
    command = [program, "serve", "-m", args.model, "--port", port, "-t", threads, "-c", args.context]
    peer = Peer("phsa", [*command, "--log-file", "none", *shlex.split(args.serve_args)], port)
    text = TEXT.read_text(encoding="utf-8")[: int(args.prompt * CHARACTERS_PER_TOKEN)]
    prompt = {}

    def read_prompt():
        with contextlib.closing(peer.connect()) as connection:
            connection.timeout = 3600  # until the answer begins
            prompt["begin"] = time.monotonic()
            prompt["answer"] = peer.complete(connection, text, 1)
            prompt["end"] = time.monotonic()

    try:
        peer.post("/v1/completions", {"prompt": text[:2000], "max_tokens": 1})  # the weights are in memory then
        times, pieces = [], []
        reader = threading.Thread(target=read_prompt)
        with contextlib.closing(peer.connect()) as connection:
            for at, piece in stream(connection, args.context - 64):
                times.append(at)
                pieces.append(piece)
                if len(times) == args.alone:
                    reader.start()
                if "end" in prompt:
                    break
        if "end" not in prompt:
            sys.exit("the stream ended before the prompt was read; give a longer -c or a shorter --prompt")
        reader.join()
    finally:
        peer.stop()
    if isinstance(prompt["answer"], str):
        sys.exit(f"{program}: {prompt['answer']}")
    begin, end, pairs = prompt["begin"], prompt["end"], list(itertools.pairwise(times))
    row = {
        "program": str(program),
        "prompt_tokens": prompt["answer"][1],
        "prompt_s": round(end - begin, 1),
        "tokens_meanwhile": sum(begin <= at <= end for at in times),
        "alone_s": summary([b - a for a, b in pairs if b < begin]),
        "meanwhile_s": summary([b - a for a, b in pairs if begin <= b <= end]),
    }
    row["tokens_per_s"] = round(row["prompt_tokens"] / row["prompt_s"], 1)
    return row, "".join(pieces)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--phsa", nargs="+", default=["build/release/bin/phsa"])
    parser.add_argument("--serve-args", default="", help="more flags for phsa serve")
    parser.add_argument("--prompt", type=int, default=8000, help="tokens of the long prompt, about")
    parser.add_argument("--alone", type=int, default=40, help="tokens of the stream before it")
    parser.add_argument("--context", type=int, default=10240)
    parser.add_argument("--threads", type=int, default=0, help="0: one per core")
    args = parser.parse_args()
    rows, texts = [], []
    for program in args.phsa:
        row, text = measure(program, args)
        print(json.dumps(row), flush=True)
        rows.append(row)
        texts.append(text)
    shared = min(map(len, texts))
    print(f"\nprompt: {rows[0]['prompt_tokens']} tokens; load of the machine: {os.getloadavg()[0]:.1f}")
    print("\n| program | seconds between tokens: median, p95, longest | alone | prompt, s | tokens meanwhile |")
    print("|---|---|---|---|---|")
    for row in rows:
        both = [", ".join(map(str, row[key].values())) for key in ("meanwhile_s", "alone_s")]
        print(f"| {row['program']} | {both[0]} | {both[1]} | {row['prompt_s']} | {row['tokens_meanwhile']} |")
    if len({text[:shared] for text in texts}) > 1:
        sys.exit("the streams differ")
    if len(texts) > 1:
        print(f"\nThe streams agree in all of the {shared} characters that each has.")


if __name__ == "__main__":
    main()
