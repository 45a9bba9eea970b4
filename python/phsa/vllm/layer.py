"""What the backends for CUDA and for the CPU have in common: one layer's part in phsa, and how pages grow by it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from .. import paged
from ..settings import Settings
from . import state


def padded(spec: Any) -> Any:
    """The specification of a layer's cache with room for phsa's part behind each page, so that vLLM counts and moves
    it with the page."""
    model = state.current()
    if model is None or getattr(spec, "sliding_window", None) is not None or not hasattr(spec, "page_size_padded"):
        return spec
    needed = _page_bytes(model, spec)
    return spec if spec.page_size_bytes >= needed else dataclasses.replace(spec, page_size_padded=needed)


def _page_bytes(model: state.Model, spec: Any) -> int:
    """Of a page with keys, values and what phsa keeps."""
    itemsize = torch.empty(0, dtype=spec.dtype).element_size()
    content = 2 * spec.block_size * spec.num_kv_heads * spec.head_size * itemsize
    return content + model.page_bytes(spec.block_size, spec.num_kv_heads, spec.head_size, itemsize)


class Sparse:
    """One layer's part: refuses what cannot be served, finds what is its own in the pages, and attends."""

    def __init__(
        self,
        config: Any,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None,
        *,
        alibi_slopes: Any,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        kv_sharing_target_layer_name: str | None,
        sinks: Tensor | None,
    ) -> None:
        self.model = state.model_of(config)
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.sinks = sinks
        if alibi_slopes is not None:
            paged.refuse("the model has ALiBi, which the kernels do not have; allowed: models with RoPE")
        if logits_soft_cap:
            paged.refuse(f"the model caps its attention scores (at {logits_soft_cap}), which the kernels do not have")
        if kv_cache_dtype not in ("auto", "float16", "bfloat16"):
            paged.refuse(f"the cache's type is {kv_cache_dtype}; allowed: --kv-cache-dtype auto")
        if kv_sharing_target_layer_name is not None:
            paged.refuse("a layer reads another layer's cache, whose representatives have other settings perhaps")
        self.settings: Settings | None = None  # when the layer's number is known
        self._cache: paged.Cache | None = None
        self._bound: tuple | None = None

    def start(self, name: str, dtype: torch.dtype, device: torch.device, spec: Any) -> None:
        """Before the first request: refuses here what the kernels would refuse later."""
        layer = state.layer_index(name)
        self.settings = self.model.of_layer(layer, self.num_kv_heads)
        self.model.check(
            device=device.type,
            dtype=dtype,
            q_heads=self.num_heads,
            kv_heads=self.num_kv_heads,
            head_dim=self.head_size,
            layer=layer,
        )
        if getattr(spec, "head_size_v", None) not in (None, self.head_size):
            paged.refuse(f"values have {spec.head_size_v} elements a head and keys {self.head_size}; allowed: as many")
        needed = _page_bytes(self.model, spec)
        if spec.page_size_bytes < needed:
            paged.refuse(
                f"this version of vLLM gives pages of {spec.page_size_bytes} bytes where {needed} are needed for "
                "representatives (docs/vllm.md lists the versions that were tested)"
            )

    def cache(self, kv_cache: Tensor) -> paged.Cache:
        """vLLM's (blocks, KV heads, tokens, 2 * head_dim) and what lies behind each page, in place."""
        bound = (kv_cache.data_ptr(), kv_cache.shape, kv_cache.stride())
        if self._cache is None or self._bound != bound:
            assert self.settings is not None
            pages, heads, page_size, _ = kv_cache.shape
            itemsize = kv_cache.element_size()
            tail = paged.Tail.of(self.settings, page_size, heads, self.head_size, itemsize)
            content = heads * page_size * 2 * self.head_size
            offset = (kv_cache.storage_offset() + content) * itemsize
            reps, flags = tail.views(kv_cache, offset, kv_cache.stride(0) * itemsize, pages)
            k, v = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
            self._cache = paged.Cache(k, v, reps, flags)
            self._bound = bound
        return self._cache

    def write_flags(self, kv_cache: Tensor, slots: Tensor) -> None:
        flags = self.model.flags
        if flags is not None and self.settings is not None and self.settings.needs_flags:
            self.cache(kv_cache).write_flags(slots, flags.buffer[: slots.shape[0]])

    def sinks_on(self, device: torch.device) -> Tensor | None:
        """Once weights are there."""
        if self.sinks is not None and (self.sinks.dtype != torch.float32 or self.sinks.device != device):
            self.sinks = self.sinks.to(device, torch.float32)
        return self.sinks


def start_layers(config: Any, names: list[str], spec: Any, device: torch.device) -> None:
    """For a builder of metadata, whose layers these are."""
    layers = config.compilation_config.static_forward_context
    sparse = [(name, layers[name].impl.sparse) for name in names if getattr(layers[name].impl, "sparse", None)]
    if not sparse:
        return
    sparse[0][1].model.start(device)
    for name, one in sparse:
        one.start(name, spec.dtype, device, spec)
