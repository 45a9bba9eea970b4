#!/usr/bin/env python3
"""Writes the table of models in docs/support-matrix.md from the tests that prove its cells; --check fails where another
one is there.

A cell of the CPU is proven by a test of tests/e2e that says so (families.proves). One of the GPU by
tests/cuda/test_families.py, in the run whose output is kept in bench/results/cuda-families-h200.txt.
"""

import importlib
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/e2e"))
import families  # noqa: E402

importlib.import_module("test_models")  # what its tests prove is in families.PROVEN from then on

PAGE = ROOT / "docs/support-matrix.md"
RUN = ROOT / "bench/results/cuda-families-h200.txt"
BEGIN, END = "<!-- scripts/support-matrix.py writes this table -->\n", "<!-- end of the table -->\n"
FILES = ("safetensors", "gguf")


def passed_on_gpu() -> set[str]:
    """The tests of the kept run that neither failed nor were skipped."""
    passed, label = set(), None
    for line in RUN.read_text(encoding="utf-8").splitlines():
        if line.startswith("test_"):
            label = line
            passed.add(label)
        elif line.startswith(("FAILED", "skipped")):
            passed.discard(label)
    return passed


def table() -> str:
    passed = passed_on_gpu()
    for name in families.ON_GPU:
        for file in FILES:
            if f"test_logits_of_families {file} {name}" in passed:
                families.prove([name], file, "dense", "gpu")
                if families.has_full_layers(name):
                    families.prove([name], file, "phsa", "gpu")
    lines = [
        "| model | safetensors: CPU | GPU | GGUF: CPU | GPU |",
        "|---|---|---|---|---|",
    ]
    for model in families.MODELS.values():
        cells = []
        for file in FILES:
            for device in ("cpu", "gpu"):
                ways = [
                    text
                    for way, text in (("dense", "dense"), ("phsa", "PHSA"))
                    if (model, file, device, way) in families.PROVEN
                ]
                cells.append(", ".join(ways) or "\u2013")
        lines.append(f"| {model} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]


if __name__ == "__main__":
    wanted = page()
    if "--check" not in sys.argv:
        PAGE.write_text(wanted, encoding="utf-8")
    elif wanted != PAGE.read_text(encoding="utf-8"):
        sys.exit(f"{PAGE.relative_to(ROOT)}: the table of models is not what the tests prove: run {sys.argv[0]}")
