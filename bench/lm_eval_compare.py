"""Compares two runs of lm-evaluation-harness row by row: `--log_samples --output_path FOLDER` of each.

    python bench/lm_eval_compare.py FOLDER_A FOLDER_B

For every task that both have: rows, the largest difference between log-likelihoods, rows whose most likely choice
differs, and rows whose generated text differs. Exits with 1 if the rows are not the same.
"""

import argparse
import json
import pathlib
import sys


def samples(folder: pathlib.Path) -> dict[str, dict[tuple, dict]]:
    """task: {row and filter: sample}, from the newest file of each task."""
    found = {}
    for path in sorted(folder.glob("**/samples_*.jsonl"), key=lambda path: path.stat().st_mtime):
        task = path.name.removeprefix("samples_").rsplit("_", 1)[0]
        rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        found[task] = {(row["doc_id"], row["filter"]): row for row in rows}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folders", nargs=2, type=pathlib.Path)
    ours, theirs = map(samples, parser.parse_args().folders)
    common = sorted(ours.keys() & theirs.keys())
    if not common:
        sys.exit("the folders have no task in common")
    for task in common:
        if ours[task].keys() != theirs[task].keys():
            sys.exit(f"{task}: not the same rows")
        largest, other_choice, other_text, rows, texts = 0.0, 0, 0, set(), False
        for key, a in ours[task].items():
            b = theirs[task][key]
            if a["doc_hash"] != b["doc_hash"] or a["prompt_hash"] != b["prompt_hash"]:
                sys.exit(f"{task}: row {key[0]} is not the same in both")
            if key[0] in rows:
                continue  # another filter on the same answer
            rows.add(key[0])
            first, second = ([answer[0] for answer in sample["resps"]] for sample in (a, b))
            if isinstance(first[0], str):
                texts = True
                other_text += first != second
                continue
            first, second = ([float(value) for value, _ in answers] for answers in (first, second))
            largest = max(largest, *(abs(x - y) for x, y in zip(first, second, strict=True)))
            other_choice += first.index(max(first)) != second.index(max(second))
        scores = f"largest difference of a log-likelihood {largest:.2e}, another choice in {other_choice} rows"
        print(f"{task}: {len(rows)} rows, " + (f"another text in {other_text} rows" if texts else scores))


if __name__ == "__main__":
    main()
