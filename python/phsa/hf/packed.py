"""Dense attention over packed sequences: the models' own SDPA would build a mask of tokens times tokens for them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from .attention import mask_function, windowed

NAME = "phsa_packed_sdpa"
# On an H200 cuDNN takes 0.57 of FlashAttention 2's time; others are for machines without them.
_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    with sdpa_kernel(_BACKENDS, set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)


@torch.compiler.disable  # the lengths are other numbers in each step, and each would be compiled for
def attention_function(
    module: nn.Module,
    query: Tensor,  # (batch, heads, tokens, head_dim)
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    if kwargs.get("sliding_window") is not None:
        return windowed(module, query, key, value, attention_mask, scaling, dropout)
    if key.shape[2] != query.shape[2]:
        raise ValueError(f"{NAME}: {query.shape[2]} queries and {key.shape[2]} keys; allowed: whole sequences")
    lengths = [query.shape[2]] if cu_seq_lens_q is None else cu_seq_lens_q.diff().tolist()
    if len(set(lengths)) == 1:

        def split(x: Tensor) -> Tensor:  # (batch * sequences, heads, tokens, head_dim)
            rows = x.unflatten(2, (len(lengths), lengths[0])).transpose(1, 2)
            return rows.flatten(0, 1)

        out = _causal(split(query), split(key), split(value), scaling)
        return out.transpose(1, 2).reshape(query.shape[0], query.shape[2], *out.shape[1:2], out.shape[3]), None
    parts = zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True)
    return torch.cat([_causal(*part, scaling) for part in parts], dim=2).transpose(1, 2), None


AttentionInterface.register(NAME, attention_function)
AttentionMaskInterface.register(NAME, mask_function)
