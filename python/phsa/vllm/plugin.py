"""What is told to vLLM at its start."""

from __future__ import annotations

import functools
from typing import Any

from . import state

_CUDA = "phsa.vllm.backend.PhsaBackend"
_CPU = "phsa.vllm.cpu.PhsaCpuBackend"


class FlaggingModel:
    """An entry of vLLM's registry of models whose class also writes its tokens' flags. What vLLM asks of an entry
    besides the class goes to the entry that was there."""

    def __init__(self, entry: Any) -> None:
        self._entry = entry

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._entry, name)

    def load_model_cls(self) -> type:
        state.models_write_flags = True
        return flagging(self._entry.load_model_cls())


def flagging(model: type) -> type:
    """A thin subclass: its forward writes the flags of the step's tokens where the layers find them."""
    if getattr(model, "_phsa_flags", False):
        return model

    @functools.wraps(model.forward)  # type: ignore[attr-defined]
    def forward(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        state.write_flags(input_ids)
        return model.forward(self, input_ids, *args, **kwargs)  # type: ignore[attr-defined]

    members = {"forward": forward, "_phsa_flags": True, "__module__": model.__module__}
    return type(model)(model.__name__, (model,), {**members, "__qualname__": model.__qualname__})


def _reads_tokens(architecture: str) -> bool:
    return architecture.endswith(("ForCausalLM", "LMHeadModel"))


def register() -> None:
    from vllm.model_executor.models import ModelRegistry
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, _CUDA)
    if current_platform.is_cpu():
        # This platform has one backend, whatever is asked for; ours is that one unless CUSTOM is.
        register_backend(AttentionBackendEnum.CPU_ATTN, _CPU)
    for architecture, entry in list(ModelRegistry.models.items()):
        if _reads_tokens(architecture) and not isinstance(entry, FlaggingModel):
            ModelRegistry.models[architecture] = FlaggingModel(entry)
