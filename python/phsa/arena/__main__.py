"""``python -m phsa.arena``: tables, and the page of results."""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .rules import RULES

if TYPE_CHECKING:  # they need torch
    from .calibrate import LayerCalibration
    from .run import Budget
    from .tasks import Sample


def _list(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m phsa.arena", description="rules for choosing what a query attends to, at equal tokens"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    table = commands.add_parser("table", help="answers by rules and budgets, as JSON lines; what was stopped goes on")
    table.add_argument("--model", required=True, help="a folder or name that transformers loads, or a .gguf file")
    table.add_argument("--out", required=True, help="a file that grows by a line for each answer")
    table.add_argument(
        "--rules", required=True, help=f"a list of: {', '.join(RULES)}; options behind colons: phsa:parts=8"
    )
    size = table.add_mutually_exclusive_group(required=True)
    size.add_argument("--budget", help="shares of the context: 0.01,0.03,0.1")
    size.add_argument(
        "-K", dest="top_k", help="blocks of 16 beside the paper's init and local: 1,2,4; all rules spend as much"
    )
    table.add_argument("--prefill", default="dense", help="who reads the text for rules that answer, a list (dense)")
    table.add_argument(
        "--phases", default="answer", choices=("answer", "both", "all"), help="where rules of both phases are used"
    )
    table.add_argument(
        "--question",
        default="rule",
        choices=("rule", "dense"),
        help="how the prompt's last tokens are read: as the answer, or densely, as rules for decoding alone have it",
    )
    table.add_argument("--tail", type=int, default=64, help="how many tokens of a prompt are its question (64)")
    table.add_argument("--niah", action="append", default=[], help="a file of `phsa niah --export`")
    table.add_argument("--longbench", help="a folder with LongBench's files, and what it has of them")
    table.add_argument("--sets", help="which of its sets; default: those that are there of the paper's 14")
    table.add_argument("--max-length", type=int, default=31500, help="LongBench's prompts are cut to this (31500)")
    table.add_argument("--perplexity", action="append", default=[], metavar="NAME=FILE", help="score a text's tokens")
    table.add_argument("--length", type=int, default=4096, help="of a text whose perplexity is taken (4096)")
    table.add_argument("--scored", type=int, default=256, help="how many tokens at its end are scored (256)")
    table.add_argument(
        "--samples", type=int, help="only the first ones of each task and length; texts for perplexity (4)"
    )
    table.add_argument("--calibration", help="a text that is in no task, for rules that are calibrated or trained")
    table.add_argument("--calibration-tokens", type=int, default=4096)
    table.add_argument("--hash-steps", type=int, default=300, help="of HashAttention's training, a layer (300)")
    table.add_argument("--punctuation", default="en+zh", help="PHSA's punctuation set (en+zh)")
    table.add_argument("--punctuation-from", help="a file of `phsa niah --export` that has its ids, without libphsa")
    table.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    table.add_argument("--device", help="cuda or cpu; default: a GPU if there is one")
    table.add_argument("--quiet", action="store_true")

    report = commands.add_parser("report", help="the page and the tables of what was recorded")
    report.add_argument("files", nargs="+")
    report.add_argument("--html", help="a page with plots")
    report.add_argument("--into", help="a Markdown file whose part between the arena's marks is replaced")
    report.add_argument("--against", default="dense,phsa", help="rules that the others are compared with (dense,phsa)")
    report.add_argument("--draws", type=int, default=1000, help="of the bootstrap for the ranks (1000)")

    rules = commands.add_parser("rules", help="what the rules keep and read, as a Markdown table")
    rules.add_argument("names", nargs="*")
    return parser


def _numbers(text: str, kind: type, option: str, low: float, high: float) -> list[Any]:
    try:
        values = [kind(part) for part in _list(text)]
    except ValueError:
        values = []
    if not values or not all(low <= value <= high for value in values):
        raise ValueError(f"arena: {option} {text}; allowed: a list of numbers from {low:g} to {high:g}")
    return values


def _budgets(args: argparse.Namespace) -> list[Budget]:
    from .run import Budget

    if args.budget:
        return [Budget(share=share) for share in _numbers(args.budget, float, "--budget", 1e-5, 1)]
    return [Budget(top_k=k) for k in _numbers(args.top_k, int, "-K", 0, 1 << 16)]


def _check(args: argparse.Namespace, wanted: set[str]) -> None:
    if not (args.niah or args.longbench or args.perplexity):
        raise ValueError("arena: nothing to ask; give --niah, --longbench or --perplexity")
    if args.tail < 0 or args.scored < 1 or args.length <= args.scored or (args.samples or 1) < 1:
        raise ValueError("arena: --tail from 0, --samples and --scored from 1, and --length above --scored")
    if "calibration" in wanted and not args.calibration:
        names = [n for n, r in RULES.items() if "calibration" in r.needs]
        raise ValueError(
            f"arena: {', '.join(names)} are calibrated: give --calibration FILE, a text that is in no task"
        )


def _given_punctuation(args: argparse.Namespace) -> dict[str, list[int]]:
    """The ids of punctuation sets that the files of samples carry."""
    from ..hf.niah import read_samples

    files = [*args.niah, *([args.punctuation_from] if args.punctuation_from else [])]
    headers = [read_samples(path)[0] for path in files]
    return {name: ids for header in headers for name, ids in header.get("punctuation", {}).items()}


def _samples(args: argparse.Namespace, tokenizer: Any) -> list[Sample]:
    from . import longbench, tasks

    samples = [one for path in args.niah for one in tasks.needles(path, args.tail, args.samples)]
    for text in args.perplexity:
        name, equals, path = text.partition("=")
        if not equals:
            raise ValueError(f"arena: --perplexity {text}; allowed: NAME=FILE")
        samples += tasks.perplexity(name, path, tokenizer, args.length, args.samples or 4, args.scored, args.tail)
    if args.longbench:
        present = longbench.present(Path(args.longbench))
        sets = _list(args.sets) if args.sets else [name for name in present if longbench.SETS[name].paper]
        unknown = [name for name in sets if name not in longbench.SETS]
        if unknown or not sets:
            raise ValueError(f"arena: --sets {','.join(unknown)}; {args.longbench} has: {', '.join(present) or 'none'}")
        samples += tasks.long_bench(args.longbench, sets, tokenizer, args.max_length, args.tail, args.samples)
    return samples


def _load_for(args: argparse.Namespace, samples: Sequence[Sample]) -> Any:
    import torch

    from ..hf.load import load_model
    from .attend import NAME

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(args.model, getattr(torch, args.dtype))
    torch.nn.Module.to(model, device).eval()
    model.set_attn_implementation(NAME)
    limit = getattr(model.config, "max_position_embeddings", None)
    longest = max(sample.prompt + max(len(sample.answer), sample.tokens) for sample in samples)
    if limit and longest > limit:
        raise ValueError(f"arena: the longest sample has {longest} tokens, the model's context {limit}")
    return model


def _calibrated(
    args: argparse.Namespace, model: Any, tokenizer: Any, hashes: bool
) -> tuple[list[LayerCalibration], str]:
    """What some rules learn from a text of the model's, and what it was learnt from."""
    from .calibrate import calibrate
    from .run import fingerprint

    text = Path(args.calibration).read_text(encoding="utf-8")
    ids = tokenizer(text, add_special_tokens=False)["input_ids"][: args.calibration_tokens]
    steps = args.hash_steps if hashes else 0
    calibration = calibrate(model, ids, hashes, steps, Path(args.out + ".calibration.pt"), fingerprint(model))
    digest = hashlib.sha256(repr(ids).encode()).hexdigest()[:12]
    return calibration, f"{digest} {len(ids)} {args.hash_steps}"


def _table(args: argparse.Namespace) -> None:
    from ..hf.load import load_tokenizer
    from . import tasks
    from .run import Records, Table, entries, needs, read_records, summary

    found = entries(_list(args.rules), _budgets(args), _list(args.prefill), args.phases)
    wanted = needs(found)
    _check(args, wanted)
    given = _given_punctuation(args)  # before the weights are loaded
    texts = args.perplexity or args.longbench or wanted & {"separators", "calibration"}
    # Needles are token ids already.
    tokenizer: Any = load_tokenizer(args.model) if texts or args.punctuation not in given else None
    samples = _samples(args, tokenizer)
    model = _load_for(args, samples)
    marks = tasks.Marks.of(model.config.vocab_size, tokenizer, args.punctuation, given, "separators" in wanted)
    calibration = learned = None
    if "calibration" in wanted:
        calibration, learned = _calibrated(args, model, tokenizer, "hash" in wanted)
    table = Table(model, tokenizer, marks, args.question, args.tail, calibration, learned)
    records = Records(Path(args.out), table.header(Path(args.model).name))
    try:
        table.run(samples, found, records, args.quiet)
    except KeyboardInterrupt:
        print(f"\narena: stopped; the same command goes on ({records.count} answers are kept)", file=sys.stderr)
        sys.exit(130)
    print(summary(read_records([args.out])[1]))


def _report(args: argparse.Namespace) -> None:
    from . import report
    from .run import read_records

    headers, records = read_records(args.files)
    if not records:
        raise ValueError("arena: the files hold no answers yet")
    text = report.markdown(headers, records, _list(args.against), args.draws)
    if args.html:
        Path(args.html).write_text(report.page(headers, records, _list(args.against), args.draws), encoding="utf-8")
    if args.into:
        report.replace_between_marks(Path(args.into), text)
    if not args.html and not args.into:
        print(text)


def _rules(args: argparse.Namespace) -> None:
    from . import report

    unknown = [name for name in args.names if name not in RULES]
    if unknown:
        raise ValueError(f"arena: there is no rule {unknown[0]!r}; allowed: {', '.join(RULES)}")
    print(report.rules_table(args.names or list(RULES)))


def main(arguments: Sequence[str] | None = None) -> None:
    args = _parser().parse_args(arguments)
    try:
        {"table": _table, "report": _report, "rules": _rules}[args.command](args)
    except (OSError, ValueError) as error:
        sys.exit(f"phsa: {error}")


if __name__ == "__main__":
    main()
