"""Training texts beside the folders of `phsa prepare`: JSON lines and folders of Hugging Face `datasets`, with chat
templates. They are read and tokenized when the run starts, and kept in memory: 4 bytes a token."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .shards import Shards

_FORMS = "input_ids, messages, prompt and completion, or text"
_MASKS = ("completion_mask", "assistant_masks")


class Documents:
    """What `Shards` is, for texts in memory. A token that is read but not learned is stored as its complement, ~id:
    the questions of a chat, for example."""

    vocab_size: int
    end: int | None = None

    def __init__(self, path: Path, documents: Iterable[np.ndarray]) -> None:
        self.folder = path
        kept = [document.astype(np.int32) for document in documents if len(document)]
        if not kept:
            raise ValueError(f"{path}: there are no tokens in it")
        self._all = np.concatenate(kept)
        if (self._all < 0).all():
            raise ValueError(f"{path}: there is nothing to learn: no answer of an assistant, no completion")
        self.offsets = np.cumsum([0, *map(len, kept)])
        self.documents, self.tokens = len(kept), len(self._all)
        self.vocab_size = int(np.maximum(self._all, ~self._all).max()) + 1
        self.punctuation: dict[str, list[int]] = {}
        self.digests = [hashlib.sha256(self._all.tobytes()).hexdigest()]

    def piece(self, begin: int, length: int) -> np.ndarray:
        return self._all[begin : begin + length]


def open_texts(path: str, tokenizer: Callable[[], Any], verify: bool) -> Shards | Documents:
    """A folder of `phsa prepare`, one that `datasets` saved, or a file of JSON lines. `tokenizer` loads the model's."""
    place = Path(path)
    if place.is_file():
        return Documents(place, _documents(place, _json_lines(place), tokenizer))
    if (place / "dataset_info.json").is_file() or (place / "dataset_dict.json").is_file():
        return Documents(place, _documents(place, _dataset(place), tokenizer))
    return Shards(path, verify=verify)


def _json_lines(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: not JSON: {error}") from None
            if not isinstance(record, dict):
                raise ValueError(f"{path}, line {number}: not an object; allowed: objects with {_FORMS}")
            yield record


def _dataset(path: Path) -> Iterable[Mapping[str, Any]]:
    try:
        import datasets
    except ImportError:
        raise ValueError(f"{path} was saved by datasets, which is not installed here: pip install datasets") from None
    loaded = datasets.load_from_disk(str(path))
    if isinstance(loaded, datasets.DatasetDict):
        raise ValueError(f"{path} holds the splits {', '.join(loaded)}; give one of these folders")
    return loaded


def _documents(path: Path, records: Iterable[Mapping[str, Any]], tokenizer: Callable[[], Any]) -> Iterator[np.ndarray]:
    loaded: list[Any] = []

    def words() -> Any:
        if not loaded:
            loaded.append(tokenizer())
        return loaded[0]

    for number, record in enumerate(records, 1):
        try:
            yield from _tokens(record, words)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path}, record {number}: {error}") from error


def _marked(ids: Iterable[int], learned: Iterable[Any]) -> np.ndarray:
    tokens, keep = np.asarray(ids, dtype=np.int64), np.asarray(learned).astype(bool)
    if tokens.ndim != 1 or tokens.shape != keep.shape:
        raise ValueError(f"{tokens.shape} ids and {keep.shape} marks of what is learned; allowed: one mark per id")
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < 2**31:
        raise ValueError(f"ids from {tokens.min()} to {tokens.max()}; allowed: 0 and up")
    return np.where(keep, tokens, ~tokens)


def _tokens(record: Mapping[str, Any], tokenizer: Callable[[], Any]) -> Iterator[np.ndarray]:
    """The documents of a record: one, or several where it was packed already."""
    if record.get("input_ids") is not None:
        ids = record["input_ids"]
        learned: Any = np.ones(len(ids), dtype=bool)
        if record.get("labels") is not None:
            learned = np.asarray(record["labels"]) >= 0
        for name in _MASKS:
            if record.get(name) is not None:
                learned = record[name]
        tokens = _marked(ids, learned)
        bounds = np.cumsum(record.get("seq_lengths") or [len(tokens)])
        if bounds[-1] != len(tokens):
            raise ValueError(f"seq_lengths sum to {bounds[-1]}, but there are {len(tokens)} ids")
        yield from np.split(tokens, bounds[:-1])
    elif record.get("messages") is not None:
        yield _chat(tokenizer(), list(record["messages"]))
    elif record.get("prompt") is not None and record.get("completion") is not None:
        prompt, completion = record["prompt"], record["completion"]
        if isinstance(prompt, str):
            before = tokenizer()(prompt)["input_ids"]
            after = tokenizer()(completion, add_special_tokens=False)["input_ids"] + _end(tokenizer())
            yield _marked([*before, *after], [0] * len(before) + [1] * len(after))
        else:
            yield _chat(tokenizer(), [*prompt, *completion], first=len(prompt))
    elif record.get("text") is not None:
        ids = tokenizer()(record["text"])["input_ids"] + _end(tokenizer())
        yield _marked(ids, [1] * len(ids))
    else:
        raise ValueError(f"it has {', '.join(record) or 'nothing'}; allowed: {_FORMS}")


def _end(tokenizer: Any) -> list[int]:
    return [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]


def _chat(tokenizer: Any, messages: list[Mapping[str, str]], first: int = 0) -> np.ndarray:
    """A conversation in the model's template; the answers of the assistant are learned, from message `first` on."""
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("the model's tokenizer has no chat template; allowed then: prompt and completion, or text")

    def ids(count: int, ask: bool = False) -> list[int]:
        return tokenizer.apply_chat_template(messages[:count], add_generation_prompt=ask, return_dict=False)

    whole = ids(len(messages))
    learned = np.zeros(len(whole), dtype=bool)
    for index in range(first, len(messages)):
        if messages[index]["role"] != "assistant":
            continue
        before, after = ids(index, ask=True), ids(index + 1)
        # Some templates drop the thoughts of earlier answers: these cannot be learned from what is left of them.
        if whole[: len(after)] == after and after[: len(before)] == before:
            learned[len(before) : len(after)] = True
    return _marked(whole, learned)
