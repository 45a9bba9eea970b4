"""Our encoding against the Python package tokenizers, one thread each, same texts: JSON lines with the ratio.

    python bench/tokenizer_bench.py --tokenizer ../shared/tokenizers/qwen3/tokenizer.json \\
        ../shared/data/haystack_en.txt ../shared/data/haystack_zh.txt

Fails where the ids differ.
"""

import argparse
import json
import os
import pathlib
import subprocess
import time

os.environ["RAYON_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from tokenizers import Tokenizer
from tokenizers import __version__ as tokenizers_version

ROOT = pathlib.Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=pathlib.Path, required=True, help="a tokenizer.json")
    parser.add_argument("--phsa", type=pathlib.Path, default=ROOT / "build/release/bin/phsa", help="the program")
    parser.add_argument("--runs", type=int, default=5, help="the best of this many runs counts")
    parser.add_argument("texts", type=pathlib.Path, nargs="+")
    args = parser.parse_args()

    tokenizer = Tokenizer.from_file(str(args.tokenizer))
    for path in args.texts:
        command = [args.phsa, "tokenize", args.tokenizer, "-f", path]
        ours = json.loads(
            subprocess.run([*command, "--benchmark", str(args.runs)], check=True, capture_output=True).stdout
        )
        ids = list(map(int, subprocess.run([*command, "--ids"], check=True, capture_output=True).stdout.split()))

        text = path.read_bytes().decode("utf-8")
        best = float("inf")
        for _ in range(args.runs):
            start = time.perf_counter()
            theirs = tokenizer.encode(text, add_special_tokens=False)
            best = min(best, time.perf_counter() - start)
        if theirs.ids != ids:
            raise SystemExit(f"{path}: the ids differ")
        line = {
            "text": path.name,
            "bytes": ours["bytes"],
            "tokens": ours["tokens"],
            "phsa_mb_per_s": round(ours["bytes"] / ours["seconds"] / 1e6, 2),
            "tokenizers_mb_per_s": round(ours["bytes"] / best / 1e6, 2),
            "ratio": round(best / ours["seconds"], 2),
            "tokenizers": tokenizers_version,
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
