"""The runs: each text is read once by each prefill rule, and all answer rules share what that leaves."""

from __future__ import annotations

import hashlib
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from . import longbench
from .attend import NAME, Pass, Text, read
from .base import Rule
from .calibrate import LayerCalibration
from .rules import RULES, label, parse
from .rules_fixed import Dense
from .tasks import Marks, Sample

FORMAT = "phsa arena 1"


@dataclass(frozen=True)
class Budget:
    """A share of the context, or K blocks of 16 beside the paper's init and local for the length."""

    share: float | None = None
    top_k: int | None = None

    def __str__(self) -> str:
        return f"K={self.top_k}" if self.share is None else f"{self.share:g}"

    def preset(self, length: int) -> dict[str, int] | None:
        if self.top_k is None:
            return None
        return {**({"init": 16, "local": 128} if length <= 4096 else {"init": 128, "local": 512}), "top_k": self.top_k}

    def tokens(self, sample: Sample) -> int:
        if self.share is not None:
            return max(1, round(self.share * sample.context))
        preset = self.preset(sample.length)
        assert preset is not None
        # And half of the query's own block.
        return preset["init"] + preset["local"] + 16 * preset["top_k"] + 8


@dataclass(frozen=True)
class Entry:
    """A line of a table: who reads the text, who answers, at which budget. `rule` is the one that it is about."""

    rule: str
    prefill: str
    answer: str
    budget: Budget | None  # None: everything

    def record(self) -> dict[str, Any]:
        budget = None if self.budget is None else str(self.budget)
        return {"rule": self.rule, "prefill": self.prefill, "answer": self.answer, "budget": budget}


def entries(rules: Sequence[str], budgets: Sequence[Budget], prefills: Sequence[str], phases: str) -> list[Entry]:
    """`prefills`: who reads the text for the rules that answer. `phases`: "answer", "both" (a rule of both phases reads
    the text, too), or "all" (once so and once so). Rules for the prefill alone are answered densely."""
    found: list[Entry] = []

    def add(entry: Entry) -> None:
        if entry not in found:
            found.append(entry)

    for prefill in prefills:
        if prefill == "dense":
            add(Entry("dense", "dense", "dense", None))
    for spec in rules:
        rule, _ = parse(spec)
        name = label(spec)
        for budget in budgets:
            if rule is Dense:
                continue
            if rule.phases == ("prefill",):
                add(Entry(name, name, "dense", budget))
                continue
            if phases in ("answer", "all") or "prefill" not in rule.phases:
                for prefill in prefills:
                    add(Entry(name, prefill, name, budget))
            if phases in ("both", "all") and "prefill" in rule.phases:
                add(Entry(name, name, name, budget))
    return found


def needs(found: Sequence[Entry]) -> set[str]:
    """What the rules of a table need besides the model."""
    return {need for entry in found for spec in (entry.prefill, entry.answer) for need in parse(spec)[0].needs}


def fingerprint(model: PreTrainedModel) -> str:
    """Tells weights from others: the shapes, and a few numbers of each tensor."""
    state = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        few = value.flatten()[:64].float().cpu()
        state.update(f"{name} {tuple(value.shape)}".encode() + few.numpy().tobytes())
    return state.hexdigest()[:16]


def _made(spec: str, budget: Budget | None, sample: Sample) -> Rule:
    rule, options = parse(spec)
    if budget is None:
        if rule is not Dense:
            raise ValueError(f"arena: {spec} without a budget")
        return Dense(sample.context)
    return rule(budget.tokens(sample), budget.preset(sample.length), **options)


class Records:
    """A file of JSON lines that grows; a run that was stopped goes on from it."""

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self.path = path
        self.known: set[str] = set()
        self.count = 0
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]  # a last line without its end is dropped
        if whole:
            try:
                first, *records = map(json.loads, whole.splitlines())
                self.known = {self.key(record) for record in records}
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"arena: {path} is not a file of the arena; give another --out") from None
            different = [name for name in header if first.get(name) != header[name]]
            if first.get("format") != FORMAT or different:
                raise ValueError(f"arena: {path} has another {', '.join(different)}; give another --out")
            self.count = len(records)
        if whole != text or not whole:
            path.write_text(whole or self._line(header), encoding="utf-8")

    @staticmethod
    def _line(value: dict[str, Any]) -> str:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n"

    @staticmethod
    def key(record: dict[str, Any]) -> str:
        names = ("task", "length", "sample", "digest", "prefill", "answer", "budget", "question", "tail", "learned")
        return json.dumps([record[name] for name in names])

    def add(self, record: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(self._line(record))
        self.known.add(self.key(record))
        self.count += 1


def read_records(paths: Sequence[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Headers and records of files of the arena, each record with its model's name."""
    headers, records = [], []
    for path in paths:
        try:
            first, *rest = map(json.loads, Path(path).read_text(encoding="utf-8").splitlines())
            if first.get("format") != FORMAT:
                raise ValueError("another format")
        except (ValueError, AttributeError) as error:
            raise ValueError(f"arena: {path} is not a file of the arena: {error}") from None
        headers.append({**first, "file": Path(path).name})
        records += [{**record, "model": first["model"]} for record in rest]
    return headers, records


class Table:
    """One model, one question mode, any samples and entries."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        marks: Marks,
        question: str = "rule",
        tail: int = 64,
        calibration: list[LayerCalibration] | None = None,
        learned: str | None = None,
    ) -> None:
        windows = "sliding_attention" in (getattr(model.config, "layer_types", None) or ())
        if windows:
            raise ValueError("arena: this model has sliding windows; allowed: full attention in all layers")
        model.set_attn_implementation(NAME)
        self.model, self.tokenizer, self.marks = model, tokenizer, marks
        self.question, self.tail = question, tail
        self.calibration, self.learned = calibration, learned

    def header(self, name: str) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "model": name,
            "weights": fingerprint(self.model),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "punctuation": self.marks.name,
        }

    def place(self) -> dict[str, Any]:
        device = self.model.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        return {"device": name, "torch": torch.__version__, "transformers": transformers.__version__}

    def keyed(self, sample: Sample, entry: Entry) -> dict[str, Any]:
        """The part of a record that tells it from others."""
        wanted = {need for spec in (entry.prefill, entry.answer) for need in parse(spec)[0].needs}
        return {
            "task": sample.task,
            "length": sample.length,
            "sample": sample.index,
            "digest": sample.digest,
            **entry.record(),
            "question": self.question,
            "tail": self.tail,
            "learned": self.learned if "calibration" in wanted else None,
        }

    def run(self, samples: Sequence[Sample], found: Sequence[Entry], records: Records, quiet: bool = False) -> int:
        """Answers what the records lack. Returns how many."""
        todo = [
            (sample, [e for e in found if Records.key(self.keyed(sample, e)) not in records.known])
            for sample in samples
        ]
        todo = [(sample, missing) for sample, missing in todo if missing]
        total, done, start = sum(len(missing) for _, missing in todo), 0, time.perf_counter()
        place = self.place()
        for sample, missing in todo:
            for record in self.answers(sample, missing):
                records.add({**record, **place})
                done += 1
                if not quiet and (sys.stderr.isatty() or done % 50 == 0 or done == total):
                    left = (time.perf_counter() - start) / done * (total - done)
                    print(f"\rarena: {done} of {total} answers, {left:.0f} s left", end="", file=sys.stderr)
        if not quiet and total:
            print(file=sys.stderr)
        return done

    @torch.no_grad()
    def answers(self, sample: Sample, missing: Sequence[Entry]) -> Iterator[dict[str, Any]]:
        groups: dict[tuple[str, str | None], list[Entry]] = {}
        for entry in missing:
            # Dense reads the same whatever the budget.
            budget = None if entry.prefill == "dense" else str(entry.budget)
            groups.setdefault((entry.prefill, budget), []).append(entry)
        for (prefill, _), group in groups.items():
            device = self.model.device
            whole = sample.text + sample.question + sample.answer
            text = Text(*self.marks.flags(whole, device))
            cache = DynamicCache(config=self.model.config)
            begun = time.perf_counter()
            rule = _made(prefill, None if prefill == "dense" else group[0].budget, sample)
            run = Pass(rule, len(sample.text), len(sample.text), True, text, calibration=self.calibration)
            run.want_sums = "sums" in needs(group)
            read(self.model, run, sample.text, cache)
            prefill_shares = run.shares(0, len(sample.text))
            prefill_seconds = time.perf_counter() - begun
            for entry in group:
                begun = time.perf_counter()
                answer = _made(entry.answer, None if entry.answer == "dense" else entry.budget, sample)
                flags = (text.flags, text.separators)
                run = Pass(answer, len(sample.text), sample.prompt, False, text, self.question, self.calibration)
                result = (
                    self._written(sample, run, cache) if sample.kind == "written" else self._known(sample, run, cache)
                )
                text.flags, text.separators = flags
                if cache.get_seq_length() > len(sample.text):
                    cache.crop(len(sample.text) - cache.get_seq_length())
                spent = (rule if entry.answer == "dense" and prefill != "dense" else answer).spent()
                yield {
                    **self.keyed(sample, entry),
                    **result,
                    "context": sample.context,
                    "read_prefill": prefill_shares,
                    "read_question": run.shares(len(sample.text), sample.prompt),
                    "spent": spent,
                    "seconds": round(time.perf_counter() - begun, 3),
                    "prefill_seconds": round(prefill_seconds, 3),
                }

    def _known(self, sample: Sample, run: Pass, cache: DynamicCache) -> dict[str, Any]:
        """Question and answer in one go: each token of the answer given the right ones before it."""
        count = len(sample.answer)
        logits = read(self.model, run, sample.question + sample.answer[:-1], cache, count)
        target = torch.tensor(sample.answer, device=logits.device)
        nll = torch.nn.functional.cross_entropy(logits, target, reduction="none")[sample.free :]
        likeliest = logits.argmax(-1) == target
        value = float(nll.mean())
        read_answer = run.shares(self._first(sample, run), sample.context - 1)
        if sample.kind == "perplexity":
            return {"score": -value, "nll": round(value, 6), "read": read_answer}
        right = float(likeliest[sample.free :].all())
        return {"score": right, "nll": round(value, 6), "read": read_answer}

    def _written(self, sample: Sample, run: Pass, cache: DynamicCache) -> dict[str, Any]:
        """Greedily, until an end token."""
        ends = self._ends(sample)
        logits = read(self.model, run, sample.question, cache)
        found: list[int] = []
        while len(found) < sample.tokens:
            token = int(logits[-1].argmax())
            if token in ends and not (found == [] and longbench.SETS[sample.task].stop_at_line):
                break
            found.append(token)
            if len(found) < sample.tokens:
                self._extend(run.sample, token)
                logits = read(self.model, run, [token], cache)
        answer = self.tokenizer.decode(found, skip_special_tokens=True)
        value = longbench.score(sample.task, answer, sample.references, sample.classes)
        shares = run.shares(self._first(sample, run), sample.prompt + len(found))
        return {"score": value, "written": len(found), "text": answer, "read": shares}

    @staticmethod
    def _first(sample: Sample, run: Pass) -> int:
        """The first query that is counted for the answer: the prompt's last token predicts the answer's first, unless
        the question is read densely and the answer has more."""
        return sample.prompt if run.dense_question or not sample.question else sample.prompt - 1

    def _extend(self, text: Text, token: int) -> None:
        device = self.model.device
        flags, separators = self.marks.flags([token], device)
        if text.flags is not None and flags is not None:
            text.flags = torch.cat((text.flags, flags))
        if text.separators is not None and separators is not None:
            text.separators = torch.cat((text.separators, separators))

    def _ends(self, sample: Sample) -> set[int]:
        config = self.model.generation_config
        ends = config.eos_token_id if config is not None else None
        found = set(ends if isinstance(ends, list) else [ends]) | {self.tokenizer.eos_token_id}
        if longbench.SETS[sample.task].stop_at_line:
            found.add(self.tokenizer("\n", add_special_tokens=False)["input_ids"][-1])
        return {x for x in found if x is not None}


def summary(records: Sequence[dict[str, Any]]) -> str:
    """A short table of what a run found, for the terminal."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for record in records:
        names = ("task", "length", "question", "rule", "prefill", "answer", "budget")
        groups.setdefault(tuple(record[name] for name in names), []).append(record)
    lines = []
    for (task, length, question, rule, prefill, answer, budget), group in groups.items():
        score = sum(r["score"] for r in group) / len(group)
        shown = f"{math.exp(-score):9.3f}" if all("nll" in r and r["score"] == -r["nll"] for r in group) else ""
        shown = shown or f"{100 * score:9.1f}"
        alone = answer == "dense" and prefill != "dense"
        shares = [share for share in (r["read_prefill" if alone else "read"] for r in group) if share]
        tokens = 100 * sum(s["token_share"] for s in shares) / max(1, len(shares))
        size = 100 * sum(s["byte_share"] for s in shares) / max(1, len(shares))
        phases = "" if (prefill, answer) in (("dense", rule), (rule, "dense")) else f" after {prefill}"
        lines.append(
            f"{task:<20} {length:>6} {question:<6} {rule + phases:<36} {budget or '-':>6} n={len(group):<4} {shown}  "
            f"tokens {tokens:5.1f} %  bytes {size:5.1f} %"
        )
    return "\n".join(lines)


__all__ = ["RULES", "Budget", "Entry", "Records", "Table", "entries", "needs", "read_records", "summary"]
