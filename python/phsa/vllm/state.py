"""What one process of vLLM knows of its model: settings, flags, which layers are sparse."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import torch
from torch import Tensor

from .. import ops, paged
from ..settings import ModelSettings, Settings
from . import versions

logger = logging.getLogger("vllm.phsa")


def layer_index(name: str) -> int:
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    if len(numbers) != 1:
        paged.refuse(f"the layer {name!r} cannot be told by its number; models with one stack of layers can be served")
    return numbers[0]


def _tensor_parallel() -> tuple[int, int]:
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    try:
        return get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    except AssertionError:  # no groups: one process
        return 0, 1


def _load_tokenizer(model_config: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        model_config.tokenizer,
        revision=model_config.tokenizer_revision,
        trust_remote_code=model_config.trust_remote_code,
    )


@dataclasses.dataclass
class Model:
    """Made when its first layer is."""

    config: Any  # VllmConfig
    settings: ModelSettings
    flags: paged.StepFlags | None = None
    said: bool = False

    @property
    def text_config(self) -> Any:
        return self.config.model_config.hf_text_config

    def page_bytes(self, page_size: int, kv_heads: int, head_dim: int, itemsize: int) -> int:
        """What phsa keeps of a page of any layer at most: all layers have the same pages."""
        layers = {self.settings.base, *self.settings.layers.values()}
        return max(paged.Tail.of(one, page_size, kv_heads, head_dim, itemsize).bytes for one in layers)

    def of_layer(self, layer: int, kv_heads: int) -> Settings:
        """As this process sees them, with its share of the KV heads."""
        total = versions.kv_heads_of_model(self.config.model_config)
        rank, size = _tensor_parallel()
        first = rank * total // size if size > total else rank * kv_heads
        settings = paged.of_kv_heads(self.settings.for_layer(layer), first, kv_heads, total)
        # Without flags a representative is the plain mean, which lambda = 1 says without looking at any.
        return settings if self.flags is not None or not settings.needs_flags else settings.replace(lam=1.0)

    def start(self, device: torch.device) -> None:
        """Before the cache is made: flags, and the log's line."""
        if self.flags is None and models_write_flags:
            table = paged.flags_of_vocabulary(
                self.settings, self.text_config, lambda: _load_tokenizer(self.config.model_config)
            )
            if table is not None:
                tokens = self.config.scheduler_config.max_num_batched_tokens
                graphs = max(self.config.compilation_config.cudagraph_capture_sizes or [0])
                self.flags = paged.StepFlags(table, max(tokens, graphs) + 64, device)
        if not self.said:
            self.said = True
            self._say()

    def _say(self) -> None:
        layers: dict[bool, list[int]] = {True: [], False: []}
        for name, layer in self.config.compilation_config.static_forward_context.items():
            if hasattr(layer, "impl") and hasattr(layer, "attn_backend"):
                layers[bool(getattr(layer.impl, "sparse", None))].append(layer_index(name))
        logger.info(paged.layers_line(self.settings, layers[True], layers[False], self.flags is not None))

    def check(self, *, device: str, dtype: torch.dtype, q_heads: int, kv_heads: int, head_dim: int, layer: int) -> None:
        reason = ops.refusal(
            self.of_layer(layer, kv_heads),
            device=device,
            dtype=dtype,
            q_heads=q_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            keys=self.config.model_config.max_model_len,
        )
        if reason is not None:
            paged.refuse(f"layer {layer} cannot be served: {reason}")


_model: Model | None = None
models_write_flags = False  # whether the classes of models in this process do (plugin.FlaggingModel)


def model_of(config: Any) -> Model:
    """The model that this process runs."""
    global _model
    # Copies that vLLM makes of its configuration for parts of a model share this, in which the layers are listed.
    if _model is None or _model.config.compilation_config is not config.compilation_config:
        speculation = getattr(config, "speculative_config", None)
        if speculation is not None and getattr(speculation, "method", None) not in ("ngram", "suffix"):
            paged.refuse(
                f"speculation by {speculation.method!r} runs a second model in the same cache; allowed: ngram, or none"
            )
        if config.parallel_config.decode_context_parallel_size > 1:
            paged.refuse(
                "a context that is split over GPUs (decode_context_parallel_size) cannot be chosen from; "
                "allowed: tensor and pipeline parallelism"
            )
        if config.cache_config.cache_dtype not in ("auto", "float16", "bfloat16"):
            paged.refuse(f"the cache's type is {config.cache_config.cache_dtype}; allowed: --kv-cache-dtype auto")
        given = config.additional_config.get("phsa") if isinstance(config.additional_config, dict) else None
        _model = Model(config, paged.model_settings(config.model_config.hf_text_config, given))
    return _model


def current() -> Model | None:
    return _model


def write_flags(ids: Tensor | None) -> None:
    if _model is not None and _model.flags is not None:
        _model.flags.write(ids)
