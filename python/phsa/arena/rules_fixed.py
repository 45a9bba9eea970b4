"""Rules that look at no query: everything, windows, separators; and those that evict for good."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .base import ELEMENT, Choice, Keys, Rule, by_group, causal, positions, scores, top_mask


class Dense(Rule):
    name = "dense"
    paper = "softmax attention"
    reads = "nothing"

    def choose(self, keys: Keys, state: object, q: Tensor, first: int) -> Choice:
        return Choice(None)


class Streaming(Rule):
    name = "streaming"
    paper = "StreamingLLM (arXiv 2309.17453)"
    keeps = "the first `sinks` tokens and the latest ones"
    reads = "nothing"
    differs = "positions stay those of the text: rotary angles are not counted within the cache"
    options: ClassVar[dict[str, Any]] = {"sinks": 4}
    needs = frozenset({"budget"})

    def spend(self) -> None:
        self.window = max(1, self.tokens - self.sinks)

    def spent(self) -> dict[str, int]:
        return {"sinks": self.sinks, "window": self.window}

    def choose(self, keys: Keys, state: object, q: Tensor, first: int) -> Choice:
        index = torch.arange(keys.tokens, device=q.device)
        own = positions(q, first)
        mask = ((index < self.sinks) | (index > own - self.window)) & (index <= own)
        return Choice(mask.expand(keys.kv_heads, -1, -1))


class SepLLM(Rule):
    name = "sepllm"
    paper = "SepLLM (arXiv 2412.12094)"
    keeps = "the first `init` tokens, separators (. , ? ! ; : space, tab, newline as whole tokens), the latest ones"
    reads = "nothing"
    differs = (
        "at a budget the separators before the window are capped, the latest ones kept, as in its streaming design: "
        "at most `share` of what init leaves; the window has the rest. Positions stay those of the text"
    )
    options: ClassVar[dict[str, Any]] = {"init": 4, "share": 0.5}
    needs = frozenset({"budget", "separators"})

    def spend(self) -> None:
        left = max(1, self.tokens - self.init)
        self.capacity = int(left * self.share)
        self.window = max(1, left - self.capacity)

    def spent(self) -> dict[str, int]:
        return {"init": self.init, "separators": self.capacity, "window": self.window}

    def choose(self, keys: Keys, state: object, q: Tensor, first: int) -> Choice:
        assert keys.separators is not None
        index = torch.arange(keys.tokens, device=q.device)
        own = positions(q, first)
        separator = keys.separators[: keys.tokens].bool() & (index >= self.init)
        count = torch.nn.functional.pad(separator.long().cumsum(0), (1, 0))  # before each token
        start = (own - self.window + 1).clamp(min=0)  # of the window
        behind = count[start] - count[index]  # separators from a token on, before the window
        kept = separator & (index < start) & (behind <= self.capacity)
        mask = ((index < self.init) | kept | (index >= start)) & (index <= own)
        return Choice(mask.expand(keys.kv_heads, -1, -1))


@dataclass
class _Heavy:
    kept: Tensor  # (kv_heads, tokens) bool
    mass: Tensor  # (kv_heads, tokens)


class H2O(Rule):
    name = "h2o"
    paper = "H2O (arXiv 2306.14048)"
    keeps = "half of the budget heavy hitters by accumulated attention, half the latest tokens; the rest is lost"
    reads = "the accumulated attention of what is kept, 4 bytes a token"
    differs = (
        "one cache for a KV head: the attention of its query heads is summed. The text is evicted at once, by the "
        "attention of the whole prefill; from there on one token a step, as the paper has it. A question that is read "
        "densely adds no attention"
    )
    phases = ("answer",)
    options: ClassVar[dict[str, Any]] = {"heavy": 0.5}
    needs = frozenset({"budget", "sums"})

    def spend(self) -> None:
        self.heavy_tokens = int(self.tokens * self.heavy)
        self.recent = max(1, self.tokens - self.heavy_tokens)

    def spent(self) -> dict[str, int]:
        return {"heavy": self.heavy_tokens, "recent": self.recent}

    def begin(self, keys: Keys, q: Tensor, first: int) -> _Heavy:
        assert keys.sums is not None and keys.sums.shape[1] == first
        kept = torch.zeros((keys.kv_heads, first), dtype=torch.bool, device=q.device)
        recent = max(0, first - self.recent)
        kept[:, recent:] = True
        older = keys.sums[:, :recent]
        kept.scatter_(1, older.topk(min(self.heavy_tokens, recent), dim=1).indices, True)
        return _Heavy(kept, keys.sums.clone())

    def choose(self, keys: Keys, state: _Heavy, q: Tensor, first: int) -> Choice:
        known = state.kept.shape[1]
        state.kept = torch.nn.functional.pad(state.kept, (0, keys.tokens - known))
        state.mass = torch.nn.functional.pad(state.mass, (0, keys.tokens - known))
        if first > known:  # a question that was read densely
            self._admit(state, known, first)
        raw = scores(keys, q)
        index = torch.arange(keys.tokens, device=q.device)
        rows = []
        for row in range(q.shape[1]):
            own = first + row
            state.kept[:, own] = True
            mask = state.kept.clone()
            rows.append(mask)
            seen = raw[:, row].masked_fill(~mask.repeat_interleave(keys.group, 0), -torch.inf)
            state.mass = state.mass + by_group(seen.softmax(-1), keys.kv_heads, "sum")
            # One in, one out: the lightest that is not recent.
            old = mask & (index <= own - self.recent)
            lightest = state.mass.masked_fill(~old, torch.inf).argmin(1, keepdim=True)
            full = (mask.sum(1, keepdim=True) > self.tokens) & old.any(1, keepdim=True)
            state.kept.scatter_(1, lightest, state.kept.gather(1, lightest) & ~full)
        mask = torch.stack(rows, 1)
        return Choice(mask, choice_bytes=mask.sum(-1).float().mean(0) * 4.0)

    def _admit(self, state: _Heavy, start: int, end: int) -> None:
        """Many at once: the lightest that are not recent make room."""
        state.kept[:, start:end] = True
        weight = state.mass.masked_fill(~state.kept, -torch.inf)
        weight[:, max(0, end - self.recent) : end] = torch.inf
        best = weight.topk(min(self.tokens, weight.shape[1]), dim=1).indices
        state.kept &= torch.zeros_like(state.kept).scatter_(1, best, True)


class SnapKV(Rule):
    name = "snapkv"
    paper = "SnapKV (arXiv 2404.14469)"
    keeps = "what the prompt's last `window` queries attend to most, pooled over neighbours, and the window; no more"
    reads = "nothing after the prompt's end; there once, the window's attention to all keys"
    differs = (
        "one cache for a KV head: votes of its query heads are summed. It chooses by the question's queries, so the "
        "question is read densely whatever the run asks"
    )
    phases = ("answer",)
    options: ClassVar[dict[str, Any]] = {"window": 32, "kernel": 5}
    needs = frozenset({"budget", "question"})

    def spend(self) -> None:
        self.observed = max(1, min(self.window, self.tokens // 2))

    def spent(self) -> dict[str, int]:
        return {"window": self.observed, "chosen": self.tokens - self.observed}

    def begin(self, keys: Keys, q: Tensor, first: int) -> Tensor:
        """(kv_heads, prompt) bool"""
        start = max(first, keys.prompt - self.observed)
        seen = q[:, start - first : keys.prompt - first]
        if seen.shape[1] == 0:
            raise ValueError("arena: snapkv chooses by the queries of a question, and there is none; give --tail")
        weight = scores(keys, seen, keys.k[:, : keys.prompt])
        weight = weight.masked_fill(~causal(seen, start, keys.prompt), -torch.inf).softmax(-1)
        vote = by_group(weight.sum(1), keys.kv_heads, "sum")[:, :start]
        vote = torch.nn.functional.max_pool1d(vote[:, None], self.kernel, 1, self.kernel // 2)[:, 0, :start]
        kept = torch.zeros((keys.kv_heads, keys.prompt), dtype=torch.bool, device=q.device)
        kept[:, start:] = True
        count = max(0, min(self.tokens - (keys.prompt - start), start))
        return kept.scatter_(1, vote.topk(count, dim=1).indices, True)

    def choose(self, keys: Keys, state: Tensor, q: Tensor, first: int) -> Choice:
        kept = torch.nn.functional.pad(state, (0, keys.tokens - state.shape[1]), value=True)
        return Choice(kept[:, None] & causal(q, first, keys.tokens))


class Oracle(Rule):
    name = "oracle"
    paper = "true attention mass"
    keeps = "nothing"
    reads = "all keys"
    differs = "`unit` tokens are chosen together (1, or 16 as blocks with nothing forced); group: sum, max or none"
    options: ClassVar[dict[str, Any]] = {"unit": 1, "group": "sum"}
    needs = frozenset({"budget"})

    def choose(self, keys: Keys, state: object, q: Tensor, first: int) -> Choice:
        seen = causal(q, first, keys.tokens)
        mass = by_group(scores(keys, q).masked_fill(~seen, -torch.inf).softmax(-1), keys.kv_heads, self.group)
        if self.unit > 1:
            blocks = -(-keys.tokens // self.unit)
            mass = torch.nn.functional.pad(mass, (0, blocks * self.unit - keys.tokens))
            mass = mass.unflatten(-1, (blocks, self.unit)).sum(-1)
            allowed = torch.arange(blocks, device=q.device) <= positions(q, first) // self.unit
            chosen = top_mask(mass, max(1, round(self.tokens / self.unit)), allowed)
            mask = chosen.repeat_interleave(self.unit, -1)[..., : keys.tokens] & seen
        else:
            mask = top_mask(mass, self.tokens, seen)
        own = positions(q, first)[:, 0] + 1
        return Choice(mask, choice_bytes=own * float(keys.head_dim * ELEMENT))
