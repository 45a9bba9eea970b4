"""Context parallelism: a row of tokens spread over processes, so that no process holds all activations of a long text.

Everything but the attention needs a token at a time. For the attention the processes of a row trade tokens for heads:
each gets all tokens of some KV heads and of the query heads that share them, attends as one process would, and gives
the outputs back (two exchanges a layer, and two for the gradients). Blocks are chosen by KV head, so the choice is that
of one process to the bit, and the kernels see whole sequences. With more processes than KV heads, those that share a
head share its queries: each has two chunks, an early and a late one, so that all have as much to read, and gathers the
head's keys and values.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface, PreTrainedConfig
from transformers.masking_utils import AttentionMaskInterface

from .. import ops
from ..hf import packed
from ..settings import ModelSettings, default_scale, is_dense
from .batches import Batch
from .config import ConfigError
from .loss import IGNORED

NAME = "phsa_context"


class _Exchange(torch.autograd.Function):
    """Part i goes to process i of the group, and what came from process i is part i of the result."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = torch.empty_like(parts, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, parts.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(d_out, ctx.group), None


class _Gather(torch.autograd.Function):
    """The rows of all processes of the group, one behind the other."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = rows.new_empty((dist.get_world_size(group) * rows.shape[0], *rows.shape[1:]))
        dist.all_gather_into_tensor(out, rows.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, None]:
        d_rows = d_out.new_empty((d_out.shape[0] // dist.get_world_size(ctx.group), *d_out.shape[1:]))
        dist.reduce_scatter_tensor(d_rows, d_out.contiguous(), group=ctx.group)
        return d_rows, None


@dataclass(frozen=True)
class Chunk:
    """Consecutive queries of a row, and the keys that they may read: from the beginning of the first one's sequence."""

    begin: int
    end: int
    first_key: int
    q_lens: list[int]
    kv_lens: list[int]

    @staticmethod
    def of(begin: int, end: int, bounds: list[int]) -> Chunk:
        """Of queries [begin, end), which is not empty; bounds: where the row's sequences begin, and its end."""
        q_lens, kv_lens, first_key = [], [], None
        for first, last in itertools.pairwise(bounds):
            stop = min(end, last)
            if stop > max(begin, first):
                first_key = first if first_key is None else first_key
                q_lens.append(stop - max(begin, first))
                kv_lens.append(stop - first)
        assert first_key is not None
        return Chunk(begin, end, first_key, q_lens, kv_lens)


class Context:
    """This process's place among those that share rows: `size` neighbours of `world`, which is a multiple of it.

    They are a grid: `heads` processes share the KV heads, `queries` the queries of each. The row is cut into
    2 · queries chunks; the i-th and the i-th last are those of the i-th of `queries`, whose `heads` processes keep
    equal parts."""

    def __init__(self, size: int, kv_heads: int, device_type: str, world: int) -> None:
        self.size = size
        self.heads = math.gcd(size, kv_heads)
        self.queries = size // self.heads
        mesh = init_device_mesh(
            device_type, (world // size, self.queries, self.heads), mesh_dim_names=("data", "queries", "heads")
        )
        self.head_group = mesh.get_group("heads")
        self.query_group = mesh.get_group("queries")
        self.query_rank = mesh.get_local_rank("queries")
        self.rank = self.query_rank * self.heads + mesh.get_local_rank("heads")

    def chunks(self, tokens: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Which queries of a row this process attends for: [begin, end) twice."""
        length = tokens // (2 * self.queries)
        last = 2 * self.queries - 1 - self.query_rank
        return (
            (self.query_rank * length, (self.query_rank + 1) * length),
            (last * length, (last + 1) * length),
        )

    def share(self, batch: Batch) -> Batch:
        """This process's tokens of a row that all processes of the group have made."""
        missing = -batch.tokens.shape[1] % (2 * self.size)
        tokens, positions, labels, bounds = batch.tokens[0], batch.positions[0], batch.labels, batch.bounds
        if missing:
            # A sequence of its own that nobody sees, of which nothing is learned.
            tokens, positions = F.pad(tokens, (0, missing)), torch.cat((positions, torch.arange(missing)))
            labels = F.pad(labels, (0, missing), value=IGNORED)
            bounds = torch.cat((bounds, bounds.new_tensor([len(tokens)])))
        both = torch.cat([torch.arange(*chunk) for chunk in self.chunks(len(tokens))])
        mine = both.chunk(self.heads)[self.rank % self.heads]
        labels = labels[mine]
        return replace(
            batch,
            tokens=tokens[mine][None],
            positions=positions[mine][None],
            bounds=bounds,
            labels=labels,
            predicted=int((labels != IGNORED).sum()),
            row=tokens,
        )

    def sum(self, value: Tensor) -> Tensor:
        """Over the processes of the row."""
        for group in (self.head_group, self.query_group):
            dist.all_reduce(value, group=group)
        return value


@dataclass
class ContextAttention:
    """What the attention layers need of a row. Travels to them in the keyword arguments, as phsa.hf's batch does."""

    context: Context
    settings: ModelSettings
    backend: str
    bounds: Tensor  # (sequences + 1,), on the CPU
    flags: Tensor | None  # (tokens,) of the whole row
    chunks: list[Chunk]

    @staticmethod
    def of(
        context: Context, settings: ModelSettings, backend: str, bounds: Tensor, flags: Tensor | None
    ) -> ContextAttention:
        ends = bounds.tolist()
        chunks = [Chunk.of(*chunk, ends) for chunk in context.chunks(ends[-1])]
        return ContextAttention(context, settings, backend, bounds, flags, chunks)


def check_config(config: PreTrainedConfig, size: int) -> None:
    """Refuses what the exchange of tokens and heads would get wrong."""
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    if "sliding_attention" in kinds or (not kinds and window):
        raise ConfigError(
            f"context_parallel is {size}; allowed for {config.model_type} models, which attend within windows: 1"
        )


def kv_heads(config: PreTrainedConfig) -> int:
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def _to_heads(context: Context, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """From (1, heads, this process's tokens, head_dim) to the queries (this process's chunks, its heads, head_dim), and
    the keys and values of the whole row."""
    own = [x[0].unflatten(0, (context.heads, -1)) for x in (query, key, value)]
    counts = [x.shape[1] for x in own]
    rows = torch.cat(own, dim=1).transpose(1, 2)  # (processes, tokens, heads, head_dim)
    if context.heads > 1:
        rows = _Exchange.apply(rows, context.head_group)
    q, kv = rows.flatten(0, 1).split([counts[0], 2 * counts[1]], dim=1)
    if context.queries > 1:
        # As the processes have them, an early and a late chunk each: back into the row's order.
        early, late = _Gather.apply(kv, context.query_group).unflatten(0, (context.queries, 2, -1)).unbind(1)
        kv = torch.cat((early, late.flip(0))).flatten(0, 1)
    k, v = kv.split(counts[1], dim=1)
    return q, k, v


def _to_tokens(context: Context, out: Tensor) -> Tensor:
    """The way back of the outputs: (1, this process's tokens, all heads, head_dim)."""
    if context.heads == 1:
        return out[None]
    parts = _Exchange.apply(out.unflatten(0, (context.heads, -1)), context.head_group)
    return parts.transpose(0, 1).flatten(1, 2)[None]


def _dense(q: Tensor, k: Tensor, v: Tensor, attention: ContextAttention, scale: float) -> Tensor:
    if attention.context.queries == 1:
        rows = (x.transpose(0, 1)[None] for x in (q, k, v))
        out, _ = packed.attention_function(nn.Module(), *rows, None, scale, cu_seq_lens_q=attention.bounds)
        return out[0]
    outs, first = [], 0
    for chunk in attention.chunks:
        key = chunk.first_key
        for q_len, kv_len in zip(chunk.q_lens, chunk.kv_lens, strict=True):
            own = q[first : first + q_len], k[key : key + kv_len], v[key : key + kv_len]
            rows = (x.transpose(0, 1)[None] for x in own)
            out = F.scaled_dot_product_attention(
                *rows, attn_mask=causal_lower_right(q_len, kv_len), scale=scale, enable_gqa=True
            )
            outs.append(out[0].transpose(0, 1))
            first += q_len
            key += kv_len
    return torch.cat(outs)


def _sparse(q: Tensor, k: Tensor, v: Tensor, attention: ContextAttention, layer: int, scale: float) -> Tensor:
    context, settings = attention.context, attention.settings.for_layer(layer)
    flags = attention.flags if settings.needs_flags else None
    lam = settings.lam
    if isinstance(lam, tuple) and len(lam) > 1:
        mine = context.rank % context.heads
        lam = lam[mine * k.shape[1] : (mine + 1) * k.shape[1]]
    lengths: dict[str, Any] = {"cu_seqlens": attention.bounds}
    if context.queries > 1:
        spans = [slice(chunk.first_key, chunk.end) for chunk in attention.chunks]
        k, v = (torch.cat([x[span] for span in spans]) for x in (k, v))
        flags = None if flags is None else torch.cat([flags[span] for span in spans])
        lengths = {
            "q_lens": [length for chunk in attention.chunks for length in chunk.q_lens],
            "kv_lens": [length for chunk in attention.chunks for length in chunk.kv_lens],
        }
    return ops.phsa_attention(
        q,
        k,
        v,
        flags,
        policy=settings.policy,
        top_k=settings.top_k,
        lam=lam,
        init=settings.init,
        local=settings.local,
        block=settings.block,
        group_reduce=settings.group_reduce,
        dense_below=settings.dense_below,
        parts=settings.parts,
        survivors=settings.survivors,
        scale=scale,
        backend=attention.backend,
        **lengths,
    )[0]


@torch.compiler.disable(reason="phsa: the exchange between processes runs eagerly")
def attention_function(
    module: nn.Module,
    query: Tensor,  # (1, heads, this process's tokens, head_dim)
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    phsa_context: ContextAttention | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention for transformers' attention interface."""
    if phsa_context is None or dropout or s_aux is not None or kwargs.get("sliding_window") is not None:
        raise ValueError(
            f"{NAME}: {type(module).__name__} is not called by the trainer, or has an attention dropout, attention "
            "sinks or a sliding window; allowed then: context_parallel = 1"
        )
    scale = default_scale(query.shape[-1]) if scaling is None else float(scaling)
    q, k, v = _to_heads(phsa_context.context, query, key, value)
    base = phsa_context.settings
    if is_dense(base.base.policy) and not base.layers:
        out = _dense(q, k, v, phsa_context, scale)
    else:
        out = _sparse(q, k, v, phsa_context, module.layer_idx, scale)
    return _to_tokens(phsa_context.context, out), None


AttentionInterface.register(NAME, attention_function)
# Masks would be made of the tokens at hand; the function knows what is causal and what is packed.
AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
