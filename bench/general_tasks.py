"""Dense against sparse attention on the general tasks that need no network, through lm-evaluation-harness.

    PYTHONPATH=python python bench/general_tasks.py --model smollm2-135m --out build/bench/general
        [--policies dense,infllm2:2,infllm2:4,phsa:2,phsa:4] [--tasks gsm8k,mmlu] [--rows 100] [--init 16] [--local 128]
        [--weights auto] [--kv-type auto] [--threads 0] [--context 4096] [--confirm-run-unsafe-code]

A policy is its name and K. Sparse attention differs from dense only for prompts longer than init + local + K blocks, so
that most tasks get more shots here than the harness gives them. Every task and policy is one file in the folder `out`;
what is there already is not run again. The model is loaded once. Prints, and writes to `out`/table.md, two markdown
tables: scores with their standard errors, and differences from dense on the same rows; and the tokens that were read.
"""

import argparse
import json
import math
import os
import pathlib
import sys
import time

import lm_eval
from lm_eval.tasks import TaskManager

from phsa.lm_eval import TASKS, PhsaLM

# task: metric, its filter, shots, rows for each of --rows: fewer where a row takes longer
PLAN = {
    "gsm8k": ("exact_match", "flexible-extract", 5, 0.5),
    "mathqa": ("acc_norm", "none", 10, 1),
    "arc_challenge": ("acc_norm", "none", 25, 1),
    "hellaswag": ("acc_norm", "none", 10, 0.5),
    "lambada": ("acc", "none", 10, 0.5),
    "mmlu": ("acc", "none", 5, 0.57),
    "arc_easy": ("acc_norm", "none", 25, 0.5),
    "humaneval": ("pass@1", "create_test", 0, 0.25),
}
SUBJECTS = 57


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--policies", default="dense,infllm2:2,infllm2:4,phsa:2,phsa:4")
    parser.add_argument("--tasks", default=",".join(PLAN))
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--init", type=int, default=16)
    parser.add_argument("--local", type=int, default=128)
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--kv-type", default="auto")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--confirm-run-unsafe-code", action="store_true", help="run what the model writes (humaneval)")
    args = parser.parse_args()
    args.policies, args.tasks = args.policies.split(","), args.tasks.split(",")
    unknown = [task for task in args.tasks if task not in PLAN]
    if unknown:
        parser.error(f"unknown tasks {', '.join(unknown)}; there are {', '.join(PLAN)}")
    if "humaneval" in args.tasks and not args.confirm_run_unsafe_code:
        parser.error("humaneval runs what the model writes: --confirm-run-unsafe-code, or --tasks without it")
    return args


def settings_of(policy, args):
    name, _, top_k = policy.partition(":")
    if name == "dense":
        return {"attention": name}
    return {"attention": name, "top_k": int(top_k), "init": args.init, "local": args.local}


def measure(model, manager, task, args):
    metric, kept, shots, share = PLAN[task]
    rows = max(1, round(args.rows * share))
    start = time.monotonic()
    result = lm_eval.simple_evaluate(
        model,
        tasks=[f"phsa_local_{task}"],
        task_manager=manager,
        num_fewshot=shots or None,
        # The harness limits each subject alone.
        limit=max(1, round(rows / SUBJECTS)) if task == "mmlu" else rows,
        bootstrap_iters=0,
        confirm_run_unsafe_code=args.confirm_run_unsafe_code,
    )
    samples = [
        sample for name in sorted(result["samples"]) for sample in result["samples"][name] if sample["filter"] == kept
    ]
    return {
        "task": task,
        "metric": metric,
        "shots": shots,
        "values": [float(sample[metric]) for sample in samples],
        "prompt_tokens": [len(model.tok_encode(sample["arguments"][0][0])) for sample in samples],
        "seconds": round(time.monotonic() - start, 1),
        "attention": dict(model.llm.attention),
    }


def read_share(lengths, attention):
    """Tokens that the queries of prompts of these lengths read, over those that dense attention reads."""
    if attention["attention"] == "dense":
        return 1.0
    block, init = attention["block"], attention["init"]
    read = [0]  # by all queries before a position
    for position in range(max(lengths)):
        local = max(0, position // block * block - attention["local"])  # where what is always read begins
        chosen = min(attention["top_k"] * block, max(0, local - init))
        read.append(read[-1] + position + 1 - local + min(init, local) + chosen)
    return sum(read[length] for length in lengths) / sum(length * (length + 1) // 2 for length in lengths)


def mean_and_error(values):
    count, mean = len(values), sum(values) / len(values)
    spread = sum((value - mean) ** 2 for value in values)
    return mean, math.sqrt(spread / (count - 1) / count) if count > 1 else 0.0


def table(found, args):
    lines = [
        "| task | rows | shots | metric | " + " | ".join(args.policies) + " |",
        "|---" * (4 + len(args.policies)) + "|",
    ]
    for task in args.tasks:
        cells = [found.get((policy, task)) for policy in args.policies]
        if not any(cells):
            continue
        first = next(cell for cell in cells if cell)
        line = [task, str(len(first["values"])), str(first["shots"]), first["metric"]]
        base = found.get(("dense", task))
        for policy, cell in zip(args.policies, cells, strict=True):
            if cell is None:
                line.append("")
                continue
            mean, error = mean_and_error(cell["values"])
            text = f"{100 * mean:.1f} ± {100 * error:.1f}"
            if base and policy != "dense":
                gaps = [a - b for a, b in zip(cell["values"], base["values"], strict=True)]
                gap, error = mean_and_error(gaps)
                text += f" ({100 * gap:+.1f} ± {100 * error:.1f})"
            line.append(text)
        lines.append("| " + " | ".join(line) + " |")
    whole = [task for task in args.tasks if all((policy, task) in found for policy in args.policies)]
    if whole:
        means = []
        for policy in args.policies:
            scores = [mean_and_error(found[policy, task]["values"])[0] for task in whole]
            means.append(f"{100 * sum(scores) / len(scores):.1f}")
        lines.append(f"| mean of {len(whole)} | | | | " + " | ".join(means) + " |")
    lines += [
        "",
        "Tokens read in the prompts, in percent of dense attention's:",
        "",
        "| task | tokens of a prompt, mean | " + " | ".join(args.policies) + " |",
        "|---" * (2 + len(args.policies)) + "|",
    ]
    for task in whole:
        lengths = found[args.policies[0], task]["prompt_tokens"]
        line = [task, f"{sum(lengths) / len(lengths):.0f}"]
        for policy in args.policies:
            cell = found[policy, task]
            line.append(f"{100 * read_share(cell['prompt_tokens'], cell['attention']):.1f}")
        lines.append("| " + " | ".join(line) + " |")
    return "\n".join(lines) + "\n"


def check_folder(args):
    """What is in the folder must come from a run like this one."""
    kept = ("model", "rows", "init", "local", "weights", "kv_type", "context")
    settings = {name: getattr(args, name) for name in kept}
    path = args.out / "settings.json"
    if path.exists() and json.loads(path.read_text()) != settings:
        sys.exit(f"{path} has other settings than this run, {settings}: take another folder")
    args.out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(settings))


def main():
    args = parse()
    check_folder(args)
    found = {}
    for policy in args.policies:
        for task in args.tasks:
            path = args.out / f"{policy.replace(':', '-')}-{task}.json"
            if path.exists():
                found[policy, task] = json.loads(path.read_text())
    # All policies of a task before the next one: what an interrupted run has can be compared.
    todo = [(policy, task) for task in args.tasks for policy in args.policies if (policy, task) not in found]
    if todo:
        manager = TaskManager(include_path=TASKS)
        model = PhsaLM(
            args.model,
            weights=args.weights,
            kv_type=args.kv_type,
            threads=args.threads,
            context=args.context,
            cache_tokens=4 * args.context,  # several prompts at a time
        )
        for number, (policy, task) in enumerate(todo):
            print(f"{number + 1}/{len(todo)}: {policy}, {task}", flush=True)
            model.llm.set_attention(**settings_of(policy, args))
            found[policy, task] = measure(model, manager, task, args)
            path = args.out / f"{policy.replace(':', '-')}-{task}.json"
            path.with_suffix(".tmp").write_text(json.dumps(found[policy, task]))
            os.replace(path.with_suffix(".tmp"), path)
            (args.out / "table.md").write_text(table(found, args))
    print(table(found, args))


if __name__ == "__main__":
    main()
