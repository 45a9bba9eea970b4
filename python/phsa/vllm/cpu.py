"""The backend on vLLM's CPU platform, which has one place for a backend: CPU_ATTN. Where CUSTOM is not asked for, and
in layers with windows, it is vLLM's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from .. import paged
from . import versions
from .layer import Sparse, padded, start_layers


class PhsaCpuBackend(CPUAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[PhsaCpuImpl]:
        return PhsaCpuImpl

    @staticmethod
    def get_builder_cls() -> type[PhsaCpuBuilder]:
        return PhsaCpuBuilder

    @classmethod
    def indexes_kv_by_block_stride(cls) -> bool:
        return True  # 0.26 asks before it pads pages

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        return padded(spec)


class PhsaCpuBuilder(CPUAttentionMetadataBuilder):
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        start_layers(vllm_config, layer_names, kv_cache_spec, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        count = common_attn_metadata.num_reqs
        metadata.q_lens = paged.int32(common_attn_metadata.query_start_loc_cpu[: count + 1].diff())
        return metadata


class PhsaCpuImpl(CPUAttentionBackendImpl):
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **more: Any,
    ) -> None:
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            sinks,
            **more,
        )
        config = get_current_vllm_config()
        self.sparse: Sparse | None = None
        if versions.backend_asked(config) and sliding_window is None and attn_type == "decoder":
            self.sparse = Sparse(
                config,
                num_heads,
                head_size,
                scale,
                num_kv_heads,
                alibi_slopes=alibi_slopes,
                kv_cache_dtype=kv_cache_dtype,
                logits_soft_cap=logits_soft_cap,
                kv_sharing_target_layer_name=kv_sharing_target_layer_name,
                sinks=sinks,
            )
        self._threads: int | None = None

    def do_kv_cache_update(
        self, layer: torch.nn.Module, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        if self.sparse is None:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        cache = self.sparse.cache(kv_cache)
        slots = slot_mapping.clamp(min=0)  # padding goes to page 0, which is nobody's
        count = slots.shape[0]
        pages, tokens = slots // cache.page_size, slots % cache.page_size
        cache.k[pages, tokens] = key[:count]
        cache.v[pages, tokens] = value[:count]
        self.sparse.write_flags(kv_cache, slots)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if self.sparse is None or attn_metadata is None:
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        sparse = self.sparse
        assert sparse.settings is not None
        if self._threads is None:
            self._threads = paged.threads_of_process()
        q_lens = attn_metadata.q_lens
        paged.attend(
            query,
            sparse.cache(kv_cache),
            output,
            sparse.settings,
            q_lens=q_lens,
            kv_lens=attn_metadata.seq_lens[: q_lens.shape[0]],
            page_table=attn_metadata.block_table[: q_lens.shape[0]],
            scale=sparse.scale,
            sinks=sparse.sinks_on(query.device),
            threads=self._threads,
        )
        return output


versions.pad_pages(Attention, lambda backend, spec: padded(spec) if issubclass(backend, PhsaCpuBackend) else spec)
