"""The attention that transformers calls during a pass, and the passes: the text is read once, then questions and
answers over its cache, each by a rule of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.masking_utils import AttentionMaskInterface

from ..settings import default_scale
from .base import ELEMENT, Choice, Keys, Rule, causal, scores
from .calibrate import LayerCalibration
from .rules_fixed import Dense

NAME = "phsa-arena"
# Elements of a tile's scores, over query heads, queries and keys.
_TILE = {"cuda": 1 << 28, "cpu": 1 << 23}

Observer = Callable[[int, Tensor, Tensor, Tensor, float], None]


@dataclass
class Text:
    """What the layers need to know of a sample's tokens, and what they derive from its text."""

    flags: Tensor | None = None  # (tokens,) of text, question and answer
    separators: Tensor | None = None
    memo: dict[int, dict[Any, Any]] = field(default_factory=dict)  # by layer
    sums: dict[int, Tensor] = field(default_factory=dict)  # by layer: (kv_heads, text)


@dataclass
class Pass:
    """One phase of one sample by one rule. A phase may take several calls of the model (decoding)."""

    rule: Rule
    text: int  # tokens that were there before this phase; in the prefill all of it
    prompt: int  # tokens before the answer
    prefill: bool
    sample: Text
    question: str = "rule"  # or "dense": how the tokens between text and answer are read
    calibration: list[LayerCalibration] | None = None
    want_sums: bool = False
    observer: Observer | None = None
    states: dict[int, Any] = field(default_factory=dict)
    # What was read, by position since the phase began, summed over layers, as averages over heads.
    tokens_read: dict[int, Tensor] = field(default_factory=dict)
    bytes_read: dict[int, Tensor] = field(default_factory=dict)
    layers: int = 0

    @property
    def dense_question(self) -> bool:
        return self.question == "dense" or "question" in self.rule.needs

    @staticmethod
    def dense(tokens: int, observer: Observer | None = None) -> Pass:
        return Pass(Dense(tokens), tokens, tokens, True, Text(), observer=observer)

    def count(self, first: int, keys: Keys, choice: Choice, queries: int, device: torch.device) -> None:
        """Tokens: what a query head attends to; bytes: of a KV head, what its query heads attend to together, keys and
        values, and what was read in order to choose, in tokens' worth."""
        own = torch.arange(first, first + queries, device=device) + 1
        if choice.mask is None:
            tokens, union = own.float(), own.float()
        else:
            tokens = choice.mask.sum(-1).float().mean(0)
            union = tokens
            if choice.mask.shape[0] > keys.kv_heads:
                union = choice.mask.unflatten(0, (keys.kv_heads, -1)).any(1).sum(-1).float().mean(0)
        total = union * (2 * keys.head_dim * ELEMENT) + choice.choice_bytes
        for kept, value in ((self.tokens_read, tokens), (self.bytes_read, total / (2 * keys.head_dim * ELEMENT))):
            kept[first] = kept[first] + value if first in kept else value

    def shares(self, start: int, end: int) -> dict[str, float] | None:
        """What the queries at [start, end) read, all layers together: tokens, and tokens and bytes as shares of dense
        attention's."""
        out = []
        for kept in (self.tokens_read, self.bytes_read):
            parts = [value[max(0, start - first) : max(0, end - first)] for first, value in kept.items()]
            out.append(float(torch.cat(parts).sum()) / max(1, self.layers) if parts else 0.0)
        count = sum(
            max(0, min(end, first + len(value)) - max(start, first)) for first, value in self.tokens_read.items()
        )
        if count == 0:
            return None
        dense = count * (start + 1 + end) / 2
        return {"tokens": round(out[0] / count, 2), "token_share": out[0] / dense, "byte_share": out[1] / dense}


def attend(keys: Keys, q: Tensor, choice: Choice) -> Tensor:
    """Softmax attention over what was chosen, in float32: (q_heads, queries, head_dim)."""
    raw = scores(keys, q)
    group = keys.group

    def by_head(x: Tensor) -> Tensor:
        return x if x.shape[0] == q.shape[0] else x.repeat_interleave(group, 0)

    if choice.bias is not None:
        raw = raw + by_head(choice.bias)
    assert choice.mask is not None
    raw = raw.masked_fill(~by_head(choice.mask), -torch.inf)
    values = keys.v.float()
    if choice.extra is not None:
        more = scores(keys, q, choice.extra.k) + by_head(choice.extra.bias)
        raw = torch.cat((raw, more), -1)
        values = torch.cat((values, choice.extra.v.float()), 1)
    weight = raw.softmax(-1)
    return (weight.unflatten(0, (keys.kv_heads, group)).flatten(1, 2) @ values).view(q.shape)


def _masked(keys: Keys, q: Tensor, mask: Tensor | None) -> Tensor:
    """The same by torch's attention in the model's type, for many queries."""
    k, v = (x.repeat_interleave(keys.group, 0)[None] for x in (keys.k, keys.v))
    if mask is not None:
        mask = mask if mask.shape[0] == q.shape[0] else mask.repeat_interleave(keys.group, 0)
        mask = mask[None]
    return nn.functional.scaled_dot_product_attention(q[None], k, v, attn_mask=mask, scale=keys.scale)[0]


def attention_sums(keys: Keys, q: Tensor, first: int, choice: Choice) -> Tensor:
    """What each token gets of these queries, summed over them and over a group's heads: (kv_heads, tokens)."""
    raw = scores(keys, q)
    mask = causal(q, first, keys.tokens) if choice.mask is None else choice.mask
    if mask.dim() == 3 and mask.shape[0] < q.shape[0]:
        mask = mask.repeat_interleave(keys.group, 0)
    weight = raw.masked_fill(~mask, -torch.inf).softmax(-1)
    return weight.sum(1).unflatten(0, (keys.kv_heads, -1)).sum(1)


def _tile(q: Tensor, tokens: int) -> int:
    return max(16, _TILE.get(q.device.type, _TILE["cpu"]) // (q.shape[0] * tokens))


def _prefill(run: Pass, keys: Keys, q: Tensor, layer: int) -> Tensor:
    dense = isinstance(run.rule, Dense)
    out = torch.empty_like(q)
    state = run.rule.begin(keys, q, 0)
    sums = torch.zeros((keys.kv_heads, keys.tokens), device=q.device) if run.want_sums else None
    if dense:
        k, v = (x.repeat_interleave(keys.group, 0)[None] for x in (keys.k, keys.v))
        out = nn.functional.scaled_dot_product_attention(q[None], k, v, is_causal=True, scale=keys.scale)[0]
        run.count(0, keys, Choice(None), q.shape[1], q.device)
        if sums is None:
            return out
    step = _tile(q, keys.tokens)
    for start in range(0, q.shape[1], step):
        rows = q[:, start : start + step]
        end = start + rows.shape[1]
        # What comes later is seen by nobody here.
        seen = Keys(**{**vars(keys), "k": keys.k[:, :end], "v": keys.v[:, :end]})
        choice = run.rule.choose(seen, state, rows, start)
        if not dense:
            plain = choice.bias is None and choice.extra is None and choice.mask is not None
            out[:, start:end] = _masked(seen, rows, choice.mask) if plain else attend(seen, rows, choice).to(q.dtype)
            run.count(start, keys, choice, rows.shape[1], q.device)
        if sums is not None:
            sums[:, :end] += attention_sums(seen, rows, start, choice)
    if sums is not None:
        run.sample.sums[layer] = sums
    return out


def _answer(run: Pass, keys: Keys, q: Tensor, layer: int) -> Tensor:
    first = keys.tokens - q.shape[1]
    if layer not in run.states:
        run.states[layer] = run.rule.begin(keys, q, first)
    out = torch.empty_like(q)
    dense_until = run.prompt if run.dense_question else 0
    step = _tile(q, keys.tokens)
    start = 0
    while start < q.shape[1]:
        at = first + start
        end = min(q.shape[1], start + step)
        if at < dense_until:
            end = min(end, dense_until - first)
        rows = q[:, start:end]
        stop = first + end
        seen = Keys(**{**vars(keys), "k": keys.k[:, :stop], "v": keys.v[:, :stop]})
        choice = Choice(None) if at < dense_until else run.rule.choose(seen, run.states[layer], rows, at)
        run.count(at, keys, choice, rows.shape[1], q.device)
        if choice.mask is None:
            choice = Choice(causal(rows, at, stop).expand(keys.kv_heads, -1, -1))
        out[:, start:end] = attend(seen, rows, choice).to(q.dtype)
        start = end
    return out


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    arena: Pass | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """query: (1, heads, tokens, head_dim), the last ones of key's tokens."""
    if arena is None or query.shape[0] != 1:
        raise ValueError("arena: this attention runs within phsa.arena, one sequence at a time")
    for name in ("sliding_window", "softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise ValueError(f"arena: {type(module).__name__} has {name}; allowed: models with plain full attention")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    q, k, v = query[0], key[0].to(query.dtype), value[0].to(query.dtype)
    sample = arena.sample
    keys = Keys(
        k=k,
        v=v,
        scale=default_scale(q.shape[-1]) if scaling is None else scaling,
        q_heads=q.shape[0],
        layer=layer,
        text=arena.text,
        prompt=arena.prompt,
        flags=None if sample.flags is None else sample.flags[: k.shape[1]],
        separators=sample.separators,
        sums=sample.sums.get(layer),
        calibration=None if arena.calibration is None else arena.calibration[layer],
        memo=sample.memo.setdefault(layer, {}),
    )
    arena.layers = max(arena.layers, layer + 1)
    if arena.observer is not None:
        arena.observer(layer, q, k, v, keys.scale)
    out = (_prefill if arena.prefill else _answer)(arena, keys, q, layer)
    return out.transpose(0, 1)[None], None


def _no_mask(*args: object, **kwargs: object) -> None:
    return None


AttentionInterface.register(NAME, attention_function)
AttentionMaskInterface.register(NAME, _no_mask)


@torch.no_grad()
def read(model: PreTrainedModel, run: Pass, tokens: Sequence[int], cache: Cache | None, logits: int = 1) -> Tensor:
    """Puts tokens behind what the cache holds, by the pass's rule; the last `logits` rows of logits, float32."""
    ids = torch.tensor([list(tokens)], device=model.device)
    out = model(
        ids, past_key_values=cache, use_cache=cache is not None, logits_to_keep=max(1, logits), arena=run
    ).logits[0]
    if run.layers != model.config.num_hidden_layers:
        raise ValueError(f"arena: {run.layers} of {model.config.num_hidden_layers} layers ran phsa.arena's attention")
    return out.float()
