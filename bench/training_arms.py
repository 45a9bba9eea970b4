"""The paper's trainings in miniature, as one resumable series: arms at 4k, continued at 32k, two languages, adapters.

    python bench/training_arms.py prepare FOLDER --model qwen2.5-coder-0.5b --corpus ../shared/corpus
        --without ../shared/data/haystack_en.txt,../shared/data/haystack_zh.txt --program build/release/bin/phsa
    python bench/training_arms.py plan FOLDER                        # what is to do, and what it should take
    python bench/training_arms.py run FOLDER --minutes 25            # trains what is left; the same command goes on
    python bench/training_arms.py table FOLDER                       # needles by K for each arm, losses, tokens, hours
    python bench/training_arms.py pack FOLDER results.tar.gz         # what the tables are made of, a few megabytes

All arms of a stage read the same tokens in the same order. `prepare` needs the program `phsa` and the corpus; `run`
and `table` need neither. What was tested for is left out by content twice: `phsa prepare --without` drops documents,
and the tokens that are left are searched for runs of the haystacks' tokens.

A stage's arms: 4k (all weights): dense, InfLLM v2 and PHSA by K, one mean, and PHSA with parts. 32k: some of them
continued. zh: the same English and Chinese text, with the punctuation of English and of both. distill: an adapter that
answers at K = 2 and 32k as dense attention does, from documents, questions and code.
"""

import argparse
import csv
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))
from training_questions import write_questions
from training_table import answers, wilson

from phsa.train.shards import Shards

ROOT = Path(__file__).resolve().parent.parent
ENGLISH = ("eltec_eng", "pg19_test", "openstax_ccby", "elife", "mdn_en", "peps")
LONG = ("eltec_eng", "pg19_test")
KS = (1, 2, 4, 8, 16)
PARTS = 4
# Tokens of a run that, where more than one in a hundred of a document's are also a haystack's, are no coincidence.
RUN = 32
OVER = 128 + signal.SIGTERM  # the exit code of a run that was stopped and can go on

# What an H200 did with the shape of Qwen3-0.6B (docs/training.md): the share of 989 TFLOP/s, by method and length.
PEAK = 989e12
SHARE = {("dense", 4096): 0.319, ("sparse", 4096): 0.251, ("dense", 32768): 0.407, ("sparse", 32768): 0.220}
# And the memory of 32,768 tokens: 59 GB, of which 18 bytes a weight are no activations.
BYTES_PER_WEIGHT, BYTES_PER_TOKEN = 18, 1.48e6


@dataclass
class Plan:
    """The sizes of a series; written by `prepare`, so that every piece trains the same."""

    model: str = "qwen2.5-coder-0.5b"
    weights: float = 494e6
    layers: int = 24
    width: int = 896  # of all heads together
    device: str = "auto"
    dtype: str = "bfloat16"
    length: int = 4096
    long: int = 32768
    batch_tokens: int = 131072
    micro_tokens: int = 32768
    tokens: float = 20e6  # of an arm at 4k
    long_tokens: float = 4e6  # of one continued at 32k
    distill_tokens: float = 4e6
    learning_rate: float = 3e-5
    adapter_learning_rate: float = 5e-4
    adapter_rank: int = 16
    samples: int = 100
    held_out: int = 16
    seed: int = 1
    stages: list[str] = field(default_factory=lambda: ["4k", "32k", "zh", "distill"])


@dataclass
class Arm:
    stage: str
    name: str
    method: str
    top_k: int
    parts: int = 1
    punctuation: str = "en"
    begins_with: str | None = None  # stage/name of another arm

    @property
    def key(self) -> str:
        return f"{self.stage}/{self.name}"


def arms_of(plan: Plan) -> list[Arm]:
    first = [
        Arm("4k", "dense", "dense", 2),
        Arm("4k", "infllm2-k2", "infllm2", 2),
        *(Arm("4k", f"phsa-k{k}", "phsa", k) for k in (0, *KS)),
        Arm("4k", f"phsa-parts{PARTS}-k2", "phsa", 2, PARTS),
    ]
    longer = [
        Arm("32k", "dense", "dense", 16, begins_with="4k/dense"),
        Arm("32k", "infllm2-k16", "infllm2", 16, begins_with="4k/infllm2-k2"),
        Arm("32k", "phsa-k16", "phsa", 16, begins_with="4k/phsa-k2"),
        Arm("32k", f"phsa-parts{PARTS}-k4", "phsa", 4, PARTS, begins_with=f"4k/phsa-parts{PARTS}-k2"),
    ]
    languages = [Arm("zh", marks, "phsa", 2, punctuation=marks) for marks in ("en", "en+zh")]
    distilled = [Arm("distill", "phsa-k2", "phsa", 2), Arm("distill", f"phsa-parts{PARTS}-k2", "phsa", 2, PARTS)]
    every = [*first, *longer, *languages, *distilled]
    return [arm for arm in every if arm.stage in plan.stages]


def read_plan(folder: Path) -> Plan:
    try:
        return Plan(**json.loads((folder / "plan.json").read_text()))
    except OSError:
        raise SystemExit(f"{folder}: there is no plan.json; run `prepare` first") from None


# What an arm trains on -----------------------------------------------------------------------------------------------


def length_of(plan: Plan, stage: str) -> int:
    return plan.long if stage in ("32k", "distill") else plan.length


def steps_of(plan: Plan, stage: str) -> tuple[int, int]:
    """Steps, and sequences of a step."""
    tokens = {"32k": plan.long_tokens, "distill": plan.distill_tokens}.get(stage, plan.tokens)
    batch = max(1, plan.batch_tokens // length_of(plan, stage))
    return max(1, round(tokens / (batch * length_of(plan, stage)))), batch


def toml(values: dict[str, Any]) -> str:
    """Two levels of tables; values as JSON has them, which TOML reads too."""
    lines = [f"{name} = {json.dumps(value)}" for name, value in values.items() if not isinstance(value, dict)]
    for table, inner in values.items():
        if isinstance(inner, dict):
            lines += [f"\n[{table}]", *(f"{name} = {json.dumps(value)}" for name, value in inner.items())]
    return "\n".join(lines) + "\n"


def configuration(folder: Path, plan: Plan, arm: Arm) -> dict[str, Any]:
    length, (steps, batch) = length_of(plan, arm.stage), steps_of(plan, arm.stage)
    small = length <= 4096
    data = {"4k": "en", "32k": "long", "zh": "en+zh", "distill": None}[arm.stage]
    out: dict[str, Any] = {"out": str(folder / "runs" / arm.key), "seed": plan.seed, "device": plan.device}
    if arm.begins_with is not None:
        out["init_from"] = str(folder / "runs" / arm.begins_with / "final")
    out["model"] = {"path": plan.model, "dtype": plan.dtype}
    out["attention"] = {
        "method": arm.method,
        "top_k": arm.top_k,
        "lambda": 0.9,
        "punctuation": arm.punctuation,
        "init": 16 if small else 128,
        "local": 128 if small else 512,
        "dense_below": 0,
        "parts": arm.parts,
        "survivors": 0,
    }
    out["data"] = {
        "train": str(folder / "questions.jsonl" if data is None else folder / "tokens" / data),
        "held_out": str(folder / "held-out" / ("long" if data is None else data)),
        "length": length,
    }
    if data is not None:
        out["data"] |= {"repeat_share": 0.5, "repeat_part": 0.5}
    else:
        out["lora"] = {"rank": plan.adapter_rank, "alpha": 2.0 * plan.adapter_rank, "save_dtype": "float16"}
        out["distill"] = {"weight": 1.0, "next_token": 0.0}
    out["optimizer"] = {
        "steps": steps,
        "batch": batch,
        "micro_batch": max(1, plan.micro_tokens // length),
        "learning_rate": plan.learning_rate if data is not None else plan.adapter_learning_rate,
        "warmup": max(1, steps // 10),
    }
    out["evaluate"] = {"sequences": max(1, plan.held_out * plan.length // length)}
    needles = folder / "needles" / f"{arm.stage}{'-parts' if arm.parts > 1 else ''}.jsonl"
    if needles.exists():
        out["evaluate"] |= {"niah": str(needles), "niah_samples": plan.samples, "niah_batch_tokens": plan.micro_tokens}
    out["checkpoint"] = {"every": 0, "keep": 1}
    return out


# Preparing -----------------------------------------------------------------------------------------------------------


def call(program: str, *arguments: object) -> None:
    try:
        done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True)
    except OSError as error:
        raise SystemExit(f"--program {program}: {error.strerror}") from None
    if done.returncode != 0:
        raise SystemExit(f"{program} {arguments[0]}: {done.stderr.strip()[-2000:]}")


def windows(tokens: np.ndarray) -> np.ndarray:
    """A number for each run of RUN tokens."""
    out, length = tokens.astype(np.uint64), 1
    while length < RUN:
        out = out[:-length] * np.uint64(0x9E3779B97F4A7C15 + 2 * length) + out[length:]
        length *= 2
    return out


def seen_in(shards: Shards, forbidden: Shards) -> list[int]:
    """The documents of `shards` that hold text of `forbidden`."""
    known = np.unique(np.concatenate([windows(forbidden.document(i)) for i in range(forbidden.documents)]))
    found = []
    for number in range(shards.documents):
        document = windows(shards.document(number))
        place = np.searchsorted(known, document).clip(max=len(known) - 1)
        if len(document) and (known[place] == document).mean() > 0.01:
            found.append(number)
    return found


def prepare(folder: Path, plan: Plan, args: argparse.Namespace) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    there = folder / "plan.json"
    if there.exists() and read_plan(folder) != plan:
        raise SystemExit(f"{folder} holds another plan; give another folder")
    corpus, without = Path(args.corpus), [Path(one) for one in args.without.split(",") if one]
    files = {path.name.split(".")[0]: path for path in sorted(corpus.iterdir()) if ".jsonl" in path.name}
    sets = {"en": ENGLISH, "long": LONG, "en+zh": ("openstax_ccby", "pg19_test", "zh_gutenberg")}
    needed = {"4k": {"en"}, "32k": {"long"}, "zh": {"en+zh"}, "distill": {"long"}}
    exclude = [part for path in without for part in ("--without", path)]
    for path in without:
        call(args.program, "prepare", "-m", plan.model, "--out", folder / "excluded" / path.stem, "--force", path)
    for name in sorted(set().union(*(needed[stage] for stage in plan.stages))):
        out, sources = folder / "tokens" / name, [files[one] for one in sets[name] if one in files]
        if not sources:
            raise SystemExit(f"{corpus} has none of {', '.join(sets[name])}")
        if not (out / "index.json").exists():
            held = folder / "held-out" / name
            share = ("--held-out", held, "--held-out-share", args.held_out_share)
            call(args.program, "prepare", "-m", plan.model, "--out", out, *share, *exclude, *sources)
        shards = Shards(out)
        for path in without:
            if found := seen_in(shards, Shards(folder / "excluded" / path.stem)):
                raise SystemExit(f"{out}: {len(found)} documents hold text of {path}, the first is {found[0]}")
        print(f"{out}: {shards.tokens:,} tokens, {shards.documents:,} documents; none holds text of {args.without}")
    if "distill" in plan.stages and not (folder / "questions.jsonl").exists():
        code = [Path(one) for one in args.code.split(",") if one]
        total = write_questions(folder / "questions.jsonl", files, code, without, plan.long, plan.distill_tokens)
        print(f"{folder / 'questions.jsonl'}: {total}")
    for stage in plan.stages:
        write_needles(folder, plan, args, stage)
    there.write_text(json.dumps(plan.__dict__, indent=2) + "\n")


def write_needles(folder: Path, plan: Plan, args: argparse.Namespace, stage: str) -> None:
    """Dense, InfLLM v2 and PHSA at each K; of an arm with parts, PHSA as it was trained."""
    length = length_of(plan, stage)
    language = "zh" if stage == "zh" else "en"
    (folder / "needles").mkdir(exist_ok=True)
    budget = ("--init", 16, "--local", 128) if length <= 4096 else ("--init", 128, "--local", 512)
    for suffix, attention, parts in (("", "dense,infllm2,phsa", 1), ("-parts", "dense,phsa", PARTS)):
        out = folder / "needles" / f"{stage}{suffix}.jsonl"
        if out.exists() or (stage == "zh" and suffix):
            continue
        haystack = args.haystack_zh if language == "zh" else args.haystack
        text = ("--haystack", haystack, "--repeat-haystack") if haystack else ()
        call(
            args.program,
            *("niah", "-m", plan.model, "--forced", "--lengths", length, "--attention", attention),
            *("-K", ",".join(map(str, KS)), "--parts", parts, "--lambda", 0.9, *budget, *text),
            *("--punctuation", "en+zh" if language == "zh" else "en", "--language", language),
            *("--samples", plan.samples, "--seed", plan.seed, "--export", out),
        )


# Training ------------------------------------------------------------------------------------------------------------


def finished(folder: Path, arm: Arm) -> bool:
    return (folder / "runs" / arm.key / "final").is_dir()


def train(folder: Path, plan: Plan, arm: Arm, deadline: float, processes: int) -> int:
    """One arm until it is done (0) or the time is over."""
    path = folder / "arms" / f"{arm.stage}-{arm.name}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(toml(configuration(folder, plan, arm)))
    start = [sys.executable, "-m"]
    if processes > 1:
        start += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    # In a session of its own, so that Ctrl-C reaches it once, through here: a second signal would end it at once.
    process = subprocess.Popen([*start, "phsa.train", str(path)], env=environment, start_new_session=True)
    try:
        return process.wait(max(0.0, deadline - time.monotonic()))
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.send_signal(signal.SIGTERM)  # it ends after the step, with a checkpoint
        code = process.wait()
        return code if processes == 1 else OVER  # torchrun has codes of its own


def run(folder: Path, plan: Plan, args: argparse.Namespace) -> int:
    deadline = time.monotonic() + 60 * args.minutes
    wanted = args.only.split(",") if args.only else None
    every = {arm.key: arm for arm in arms_of(plan)}
    for name in wanted or ():
        if name not in every and name not in plan.stages:
            raise SystemExit(f"--only {name}; allowed: {', '.join([*plan.stages, *every])}")
    for arm in every.values():
        if finished(folder, arm) or (wanted and arm.key not in wanted and arm.stage not in wanted):
            continue
        if arm.begins_with is not None and not (folder / "runs" / arm.begins_with / "final").is_dir():
            print(f"{arm.key}: left out, because {arm.begins_with} is not there", file=sys.stderr)
            continue
        if time.monotonic() >= deadline:
            print("the time is over; the same command goes on", file=sys.stderr)
            return OVER
        print(f"== {arm.key}", file=sys.stderr)
        code = train(folder, plan, arm, deadline, args.processes)
        if code == OVER:
            print(f"{arm.key}: the time is over; the same command goes on", file=sys.stderr)
            return OVER
        if code:
            return code
        # Weights and optimizer state are twelve bytes a weight, and the arm is done.
        shutil.rmtree(folder / "runs" / arm.key / "checkpoints", ignore_errors=True)
    return 0


# Numbers -------------------------------------------------------------------------------------------------------------


def estimate(plan: Plan, arm: Arm) -> tuple[float, float, float, float]:
    """Tokens to train, tokens/s, minutes and gigabytes that an H200 should take."""
    length, (steps, batch) = length_of(plan, arm.stage), steps_of(plan, arm.stage)

    def read(method: str) -> float:
        init, local = (16, 128) if length <= 4096 else (128, 512)
        most = length if method == "dense" else init + local + 16 * arm.top_k + 8
        return float(np.minimum(np.arange(1, length + 1), most).mean())

    def flops(method: str, weights: float, attention: float) -> float:
        return weights * plan.weights + attention * plan.layers * plan.width * read(method)

    adapter = arm.stage == "distill"
    kind = "dense" if arm.method == "dense" else "sparse"
    near = 4096 if length <= 8192 else 32768
    # Six operations a weight and token, four where it is frozen; the teacher reads densely and forwards only.
    seconds = flops(arm.method, 4 if adapter else 6, 12) / (SHARE[kind, near] * PEAK)
    if adapter:
        seconds += flops("dense", 2, 4) / (SHARE["dense", near] * PEAK)
    tokens = steps * batch * length
    weights = 2 if adapter else BYTES_PER_WEIGHT
    memory = weights * plan.weights + BYTES_PER_TOKEN * max(length, plan.micro_tokens)
    return tokens, 1 / seconds, tokens * seconds / 60, memory / 1e9


def show_plan(folder: Path, plan: Plan) -> None:
    print("| arm | tokens | steps | tokens/s | minutes | GB | done |\n|---|---|---|---|---|---|---|")
    left = 0.0
    for arm in arms_of(plan):
        tokens, speed, minutes, memory = estimate(plan, arm)
        done = finished(folder, arm)
        left += 0 if done else minutes
        steps, _ = steps_of(plan, arm.stage)
        print(
            f"| {arm.key} | {tokens / 1e6:.1f} M | {steps} | {speed:,.0f} | {minutes:.1f} | {memory:.0f} | "
            f"{'yes' if done else ''} |"
        )
    print(
        f"\n{left:.0f} minutes are left on one H200, estimated from what it did with Qwen3-0.6B; needles come on top."
    )


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def of_data(run: Path) -> tuple[Any, ...]:
    """What two arms must share to be compared."""
    config = json.loads((run / "config.json").read_text())
    return (config["seed"], config["data"], config["optimizer"]["batch"], config["optimizer"]["steps"])


def table(folder: Path, plan: Plan) -> Iterator[str]:
    for stage in plan.stages:
        arms = [arm for arm in arms_of(plan) if arm.stage == stage and finished(folder, arm)]
        if not arms:
            yield f"\n## {stage}\nNo arm is finished."
            continue
        if len({json.dumps(of_data(folder / "runs" / arm.key)) for arm in arms}) != 1:
            raise SystemExit(f"{stage}: the arms read other tokens, or in another order")
        yield f"\n## {stage}"
        ks = " | ".join(f"K={k}" for k in KS)
        yield f"| trained with | read with | {ks} | dense | loss, as trained | dense | tokens | hours |"
        yield "|---|---|" + "---|" * (len(KS) + 5)
        for arm in arms:
            run = folder / "runs" / arm.key
            last, log = rows_of(run / "evaluations.csv")[-1], rows_of(run / "log.csv")
            _, batch = steps_of(plan, stage)
            hours = sum(batch * length_of(plan, stage) / float(row["tokens_per_second"]) for row in log) / 3600
            ends = [f"{float(last['held_out_loss']):.4f}", f"{float(last['held_out_loss_dense']):.4f}"]
            ends += [f"{int(log[-1]['tokens']):,}", f"{hours:.3f}"]
            needles = sorted(run.glob("niah-*.jsonl"))
            found = answers(needles[-1]) if needles else {}
            kinds = sorted({name for name, _ in found if name != "dense"}) or [arm.method]
            if arm.method != "dense" and arm.method in kinds:
                kinds = [arm.method]  # as it was trained; the dense arm is read with each
            for kind in kinds:
                cells = []
                for key in [*((kind, k) for k in KS), ("dense", 0)]:
                    if key not in found:
                        cells.append("")
                        continue
                    right, count = sum(found[key].values()), len(found[key])
                    low, high = wilson(int(right), count)
                    cells.append(f"{100 * right / count:.1f} ({low:.0f}–{high:.0f})")
                yield f"| {arm.name} | {kind} | {' | '.join([*cells, *ends])} |"


def pack(folder: Path, out: Path) -> None:
    """Everything but tokens, weights and optimizer states."""
    with tarfile.open(out, "w:gz") as archive:
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder)
            small = path.is_file() and path.suffix in (".json", ".csv", ".toml", ".jsonl", ".md", ".png")
            ours = name.parts[0] in ("arms", "runs", "plan.json", "table.md")
            if small and ours and not {"checkpoints", "final"} & set(name.parts):
                archive.add(path, str(name))
        for adapter in sorted(folder.glob("runs/distill/*/final")):
            archive.add(adapter, str(adapter.relative_to(folder)))
    digest = hashlib.sha256(out.read_bytes()).hexdigest()[:16]
    print(f"{out}: {out.stat().st_size / 1e6:.1f} MB, sha256 {digest}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = {name: commands.add_parser(name) for name in ("prepare", "plan", "run", "table", "pack")}
    for command in one.values():
        command.add_argument("folder", type=Path)
    first = one["prepare"]
    for name, value in Plan().__dict__.items():
        kind = type(value)
        flag = "--" + name.replace("_", "-")
        if isinstance(value, list):
            first.add_argument(flag, type=lambda text: text.split(","), default=value, help=",".join(value))
        else:
            first.add_argument(flag, type=kind, default=value, help=str(value))
    first.add_argument("--corpus", required=True, help="a folder of .jsonl(.xz) files, named as in this script")
    first.add_argument("--without", default="", help="texts that must not be in the tokens, separated by commas")
    first.add_argument("--program", default=str(ROOT / "build/release/bin/phsa"))
    first.add_argument("--held-out-share", default="0.01")
    first.add_argument("--haystack", help="for English needles; else the program's own")
    first.add_argument("--haystack-zh", help="for Chinese needles")
    first.add_argument("--code", default=f"{ROOT / 'python'},{ROOT / 'src'}", help="folders of source code")
    one["run"].add_argument("--minutes", type=float, default=1e6)
    one["run"].add_argument("--only", help="stages and arms, separated by commas: 4k,32k/phsa-k16")
    one["run"].add_argument("--processes", type=int, default=1, help="on one machine, by torchrun")
    one["pack"].add_argument("out", type=Path)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if args.command == "prepare":
        plan = Plan(**{name: getattr(args, name) for name in Plan().__dict__})
        if set(plan.stages) - set(Plan().stages):
            raise SystemExit(f"--stages {','.join(plan.stages)}; allowed: {','.join(Plan().stages)}")
        if "zh" in plan.stages and args.haystack_zh is None:
            raise SystemExit("--haystack-zh is missing: Chinese needles are hidden in a Chinese text")
        prepare(args.folder, plan, args)
        return 0
    plan = read_plan(args.folder)
    if args.command == "plan":
        show_plan(args.folder, plan)
    elif args.command == "run":
        return run(args.folder, plan, args)
    elif args.command == "table":
        text = "\n".join(table(args.folder, plan)).lstrip("\n")
        (args.folder / "table.md").write_text(text + "\n")
        print(text)
    else:
        pack(args.folder, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
