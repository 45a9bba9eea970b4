"""Needles and held-out losses of several training runs in one table, in the paper's form.

    python bench/training_table.py --untrained runs/phsa-k2/niah-00000000.jsonl runs/phsa-k2 runs/infllm2-k2 runs/dense

A run is a folder of `python -m phsa.train`; its last needle answers and its last evaluation count. All runs must have
answered the same samples: differences are taken sample by sample.
"""

import argparse
import csv
import json
import math
from pathlib import Path


def wilson(right: int, count: int) -> tuple[float, float]:
    """The 95 % interval of a share, in percent."""
    z, p = 1.959964, right / count
    middle, half = p + z * z / (2 * count), z * math.sqrt(p * (1 - p) / count + z * z / (4 * count * count))
    return 100 * (middle - half) / (1 + z * z / count), 100 * (middle + half) / (1 + z * z / count)


def paired(ours: dict[int, float], theirs: dict[int, float]) -> str:
    """The mean difference on the same samples, in points, with its 95 % interval and McNemar's exact p."""
    differences = [ours[sample] - theirs[sample] for sample in sorted(ours)]
    count = len(differences)
    mean = sum(differences) / count
    spread = math.sqrt(sum((d - mean) ** 2 for d in differences) / (count - 1) / count)
    more, fewer = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    n = more + fewer
    p = min(1.0, 2 * sum(math.comb(n, i) for i in range(min(more, fewer) + 1)) / 2**n) if n else 1.0
    return (
        f"{100 * mean:+.1f} ({100 * (mean - 1.96 * spread):+.1f} to {100 * (mean + 1.96 * spread):+.1f}; p = {p:.2f})"
    )


def answers(path: Path) -> dict[tuple[str, int], dict[int, float]]:
    """(attention, K) to sample to score; dense has K = 0."""
    out: dict[tuple[str, int], dict[int, float]] = {}
    for line in path.read_text().splitlines()[1:]:
        record = json.loads(line)
        name = record["attention"]["attention"]
        key = (name, 0 if name == "dense" else record["attention"]["top_k"])
        out.setdefault(key, {})[record["sample"]] = record["score"]
    return out


def plot(path: Path, scores: dict, curve: list[tuple[float, dict]], title: str) -> None:
    """scores: run to answers. curve: millions of tokens and the answers then, of the first run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.6), layout="constrained", sharey=True)
    for run, found in scores.items():
        name = "infllm2" if run.startswith("infllm2") else "phsa"
        ks = sorted(k for one, k in found if one == name)
        share = [100 * sum(found[name, k].values()) / len(found[name, k]) for k in ks]
        left.plot(range(len(ks)), share, marker="o", label=f"{run}, read with {name}")
    left.set_xticks(range(len(ks)), [f"K={k}" for k in ks])
    left.set_xlabel("blocks chosen when reading")
    left.set_ylabel("needles found, percent")
    left.set_ylim(0, 102)
    left.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncol=2)
    for k in ks:
        points = [(tokens, 100 * sum(found["phsa", k].values()) / len(found["phsa", k])) for tokens, found in curve]
        right.plot(*zip(*points, strict=True), marker="o", label=f"K={k}")
    right.set_xlabel("millions of tokens trained")
    right.set_title(title, fontsize=10)
    right.legend(frameon=False, fontsize=8)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--untrained", type=Path, help="needle answers of the model before training")
    parser.add_argument(
        "--plot", type=Path, help="a PNG file: found by K for each run, and by tokens for the first one"
    )
    parser.add_argument("--pair", action="append", default=[], help="RUN:ATTENTION,RUN:ATTENTION to compare")
    args = parser.parse_args()
    scores, losses = {}, {}
    if args.untrained is not None:
        scores["untrained"] = answers(args.untrained)
    for run in args.runs:
        scores[run.name] = answers(max(run.glob("niah-*.jsonl")))
        with (run / "evaluations.csv").open(newline="") as file:
            losses[run.name] = list(csv.DictReader(file))[-1]
    samples = {tuple(sorted(one)) for run in scores.values() for one in run.values()}
    if len(samples) != 1:
        raise SystemExit("the runs answered different samples")
    count = len(samples.pop())
    ks = sorted({k for run in scores.values() for name, k in run if name != "dense"})
    print(f"{count} samples, percent found (95 % interval)\n")
    print("| trained with | read with | " + " | ".join(f"K={k}" for k in ks) + " | dense |")
    print("|---|---|" + "---|" * (len(ks) + 1))
    for run, found in scores.items():
        for name in sorted({name for name, _ in found if name != "dense"}):
            cells = []
            for key in [*((name, k) for k in ks), ("dense", 0)]:
                right = int(sum(found[key].values()))
                low, high = wilson(right, count)
                cells.append(f"{100 * right / count:.1f} ({low:.0f}–{high:.0f})")
            print(f"| {run} | {name} | " + " | ".join(cells) + " |")
    if losses:
        print("\n| trained with | held-out loss as trained | dense |\n|---|---|---|")
        for run, last in losses.items():
            print(f"| {run} | {last['held_out_loss']} | {last['held_out_loss_dense']} |")
    if args.plot is not None:
        first = args.runs[0]
        with (first / "log.csv").open(newline="") as file:
            tokens = {int(row["step"]): int(row["tokens"]) / 1e6 for row in csv.DictReader(file)} | {0: 0.0}
        curve = [(tokens[int(one.stem.split("-")[1])], answers(one)) for one in sorted(first.glob("niah-*.jsonl"))]
        plot(args.plot, scores, curve, f"{first.name}, read with phsa")
    for pair in args.pair:
        (run_a, a), (run_b, b) = (part.split(":") for part in pair.split(","))
        for run in (run_a, run_b):
            if run not in scores:
                raise SystemExit(f"--pair {pair}: there is no run {run}; there are {', '.join(scores)}")
        print(f"\n{run_a} read with {a} minus {run_b} read with {b}, on the same samples, in points (95 %; McNemar)")
        for k in ks:
            key_a, key_b = ((name, 0 if name == "dense" else k) for name in (a, b))
            print(f"  K={k:<3} {paired(scores[run_a][key_a], scores[run_b][key_b])}")


if __name__ == "__main__":
    main()
