"""Rules for decoding that choose single tokens by something smaller than their keys."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .base import ELEMENT, Choice, Keys, Rule, by_group, causal, positions, scores, solve, top_mask
from .rules_blocks import page_scores


class DoubleSparsity(Rule):
    name = "double-sparsity"
    paper = "Double Sparsity (arXiv 2408.07092)"
    keeps = "`channels` channels of each key (default: an eighth), those whose products were largest in calibration"
    reads = "these channels of all keys"
    differs = "channels stay 16 bits wide (the paper packs them to 4); one set of channels for a KV head"
    phases = ("answer",)
    options: ClassVar[dict[str, Any]] = {"channels": 0, "group": "none"}
    needs = frozenset({"budget", "calibration"})

    def choose(self, keys: Keys, state: object, q: Tensor, first: int) -> Choice:
        assert keys.calibration is not None
        count = self.channels or keys.head_dim // 8
        index = keys.calibration.channels[:, :count].to(q.device)  # (kv_heads, channels)
        text = keys.once(("channels", count), lambda: self._labels(keys.k[:, : keys.text], index))
        labels = torch.cat((text, self._labels(keys.k[:, keys.text :], index)), 1)
        query = q.gather(2, index.repeat_interleave(keys.group, 0)[:, None].expand(-1, q.shape[1], -1))
        seen = causal(q, first, keys.tokens)
        score = scores(keys, query, labels)
        if self.group != "none":
            score = by_group(score.masked_fill(~seen, -torch.inf).softmax(-1), keys.kv_heads, self.group)
        own = positions(q, first)[:, 0] + 1
        return Choice(top_mask(score, self.tokens, seen), choice_bytes=own * float(count * ELEMENT))

    @staticmethod
    def _labels(k: Tensor, index: Tensor) -> Tensor:
        return k.gather(2, index[:, None].expand(-1, k.shape[1], -1))


@dataclass
class _Clusters:
    centre: Tensor  # (kv_heads, clusters, head_dim)
    of: Tensor  # (kv_heads, clustered tokens)
    rank: Tensor  # (kv_heads, clustered tokens), a token's place within its cluster
    size: Tensor  # (kv_heads, clusters)


def cluster(k: Tensor, count: int, steps: int) -> tuple[Tensor, Tensor]:
    """k-means by the cosine: means (kv_heads, count, head_dim) of the keys, and each key's cluster. It begins with
    evenly spaced keys."""
    k = k.float()
    unit = torch.nn.functional.normalize(k, dim=-1)
    start = torch.linspace(0, k.shape[1] - 1, count, device=k.device).round().long()
    centre = k[:, start]
    for _ in range(steps):
        of = (unit @ torch.nn.functional.normalize(centre, dim=-1).transpose(1, 2)).argmax(-1)
        total = torch.zeros_like(centre).scatter_add_(1, of[..., None].expand_as(k), k)
        size = torch.zeros(centre.shape[:2], device=k.device).scatter_add_(1, of, torch.ones_like(of, dtype=k.dtype))
        # A cluster that lost all of its keys stays where it was.
        centre = torch.where(size[..., None] > 0, total / size.clamp(min=1)[..., None], centre)
    return centre, of


class ClusterKv(Rule):
    name = "clusterkv"
    paper = "ClusterKV (arXiv 2412.03213)"
    keeps = "means of clusters of keys, one for 80 tokens, by the cosine; the first 16 tokens apart"
    reads = "the means"
    differs = (
        "each query head chooses among its KV head's clusters; k-means begins with evenly spaced keys and takes "
        "`steps` steps; tokens after the text are always read, not clustered (the paper clusters 320 of them at once)"
    )
    phases = ("answer",)
    options: ClassVar[dict[str, Any]] = {"sinks": 16, "per": 80, "steps": 10, "group": "none"}
    needs = frozenset({"budget"})

    def begin(self, keys: Keys, q: Tensor, first: int) -> _Clusters | None:
        if keys.text <= self.sinks:
            return None

        def make() -> _Clusters:
            k = keys.k[:, self.sinks : keys.text]
            count = max(1, k.shape[1] // self.per)
            centre, of = cluster(k, count, self.steps)
            size = torch.zeros(centre.shape[:2], dtype=torch.long, device=k.device)
            size.scatter_add_(1, of, torch.ones_like(of))
            order = of.sort(dim=1, stable=True).indices
            begin = (size.cumsum(1) - size).gather(1, of.gather(1, order))
            place = torch.arange(of.shape[1], device=k.device) - begin
            return _Clusters(centre, of, torch.empty_like(of).scatter_(1, order, place), size)

        return keys.once(("clusters", self.sinks, self.per, self.steps), make)

    def choose(self, keys: Keys, state: _Clusters | None, q: Tensor, first: int) -> Choice:
        seen = causal(q, first, keys.tokens)
        index = torch.arange(keys.tokens, device=q.device)
        always = ((index < self.sinks) | (index >= keys.text)) & seen
        if state is None:
            return Choice(always.expand(keys.kv_heads, -1, -1))
        score = by_group(scores(keys, q, state.centre), keys.kv_heads, self.group)
        repeat = score.shape[0] // keys.kv_heads
        size = state.size.repeat_interleave(repeat, 0)[:, None].expand_as(score)
        order = score.argsort(dim=-1, descending=True)
        ranked = size.gather(-1, order)
        # How many tokens the better clusters have: the last cluster that begins within the budget is cut to fit.
        before = torch.empty_like(ranked).scatter_(-1, order, ranked.cumsum(-1) - ranked)
        of = state.of.repeat_interleave(repeat, 0)[:, None].expand(-1, q.shape[1], -1)
        place = before.gather(-1, of) + state.rank.repeat_interleave(repeat, 0)[:, None]
        room = (self.tokens - always.sum(-1)).clamp(min=0)
        mask = always.expand(score.shape[0], -1, -1).clone()
        mask[..., self.sinks : keys.text] |= place < room[:, None]
        return Choice(mask, choice_bytes=float(state.centre.shape[1] * keys.head_dim * ELEMENT))


def collision_probability(p: Tensor, bits: int, tables: Tensor | int) -> Tensor:
    """That two vectors which one random plane leaves together with probability p meet in at least two tables."""
    bucket = p.double().clamp(0, 1) ** bits
    miss = (1 - bucket) ** tables
    return (1 - miss - tables * bucket * (1 - bucket) ** (tables - 1)).clamp(0, 1).float()


@dataclass
class _Hashes:
    planes: Tensor  # (head_dim, tables · bits)
    centre: Tensor  # (kv_heads, 1, head_dim)
    codes: Tensor  # (kv_heads, text, tables)
    unit: Tensor  # (kv_heads, text, head_dim), centred and of length 1


class MagicPig(Rule):
    name = "magicpig"
    paper = "MagicPIG (arXiv 2410.16179)"
    keeps = (
        "`tables` hashes of `bits` bits a token, of keys less their mean; the first 4 and the latest 64 tokens apart"
    )
    reads = "the buckets that the query falls into, 4 bytes a token found"
    differs = (
        "tables are as many as meet the budget in expectation over a call's queries, for each query head; bits are 10 "
        "for budgets up to 2 %, 9 up to 5 %, else 8 (the paper: 10 and 150 for 2 %); no layer is dense (the paper: two)"
    )
    phases = ("answer",)
    options: ClassVar[dict[str, Any]] = {"bits": 0, "tables": 0, "sinks": 4, "local": 64, "seed": 1, "most": 300}
    needs = frozenset({"budget"})

    def begin(self, keys: Keys, q: Tensor, first: int) -> _Hashes:
        share = self.tokens / max(1, keys.tokens)
        bits = self.bits or (10 if share <= 0.02 else 9 if share <= 0.05 else 8)
        tables = self.tables or self.most

        def make() -> _Hashes:
            generator = torch.Generator().manual_seed(self.seed * 1000 + keys.layer)
            planes = torch.randn((keys.head_dim, tables * bits), generator=generator).to(q.device)
            centre = keys.k[:, : keys.text].float().mean(1, keepdim=True)
            unit = torch.nn.functional.normalize(keys.k[:, : keys.text].float() - centre, dim=-1)
            return _Hashes(planes, centre, self._codes(unit, planes, bits), unit)

        return keys.once(("hashes", bits, tables, self.seed), make)

    @staticmethod
    def _codes(x: Tensor, planes: Tensor, bits: int) -> Tensor:
        sign = (x @ planes > 0).unflatten(-1, (-1, bits)).to(torch.int16)
        return (sign << torch.arange(bits, dtype=torch.int16, device=x.device)).sum(-1, dtype=torch.int16)

    def choose(self, keys: Keys, state: _Hashes, q: Tensor, first: int) -> Choice:
        seen = causal(q, first, keys.tokens)
        index = torch.arange(keys.tokens, device=q.device)
        own = positions(q, first)
        local = max(1, min(self.local, self.tokens // 2))
        # What comes after the text is in no table yet.
        static = ((index < self.sinks) | (index > own - local) | (index >= keys.text)) & seen
        bits = state.planes.shape[1] // state.codes.shape[-1]
        unit = torch.nn.functional.normalize(q.float(), dim=-1)
        codes = self._codes(unit, state.planes, bits)  # (q_heads, queries, tables)
        kv = torch.arange(keys.q_heads, device=q.device) // keys.group
        hashed = ~static[:, : keys.text]
        room = (self.tokens - static.sum(-1)).float().mean().clamp(min=1)
        cosine = unit @ state.unit[kv].transpose(1, 2)
        p = 1 - cosine.clamp(-1, 1).acos() / math.pi
        if self.tables:
            tables = torch.full((keys.q_heads, 1, 1), self.tables, device=q.device)
        else:
            tables = self._solve(p, hashed, bits, room)
        meets = torch.zeros(p.shape, dtype=torch.int16, device=q.device)
        for table in range(int(tables.max())):
            same = codes[:, :, table, None] == state.codes[kv, None, :, table]
            meets += same & (table < tables)
        sampled = (meets >= 2) & hashed
        chance = collision_probability(p, bits, tables).clamp(min=1e-12)
        bias = torch.nn.functional.pad(torch.where(sampled, -chance.log(), 0), (0, keys.tokens - keys.text))
        mask = torch.nn.functional.pad(sampled, (0, keys.tokens - keys.text)) | static
        return Choice(mask, bias=bias, choice_bytes=(meets * hashed).sum(-1).float().mean(0) * 4)

    def _solve(self, p: Tensor, hashed: Tensor, bits: int, room: Tensor) -> Tensor:
        """The most tables for each head, (q_heads, 1, 1), whose expected tokens are within the room."""
        low = torch.full((p.shape[0], 1, 1), 2, device=p.device)
        high = torch.full_like(low, self.most)
        for _ in range(self.most.bit_length()):
            middle = (low + high + 1) // 2
            expected = (collision_probability(p, bits, middle) * hashed).sum(-1).mean(-1)[:, None, None]
            fits = expected <= room
            low, high = torch.where(fits, middle, low), torch.where(fits, high, middle - 1).clamp(min=2)
        return low


class HashAttention(Rule):
    name = "hashattention"
    paper = "HashAttention (arXiv 2412.14468)"
    keeps = "32 learned bits a token and KV head"
    reads = "the bits of all tokens, 4 bytes"
    differs = (
        "trained here, on the calibration text, for each layer: three small layers for keys and for each query head "
        "(as arena/calibrate.py has it), not on the paper's corpus. Of equally near tokens the latest are taken"
    )
    phases = ("answer",)
    options: ClassVar[dict[str, Any]] = {"sinks": 4, "local": 16, "group": "none"}
    needs = frozenset({"budget", "calibration", "hash"})

    def choose(self, keys: Keys, state: object, q: Tensor, first: int) -> Choice:
        assert keys.calibration is not None and keys.calibration.hash is not None
        learned = keys.calibration.hash.to(q.device)
        text = keys.once("bits", lambda: learned.key_bits(keys.k[:, : keys.text]))
        of_keys = torch.cat((text, learned.key_bits(keys.k[:, keys.text :])), 1).repeat_interleave(keys.group, 0)
        same = learned.query_bits(q).float() @ of_keys.float().transpose(1, 2)  # 32 less twice the distance
        score = by_group(same, keys.kv_heads, self.group)
        index = torch.arange(keys.tokens, device=q.device)
        own = positions(q, first)
        seen = index <= own
        local = max(1, min(self.local, self.tokens // 4))
        static = ((index < self.sinks) | (index > own - local)) & seen
        late = score + index / keys.tokens  # distances are whole numbers
        room = max(0, self.tokens - int(static.sum(-1).float().mean()))
        return Choice(top_mask(late, room, seen & ~static) | static, choice_bytes=(own[:, 0] + 1) * 4.0)


def quantised(k: Tensor, bits: int) -> Tensor:
    """Each key rounded to that many bits between its own smallest and largest channel."""
    k = k.float()
    low, high = k.amin(-1, keepdim=True), k.amax(-1, keepdim=True)
    step = ((high - low) / (2**bits - 1)).clamp(min=1e-12)
    return low + ((k - low) / step).round() * step


class TopP:
    """The fewest highest of each row of weights (…, n) whose sum is at least p of the row's."""

    def __init__(self, weight: Tensor) -> None:
        ranked, self.order = weight.sort(dim=-1, descending=True)
        total = ranked.sum(-1, keepdim=True)
        # What is worth nothing is never needed.
        self.before = ((ranked.cumsum(-1) - ranked) / total).masked_fill(ranked <= 0, torch.inf)

    def mask(self, p: float) -> Tensor:
        kept = self.before < p
        return torch.zeros_like(kept).scatter_(-1, self.order, kept)

    def count(self, p: float) -> float:
        return float((self.before < p).sum(-1).float().mean())


class Twilight(Rule):
    name = "twilight"
    paper = "Twilight (arXiv 2502.02770) over Quest"
    keeps = "Quest's bounds a page of 16, and a 4-bit copy of the keys"
    reads = "the bounds, and the 4-bit keys of the pages that Quest leaves (a quarter of the context)"
    differs = (
        "p is not set but solved on each layer's queries, so that the tokens are the budget's on average over them and "
        "the heads; p=… sets it"
    )
    phases = ("answer",)
    options: ClassVar[dict[str, Any]] = {"page": 16, "base": 0.25, "bits": 4, "p": 0.0}
    needs = frozenset({"budget"})

    def choose(self, keys: Keys, state: object, q: Tensor, first: int) -> Choice:
        bound = page_scores(keys, q, self.page)
        own = positions(q, first)
        pages = torch.arange(bound.shape[-1], device=q.device)
        count = max(1, math.ceil(max(self.base * keys.tokens, 2 * self.tokens) / self.page))
        base = top_mask(bound, count, pages < own // self.page) | (pages == own // self.page)
        seen = causal(q, first, keys.tokens)
        candidate = base.repeat_interleave(self.page, -1)[..., : keys.tokens] & seen
        text = keys.once(("quantised", self.bits), lambda: quantised(keys.k[:, : keys.text], self.bits))
        small = torch.cat((text, quantised(keys.k[:, keys.text :], self.bits)), 1)
        weight = scores(keys, q, small).masked_fill(~candidate, -torch.inf).softmax(-1)
        top = TopP(weight)
        p = self.p or solve(top.count, self.tokens)
        bounds = (own[:, 0] // self.page + 1) * float(2 * keys.head_dim * ELEMENT)
        estimate = candidate.sum(-1).float().mean(0) * (keys.head_dim * self.bits / 8)
        return Choice(top.mask(p), choice_bytes=bounds + estimate)
