"""What is asked: needles from `phsa niah --export`, LongBench, and perplexity of a text."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import _library
from .. import punctuation as punctuation_sets
from . import longbench

_SEPARATORS = tuple(mark.encode() for mark in (".", ",", "?", "!", ";", ":", " ", "\t", "\n"))


@dataclass(frozen=True)
class Sample:
    """A text that is read first, a question behind it, and an answer: known (scored as it stands) or to be written."""

    task: str
    length: int  # what it was made for
    index: int
    text: tuple[int, ...]
    question: tuple[int, ...]
    answer: tuple[int, ...] = ()
    free: int = 0  # tokens of the answer that do not count
    kind: str = "needle"  # or "perplexity", "written"
    references: tuple[str, ...] = ()
    classes: tuple[str, ...] | None = None
    tokens: int = 0  # the most to be written

    @property
    def prompt(self) -> int:
        return len(self.text) + len(self.question)

    @property
    def context(self) -> int:
        return self.prompt + len(self.answer)

    @functools.cached_property
    def digest(self) -> str:
        whole = repr((self.text + self.question, self.answer, self.free, self.references, self.tokens))
        return hashlib.sha256(whole.encode()).hexdigest()[:12]


def _split(tokens: Sequence[int], tail: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The text, and the last `tail` tokens, which are read as the question; one token of text at least."""
    cut = max(1, len(tokens) - tail)
    return tuple(tokens[:cut]), tuple(tokens[cut:])


def needles(path: str, tail: int, most: int | None) -> Iterator[Sample]:
    from ..hf.niah import read_samples

    _, samples = read_samples(path)
    counts: dict[tuple[str, int], int] = {}
    for sample in samples:
        record = sample["records"][0]
        place = (record["task"], record["length"])
        counts[place] = counts.get(place, 0) + 1
        if most is not None and counts[place] > most:
            continue
        text, question = _split(sample["tokens"], tail)
        yield Sample(
            *(record["task"], record["length"], record["sample"], text, question),
            answer=tuple(sample["answer_tokens"]),
            free=sample["free_tokens"],
        )


def perplexity(
    name: str, path: str, tokenizer: Any, length: int, count: int, scored: int, tail: int
) -> Iterator[Sample]:
    """Stretches of a text, evenly spaced, whose last `scored` tokens are scored behind the rest."""
    text = Path(path).read_text(encoding="utf-8", errors="replace")
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) < length:
        raise ValueError(f"arena: {path} has {len(ids)} tokens; {length} are asked for")
    for index in range(count):
        start = (len(ids) - length) * index // max(1, count - 1) if count > 1 else 0
        part = ids[start : start + length]
        before, question = _split(part[: length - scored], tail)
        yield Sample(
            *(name, length, index, before, question),
            answer=tuple(part[length - scored :]),
            kind="perplexity",
        )


def _with_template(tokenizer: Any, prompt: str) -> str:
    if getattr(tokenizer, "chat_template", None) is None:
        return prompt
    messages = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def long_bench(
    folder: str, names: Sequence[str], tokenizer: Any, most_tokens: int, tail: int, most: int | None
) -> Iterator[Sample]:
    """Prompts cut in the middle to `most_tokens`, the answer's room included in what the model must hold."""
    for name in names:
        one = longbench.SETS[name]
        for index, row in enumerate(longbench.rows(Path(folder), name)[:most]):
            prompt = one.prompt.format(context=row["context"], input=row["input"])
            ids = tokenizer(prompt)["input_ids"]
            if len(ids) > most_tokens:
                half = most_tokens // 2
                ends = (ids[:half], ids[len(ids) - half :])
                prompt = "".join(tokenizer.decode(part, skip_special_tokens=True) for part in ends)
            if one.chat:
                prompt = _with_template(tokenizer, prompt)
            text, question = _split(tokenizer(prompt)["input_ids"], tail)
            yield Sample(
                *(name, most_tokens, index, text, question),
                kind="written",
                references=tuple(row["answers"]),
                classes=tuple(row["all_classes"]) if row.get("all_classes") else None,
                tokens=one.max_tokens,
            )


@dataclass
class Marks:
    """Which token ids are punctuation and which are SepLLM's separators."""

    punctuation: Tensor | None
    separators: Tensor | None
    name: str = "en+zh"
    known: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(size: int, tokenizer: Any, punctuation: str, given: dict[str, list[int]], separators: bool) -> Marks:
        """`given`: sets that a file of samples holds, for where libphsa is not installed."""
        if punctuation in given:
            ids = given[punctuation]
        else:
            try:
                ids = punctuation_sets.ids(tokenizer, punctuation)
            except (_library.LibraryError, OSError) as error:
                raise ValueError(
                    f"arena: which tokens are punctuation ({punctuation}) is not known here: {error}. Or give "
                    "--punctuation-from a file of `phsa niah --export` that has this set"
                ) from None
        seps = None
        if separators:
            raw, special = punctuation_sets.token_bytes(tokenizer)
            found = [i for i, one in enumerate(raw) if not special[i] and one in _SEPARATORS]
            seps = _table(size, found)
        return Marks(_table(size, ids), seps, punctuation)

    def flags(self, tokens: Sequence[int], device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        ids = torch.tensor(tokens)
        first, second = (None if t is None else t[ids].to(device) for t in (self.punctuation, self.separators))
        return first, second


def _table(size: int, ids: Sequence[int]) -> Tensor:
    table = torch.zeros(max(size, max(ids, default=0) + 1), dtype=torch.bool)
    table[torch.tensor(ids, dtype=torch.long)] = True
    return table
