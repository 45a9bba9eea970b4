"""Rules for the prefill: patterns found once for a whole text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .base import ELEMENT, Choice, Keys, Rule, causal, positions, scores, solve, to_tokens, top_mask


@dataclass
class Lines:
    """Columns that all queries of a head read, and distances at which they do: (q_heads, tokens) bool each."""

    vertical: Tensor
    slash: Tensor

    def mask(self, q: Tensor, first: int, tokens: int) -> Tensor:
        distance = positions(q, first) - torch.arange(tokens, device=q.device)
        seen = distance >= 0
        return (self.vertical[:, None, :tokens] | self.slash[:, distance.clamp(min=0)]) & seen


def line_sums(keys: Keys, q: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """What queries attend to by column and by distance: (q_heads, tokens) each."""
    weight = scores(keys, q).masked_fill(~causal(q, first, keys.tokens), -torch.inf).softmax(-1)
    distance = positions(q, first) - torch.arange(keys.tokens, device=q.device)
    slash = torch.zeros((q.shape[0], keys.tokens), device=q.device)
    slash.index_add_(1, distance.clamp(min=0).flatten(), weight.flatten(1))
    return weight.sum(1), slash


class MInference(Rule):
    name = "minference"
    paper = "MInference (arXiv 2407.02490), vertical-slash"
    keeps = "columns and diagonals that the last `last` queries of the text attend to most"
    reads = "these queries' attention to all keys, once for the text"
    differs = (
        "every head has this pattern (the paper finds one of three for each head offline); lines are single tokens, "
        "not blocks of 64; a budget is cut as the paper's 1,000 columns and 6,096 diagonals; the first `sinks` columns "
        "and the last `near` diagonals are always taken. Early queries reach fewer diagonals and read less"
    )
    phases = ("prefill",)
    options: ClassVar[dict[str, Any]] = {"last": 64, "vertical": 1000 / 7096, "sinks": 4, "near": 16}
    needs = frozenset({"budget"})

    def spend(self) -> None:
        self.columns = max(1, round(self.tokens * self.vertical))
        self.diagonals = max(1, self.tokens - self.columns)

    def spent(self) -> dict[str, int]:
        return {"vertical": self.columns, "slash": self.diagonals}

    def begin(self, keys: Keys, q: Tensor, first: int) -> Lines:
        last = min(self.last, q.shape[1])
        vertical, slash = line_sums(keys, q[:, -last:], first + q.shape[1] - last)
        vertical[:, : self.sinks] = torch.inf
        slash[:, : self.near] = torch.inf
        every = torch.ones(vertical.shape[1], dtype=torch.bool, device=q.device)
        return Lines(top_mask(vertical, self.columns, every), top_mask(slash, self.diagonals, every))

    def choose(self, keys: Keys, state: Lines, q: Tensor, first: int) -> Choice:
        mask = state.mask(q, first, keys.tokens)
        return Choice(mask, choice_bytes=float(self.last * keys.head_dim * ELEMENT))


def antidiagonal_scores(q: Tensor, k: Tensor, stride: int) -> Tensor:
    """The mean score on the antidiagonal of each tile of stride × stride; q, k: (heads, a multiple of it, head_dim)."""
    # Query stride − 1 − i of a tile meets its key i.
    rows = q.float().unflatten(1, (-1, stride)).flip(2).flatten(2)
    columns = k.float().unflatten(1, (-1, stride)).flatten(2)
    return rows @ columns.transpose(1, 2) / stride


class XAttention(Rule):
    name = "xattention"
    paper = "XAttention (arXiv 2503.16428)"
    keeps = "nothing"
    reads = "all keys, once for a block of queries"
    differs = (
        "each block of queries reads its own block and the highest ones that the budget has, in place of those that "
        "reach a share of the mass (tau=… is the paper's); blocks are of 128, of 64 below 1,024 tokens and of 32 below "
        "256, so that a budget has blocks to choose"
    )
    phases = ("prefill",)
    options: ClassVar[dict[str, Any]] = {"stride": 8, "tau": 0.0, "block": 0}
    needs = frozenset({"budget"})

    def spend(self) -> None:
        self.size = self.block or (128 if self.tokens >= 1024 else 64 if self.tokens >= 256 else 32)
        # Of its own block a query reads half.
        self.count = max(1, round((self.tokens - self.size / 2) / self.size))

    def spent(self) -> dict[str, int]:
        return {"block": self.size, "blocks": self.count}

    def begin(self, keys: Keys, q: Tensor, first: int) -> Tensor:
        """Which blocks each block of queries reads: (q_heads, blocks, blocks)."""
        if first != 0:
            raise ValueError("arena: xattention is for the prefill of a whole text")
        blocks = -(-q.shape[1] // self.size)
        missing = blocks * self.size - q.shape[1]
        full_q = torch.nn.functional.pad(q, (0, 0, 0, missing))
        full_k = torch.nn.functional.pad(keys.k, (0, 0, 0, missing))
        per = self.size // self.stride
        index = torch.arange(blocks, device=q.device)
        out = []
        for head in range(q.shape[0]):
            score = antidiagonal_scores(full_q[head][None], full_k[head // keys.group][None], self.stride)[0]
            tile = torch.arange(score.shape[0], device=q.device)
            score = (score * keys.scale).masked_fill(tile > tile[:, None], -torch.inf).softmax(-1)
            mass = score.unflatten(0, (blocks, per)).unflatten(2, (blocks, per)).sum((1, 3))
            own = index == index[:, None]
            if self.tau:
                order = mass.masked_fill(own, torch.inf).argsort(-1, descending=True)
                ranked = mass.gather(-1, order)
                kept = ranked.cumsum(-1) - ranked < self.tau * ranked.sum(-1, keepdim=True)
                out.append(torch.zeros_like(kept).scatter_(-1, order, kept) & (index <= index[:, None]) | own)
            else:
                out.append(top_mask(mass[None], self.count, index < index[:, None])[0] | own)
        return torch.stack(out)

    def choose(self, keys: Keys, state: Tensor, q: Tensor, first: int) -> Choice:
        rows = state[:, positions(q, first)[:, 0] // self.size]
        mask = to_tokens(rows, self.size, keys.tokens) & causal(q, first, keys.tokens)
        own = positions(q, first)[:, 0] + 1
        return Choice(mask, choice_bytes=own * (keys.head_dim * ELEMENT / self.size))


def reached(value: Tensor, order: Tensor, share: float) -> Tensor:
    """The fewest highest of each row whose sum is at least that; value: sorted downwards, order: what lay where."""
    kept = value.cumsum(-1) - value < share
    return torch.zeros_like(kept).scatter_(-1, order, kept)


@dataclass
class _Patterns:
    lines: Lines
    blocks: Tensor  # (q_heads, blocks, blocks) bool
    by_block: Tensor  # (q_heads,) bool: whether a head reads blocks and not lines


class FlexPrefill(Rule):
    name = "flexprefill"
    paper = "FlexPrefill (arXiv 2502.20766)"
    keeps = "for a head either blocks by pooled queries and keys, or columns and diagonals of the last queries"
    reads = "the pooled keys, and the last block of queries' attention to all keys, once for the text"
    differs = (
        "gamma is not set but solved for each layer, so that the tokens are the budget's on average over its heads and "
        "queries; gamma=… sets it. Columns and "
        "diagonals are single tokens; no least budget (the paper: 1,024 tokens). Blocks as xattention's"
    )
    phases = ("prefill",)
    options: ClassVar[dict[str, Any]] = {"tau": 0.1, "gamma": 0.0, "block": 0}
    needs = frozenset({"budget"})

    def spend(self) -> None:
        self.size = self.block or (128 if self.tokens >= 1024 else 64 if self.tokens >= 256 else 32)

    def begin(self, keys: Keys, q: Tensor, first: int) -> _Patterns:
        if first != 0:
            raise ValueError("arena: flexprefill is for the prefill of a whole text")
        tokens, size = q.shape[1], self.size
        blocks = -(-tokens // size)
        pooled_q, pooled_k = self._pooled(q, blocks), self._pooled(keys.k, blocks)
        index = torch.arange(blocks, device=q.device)
        pooled = scores(keys, pooled_q, pooled_k).masked_fill(index > index[:, None], -torch.inf)
        estimate = pooled.softmax(-1)
        # The last queries, as many as a block has: what their pooled query would see against what they do see.
        last = q[:, -min(size, tokens) :]
        start = tokens - last.shape[1]
        columns, diagonals = line_sums(keys, last, start)
        truth = torch.nn.functional.pad(columns, (0, blocks * size - tokens)).unflatten(1, (blocks, size)).sum(-1)
        truth = truth / truth.sum(-1, keepdim=True)
        guess = scores(keys, last.float().mean(1, keepdim=True), pooled_k)[:, 0].softmax(-1)
        by_block = divergence(guess, truth).sqrt() < self.tau
        columns, diagonals = (x / x.sum(-1, keepdim=True) for x in (columns, diagonals))
        flat = (estimate / blocks).flatten(1)
        ranked = [x.sort(dim=-1, descending=True) for x in (flat, columns, diagonals)]
        index = torch.arange(tokens, device=q.device)

        def reads(gamma: float) -> float:
            """Tokens a query, on average over queries and heads."""
            by_blocks = (ranked[0][0].cumsum(-1) - ranked[0][0] < gamma).sum(-1) * (size / blocks)
            columns, diagonals = (reached(*one, gamma).float() for one in ranked[1:])
            # Of columns and diagonals: query p reads what is a column, or lies at one of the distances, up to p.
            both = torch.fft.rfft(columns, 2 * tokens) * torch.fft.rfft(diagonals, 2 * tokens)
            crossings = torch.fft.irfft(both, 2 * tokens)[:, :tokens].sum(-1)
            by_lines = (((columns + diagonals) * (tokens - index)).sum(-1) - crossings) / tokens
            return float(torch.where(by_block, by_blocks, by_lines).mean())

        target = float((index + 1).clamp(max=self.tokens).float().mean())
        gamma = self.gamma or solve(reads, target)
        masks = [reached(*one, gamma) for one in ranked]
        chosen = masks[0].unflatten(1, (blocks, blocks)) | torch.eye(blocks, dtype=torch.bool, device=q.device)
        chosen[:, :, 0] = True
        masks[1][:, 0] = True
        masks[2][:, : min(16, tokens)] = True
        return _Patterns(Lines(masks[1], masks[2]), chosen, by_block)

    def _pooled(self, x: Tensor, blocks: int) -> Tensor:
        """Means of blocks, the last one of what there is of it."""
        missing = blocks * self.size - x.shape[1]
        total = torch.nn.functional.pad(x.float(), (0, 0, 0, missing)).unflatten(1, (blocks, self.size)).sum(2)
        count = torch.full((blocks, 1), float(self.size), device=x.device)
        count[-1] -= missing
        return total / count

    def choose(self, keys: Keys, state: _Patterns, q: Tensor, first: int) -> Choice:
        rows = state.blocks[:, positions(q, first)[:, 0] // self.size]
        by_blocks = to_tokens(rows, self.size, keys.tokens) & causal(q, first, keys.tokens)
        mask = torch.where(state.by_block[:, None, None], by_blocks, state.lines.mask(q, first, keys.tokens))
        own = positions(q, first)[:, 0] + 1
        # The pooled keys once for a block of queries, and the last block's share.
        pooled = own / self.size / self.size * keys.head_dim * ELEMENT
        return Choice(mask, choice_bytes=pooled + float(self.size * keys.head_dim * ELEMENT))


def divergence(a: Tensor, b: Tensor) -> Tensor:
    """Jensen and Shannon's, of distributions (…, n), natural logarithms."""
    middle = (a + b) / 2

    def to_middle(x: Tensor) -> Tensor:
        return torch.where(x > 0, x * (x / middle).log(), 0).sum(-1)

    return ((to_middle(a) + to_middle(b)) / 2).clamp(min=0)
