"""Rules that choose blocks of consecutive tokens by what represents them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import _fallback
from ..settings import Settings
from .base import ELEMENT, Choice, Extra, Keys, Rule, by_group, causal, positions, round_to, scores, to_tokens, top_mask


class _Phsa(Rule):
    """PHSA's family, by the lists of phsa's own PyTorch path."""

    policy = "phsa"
    needs = frozenset({"budget"})

    def settings(self) -> Settings:
        raise NotImplementedError

    def spend(self) -> None:
        self.made = self.settings()
        self.blocks = _fallback.Blocks.of(self.made)

    def spent(self) -> dict[str, int]:
        return {"init": self.made.init, "local": self.made.local, "top_k": self.made.top_k}

    def _budget(self, init_share: float, local_share: float) -> dict[str, int]:
        """init, local and K of blocks of 16; half of the query's own block is read beside them."""
        init = round_to(init_share * self.tokens, 16, 16)
        local = round_to(local_share * self.tokens, 16, 16)
        return {"init": init, "local": local, "top_k": max(1, (self.tokens - init - local - 8) // 16)}

    def begin(self, keys: Keys, q: Tensor, first: int) -> Tensor:
        """Representatives of the text's complete blocks: (rows, kv_heads, width)."""
        rows = self.blocks.rep_rows(keys.text)
        key = ("reps", self.blocks.policy, self.blocks.rep_span, self.made.lam)
        return keys.once(key, lambda: self._represent(keys, 0, rows))

    def _represent(self, keys: Keys, first: int, end: int) -> Tensor:
        k = keys.k.transpose(0, 1)
        return _fallback.represent(k, keys.flags, self.blocks, self.made.lam, first, end)

    def choose(self, keys: Keys, state: Tensor, q: Tensor, first: int) -> Choice:
        blocks, queries = self.blocks, q.shape[1]
        rows = blocks.rep_rows(keys.tokens)
        reps = state
        if rows > reps.shape[0]:  # of what was decoded since
            reps = torch.cat((reps, self._represent(keys, reps.shape[0], rows)))
        parts = _fallback.Parts.kept(reps, keys.k.transpose(0, 1), blocks) if blocks.parts > 1 else None
        heads = keys.q_heads if self.made.group_reduce == "none" else keys.kv_heads
        slots = max(1, min(blocks.top_k, -(-keys.tokens // blocks.block)))
        selection = torch.full((queries, heads, slots), -1, dtype=torch.int32, device=q.device)
        tile = _fallback.Tile(0, queries, first, everything=False)
        _fallback.select_tile(
            tile, q.transpose(0, 1), reps, parts, blocks, keys.scale, self.made.group_reduce, selection, None
        )
        return Choice(self._mask(keys, q, first, selection), choice_bytes=self._bytes(keys, q, first))

    def _mask(self, keys: Keys, q: Tensor, first: int, selection: Tensor) -> Tensor:
        blocks, size = self.blocks, self.blocks.block
        count = -(-keys.tokens // size)
        chosen = selection.long().transpose(0, 1)
        mask = torch.zeros((*chosen.shape[:2], count + 1), dtype=torch.bool, device=q.device)
        mask.scatter_(-1, chosen.masked_fill(chosen < 0, count), True)
        index = torch.arange(count, device=q.device)
        own = positions(q, first) // size
        always = (index < blocks.init_blocks) | (index >= own - blocks.local_blocks)
        return to_tokens(mask[..., :count] | always, size, keys.tokens) & causal(q, first, keys.tokens)

    def _bytes(self, keys: Keys, q: Tensor, first: int) -> Tensor:
        own = positions(q, first)[:, 0] // self.blocks.block * self.blocks.block
        rows = ((own - self.blocks.rep_span) // self.blocks.rep_stride + 1).clamp(min=0)
        return rows * float(self.blocks.rep_width(keys.head_dim) * ELEMENT)


class Phsa(_Phsa):
    name = "phsa"
    paper = "PHSA (arXiv 2601.02819); parts are ours"
    keeps = "`parts` representatives a block of 16: means of keys, punctuation's keys with the weight 1 − lam"
    reads = "the representatives"
    differs = (
        "split: paper divides a budget as the paper's 32k setting does (init 1/7, local 4/7, chosen 2/7), narrow puts "
        "1/28 and 2/7 beside 19/28 chosen. init, local and top_k set them outright"
    )
    options: ClassVar[dict[str, Any]] = {
        "parts": 1,
        "lam": 0.9,
        "split": "paper",
        "group": "sum",
        "init": None,
        "local": None,
        "top_k": None,
    }

    def settings(self) -> Settings:
        if self.split not in ("paper", "narrow"):
            raise ValueError(f"arena: split={self.split}; allowed: paper, narrow")
        values = self._budget(1 / 7, 4 / 7) if self.split == "paper" else self._budget(1 / 28, 2 / 7)
        if self.preset is not None and self.split == "paper":
            values = dict(self.preset)
        given = {"init": self.init, "local": self.local, "top_k": self.top_k}
        values.update({name: value for name, value in given.items() if value is not None})
        split: dict[str, Any] = values
        return Settings(policy=self.policy, lam=self.lam, parts=self.parts, group_reduce=self.group, **split)


class InfLlm2(Phsa):
    name = "infllm2"
    policy = "infllm2"
    paper = "InfLLM v2 (arXiv 2509.24663) as the PHSA paper compares with it"
    keeps = "the mean of the keys of each block of 16"
    differs = "our reading of that comparison: PHSA with lam 1 and the same budget"
    options: ClassVar[dict[str, Any]] = {
        name: value for name, value in {**Phsa.options, "lam": 1.0}.items() if name != "parts"
    }
    parts = 1


class InfLlm264(_Phsa):
    name = "infllm2-64"
    policy = "infllm2-64"
    paper = "InfLLM v2 (arXiv 2509.24663), as published"
    keeps = "means of 32 keys, every 16 tokens"
    reads = "the means"
    differs = (
        "a budget gives one init block, a third to the window (as 2,048 of 6,144 + 64), the rest to blocks of 64; no "
        "fewer than 160 tokens"
    )

    def settings(self) -> Settings:
        local = round_to((self.tokens - 64) / 3, 64, 0)
        count = max(1, round((self.tokens - 64 - local - 32) / 64))
        return Settings(policy=self.policy, lam=1.0, init=64, local=local, top_k=count)


def _means(k: Tensor, size: int) -> Tensor:
    """(kv_heads, complete blocks, head_dim), float32"""
    count = k.shape[1] // size
    return k[:, : count * size].float().unflatten(1, (count, size)).mean(2)


def block_means(keys: Keys, size: int, of: str = "k") -> Tensor:
    """As above; those of the text are made once."""
    x = keys.k if of == "k" else keys.v
    done = keys.text // size * size
    return torch.cat((keys.once(("means", of, size), lambda: _means(x[:, :done], size)), _means(x[:, done:], size)), 1)


class Moba(Rule):
    name = "moba"
    paper = "MoBA (arXiv 2502.13189)"
    keeps = "the mean of each block's keys"
    reads = "the means"
    differs = (
        "untrained: the model never learned it. top_k blocks, the query's own among them, as the paper has them (3); a "
        "budget sets the block's size in place of the paper's 512: budget / (top_k − 1/2), in 16s"
    )
    options: ClassVar[dict[str, Any]] = {"top_k": 3, "group": "none"}
    needs = frozenset({"budget"})

    def spend(self) -> None:
        self.block = round_to(self.tokens / (self.top_k - 0.5), 16, 16)

    def spent(self) -> dict[str, int]:
        return {"block": self.block, "top_k": self.top_k}

    def choose(self, keys: Keys, state: object, q: Tensor, first: int) -> Choice:
        means = block_means(keys, self.block)
        count = -(-keys.tokens // self.block)
        own = positions(q, first) // self.block
        index = torch.arange(count, device=q.device)
        score = by_group(scores(keys, q, means), keys.kv_heads, self.group)
        score = torch.nn.functional.pad(score, (0, count - score.shape[-1]))
        chosen = top_mask(score, self.top_k - 1, index < own) | (index == own)
        mask = to_tokens(chosen, self.block, keys.tokens) & causal(q, first, keys.tokens)
        return Choice(mask, choice_bytes=own[:, 0] * float(keys.head_dim * ELEMENT))


def _bounds(k: Tensor, page: int) -> tuple[Tensor, Tensor]:
    count = -(-k.shape[1] // page)
    missing = count * page - k.shape[1]
    high = torch.nn.functional.pad(k.float(), (0, 0, 0, missing), value=-torch.inf)
    low = torch.nn.functional.pad(k.float(), (0, 0, 0, missing), value=torch.inf)
    return high.unflatten(1, (count, page)).amax(2), low.unflatten(1, (count, page)).amin(2)


def page_bounds(keys: Keys, page: int) -> tuple[Tensor, Tensor]:
    """The largest and the smallest of each channel, (kv_heads, pages, head_dim), of the last page as far as it goes."""
    done = keys.text // page * page
    text = keys.once(("bounds", page), lambda: _bounds(keys.k[:, :done], page))
    if done == keys.tokens:
        return text
    new = _bounds(keys.k[:, done:], page)
    return torch.cat((text[0], new[0]), 1), torch.cat((text[1], new[1]), 1)


def page_scores(keys: Keys, q: Tensor, page: int) -> Tensor:
    """Quest's upper bound of any product with a page's keys: (q_heads, queries, pages)."""
    high, low = page_bounds(keys, page)
    return scores(keys, q.float().clamp(min=0), high) + scores(keys, q.float().clamp(max=0), low)


class Quest(Rule):
    name = "quest"
    paper = "Quest (arXiv 2406.10774)"
    keeps = "the largest and the smallest of each channel, a page of 16"
    reads = "both"
    differs = (
        "each query head chooses for itself, as in the paper (group=sum shares by the sum of the bounds' softmax); the "
        "page in the making is always read; the first two layers are not dense, so that tokens are equal (dense=2 is "
        "the paper's)"
    )
    phases = ("answer",)
    options: ClassVar[dict[str, Any]] = {"page": 16, "group": "none", "dense": 0}
    needs = frozenset({"budget"})

    def spend(self) -> None:
        self.pages = max(1, (self.tokens - self.page // 2) // self.page)

    def spent(self) -> dict[str, int]:
        return {"page": self.page, "pages": self.pages}

    def choose(self, keys: Keys, state: object, q: Tensor, first: int) -> Choice:
        if keys.layer < self.dense:
            return Choice(None)
        score = page_scores(keys, q, self.page)
        own = positions(q, first) // self.page
        index = torch.arange(score.shape[-1], device=q.device)
        if self.group != "none":
            score = by_group(score.masked_fill(index >= own, -torch.inf).softmax(-1), keys.kv_heads, self.group)
            score = score.nan_to_num()  # of a query in the first page, which has nothing to choose from
        chosen = top_mask(score, self.pages, index < own) | (index == own)
        mask = to_tokens(chosen, self.page, keys.tokens) & causal(q, first, keys.tokens)
        return Choice(mask, choice_bytes=(own[:, 0] + 1) * float(2 * keys.head_dim * ELEMENT))


@dataclass
class _Compressed:
    k: Tensor
    v: Tensor


class Nsa(Rule):
    name = "nsa"
    paper = "NSA (arXiv 2502.11089)"
    keeps = "a mean key and a mean value of 32 tokens, every 16"
    reads = "the mean keys, and the mean values as attention does"
    differs = (
        "untrained: means in place of its learned compression, and no gates. Its three branches are joined in one "
        "softmax: selected and window tokens as they are, and the compressed entries of what is not read, each for the "
        "16 tokens that it adds (+ log 16). join=gates is its sum with equal gates. Compressed entries count as bytes, "
        "not as tokens. A budget gives a third to the window and the rest to blocks of 64 (of 32 below 768 tokens), "
        "one initial and two local ones among them"
    )
    options: ClassVar[dict[str, Any]] = {"join": "softmax"}
    needs = frozenset({"budget"})
    span, stride = 32, 16

    def spend(self) -> None:
        if self.join not in ("softmax", "gates"):
            raise ValueError(f"arena: join={self.join}; allowed: softmax, gates")
        self.block = 64 if self.tokens >= 768 else 32
        # The two local blocks lie in the window.
        self.count = 2 + max(2, round(2 * self.tokens / 3 / self.block))
        self.window = max(16, self.tokens - (self.count - 2) * self.block)

    def spent(self) -> dict[str, int]:
        return {"block": self.block, "blocks": self.count, "window": self.window}

    def _compressed(self, keys: Keys) -> _Compressed:
        halves = [block_means(keys, self.stride, of) for of in ("k", "v")]
        return _Compressed(*((half[:, :-1] + half[:, 1:]) / 2 for half in halves))

    def block_scores(self, share: Tensor, blocks: int) -> Tensor:
        """Of blocks, from the shares of compressed entries (…, entries): each counts once for each half inside."""
        ratio, halves = self.block // self.stride, self.span // self.stride
        padded = torch.nn.functional.pad(share, (halves - 1, max(0, blocks * ratio - share.shape[-1])))
        total = torch.stack([padded[..., n : n + blocks * ratio] for n in range(halves)]).sum(0)
        return total.unflatten(-1, (blocks, ratio)).sum(-1)

    def choose(self, keys: Keys, state: object, q: Tensor, first: int) -> Choice:
        own = positions(q, first)
        index = torch.arange(keys.tokens, device=q.device)
        count = -(-keys.tokens // self.block)
        block, own_block = torch.arange(count, device=q.device), own // self.block
        forced = (block == 0) | ((block <= own_block) & (block > own_block - 2))
        near = (index > own - self.window) & (index <= own)
        small = keys.tokens < self.span
        compressed = None if small else self._compressed(keys)
        entries = 0 if compressed is None else compressed.k.shape[1]
        chosen = forced.expand(keys.kv_heads, -1, -1)
        if compressed is not None:
            end = torch.arange(entries, device=q.device) * self.stride + self.span - 1
            visible = end <= own
            score = scores(keys, q, compressed.k).masked_fill(~visible, -torch.inf)
            share = by_group(score.softmax(-1).nan_to_num(), keys.kv_heads, "sum")
            free = self.count - forced.sum(-1, keepdim=True)
            ranked = self.block_scores(share, count).masked_fill(forced | (block > own_block), -torch.inf)
            # All rows have as many forced blocks, but for the first few, which may then read one or two more.
            chosen = chosen | top_mask(ranked, int(free.min()), block <= own_block)
        selected = to_tokens(chosen, self.block, keys.tokens) & (index <= own)
        mask = selected | near
        if compressed is None:
            return Choice(mask)
        cost = visible.sum(-1) * float(2 * keys.head_dim * ELEMENT)
        if self.join == "gates":
            return self._gated(keys, q, compressed, visible, selected, near, mask, cost)
        # An entry stands for its second half, so that each token counts once; the first half of all is always selected.
        half = torch.nn.functional.pad(mask[..., self.stride :], (0, self.stride))
        half = half[..., : entries * self.stride].unflatten(-1, (entries, self.stride)).any(-1)
        weight = torch.full((entries,), float(self.stride), device=q.device).log()
        bias = weight.expand(half.shape).masked_fill(half | ~visible, -torch.inf)
        return Choice(mask, extra=Extra(compressed.k, compressed.v, bias), choice_bytes=cost)

    def _gated(
        self,
        keys: Keys,
        q: Tensor,
        compressed: _Compressed,
        visible: Tensor,
        selected: Tensor,
        near: Tensor,
        mask: Tensor,
        cost: Tensor,
    ) -> Choice:
        """The mean of three softmaxes, as one whose scores are shifted by the logarithms of their sums."""
        raw = scores(keys, q)
        heads = [x.expand(keys.kv_heads, -1, -1).repeat_interleave(keys.group, 0) for x in (selected, near)]
        branches = [raw.masked_fill(~x, -torch.inf).logsumexp(-1, keepdim=True) for x in heads]
        entry = scores(keys, q, compressed.k).masked_fill(~visible, -torch.inf).logsumexp(-1, keepdim=True)
        shift = [torch.where(x, -lse, -torch.inf) for x, lse in zip(heads, branches, strict=True)]
        bias = torch.logaddexp(*shift)
        joined = mask.repeat_interleave(keys.group, 0)
        extra = torch.where(visible, -entry, -torch.inf)
        return Choice(joined, bias=bias, extra=Extra(compressed.k, compressed.v, extra), choice_bytes=cost)
