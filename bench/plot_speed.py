"""Draws tokens/s against length and depth from what llama_bench.py printed.

    python bench/plot_speed.py bench/results/FILE... --out docs/speed.svg

One row of pictures per model: reading (tokens/s against the length of the text) and writing (against the depth). A
line for each attention, and one for llama.cpp, from the JSON lines of the files. Lines of `phsa bench --json` may stand
among them.
"""

import argparse
import json
import pathlib

import matplotlib
import matplotlib.ticker

matplotlib.use("svg")
import matplotlib.pyplot as plt

NAMES = {"dense": "phsa, dense", "infllm2": "phsa, InfLLM v2", "phsa": "phsa, PHSA", "llama.cpp": "llama.cpp"}
COLORS = {"dense": "#6b7280", "infllm2": "#d97706", "phsa": "#2563eb", "llama.cpp": "#111827"}


def points_of(paths):
    """{(model, --weights): {"pp" or "tg": {attention: {length or depth: tokens/s}}}}"""
    lines = [line for path in paths for line in pathlib.Path(path).read_text().splitlines() if line.startswith("{")]
    rows = [row for row in map(json.loads, lines) if "attention" in row]
    models = {}
    modes = {(row["model"], row["weights"]): row["weights_mode"] for row in rows if "weights_mode" in row}
    for row in rows:
        if (row["test"] == "pp" and row["depth"] != 0) or (row["model"], row["weights"]) not in modes:
            continue
        tests = models.setdefault((row["model"], modes[row["model"], row["weights"]]), {"pp": {}, "tg": {}})
        at = row["tokens"] if row["test"] == "pp" else row["depth"]
        # A line of `phsa bench` has no peer.
        speeds = {row["attention"]: row.get("phsa", row.get("tokens_per_s")), "llama.cpp": row.get("llama_cpp")}
        for name, speed in speeds.items():
            if speed is not None:
                points = tests[row["test"]].setdefault(name, {})
                points[at] = max(points.get(at, 0), speed)
    return models


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    models = points_of(args.files)
    plt.rcParams["svg.fonttype"] = "none"
    plt.rcParams["svg.hashsalt"] = "phsa"  # the same numbers give the same picture
    figure, axes = plt.subplots(len(models), 2, figsize=(9, 3.1 * len(models)), squeeze=False)
    for (model, weights), pair in zip(models, axes, strict=True):
        for test, axis in zip(("pp", "tg"), pair, strict=True):
            for name, points in models[model, weights][test].items():
                xs = sorted(points)
                style = "--" if name == "llama.cpp" else "-"
                axis.plot(xs, [points[x] for x in xs], style, marker="o", ms=3.5, color=COLORS[name], label=NAMES[name])
            axis.set_ylim(0, 1.05 * axis.get_ylim()[1])
            axis.grid(alpha=0.25)
            axis.spines[["top", "right"]].set_visible(False)
            axis.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(6))
            axis.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:g}k")
            axis.set_xlabel("tokens of the prompt" if test == "pp" else "tokens in the cache", fontsize=9)
            what = "prefill" if test == "pp" else "decode"
            axis.set_title(f"{model}, {weights} weights: {what}, tokens/s", fontsize=8)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=len(labels), fontsize=9, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.95))
    figure.savefig(args.out, metadata={"Date": None})


if __name__ == "__main__":
    main()
