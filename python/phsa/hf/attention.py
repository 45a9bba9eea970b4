"""The attention function and the mask function that transformers calls, and the batch that they share.

The batch is worked out once per forward pass of the model, before its first layer, and travels to the layers in the
keyword arguments: there is no state outside the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from .. import ops
from .._fallback import Blocks
from ..settings import ModelSettings, Settings, default_scale
from .cache import PhsaLayer, PhsaStaticLayer, StaticView


@dataclass
class Batch:
    """Which tokens of a padded batch are real, and to which sequence they belong.

    The new tokens are the columns [past, past + q_len) of (batch, past + q_len) columns.
    """

    settings: ModelSettings
    backend: str
    flags: Tensor | None  # (batch, q_len) of the new tokens; None: nothing needs them
    cache: Cache | None
    rows: int
    past: int
    q_len: int
    q_lens: list[int]
    kv_lens: list[int]
    starts: list[int]  # the first real column of each row
    q_index: Tensor | None = None  # rows of the flattened new tokens that are real; None: all
    kv_index: Tensor | None = None  # rows of all flattened tokens that are real; None: each row from its start on
    packed: bool = False  # several sequences in one row

    @classmethod
    def unpadded(cls, settings: ModelSettings, backend: str, rows: int, past: int, q_len: int) -> Batch:
        """One in which all tokens are real, and each row is a sequence; without flags and a cache."""
        q_lens, kv_lens, starts = [q_len] * rows, [past + q_len] * rows, [0] * rows
        return cls(settings, backend, None, None, rows, past, q_len, q_lens, kv_lens, starts)

    @property
    def kv_len(self) -> int:
        return self.past + self.q_len


@dataclass
class GraphBatch:
    """A batch in a compiled graph, which cannot look at numbers: whole rows, sequences packed by their bounds, or rows
    whose real tokens are moved to the front of them all."""

    settings: ModelSettings
    backend: str
    flags: Tensor | None  # (batch, q_len)
    bounds: Tensor | None  # cu_seq_lens_q
    lengths: Tensor | None = None  # of the sequences behind each other, padding as the last one; zeros are none
    order: Tensor | None = None  # the flattened tokens, the real ones first; None: as they are
    place: Tensor | None = None  # where each went
    real: Tensor | None = None  # (tokens,) bool


@dataclass
class StaticBatch:
    """New tokens for a static cache, eagerly or in a compiled graph: phsa::attention_static looks at the numbers."""

    settings: ModelSettings
    backend: str
    flags: Tensor | None  # (batch, q_len) of the new tokens
    cache: Cache
    mask: Tensor | None  # (batch, tokens and perhaps more) bool, on the CPU
    past: Tensor  # (1,)
    numbers: Tensor  # int64 on the CPU: the tokens in the cache, and whether positions restart among the new ones


def _mask_layout(mask: Tensor, past: int, q_len: int) -> dict[str, object]:
    """The layout of a batch with padding. mask: (batch, past + q_len) bool."""
    kv_len = past + q_len
    lens = mask.sum(1)
    new = mask[:, past:]
    # argmax finds the first real token; a row without any starts at its end.
    starts = torch.where(lens > 0, mask.to(torch.uint8).argmax(1), kv_len)
    left = bool((starts + lens == kv_len).all())
    return {
        "q_lens": new.sum(1).tolist(),
        "kv_lens": lens.tolist(),
        "starts": starts.tolist(),
        "q_index": None if bool(new.all()) else new.flatten().nonzero().flatten(),
        # Right padding, or holes: the real tokens of a row are not one piece and must be gathered.
        "kv_index": None if left else mask.flatten().nonzero().flatten(),
    }


def _packed_lengths(position_ids: Tensor | None, cu_seq_lens: Tensor | None, rows: int, q_len: int) -> list[int] | None:
    """The lengths of sequences that are packed into the rows, or None where every row is one sequence."""
    if cu_seq_lens is not None:
        if rows != 1:
            raise ValueError(f"phsa: cu_seq_lens_q with a batch of {rows}; allowed: packed sequences in one row")
        return cu_seq_lens.diff().tolist()
    if position_ids is None or position_ids.dim() != 2:
        return None
    # As everywhere in transformers: a position that does not follow the one before it starts a new sequence.
    restart = position_ids.diff(dim=1) != 1
    if not bool(restart.any()):
        return None
    first = torch.ones((rows, 1), dtype=torch.bool, device=restart.device)
    begin = torch.cat((first, restart.expand(rows, -1)), dim=1).flatten().nonzero().flatten()
    end = torch.tensor([rows * q_len], device=begin.device)
    return torch.cat((begin, end)).diff().tolist()


Mask: TypeAlias = "Tensor | dict[str, Tensor | None] | None"


def padding_mask(mask: Mask) -> Tensor | None:
    if isinstance(mask, dict):
        # generate() makes the masks of a static cache itself, by kind of layer; mask_function is where they came from.
        mask = mask["full_attention"]
    if mask is not None and mask.dim() != 2:
        raise ValueError(
            "phsa: the attention mask is not 2-D (batch, tokens); other masks than padding are not supported"
        )
    return mask


def make_graph_batch(
    settings: ModelSettings,
    backend: str,
    flags: Tensor | None,
    mask: Tensor | None,
    position_ids: Tensor | None,
    bounds: Tensor | None,
    rows: int,
    q_len: int,
) -> GraphBatch:
    """What make_batch does, for a compiled graph and without a cache: shapes depend on no number."""
    batch = GraphBatch(settings, backend, flags, bounds)
    if position_ids is not None and position_ids.dim() != 2:
        position_ids = None
    if bounds is not None or (mask is None and position_ids is None):
        return batch
    tokens = rows * q_len
    if mask is not None:
        batch.real = real = mask.bool().flatten()
        count = real.sum()
        batch.place = torch.where(real, real.cumsum(0) - 1, count + (~real).cumsum(0) - 1)
        batch.order = torch.empty_like(batch.place).scatter_(0, batch.place, torch.arange(tokens, device=mask.device))
        batch.lengths = torch.cat((mask.bool().sum(1), (tokens - count)[None]))
    if position_ids is not None:
        # As many places as there might be sequences.
        restart = (position_ids.diff(dim=1) != 1).expand(rows, -1)
        first = torch.cat((restart.new_ones((rows, 1)), restart), dim=1).flatten()
        packed = torch.zeros(tokens + 1, dtype=torch.long, device=first.device)
        packed = packed.scatter_add(0, first.cumsum(0) - 1, torch.ones_like(packed[:tokens]))
        if batch.lengths is None or batch.real is None:
            batch.lengths = packed
        else:
            by_rows = torch.cat((batch.lengths, batch.lengths.new_zeros(tokens - rows)))
            batch.lengths = torch.where(batch.real.all(), packed, by_rows)
    assert batch.lengths is not None
    batch.lengths = batch.lengths.cpu()
    return batch


def make_static_batch(
    settings: ModelSettings,
    backend: str,
    flags: Tensor | None,
    cache: Cache,
    mask: Tensor | None,
    position_ids: Tensor | None,
    device: torch.device,
) -> StaticBatch:
    layer = next(layer for layer in cache.layers if isinstance(layer, PhsaStaticLayer))
    # A copy: the layer counts in place.
    past = torch.zeros(1, dtype=torch.long, device=device) + layer.get_seq_length()
    restarts = torch.zeros_like(past)
    if position_ids is not None and position_ids.dim() == 2:
        restarts = restarts + (position_ids.diff(dim=1) != 1).any()
    numbers = torch.cat((past, restarts)).cpu()
    return StaticBatch(settings, backend, flags, cache, None if mask is None else mask.bool().cpu(), past, numbers)


def make_batch(
    settings: ModelSettings,
    backend: str,
    flags: Tensor | None,
    cache: Cache | None,
    attention_mask: Mask,
    position_ids: Tensor | None,
    cu_seq_lens: Tensor | None,
    rows: int,
    q_len: int,
) -> Batch:
    past = 0 if cache is None else int(cache.get_seq_length())
    kv_len = past + q_len
    attention_mask = padding_mask(attention_mask)
    if attention_mask is not None and attention_mask.shape != (rows, kv_len):
        raise ValueError(
            f"phsa: the attention mask has the shape {tuple(attention_mask.shape)}; {past} cached and {q_len} new "
            f"tokens in {rows} rows need {(rows, kv_len)}"
        )
    batch = Batch.unpadded(settings, backend, rows, past, q_len)
    batch.flags, batch.cache = flags, cache
    if attention_mask is not None and not bool(attention_mask.bool().all()):
        if cu_seq_lens is not None:
            raise ValueError("phsa: cu_seq_lens_q and padding in the attention mask do not go together")
        for name, value in _mask_layout(attention_mask.bool(), past, q_len).items():
            setattr(batch, name, value)
        return batch
    lengths = _packed_lengths(position_ids, cu_seq_lens, rows, q_len) if past == 0 else None
    if lengths is not None:
        if sum(lengths) != rows * q_len:
            raise ValueError(f"phsa: cu_seq_lens_q covers {sum(lengths)} tokens, the batch has {rows * q_len}")
        batch.packed = True
        batch.q_lens = batch.kv_lens = lengths
    return batch


def mask_function(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: object,
) -> Tensor | None:
    """The mask for transformers' mask interface: padding only. The batch has it already, so it need not be made; but
    this is where a model says what else it would mask, and what is not causal must be refused. Layers that attend
    within a window keep their own attention, and so their own mask."""
    if local_size is not None:
        return sdpa_mask(
            batch_size,
            q_length,
            kv_length,
            q_offset,
            kv_offset,
            mask_function,
            attention_mask,
            local_size=local_size,
            use_vmap=use_vmap,
            device=device,
            **kwargs,
        )
    if use_vmap:
        raise ValueError("phsa: this model brings a mask of its own, which phsa does not support")
    # A compiled graph cannot look; enable() and the eager run have.
    if mask_function is not causal_mask_function and q_length > 1 and not torch.compiler.is_compiling():
        # Padding and packing only take away from a causal mask. Anything that lets a token see the next one is not.
        row = torch.arange(batch_size, device=device)[:, None]
        query = torch.arange(q_length - 1, device=device)[None] + q_offset
        if bool(torch.as_tensor(mask_function(row, torch.zeros_like(row), query, query + 1)).any()):
            raise ValueError("phsa: the attention of this model is not causal, which phsa does not support")
    return attention_mask


def windowed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None,
    dropout: float,
    sinks: Tensor | None,
) -> tuple[Tensor, None]:
    """A layer that attends within a window reads little as it is: it stays as the model has it."""
    if sinks is not None:
        return _windowed_with_sinks(query, key, value, attention_mask, scaling, dropout, sinks), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling)


def _windowed_with_sinks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None,
    dropout: float,
    sinks: Tensor,
) -> Tensor:
    if dropout:
        raise ValueError(f"phsa: attention sinks with an attention dropout of {dropout}; allowed: 0")
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.transpose(2, 3) * (default_scale(query.shape[-1]) if scaling is None else scaling)
    if attention_mask is None:
        q_len, kv_len = scores.shape[-2:]
        attention_mask = torch.ones(q_len, kv_len, dtype=torch.bool, device=scores.device).tril(kv_len - q_len)
    if attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, float("-inf"))
    else:
        scores = scores + attention_mask
    of_heads = sinks.to(scores)[:, None, None].expand(*scores.shape[:-1], 1)
    shares = torch.cat((scores, of_heads), dim=-1).softmax(-1, dtype=torch.float32)[..., :-1]
    return (shares.to(value.dtype) @ value).transpose(1, 2).contiguous()


def _weakened(out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """The attention with one more key for each head, of that score and without a value: what is read counts for less.
    out: (rows, heads, head_dim)."""
    if sinks is None:
        return out
    return (out * torch.sigmoid(lse - sinks.to(lse))[..., None]).to(out.dtype)


_REFUSED = {
    "softcap": "caps its attention scores",
    "position_bias": "adds a bias to its attention scores",
    "head_mask": "masks heads",
    "cache": "runs with a paged cache",
}


def _refuse(module: nn.Module, dropout: float, is_causal: bool | None, kwargs: dict[str, object]) -> None:
    name = type(module).__name__
    for key, what in _REFUSED.items():
        if kwargs.get(key) is not None:
            raise ValueError(f"phsa: {name} {what} ({key}), which phsa does not support")
    if is_causal is False or (is_causal is None and getattr(module, "is_causal", True) is False):
        raise ValueError(f"phsa: {name} is not causal, which phsa does not support")
    if dropout:
        raise ValueError(f"phsa: {name} has an attention dropout of {dropout}; allowed: attention_dropout = 0")


def _same_type(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under autocast RoPE leaves queries and keys in f32 while values are in the lower type."""
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
    return query.to(dtype), key.to(dtype), value.to(dtype)


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    phsa_batch: Batch | GraphBatch | StaticBatch | None = None,
    s_aux: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """The attention for transformers' attention interface.

    query: (batch, heads, tokens, head_dim); s_aux: (heads,), the attention sinks."""
    window = kwargs.get("sliding_window")
    _refuse(module, dropout if window is None else 0.0, is_causal, kwargs)
    if phsa_batch is None:
        raise RuntimeError(
            "phsa: the model's forward hook did not run, so there are no punctuation flags. Call "
            "phsa.hf.enable(model) on the model that is used"
        )
    if window is not None:
        return windowed(module, *_same_type(query, key, value), attention_mask, scaling, dropout, s_aux)
    if value.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"phsa: values have {value.shape[-1]} channels and queries {query.shape[-1]}; allowed: the same"
        )
    if not hasattr(module, "layer_idx"):
        raise ValueError(f"phsa: {type(module).__name__} does not know its layer; phsa supports causal decoders only")
    scale = default_scale(query.shape[-1]) if scaling is None else float(scaling)
    if isinstance(phsa_batch, Batch):
        return _attend_eagerly(module, query, key, value, attention_mask, scale, phsa_batch, s_aux), None
    if s_aux is not None:
        raise ValueError(
            f"phsa: {type(module).__name__} has attention sinks (s_aux), which phsa does not support in compiled "
            "graphs and with static caches"
        )
    query, key, value = _same_type(query, key, value)
    settings = phsa_batch.settings.for_layer(module.layer_idx)
    if isinstance(phsa_batch, StaticBatch):
        return _attend_static(module, query, key, value, settings, scale, phsa_batch), None
    rows, options = [x.transpose(1, 2) for x in (query, key, value)], _options(settings, scale, phsa_batch.backend)
    flags = phsa_batch.flags if settings.needs_flags else None
    bounds, lengths = phsa_batch.bounds, phsa_batch.lengths
    if bounds is None and lengths is None:
        return ops.phsa_attention(*rows, flags, **options)[0], None
    if flags is not None:
        flags = flags.flatten()
    packed = [x.flatten(0, 1) for x in rows]
    if bounds is not None:
        return ops.phsa_attention(*packed, flags, cu_seqlens=bounds, **options)[0][None], None
    order, place, real = phsa_batch.order, phsa_batch.place, phsa_batch.real
    if order is not None:
        packed, flags = [x[order] for x in packed], None if flags is None else flags[order]
    out, _ = ops.phsa_attention(*packed, flags, q_lens=lengths, kv_lens=lengths, **options)
    if place is not None and real is not None:
        out = torch.where(real[:, None, None], out[place], 0)
    return out.unflatten(0, rows[0].shape[:2]), None


# The batch's lengths are other numbers in each step, and each would be compiled for.
@torch.compiler.disable(reason="phsa: with a cache that is not static, attention runs eagerly")
def _attend_eagerly(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scale: float,
    batch: Batch,
    sinks: Tensor | None,
) -> Tensor:
    if isinstance(attention_mask, Tensor) and attention_mask.dim() != 2:
        raise ValueError("phsa: the attention mask is not 2-D (batch, tokens); other masks are not supported")
    settings = batch.settings.for_layer(module.layer_idx)

    layer = None
    if batch.cache is not None and module.layer_idx < len(batch.cache.layers):
        layer = batch.cache.layers[module.layer_idx]
        if layer.keys is not key:
            layer = None  # gradient checkpointing bypasses the cache
    if key.shape[2] != (batch.kv_len if layer is not None else batch.q_len) or (layer is None and batch.past > 0):
        raise ValueError(f"phsa: {key.shape[2]} keys arrived where {batch.kv_len} are expected")
    if layer is not None:
        assert isinstance(layer, PhsaLayer)
        if layer.packed:
            raise ValueError("phsa: the cache holds packed sequences, which cannot be continued")
        layer.packed = batch.packed
        if batch.settings.needs_flags:
            layer.add_flags(batch.flags)

    typed = _same_type(query, key, value)
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in typed)
    if learns and sinks is not None:
        raise ValueError(
            f"phsa: {type(module).__name__} has attention sinks (s_aux), whose gradients phsa does not compute; run it "
            "in torch.no_grad()"
        )
    in_place = layer is not None and not learns and batch.kv_index is None and not batch.packed
    # Representatives are kept in the type of the cache; where autocast asks for another, they are computed anew.
    if in_place and layer is not None and typed[1] is key:
        return _attend_cached(batch, layer, settings, scale, *typed, sinks)
    return _attend_packed(batch, layer, settings, scale, *typed, sinks)


def _rows(x: Tensor, index: Tensor | None) -> Tensor:
    """(batch, heads, tokens, head_dim) to (tokens, heads, head_dim), real tokens only."""
    x = x.transpose(1, 2).flatten(0, 1)
    return x if index is None else x[index.to(x.device)]


def _padded(out: Tensor, batch: Batch) -> Tensor:
    """The way back, with zeros for padding: (batch, tokens, heads, head_dim)."""
    if batch.q_index is not None:
        full = out.new_zeros((batch.rows * batch.q_len, *out.shape[1:]))
        out = full.index_copy(0, batch.q_index.to(out.device), out)
    return out.unflatten(0, (batch.rows, batch.q_len))


def _options(settings: Settings, scale: float, backend: str) -> dict[str, object]:
    return {
        "policy": settings.policy,
        "top_k": settings.top_k,
        "lam": settings.lam,
        "init": settings.init,
        "local": settings.local,
        "block": settings.block,
        "group_reduce": settings.group_reduce,
        "dense_below": settings.dense_below,
        "parts": settings.parts,
        "survivors": settings.survivors,
        "scale": scale,
        "backend": backend,
    }


def _attend_packed(
    batch: Batch,
    layer: PhsaLayer | StaticView | None,
    settings: Settings,
    scale: float,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None = None,
) -> Tensor:
    """Gathers the real tokens; representatives are computed anew. The only way with gradients."""
    kv_index = batch.kv_index
    if kv_index is None and any(batch.starts):  # left padding
        columns = torch.arange(batch.kv_len)
        kv_index = (columns >= torch.tensor(batch.starts)[:, None]).flatten().nonzero().flatten()
    flags = None
    if settings.needs_flags:
        flags = layer.flags if layer is not None else batch.flags
        assert flags is not None
        flags = flags.flatten().to(query.device)
        if kv_index is not None:
            flags = flags[kv_index.to(flags.device)]
    out, lse = ops.phsa_attention(
        _rows(query, batch.q_index),
        _rows(key, kv_index),
        _rows(value, kv_index),
        flags,
        q_lens=batch.q_lens,
        kv_lens=batch.kv_lens,
        **_options(settings, scale, batch.backend),
    )
    return _padded(_weakened(out, lse, sinks), batch)


def _row_view(x: Tensor) -> tuple[Tensor, int] | None:
    """(batch, heads, tokens, head_dim) as (rows, heads, head_dim) without a copy, and the rows from one sequence to
    the next. None where the strides do not allow it."""
    batch, heads, tokens, head_dim = x.shape
    to_row, to_head, to_token, to_channel = x.stride()
    if to_channel != 1 or to_token < head_dim or (batch > 1 and to_row % to_token):
        return None
    step = to_row // to_token if batch > 1 else tokens
    return x.as_strided(((batch - 1) * step + tokens, heads, head_dim), (to_token, to_head, 1)), step


def _attend_cached(
    batch: Batch,
    layer: PhsaLayer | StaticView,
    settings: Settings,
    scale: float,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None = None,
) -> Tensor:
    """Reads the cache where it lies and keeps its representatives up to date."""
    keys, values = _row_view(key), _row_view(value)
    if keys is None or values is None or keys[1] != values[1]:
        keys, values = _row_view(key.contiguous()), _row_view(value.contiguous())
        assert keys is not None and values is not None
    (k, step), (v, _) = keys, values
    blocks = Blocks.of(settings)
    reps, rep_rows = layer.ready_reps(settings, batch.starts, batch.past)
    completes = any(
        blocks.rep_rows(kv_len) > blocks.rep_rows(kv_len - q_len)
        for q_len, kv_len in zip(batch.q_lens, batch.kv_lens, strict=True)
    )
    flags = None
    # Flags are read for blocks that are complete from now on; for parts, which are not kept, of all blocks.
    if settings.needs_flags and (completes or blocks.parts > 1):
        assert layer.flags is not None
        flags = layer.flags.new_zeros(k.shape[0])
        flags.as_strided(layer.flags.shape, (step, 1)).copy_(layer.flags)
    rows = range(batch.rows)
    q = _rows(query, batch.q_index)
    top_k = min(settings.top_k, batch.kv_len // blocks.block)
    out, lse, _ = torch.ops.phsa.attention_cached(
        q,
        k,
        v,
        flags,
        reps,
        torch.tensor(batch.q_lens, dtype=torch.int32),
        torch.tensor(batch.kv_lens, dtype=torch.int32),
        torch.tensor([row * step + batch.starts[row] for row in rows]),
        torch.tensor([row * rep_rows for row in rows]),
        settings.policy,
        settings.block,
        settings.init,
        settings.local,
        top_k,
        list(settings.lam) if isinstance(settings.lam, tuple) else [settings.lam],
        settings.group_reduce,
        settings.dense_below,
        settings.parts,
        settings.survivors,
        scale,
        batch.backend,
    )
    return _padded(_weakened(out, lse, sinks), batch)


@torch.library.custom_op("phsa::attention_static", mutates_args=("reps", "state"))
def _static(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    flags: Tensor | None,
    reps: Tensor,
    state: Tensor,
    mask: Tensor | None,
    numbers: Tensor,
    policy: str,
    block: int,
    init: int,
    local: int,
    top_k: int,
    lam: Sequence[float],
    group_reduce: str,
    dense_below: int,
    scale: float,
    backend: str,
    parts: int,
    survivors: int,
) -> Tensor:
    """Attention of new tokens, which are in the cache already, over all of a static cache. No gradients.

    q: (batch, heads, q_len, head_dim); k, v: (batch, kv_heads, room, head_dim); flags: (batch, room); reps and state:
    those of PhsaStaticLayer; mask, numbers: those of StaticBatch. Returns (batch, q_len, heads, head_dim).
    """
    past, restarts = numbers.tolist()
    rows, _, q_len, _ = q.shape
    tokens = past + q_len
    if int(state[-1, 0]) != past:
        raise ValueError("phsa: the static cache was filled while phsa was off; start with an empty cache")
    if mask is not None and (mask.shape[0] != rows or mask.shape[1] < tokens):
        raise ValueError(
            f"phsa: the attention mask has the shape {tuple(mask.shape)}; {past} cached and {q_len} new tokens in "
            f"{rows} rows need {(rows, tokens)}"
        )
    settings = Settings(
        policy=policy,
        block=block,
        init=init,
        local=local,
        top_k=top_k,
        lam=lam[0] if len(lam) == 1 else tuple(lam),
        group_reduce=group_reduce,
        dense_below=dense_below,
        parts=parts,
        survivors=survivors,
    )
    batch = Batch.unpadded(ModelSettings(settings), backend, rows, past, q_len)
    if mask is not None and not bool(mask[:, :tokens].all()):
        for name, value in _mask_layout(mask[:, :tokens], past, q_len).items():
            setattr(batch, name, value)
    elif restarts and past == 0:
        raise ValueError("phsa: packed sequences in a static cache; allowed: with use_cache=False")
    state[-1, 0] = tokens
    view = StaticView(k[:, :, :tokens], None if flags is None else flags[:, :tokens], reps, state)
    attend = _attend_cached if batch.kv_index is None else _attend_packed
    return attend(batch, view, settings, scale, q, k[:, :, :tokens], v[:, :, :tokens])


@_static.register_fake
def _(q: Tensor, *rest: object) -> Tensor:
    rows, heads, q_len, head_dim = q.shape
    return q.new_empty((rows, q_len, heads, head_dim))


def _attend_static(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    settings: Settings,
    scale: float,
    batch: StaticBatch,
) -> Tensor:
    layer = batch.cache.layers[module.layer_idx]
    assert isinstance(layer, PhsaStaticLayer)
    if key.shape[2] != layer.max_cache_len:
        raise ValueError(f"phsa: {key.shape[2]} keys arrived where {layer.max_cache_len} are expected")
    reps, state = layer.ready_reps(settings, key)
    flags = layer.add_flags(batch.flags, batch.past) if batch.settings.needs_flags else None
    return _static(
        query,
        key,
        value,
        flags if settings.needs_flags else None,
        reps,
        state,
        batch.mask,
        batch.numbers,
        settings.policy,
        settings.block,
        settings.init,
        settings.local,
        settings.top_k,
        list(settings.lam) if isinstance(settings.lam, tuple) else [settings.lam],
        settings.group_reduce,
        settings.dense_below,
        scale,
        batch.backend,
        settings.parts,
        settings.survivors,
    )
