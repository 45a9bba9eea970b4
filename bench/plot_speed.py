"""Draws tokens/s against length and depth from what llama_bench.py printed.

    python bench/plot_speed.py bench/results/FILE... --out docs/speed.svg

One row of pictures per model: reading (tokens/s against the length of the text) and writing (against the depth). A
line for each attention, and one for llama.cpp, from the JSON lines of the files.
"""

import argparse
import json
import pathlib

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

NAMES = {"dense": "phsa, dense", "infllm2": "phsa, InfLLM v2", "phsa": "phsa, PHSA", "llama.cpp": "llama.cpp"}
COLORS = {"dense": "#6b7280", "infllm2": "#d97706", "phsa": "#2563eb", "llama.cpp": "#111827"}


def rows(paths):
    for path in paths:
        for line in pathlib.Path(path).read_text().splitlines():
            if line.startswith("{") and "ratio" in line:
                yield json.loads(line)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    # {model: {test: {attention: {length or depth: tokens/s}}}}
    models = {}
    for row in rows(args.files):
        tests = models.setdefault((row["model"], row["weights_mode"]), {"pp": {}, "tg": {}})
        at = row["tokens"] if row["test"] == "pp" else row["depth"]
        if row["test"] == "pp" and row["depth"] != 0:
            continue
        for name, speed in ((row["attention"], row["phsa"]), ("llama.cpp", row["llama_cpp"])):
            points = tests[row["test"]].setdefault(name, {})
            points[at] = max(points.get(at, 0), speed)
    figure, axes = plt.subplots(len(models), 2, figsize=(9, 3.1 * len(models)), squeeze=False)
    for (model, weights), pair in zip(models, axes, strict=True):
        for test, axis in zip(("pp", "tg"), pair, strict=True):
            for name, points in models[model, weights][test].items():
                xs = sorted(points)
                style = "--" if name == "llama.cpp" else "-"
                axis.plot(xs, [points[x] for x in xs], style, marker="o", ms=3.5, color=COLORS[name], label=NAMES[name])
            axis.set_ylim(bottom=0)
            axis.grid(alpha=0.25)
            axis.spines[["top", "right"]].set_visible(False)
            axis.set_xlabel("tokens read" if test == "pp" else "tokens in the cache")
            axis.set_title(
                f"{model}, {weights} weights:\n{'reading' if test == 'pp' else 'writing'}, tokens/s", fontsize=9
            )
        pair[0].legend(fontsize=8, frameon=False)
    figure.tight_layout()
    # No date and no random names in the file: the same numbers give the same picture.
    plt.rcParams["svg.hashsalt"] = "phsa"
    figure.savefig(args.out, metadata={"Date": None})


if __name__ == "__main__":
    main()
