"""Attention over another program's paged KV cache: what phsa.vllm and phsa.sglang have in common.

Their cache keeps keys and values. What phsa needs beside them, representatives and punctuation flags, is indexed by the
same physical pages, so that pages which several texts share (prefix caching) carry theirs along. A full block never
changes, and so neither does its representative.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import ops
from ._fallback import Blocks
from .punctuation import flag_table
from .settings import PUNCTUATION_SETS, ModelSettings, Settings, read_settings, resolve

VARIABLE = "PHSA_SETTINGS"
_ALIGNMENT = 16  # bytes: what the CUDA kernels load at a time

logger = logging.getLogger("phsa")


class Refused(ValueError):
    """A model or setting that cannot be served sparsely; the message says why and what to do."""


def refuse(what: str) -> None:
    raise Refused(f"phsa: {what}")


# ---------------------------------------------------------------------------------------------------------------------
# Settings


def _given(value: Any, where: str) -> Mapping[str, Any] | str | None:
    """Settings as somebody gave them: a mapping, JSON, or the path of a file of JSON."""
    if value is None or value == "" or isinstance(value, Mapping):
        return value or None
    if not isinstance(value, (str, os.PathLike)):
        refuse(f"{where} is {value!r}; allowed: an object of settings, or the path of a file with one")
    text = os.fspath(value).strip()
    if not text.startswith("{"):
        if not os.path.isfile(text):
            refuse(
                f"{where} names {text!r}, which is no file; allowed: a file of settings, or an object such as "
                '{"top_k": 16} (docs/settings.md)'
            )
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        refuse(f"{where} is not JSON: {error}")
    return None


def model_settings(config: Any, given: Any = None) -> ModelSettings:
    """The settings of a model: the environment's PHSA_SETTINGS, then `given`, then what its configuration carries, then
    the preset for its context. All of them as docs/settings.md has it."""
    context = getattr(config, "max_position_embeddings", None) or 1 << 20
    value = _given(os.environ.get(VARIABLE), VARIABLE) or _given(given, "phsa")
    carried = getattr(config, "phsa", None) or {}
    try:
        values = read_settings(value)
        # Who chose the backend asked for sparse attention, also of a model that is dense until somebody does.
        if carried.get("attention", "dense") == "dense" and not {"attention", "policy"} & {*values}:
            values = {"attention": "phsa", **values}
        settings = resolve(context, carried=carried, settings=values)
    except ValueError as error:
        raise Refused(f"phsa: {error}") from error
    layers = getattr(config, "num_hidden_layers", None)
    for layer in settings.layers:
        if layers is not None and layer >= layers:
            refuse(f"settings: layers has layer {layer}; this model has 0 to {layers - 1}")
    for one in (settings.base, *settings.layers.values()):
        if one.policy == "infllm2-64":
            refuse(
                "policy infllm2-64: its representatives reach into the next page, which other texts may not share; "
                "allowed: phsa, infllm2, quest, streaming, dense"
            )
    return settings


def of_kv_heads(settings: Settings, first: int, count: int, total: int) -> Settings:
    """The settings as one of several processes sees them that share out a model's KV heads."""
    if not isinstance(settings.lam, tuple) or len(settings.lam) == 1:
        return settings
    if len(settings.lam) != total:
        refuse(f"settings: lambda lists {len(settings.lam)} values; allowed: one, or one per KV head ({total})")
    return dataclasses.replace(settings, lam=settings.lam[first : first + count])


def flags_of_vocabulary(settings: ModelSettings, config: Any, load_tokenizer: Any) -> bytes | None:
    """One byte a token id, 1 where it is punctuation; None where no setting asks."""
    if not settings.needs_flags:
        return None
    vocabulary = config.vocab_size
    name = settings.base.punctuation
    ids: Iterable[int] | None = None if isinstance(name, str) else name
    if name == "custom":
        ids = getattr(config, "phsa_punctuation_ids", None)
        if ids is None:
            refuse("the configuration has a punctuation set of its own, but its ids (phsa_punctuation_ids) are missing")
    if ids is not None:
        table = bytearray(vocabulary)
        for index in ids:
            if not 0 <= index < vocabulary:
                refuse(f"punctuation has the id {index}; allowed: 0 to {vocabulary - 1}")
            table[index] = 1
        return bytes(table)
    carried = (getattr(config, "phsa", None) or {}).get("punctuation")
    if name not in PUNCTUATION_SETS and name == carried:
        # A model is data of others: it may name no file of this machine.
        refuse(f"the configuration names the punctuation {name!r}; allowed there: {', '.join(PUNCTUATION_SETS)}")
    try:
        return flag_table(load_tokenizer(), str(name), vocabulary)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Refused(
            f"phsa: the punctuation flags need the model's tokenizer: {error}. Give token ids as punctuation, "
            'or "none"'
        ) from error


def describe(settings: Settings) -> str:
    """For a log's line."""
    if settings.policy == "dense":
        return "dense"
    parts = f", parts {settings.parts}" if settings.parts > 1 else ""
    lam = f", lambda {settings.lam}" if settings.policy == "phsa" else ""
    chosen = "" if settings.policy == "streaming" else f", K {settings.top_k}{parts}{lam}"
    return f"{settings.policy}, init {settings.init}, local {settings.local}{chosen}"


def ranges(layers: Iterable[int]) -> str:
    """0-3, 5"""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and runs[-1][1] == layer - 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def layers_line(settings: ModelSettings, sparse: Sequence[int], kept: Sequence[int], flags: bool) -> str:
    """The one line of the log that says which layers are sparse and how."""
    by_settings: dict[str, list[int]] = {}
    for layer in sparse:
        by_settings.setdefault(describe(settings.for_layer(layer)), []).append(layer)
    parts = [f"layers {ranges(layers)}: {text}" for text, layers in by_settings.items()]
    if kept:
        parts.append(f"layers {ranges(kept)} keep their own attention (windows)")
    if settings.needs_flags and not flags:
        parts.append("no punctuation flags reach this model: lambda = 1 everywhere")
    return "phsa: " + "; ".join(parts)


# ---------------------------------------------------------------------------------------------------------------------
# Pages


@dataclass(frozen=True)
class Tail:
    """What phsa keeps of a page and layer, in bytes: representatives, then flags."""

    page_size: int
    rows: int  # of representatives
    width: int  # elements of a row and KV head
    kv_heads: int
    itemsize: int

    @staticmethod
    def of(settings: Settings, page_size: int, kv_heads: int, head_dim: int, itemsize: int) -> Tail:
        blocks = Blocks.of(settings)
        if page_size % blocks.block:
            refuse(
                f"pages have {page_size} tokens; allowed: a multiple of the block size ({blocks.block}): set "
                f"--block-size {blocks.block}"
            )
        none = blocks.top_k == 0
        width = 0 if none else blocks.rep_width(head_dim)
        return Tail(page_size, 0 if none else page_size // blocks.rep_stride, width, kv_heads, itemsize)

    @property
    def flags_at(self) -> int:
        return self.rows * self.kv_heads * self.width * self.itemsize

    @property
    def bytes(self) -> int:
        size = self.flags_at + self.page_size
        return -(-size // _ALIGNMENT) * _ALIGNMENT

    def views(self, base: Tensor, offset: int, page_bytes: int, pages: int) -> tuple[Tensor | None, Tensor]:
        """The representatives (pages, rows, kv_heads, width), None where nothing is chosen, and the flags (pages,
        page_size), in `base`'s memory: those of page i begin at byte `offset` + i * page_bytes of its storage."""
        storage = base.untyped_storage()
        raw = torch.empty(0, dtype=torch.uint8, device=base.device).set_(storage)
        flags = raw.as_strided((pages, self.page_size), (page_bytes, 1), offset + self.flags_at)
        if self.rows == 0:
            return None, flags
        typed = torch.empty(0, dtype=base.dtype, device=base.device).set_(storage)
        page_stride, remainder = divmod(page_bytes, self.itemsize)
        start, rest = divmod(offset, self.itemsize)
        assert remainder == 0 and rest == 0
        reps = typed.as_strided(
            (pages, self.rows, self.kv_heads, self.width),
            (page_stride, self.kv_heads * self.width, self.width, 1),
            start,
        )
        return reps, flags


@dataclass
class Cache:
    """One layer's pages: (pages, page_size, kv_heads, head_dim), views of the server's memory, and what is beside."""

    k: Tensor
    v: Tensor
    reps: Tensor | None
    flags: Tensor | None

    @property
    def page_size(self) -> int:
        return self.k.shape[1]

    def write_flags(self, slots: Tensor, flags: Tensor) -> None:
        """The flags of tokens at these slots; a negative one is padding, and goes where nobody looks: page 0."""
        assert self.flags is not None
        slots = slots.clamp(min=0)
        page_size = self.page_size
        self.flags[torch.div(slots, page_size, rounding_mode="floor"), slots % page_size] = flags


def int32(values: Tensor) -> Tensor:
    return values if values.dtype == torch.int32 and values.is_contiguous() else values.to(torch.int32).contiguous()


def attend(
    q: Tensor,
    cache: Cache,
    out: Tensor,
    settings: Settings,
    *,
    q_lens: Tensor,
    kv_lens: Tensor,
    page_table: Tensor,
    scale: float,
    sinks: Tensor | None = None,
    threads: int | None = None,
) -> None:
    """Prefill, chunks of it, decode and mixtures: the lengths are known to the host."""
    rows = int(q_lens.sum())
    if rows == 0:
        return
    ops.paged_attention(
        q[:rows],
        cache.k,
        cache.v,
        settings=settings,
        q_lens=int32(q_lens),
        kv_lens=int32(kv_lens),
        page_table=page_table,
        out=out[:rows],
        reps=cache.reps,
        flags=cache.flags if settings.needs_flags else None,
        sinks=sinks,
        scale=scale,
        threads=threads,
    )


def decode(
    q: Tensor,
    cache: Cache,
    out: Tensor,
    settings: Settings,
    *,
    lens: Tensor,
    most: int,
    page_table: Tensor,
    scale: float,
    sinks: Tensor | None = None,
) -> None:
    """One query a sequence; `lens` are where q is and may be read late, so that a CUDA graph can hold this call. None
    exceeds `most`. Sequences of length 0 are padding."""
    count = lens.shape[0]
    if count == 0:
        return
    if q.device.type == "cpu":  # no graphs there
        used = int((lens > 0).sum())
        ones = torch.ones(used, dtype=torch.int32)
        table = page_table[:used]
        attend(q, cache, out, settings, q_lens=ones, kv_lens=lens[:used], page_table=table, scale=scale, sinks=sinks)
        return
    ones = torch.ones(count, dtype=torch.int32)
    ops.paged_attention(
        q[:count],
        cache.k,
        cache.v,
        settings=settings,
        q_lens=ones,
        kv_lens=ones * min(most, page_table.shape[1] * cache.page_size),
        device_lens=int32(lens),
        page_table=page_table,
        out=out[:count],
        reps=cache.reps,
        flags=cache.flags if settings.needs_flags else None,
        sinks=sinks,
        scale=scale,
    )


class StepFlags:
    """The flags of a step's tokens: a model's forward writes them, its layers' caches take them. The buffer keeps its
    place, so that CUDA graphs may hold both."""

    def __init__(self, table: bytes, tokens: int, device: torch.device) -> None:
        self.table = torch.frombuffer(bytearray(table), dtype=torch.uint8).to(device)
        self.buffer = torch.zeros(tokens, dtype=torch.uint8, device=device)

    def write(self, ids: Tensor | None) -> None:
        if ids is None:
            self.buffer.zero_()  # embeddings, such as those of pictures
            return
        # Placeholders of tokens that are yet to come are negative.
        torch.index_select(self.table, 0, ids.clamp(0, self.table.shape[0] - 1), out=self.buffer[: ids.shape[0]])


def threads_of_process() -> int:
    """torch's threads; serving engines bind them to cores, and the kernels' own threads inherit what binds the thread
    that starts them. So where that is fewer cores than threads, it is let go to all cores of the process."""
    threads = torch.get_num_threads()
    if threads > 1 and len(os.sched_getaffinity(0)) < threads:
        cores: set[int] = set()
        for task in os.listdir("/proc/self/task"):
            try:
                cores |= os.sched_getaffinity(int(task))
            except (OSError, ValueError):
                continue  # it has ended
        os.sched_setaffinity(0, cores)
    return threads
