"""The backend on CUDA devices: CUSTOM.

Decodes come first in a batch and read their lengths on the device, so that full CUDA graphs hold them; what is
prefilled comes behind them with lengths that the host knows. One query a sequence is what the decode kernels take:
batches of several each, as speculation makes them, run as prefill between the graphs' pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

from .. import paged
from . import versions
from .layer import Sparse, padded, start_layers


class PhsaBackend(AttentionBackend):
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[PhsaImpl]:
        return PhsaImpl

    @staticmethod
    def get_builder_cls() -> type[PhsaBuilder]:
        return PhsaBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(16)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [64, 80, 96, 128, 256]

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return capability.major >= 8

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        return padded(spec)

    @classmethod
    def indexes_kv_by_block_stride(cls) -> bool:
        return True  # 0.26 asks before it pads pages

    @classmethod
    def supported_kv_cache_layouts(cls) -> Any:
        return versions.layouts()

    # Until 0.26 the shape is the backend's; it is the one that later versions give.
    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        if include_num_layers_dimension:
            raise NotImplementedError("pages of several layers in one piece")
        return 0, 2, 1, 3

    @staticmethod
    def use_cascade_attention(*args: Any, **kwargs: Any) -> bool:
        return False


@dataclass
class PhsaMetadata:
    num_decodes: int  # the first sequences, of one query each
    seq_lens: Tensor  # of all, on the device
    most: int  # tokens of the longest decoding sequence, or more
    block_table: Tensor
    q_lens: Tensor  # of what is behind the decodes, on the host
    kv_lens: Tensor


class PhsaBuilder(AttentionMetadataBuilder[PhsaMetadata]):
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    reorder_batch_threshold: int = 1

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.longest = vllm_config.model_config.max_model_len
        start_layers(vllm_config, layer_names, kv_cache_spec, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> PhsaMetadata:
        common = common_attn_metadata
        count = common.num_reqs
        q_lens = paged.int32(common.query_start_loc_cpu[: count + 1].diff())
        # Of a batch that only decodes the last sequences may be a graph's padding, of length 0.
        several = (q_lens > 1).nonzero()
        decodes = count if several.numel() == 0 else int(several[0])
        lengths = versions.host_lengths(common)[decodes:count] if decodes < count else q_lens[count:]
        return PhsaMetadata(
            num_decodes=decodes,
            seq_lens=common.seq_lens[:count],
            most=min(self.longest, max(1, common.max_seq_len)),
            block_table=common.block_table_tensor[:count],
            q_lens=q_lens[decodes:],
            kv_lens=paged.int32(lengths),
        )

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> PhsaMetadata:
        metadata = self.build(0, common_attn_metadata)
        metadata.most = self.longest  # of all that will be replayed
        return metadata


class PhsaImpl(AttentionImpl[PhsaMetadata]):
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
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        if sliding_window is not None:
            paged.refuse(
                f"a layer has a window of {sliding_window} tokens and keeps its own attention: ask for "
                '--attention-config \'{"backend_per_kind": {"full_attention": "CUSTOM"}}\' (vLLM 0.26 and newer) in '
                "place of --attention-backend CUSTOM"
            )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.sparse = Sparse(
            get_current_vllm_config(),
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

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        from vllm._custom_ops import reshape_and_cache_flash

        cache = self.sparse.cache(kv_cache)
        reshape_and_cache_flash(
            key, value, cache.k, cache.v, slot_mapping, self.kv_cache_dtype, layer._k_scale, layer._v_scale
        )
        self.sparse.write_flags(kv_cache, slot_mapping)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: PhsaMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("phsa: outputs are not quantised")
        if attn_metadata is None:
            return output.zero_()  # memory is being measured
        sparse, batch = self.sparse, attn_metadata
        assert sparse.settings is not None
        cache = sparse.cache(kv_cache)
        more = {"scale": sparse.scale, "sinks": sparse.sinks_on(query.device)}
        first = batch.num_decodes
        paged.decode(
            query,
            cache,
            output,
            sparse.settings,
            lens=batch.seq_lens[:first],
            most=batch.most,
            page_table=batch.block_table[:first],
            **more,
        )
        paged.attend(
            query[first:],
            cache,
            output[first:],
            sparse.settings,
            q_lens=batch.q_lens,
            kv_lens=batch.kv_lens,
            page_table=batch.block_table[first:],
            **more,
        )
        return output


versions.pad_pages(Attention, lambda backend, spec: padded(spec) if issubclass(backend, PhsaBackend) else spec)
