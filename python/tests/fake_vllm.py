"""Stand-ins for what of vLLM and SGLang the plugins touch, with their names and shapes: so the plugins' own work is
tested where neither is installed. `make test-vllm` runs the real ones."""

from __future__ import annotations

import dataclasses
import enum
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch


class AttentionBackend:
    @classmethod
    def customize_spec(cls, spec):
        return spec


class AttentionCGSupport(enum.Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


class AttentionType(str, enum.Enum):
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


class _Generic:
    def __class_getitem__(cls, item):
        return cls


class AttentionImpl(_Generic):
    pass


class AttentionMetadataBuilder(_Generic):
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec, self.layer_names, self.vllm_config, self.device = (
            kv_cache_spec,
            layer_names,
            vllm_config,
            device,
        )

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        return SimpleNamespace(
            seq_lens=common_attn_metadata.seq_lens, block_table=common_attn_metadata.block_table_tensor
        )


@dataclasses.dataclass
class MultipleOf:
    base: int


class BackendEnum(enum.Enum):
    CPU_ATTN = "cpu"
    CUSTOM = None


class CPUAttentionBackend(AttentionBackend):
    pass


class CPUAttentionBackendImpl(AttentionImpl):
    def __init__(self, *args):
        self.args = args

    def forward(self, *args):
        return "vLLM's own"

    def do_kv_cache_update(self, *args):
        self.updated = True


class Attention:
    def get_kv_cache_spec(self, vllm_config):
        return self.spec


@dataclasses.dataclass(frozen=True)
class FullAttentionSpec:
    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    page_size_padded: int | None = None
    sliding_window: int | None = None

    @property
    def page_size_bytes(self):
        content = 2 * self.block_size * self.num_kv_heads * self.head_size * self.dtype.itemsize
        return self.page_size_padded or content


def reshape_and_cache_flash(key, value, key_cache, value_cache, slots, kind, k_scale, v_scale):
    """As vLLM's kernel: slots may be fewer than keys, and negative ones are padding."""
    for i, slot in enumerate(slots.tolist()):
        if slot >= 0:
            page, token = divmod(slot, key_cache.shape[1])
            key_cache[page, token] = key[i]
            value_cache[page, token] = value[i]


class Entry:
    """Of the registry of models."""

    def __init__(self, model):
        self.model = model

    def load_model_cls(self):
        return self.model

    def inspect_model_cls(self):
        return "inspected"


class World:
    """What tests look at and change."""

    def __init__(self):
        self.config = None
        self.overrides = {}
        self.is_cpu = True
        self.models = {}
        self.rank, self.size = 0, 1


def _modules(world: World) -> dict[str, dict]:
    ops = {"reshape_and_cache_flash": reshape_and_cache_flash}
    return {
        "vllm": {},
        "vllm._custom_ops": ops,
        "vllm.config": {"get_current_vllm_config": lambda: world.config},
        "vllm.distributed": {
            "get_tensor_model_parallel_rank": lambda: world.rank,
            "get_tensor_model_parallel_world_size": lambda: world.size,
        },
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: world.is_cpu)},
        "vllm.model_executor": {},
        "vllm.model_executor.models": {"ModelRegistry": SimpleNamespace(models=world.models)},
        "vllm.model_executor.layers": {},
        "vllm.model_executor.layers.attention": {"Attention": Attention},
        "vllm.v1": {},
        "vllm.v1.attention": {},
        "vllm.v1.attention.backend": {
            one.__name__: one
            for one in (
                AttentionBackend,
                AttentionCGSupport,
                AttentionImpl,
                AttentionMetadataBuilder,
                AttentionType,
                MultipleOf,
            )
        },
        "vllm.v1.attention.backends": {},
        "vllm.v1.attention.backends.registry": {
            "AttentionBackendEnum": BackendEnum,
            "register_backend": world.overrides.__setitem__,
        },
        "vllm.v1.attention.backends.cpu_attn": {
            "CPUAttentionBackend": CPUAttentionBackend,
            "CPUAttentionBackendImpl": CPUAttentionBackendImpl,
            "CPUAttentionMetadataBuilder": AttentionMetadataBuilder,
        },
    }


@contextmanager
def installed() -> Iterator[World]:
    """As if vLLM were there."""
    world = World()
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "vllm"}
    ours = [name for name in sys.modules if name.startswith("phsa.vllm")]
    for name in (*before, *ours):
        del sys.modules[name]
    for name, members in _modules(world).items():
        module = types.ModuleType(name)
        module.__path__ = []
        vars(module).update(members)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    try:
        yield world
    finally:
        for name in list(sys.modules):
            if name.split(".")[0] == "vllm" or name.startswith("phsa.vllm"):
                del sys.modules[name]
        sys.modules.update(before)


def config(**changes):
    """A VllmConfig of a small model with 4 layers, 6 query and 2 KV heads of 64."""
    text = SimpleNamespace(vocab_size=100, max_position_embeddings=4096, num_hidden_layers=4, **changes.pop("text", {}))
    model = SimpleNamespace(
        hf_text_config=text,
        max_model_len=1024,
        get_total_num_kv_heads=lambda: changes.get("kv_heads", 2),
        tokenizer="nowhere",
        tokenizer_revision=None,
        trust_remote_code=False,
    )
    out = SimpleNamespace(
        model_config=model,
        attention_config=SimpleNamespace(backend=BackendEnum.CUSTOM, backend_per_kind={}),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=256),
        compilation_config=SimpleNamespace(static_forward_context={}, cudagraph_capture_sizes=[1, 2, 4]),
        speculative_config=None,
        additional_config={},
    )
    for name in ("additional_config", "speculative_config", "attention_config"):
        if name in changes:
            setattr(out, name, changes[name])
    return out
