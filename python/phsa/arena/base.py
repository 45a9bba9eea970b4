"""What a rule is: what it keeps of the keys, what it chooses for a tile of queries, and what it reads to do so."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .calibrate import LayerCalibration

# Bytes are counted as if keys and values were 16 bits wide, whatever the run computes with.
ELEMENT = 2


@dataclass
class Keys:
    """Keys and values of one layer of one sequence, as far as they exist.

    k, v: (kv_heads, tokens, head_dim). The first `text` tokens were there before the phase began, the first `prompt`
    tokens before the answer did; in the prefill both are the tokens there are.
    """

    k: Tensor
    v: Tensor
    scale: float
    q_heads: int
    layer: int = 0
    text: int = 0
    prompt: int = 0
    flags: Tensor | None = None  # (tokens,), which are punctuation
    separators: Tensor | None = None  # (tokens,), which are SepLLM's
    sums: Tensor | None = None  # (kv_heads, text), attention that each token got in the prefill, over queries and heads
    calibration: LayerCalibration | None = None
    memo: dict[Any, Any] = field(default_factory=dict)  # what several rules derive from the text's keys

    @property
    def tokens(self) -> int:
        return self.k.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.k.shape[0]

    @property
    def head_dim(self) -> int:
        return self.k.shape[2]

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    def once(self, name: Any, make: Callable[[], Any]) -> Any:
        if name not in self.memo:
            self.memo[name] = make()
        return self.memo[name]


@dataclass
class Extra:
    """Entries that are no tokens: k, v (kv_heads, entries, head_dim), bias (heads, queries, entries), -inf: unread."""

    k: Tensor
    v: Tensor
    bias: Tensor


@dataclass
class Choice:
    """What the queries of a tile attend to.

    mask: (heads, queries, tokens) bool, with one head for each KV head or one for each query head, causal already.
    None: everything. bias: added to the scores, of the mask's shape. choice_bytes: what a query reads of a KV head in
    order to choose, a number or (queries,).
    """

    mask: Tensor | None
    bias: Tensor | None = None
    extra: Extra | None = None
    choice_bytes: float | Tensor = 0.0


class Rule:
    """A rule at one budget. A subclass names its paper, its phases and its options with their defaults."""

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    keeps: ClassVar[str] = ""  # per token or block
    reads: ClassVar[str] = ""  # in order to choose
    differs: ClassVar[str] = ""  # from the paper, and why
    phases: ClassVar[tuple[str, ...]] = ("prefill", "answer")
    options: ClassVar[dict[str, Any]] = {}
    needs: ClassVar[frozenset[str]] = frozenset()  # of "calibration", "sums", "question", "budget"

    def __init__(self, tokens: int, preset: dict[str, int] | None = None, **options: Any) -> None:
        """tokens: how many a query may attend to; preset: init, local and top_k where K was given in place of it."""
        unknown = sorted(set(options) - set(self.options))
        if unknown:
            known = ", ".join(self.options) or "none"
            raise ValueError(f"arena: {self.name} has no option {unknown[0]!r}; it has: {known}")
        self.tokens = max(1, tokens)
        self.preset = preset
        for key, value in {**self.options, **options}.items():
            setattr(self, key, value)
        self.spend()

    if TYPE_CHECKING:  # the options

        def __getattr__(self, name: str) -> Any: ...

    def spend(self) -> None:
        """Turns `tokens` into what the rule's paper sets."""

    def begin(self, keys: Keys, q: Tensor, first: int) -> Any:
        """What is kept: called once a phase and layer, with all queries of the phase's first call."""
        return None

    def choose(self, keys: Keys, state: Any, q: Tensor, first: int) -> Choice:
        """For queries (q_heads, queries, head_dim) at the positions from `first` on, in order, after `begin`."""
        raise NotImplementedError

    def spent(self) -> dict[str, Any]:
        """What the budget came to, for the records."""
        return {}


def positions(q: Tensor, first: int) -> Tensor:
    """(queries, 1)"""
    return torch.arange(first, first + q.shape[1], device=q.device)[:, None]


def causal(q: Tensor, first: int, tokens: int) -> Tensor:
    """(queries, tokens)"""
    return torch.arange(tokens, device=q.device) <= positions(q, first)


def scores(keys: Keys, q: Tensor, k: Tensor | None = None) -> Tensor:
    """Scaled products of the queries with keys (kv_heads, n, width), float32: (q_heads, queries, n)."""
    k = keys.k if k is None else k
    heads, queries, width = q.shape
    grouped = q.float().reshape(k.shape[0], -1, width)
    return (grouped @ k.float().transpose(1, 2)).view(heads, queries, -1) * keys.scale


def by_group(x: Tensor, kv_heads: int, reduce: str) -> Tensor:
    """(q_heads, …) to (kv_heads, …) by the sum or the maximum over a group's heads; "none" leaves it."""
    if reduce == "none":
        return x
    grouped = x.unflatten(0, (kv_heads, -1))
    if reduce == "sum":
        return grouped.sum(1)
    if reduce == "max":
        return grouped.amax(1)
    raise ValueError(f"arena: group={reduce}; allowed: sum, max, none")


def top_mask(score: Tensor, count: int, allowed: Tensor) -> Tensor:
    """The `count` highest of each row where `allowed`, as a mask. score: (heads, queries, n)."""
    mask = torch.zeros(score.shape, dtype=torch.bool, device=score.device)
    count = min(count, score.shape[-1])
    if count <= 0:
        return mask
    value, index = score.masked_fill(~allowed, -torch.inf).topk(count, dim=-1)
    return mask.scatter_(-1, index, value > -torch.inf)


def to_tokens(blocks: Tensor, size: int, tokens: int) -> Tensor:
    """A mask of blocks (…, blocks) as one of tokens; what lies behind the last block is not in it."""
    wide = blocks.repeat_interleave(size, dim=-1)
    missing = tokens - wide.shape[-1]
    return torch.nn.functional.pad(wide, (0, missing)) if missing > 0 else wide[..., :tokens]


def round_to(value: float, unit: int, least: int) -> int:
    return max(least, int(value / unit + 0.5) * unit)


def solve(reads: Callable[[float], float], target: float, steps: int = 16) -> float:
    """The share p of a mass at which something that grows with it comes closest to the target, from below. What is left
    of the mass is halved evenly: the last thousandth can be most of the tokens."""
    low, high = 0.0, 16.0
    if reads(1.0) <= target:
        return 1.0
    for _ in range(steps):
        middle = (low + high) / 2
        if reads(1 - math.exp(-middle)) <= target:
            low = middle
        else:
            high = middle
    return 1 - math.exp(-low)
