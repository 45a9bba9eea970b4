"""What differs between the versions of vLLM (0.20 to 0.32): this file, and no other, asks what a version has."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from vllm.v1.attention.backend import AttentionBackend

# From here on a backend adjusts the specification of its layers' cache itself, and vLLM lays pages out.
CUSTOMIZES_SPEC = hasattr(AttentionBackend, "customize_spec")


def pad_pages(attention: type, pad: Callable[[type, Any], Any]) -> None:
    """Has `pad` see the specification of each layer's cache before memory is counted, where a backend is not asked."""
    if CUSTOMIZES_SPEC or hasattr(attention.get_kv_cache_spec, "_phsa"):
        return
    inner = attention.get_kv_cache_spec

    @functools.wraps(inner)
    def get_kv_cache_spec(self: Any, vllm_config: Any) -> Any:
        spec = inner(self, vllm_config)
        return pad(self.attn_backend, spec) if spec is not None else None

    get_kv_cache_spec._phsa = True  # type: ignore[attr-defined]
    attention.get_kv_cache_spec = get_kv_cache_spec


def layouts() -> Any:
    """The orders of pages in memory that keep a layer's page in one piece; until 0.26 that goes by stride order."""
    try:
        from vllm.v1.kv_cache_interface import KVCacheLayout
    except ImportError:
        return None
    return tuple(KVCacheLayout[name] for name in ("LBNHC", "LBHNC", "BLNHC", "BLHNC"))


def host_lengths(common: Any) -> Tensor:
    """The lengths of a batch's sequences on the host: exact for those in prefill, and for all others outside
    asynchronous speculation."""
    lengths = getattr(common, "seq_lens_cpu_upper_bound", None)
    return common.seq_lens.cpu() if lengths is None else lengths


def kv_heads_of_model(model_config: Any) -> int:
    return model_config.get_total_num_kv_heads()


def backend_asked(vllm_config: Any) -> bool:
    """Whether the user asked for CUSTOM, for all layers or for those with full attention."""
    config = vllm_config.attention_config
    full = (getattr(config, "backend_per_kind", None) or {}).get("full_attention", config.backend)
    return getattr(full, "name", full) == "CUSTOM"
