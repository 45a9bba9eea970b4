"""`phsa prepare` against the Python packages datasets and tokenizers: JSON lines to token ids on the disk, same cores.

    pip install datasets==5.2.0
    xz -dk ../shared/corpus/openstax_ccby.jsonl.xz ../shared/corpus/mdn_en.jsonl.xz
    python bench/prepare_bench.py --tokenizer ../shared/tokenizers/qwen3/tokenizer.json \\
        ../shared/corpus/openstax_ccby.jsonl ../shared/corpus/mdn_en.jsonl

Both begin with the same files and end with files that training reads: ours is the whole run of the program, theirs
load_dataset and a batched map with one process for each core. Runs alternate, the best of each counts. Prints one JSON
line; fails where an id differs.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each process has its own core
os.environ["HF_HUB_OFFLINE"] = "1"

import datasets
import tokenizers

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "python"))
from phsa.train.shards import Shards  # noqa: E402


def theirs(files, tokenizer, cores, folder):
    """The data set with the ids, and the seconds until its files are parsed and until the ids are written."""

    def encode(batch):
        return {"ids": [encoding.ids for encoding in tokenizer.encode_batch(batch["text"], add_special_tokens=False)]}

    start = time.perf_counter()
    data = datasets.load_dataset("json", data_files=files, split="train", cache_dir=folder)
    parsed = time.perf_counter() - start
    data = data.map(encode, batched=True, batch_size=100, num_proc=cores, remove_columns=data.column_names)
    return data, parsed, time.perf_counter() - start


def ours(command, files, cores, folder):
    start = time.perf_counter()
    subprocess.run([*command, "--force", "-t", str(cores), "--out", folder, *files], check=True, capture_output=True)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True, help="a tokenizer.json")
    parser.add_argument("--phsa", default=ROOT / "build/release/bin/phsa", help="the program")
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("files", nargs="+", help="JSON lines with a field text")
    args = parser.parse_args()

    datasets.disable_progress_bars()
    tokenizer = tokenizers.Tokenizer.from_file(args.tokenizer)
    tokenizer.encode_special_tokens = True  # in training text they are text
    our_times, their_times, parse_times = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for run in range(args.runs):
            tokens = pathlib.Path(folder, "tokens")
            our_times.append(ours([args.phsa, "prepare", "-m", args.tokenizer], args.files, args.cores, tokens))
            # A folder of its own: what it finds in its cache it does not compute.
            data, parsed, seconds = theirs(args.files, tokenizer, args.cores, f"{folder}/cache{run}")
            their_times.append(seconds)
            parse_times.append(parsed)
        shards = Shards(tokens)
        if len(data) != shards.documents:
            raise SystemExit(f"{len(data)} documents against our {shards.documents}")
        for number, row in enumerate(data):
            if row["ids"] != shards.document(number)[:-1].tolist():
                raise SystemExit(f"the ids of document {number} differ")
        size = sum(os.path.getsize(file) for file in args.files)
        line = {
            "files": [os.path.basename(file) for file in args.files],
            "megabytes": round(size / 1e6, 1),
            "documents": shards.documents,
            "tokens": shards.tokens,
            "cores": args.cores,
            "phsa_s": round(min(our_times), 2),
            "datasets_s": round(min(their_times), 2),
            "of_that_load_dataset_s": round(min(parse_times), 2),
            "phsa_mb_per_s": round(size / 1e6 / min(our_times), 1),
            "datasets_mb_per_s": round(size / 1e6 / min(their_times), 1),
            "ratio": round(min(their_times) / min(our_times), 1),
            "datasets": datasets.__version__,
            "tokenizers": tokenizers.__version__,
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
