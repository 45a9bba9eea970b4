"""Tables of `phsa niah --out` files as docs/results.md has them.

    python bench/niah_tables.py --phsa PROGRAM [--tune tune.jsonl] [--goals] 'TITLE=a.jsonl,b.jsonl' …

Each TITLE is a section: its files are joined by `phsa niah --merge`, whose numbers these are. A section has a table of
scores for each task with several lengths or several weights λ, and one for all other tasks together; below each, the
paired differences of PHSA from InfLLM v2 with the same K and from dense attention, with their 95 % intervals. Bold:
the interval does not hold 0. Where a task has a table of its own, the differences from InfLLM v2 are given for all K
together too: the mean of a sample's, and 1.96 of its standard errors.

--tune names files of other samples (another --seed), on which λ is chosen: the one with the best mean over K; where
two are equal, the larger one, which is closer to plain means. Without sections it is printed alone. --goals says which
of the project's goals the sections with single_2 reach, at that λ.
"""

import argparse
import json
import statistics
import subprocess
import sys

GOAL_TASK = "single_2"
NAMES = {"dense": "dense", "infllm2": "InfLLM v2", "phsa": "PHSA"}


def load(phsa, files):
    """The header of the first file and the rows of all."""
    done = subprocess.run([phsa, "niah", "--merge", ",".join(files), "--json"], stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(done.returncode)
    with open(files[0], encoding="utf-8") as file:
        return json.loads(file.readline()), [json.loads(line) for line in done.stdout.splitlines()]


def method(row):
    """What a line of a table is about; K is its columns."""
    return (row["attention"], row["lambda"] if row["attention"] == "phsa" else None)


def name(of):
    attention, weight = of
    return NAMES.get(attention, attention) + (f" λ={weight:g}" if weight is not None else "")


def percent(row):
    low, high = row["ci95"]
    return f"{100 * row['score']:.1f} ({100 * low:.1f}–{100 * high:.1f})"


def points(difference):
    low, high = (signed(100 * bound) for bound in difference["ci95"])
    value = signed(100 * difference["difference"])
    if difference["ci95"][0] > 0 or difference["ci95"][1] < 0:
        value = f"**{value}**"
    p = "p < 0.001" if difference["p"] < 0.001 else f"p = {difference['p']:.3g}"
    return f"{value} ({low} to {high}; {p})"


def signed(value):
    return f"{value:+.1f}".replace("-", "−")


def against(row, attention):
    return next((other for other in row["against"] if other["attention"] == attention), None)


def print_lines(head, lines):
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    for line in lines:
        print("| " + " | ".join(line) + " |")
    print()


def columns(rows):
    """The values of K, None for what has none."""
    return sorted({row["top_k"] for row in rows}, key=lambda k: -1 if k is None else k)


def grid(rows, label, make, cells):
    """A line for each label(row), in the order of the rows, with make(row) for each K."""
    lines = {}
    for row in rows:
        text = make(row)
        if text is not None:
            lines.setdefault(label(row), {})[row["top_k"]] = text
    return [[*key, *(line.get(k, "–") for k in cells)] for key, line in lines.items()]


def print_table(rows, label, head):
    ks = columns(rows)
    print_lines([*head, *("no K" if k is None else f"K={k}" for k in ks)], grid(rows, label, percent, ks))
    sparse = [row for row in rows if row["attention"] == "phsa"]
    ks = columns(sparse)
    for other in ("infllm2", "dense"):

        def difference(row, other=other):
            found = against(row, other)
            return points(found) if found else None

        lines = grid(sparse, label, difference, ks)
        if lines:
            print(f"Differences from {NAMES[other]} on the same samples, in points:\n")
            print_lines([*head, *(f"K={k}" for k in ks)], lines)


def samples(rows):
    counts = sorted({row["samples"] for row in rows})
    return f"{counts[0]} samples" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} samples"


def over_all_k(files, task, length):
    """By λ, the differences of PHSA from InfLLM v2: the mean of each sample that has both with the same values of K."""
    scores = {}
    for path in files:
        with open(path, encoding="utf-8") as file:
            for row in map(json.loads, file):
                if row.get("task") != task or row["length"] != length:
                    continue
                attention = row["attention"]
                sample = scores.setdefault(row["sample"], {})
                sample.setdefault(method(attention), {})[attention["top_k"]] = row["score"]
    differences = {}
    for sample in scores.values():
        base = sample.get(("infllm2", None))
        for (attention, weight), by_k in sample.items():
            if attention == "phsa" and base is not None and by_k.keys() == base.keys():
                mean = statistics.mean(by_k[k] - base[k] for k in by_k)
                differences.setdefault(weight, []).append(mean)
    return differences


def print_over_all_k(files, task, length):
    told = []
    for weight, values in sorted(over_all_k(files, task, length).items()):
        if len(values) > 1:
            mean, error = statistics.mean(values), statistics.stdev(values) / len(values) ** 0.5
            low, high = (signed(100 * (mean + side * 1.96 * error)) for side in (-1, 1))
            told.append(f"λ={weight:g} {signed(100 * mean)} ({low} to {high})")
    if told:
        print(f"From InfLLM v2 over all K together: {', '.join(told)}.\n")


def print_section(title, header, rows, files):
    print(f"## {title}\n{header['model']}, scored {header['scoring']}, seed {header['seed']}.\n")
    by_task = {}
    for row in rows:
        by_task.setdefault(row["task"], []).append(row)
    together = []
    for task, of_task in by_task.items():
        lengths = sorted({row["length"] for row in of_task})
        weights = {row["lambda"] for row in of_task if row["attention"] == "phsa"}
        if len(by_task) > 1 and len(lengths) == 1 and len(weights) <= 1:
            together += of_task
            continue
        for length in lengths:
            of_length = [row for row in of_task if row["length"] == length]
            print(f"`{task}` at {length} tokens, {samples(of_length)}, percent found:\n")
            print_table(of_length, lambda row: (name(method(row)),), ["method"])
            print_over_all_k(files, task, length)
    if together:
        print(f"Tasks at {together[0]['length']} tokens, {samples(together)} each, percent found:\n")
        print_table(together, lambda row: (f"`{row['task']}`", name(method(row))), ["task", "method"])


def choose_lambda(rows):
    """λ by its mean score over K, and the means."""
    scores = {}
    for row in rows:
        if row["attention"] == "phsa":
            scores.setdefault(row["lambda"], {})[row["top_k"]] = row["score"]
    if len({frozenset(by_k) for by_k in scores.values()}) != 1:
        sys.exit("--tune: every λ needs results for the same values of K, and there must be some")
    means = {weight: statistics.mean(by_k.values()) for weight, by_k in scores.items()}
    return max(means, key=lambda weight: (means[weight], weight)), means


def goals(title, rows, weight):
    """Sentences about what was to be reached, in points."""
    sparse = [
        row
        for row in rows
        if row["task"] == GOAL_TASK and row["attention"] == "phsa" and (weight is None or row["lambda"] == weight)
    ]
    for row in sparse:
        place = f"{title}, {row['length']} tokens, λ={row['lambda']:g}, K={row['top_k']}"
        found = against(row, "infllm2")
        if found:
            kept = found["ci95"][0] > -0.01
            yield f"{place}: {points(found)} against InfLLM v2; the interval excludes −1: {'yes' if kept else 'NO'}"
            if row["length"] == 4096 and row["top_k"] in (2, 4):
                reached = found["difference"] >= 0.03
                yield f"{place}: at least +3 points above InfLLM v2: {'yes' if reached else 'NO'}"
        found = against(row, "dense")
        if found and row["top_k"] == 16 and row["length"] <= 16384:
            reached = found["difference"] >= -0.01
            yield f"{place}: {points(found)} against dense; within 1 point: {'yes' if reached else 'NO'}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="TITLE=FILES")
    parser.add_argument("--phsa", default="phsa", help="the program")
    parser.add_argument("--tune", default="", help="files of other samples, for the choice of λ")
    parser.add_argument("--goals", action="store_true", help="what is reached of what was to be")
    args = parser.parse_args()
    if any("=" not in section for section in args.sections):
        parser.error("a section is TITLE=FILE,FILE,…")
    if not args.sections and not args.tune:
        parser.error("give sections, or --tune")
    weight, tuned = None, None
    if args.tune:
        tuned, rows = load(args.phsa, args.tune.split(","))
        weight, means = choose_lambda([row for row in rows if row["task"] == GOAL_TASK])
        if not args.sections:
            print(f"{weight:g}")
            return
        values = ", ".join(f"{one:g}: {100 * mean:.2f}" for one, mean in sorted(means.items()))
        print(f"λ = {weight:g}, chosen on other samples (seed {tuned['seed']}): mean percent over K by λ: {values}.\n")
    told = []
    for section in args.sections:
        title, files = section.rsplit("=", 1)
        files = files.split(",")
        header, rows = load(args.phsa, files)
        if tuned is not None and header["seed"] == tuned["seed"]:
            sys.exit(f"{title}: its samples have the seed {header['seed']}, as those that λ was chosen on")
        print_section(title, header, rows, files)
        if args.goals:
            told += goals(title, rows, weight)
    if told:
        print("## Goals\n" + "\n".join(f"- {line}" for line in told))


if __name__ == "__main__":
    main()
