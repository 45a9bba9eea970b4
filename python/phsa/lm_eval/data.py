"""The rows of the local tasks, from files instead of the Hub.

The task files name these functions as their ``custom_dataset``. What the harness passes to such a function besides its
own arguments (versions, the model's arguments) is of no use here and lands in ``**_``.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import datasets

Splits = dict[str, datasets.Dataset]


def folder() -> Path:
    """Where the data lies: PHSA_DATA, or ``../shared/data`` beside a source checkout."""
    variable = os.environ.get("PHSA_DATA")
    if variable:
        path = Path(variable)
        if not path.is_dir():
            raise FileNotFoundError(f"PHSA_DATA={variable} is not a folder; docs/lm_eval.md says what it must hold")
        return path
    root = Path(__file__).resolve().parents[3]
    path = root.parent / "shared" / "data"
    if (root / "include" / "phsa").is_dir() and path.is_dir():
        return path
    raise FileNotFoundError(
        "the data of the local tasks was not found: set PHSA_DATA to its folder (docs/lm_eval.md says what it must "
        "hold), or use the harness's own tasks, which fetch theirs"
    )


def _file(name: str) -> Path:
    path = folder() / name
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; docs/lm_eval.md says what the folder must hold")
    return path


def _json_lines(name: str) -> Iterator[dict[str, Any]]:
    data = _file(name).read_bytes()
    text = (gzip.decompress(data) if name.endswith(".gz") else data).decode("utf-8")
    # Not splitlines(): a text may hold other line ends, such as U+2028.
    return (json.loads(line) for line in text.split("\n") if line)


def _splits(**splits: Iterable[dict[str, Any]]) -> Splits:
    return {name: datasets.Dataset.from_list(list(rows)) for name, rows in splits.items()}


def gsm8k(**_: Any) -> Splits:
    return _splits(train=_json_lines("gsm8k/train_first200.jsonl"), test=_json_lines("gsm8k/test.jsonl"))


def humaneval(**_: Any) -> Splits:
    return _splits(test=_json_lines("humaneval/HumanEval.jsonl.gz"))


def lambada(**_: Any) -> Splits:
    return _splits(test=_json_lines("lambada/lambada_test.jsonl"))


def mathqa(**_: Any) -> Splits:
    return _splits(test=json.loads(_file("mathqa/test.json").read_text(encoding="utf-8")))


def _capitalise_last_fragment(context: str) -> str:
    """As the harness writes it: where the endings go on with a sentence that the context has begun (rows from
    ActivityNet), that beginning starts with a capital and is lower-case otherwise."""
    if context.endswith((".", "!", "?", '"')):
        return context
    start = max(context.rfind(mark) for mark in (". ", "! ", "? ", '" ')) + 2
    return context if start < 2 else context[:start] + context[start:].capitalize()


def hellaswag(**_: Any) -> Splits:
    """Six lines a row: label and context, the right ending's index, four endings; WikiHow's brackets are gone."""
    with bz2.open(_file("hellaswag/hellaswag_val_full.txt.bz2"), "rt", encoding="utf-8", newline="\n") as text:
        lines = [line.rstrip("\n") for line in text]
    while lines and not lines[-1]:
        lines.pop()
    return _splits(
        validation=(
            {
                "query": _capitalise_last_fragment(lines[i]),
                "label": int(lines[i + 1]),
                "choices": lines[i + 2 : i + 6],
            }
            for i in range(0, len(lines), 6)
        )
    )


def _arc_row(row: dict[str, str]) -> dict[str, Any]:
    """``…question: Q\\n\\nAnswer1: A Answer2: B …\\n\\nAnswer format: answer1/answer2/…``, and ``answer2``."""
    head, answers, _ = row["instruction"].rsplit("\n\n", 2)
    texts = re.split(r" ?Answer[1-9]: ", answers)[1:]
    return {
        "question": head.partition("question: ")[2],
        "choices": {"text": texts, "label": [str(i + 1) for i in range(len(texts))]},
        "answerKey": row["answer"].removeprefix("answer"),
    }


def _arc_original(row: dict[str, Any]) -> dict[str, Any]:
    choices = row["question"]["choices"]
    return {
        "question": row["question"]["stem"],
        "choices": {"text": [c["text"] for c in choices], "label": [c["label"] for c in choices]},
        "answerKey": row["answerKey"],
    }


def arc(*, level: str, **_: Any) -> Splits:
    """All rows of the test from their instruction text; the shots of Challenge from the original development set."""
    rows = json.loads(_file(f"arc/ARC-{level}_test.llm-adapters.json").read_text(encoding="utf-8"))
    splits: dict[str, Iterable[dict[str, Any]]] = {"test": map(_arc_row, rows)}
    if level == "Challenge":
        splits["validation"] = map(_arc_original, _json_lines("arc/ARC-Challenge-Dev.jsonl"))
    return _splits(**splits)


def mmlu(*, subject: str, **_: Any) -> Splits:
    def rows(name: str) -> Iterator[dict[str, Any]]:
        with _file(f"mmlu/{name}.csv").open(encoding="utf-8", newline="") as lines:
            for question, *choices, answer in csv.reader(lines):
                yield {
                    "subject": subject.replace("_", " "),
                    "question": question,
                    "choices": choices,
                    "answer": "ABCD".index(answer),
                }

    return _splits(
        dev=rows(f"dev/{subject}_dev"),
        validation=rows(f"val/{subject}_val"),
        test=rows(f"test_first20/{subject}_test"),
    )


def multifieldqa_zh(**_: Any) -> Splits:
    return _splits(
        test=(
            {"context": row["context"], "question": row["input"], "answers": row["answers"]}
            for row in _json_lines("longbench/multifieldqa_zh.jsonl")
        )
    )


def qmsum(**_: Any) -> Splits:
    """One row for each query of each meeting, the transcript as LongBench writes it: one ``speaker: words`` a line."""
    return _splits(
        test=(
            {
                "context": "\n".join(
                    f"{turn['speaker']}: {turn['content']}" for turn in meeting["meeting_transcripts"]
                ),
                "question": query["query"],
                "answers": [query["answer"]],
            }
            for meeting in _json_lines("longbench/upstream_qmsum_test.jsonl")
            for query in meeting["general_query_list"] + meeting["specific_query_list"]
        )
    )
