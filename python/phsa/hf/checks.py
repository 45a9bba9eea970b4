"""Refuses models whose attention phsa would get wrong: first by what they declare, then by what they compute."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel

if TYPE_CHECKING:
    from .hook import ForwardHook

_TOKENS = 40


def _refuse(model: nn.Module, what: str, instead: str = "") -> None:
    raise ValueError(f"phsa: {type(model).__name__} {what}, which phsa does not support{instead and f'; {instead}'}")


def check_config(decoder: PreTrainedModel) -> None:
    """What a model says about itself. The attention function checks the rest as it is called."""
    config = decoder.config
    if getattr(config, "vocab_size", None) is None:
        _refuse(decoder, "reads no tokens: its configuration has no vocab_size")
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        _refuse(decoder, "has cross attention")
    if getattr(config, "is_causal", True) is False:
        _refuse(decoder, "is not causal")
    kinds = set(getattr(config, "layer_types", None) or ())
    if others := kinds - {"full_attention", "sliding_attention"}:
        _refuse(decoder, f"has layers of the kind {', '.join(sorted(others))}")
    # Layers with a window keep it; without any other there is nothing to choose from.
    window = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    if kinds == {"sliding_attention"} or (not kinds and window):
        what = f"attends within a sliding window of {config.sliding_window} tokens in all of its layers"
        _refuse(decoder, what, "models with windows in some layers go sparse in the others (Gemma 3, Ministral)")
    for name in ("attn_logit_softcapping", "attn_logit_soft_cap"):
        if getattr(config, name, None) is not None:
            what = f"caps its attention scores ({name} = {getattr(config, name)})"
            _refuse(decoder, what, "models without a cap work, Gemma 3 among them")
    if not getattr(decoder, "_supports_attention_backend", False):
        _refuse(decoder, "does not use transformers' attention interface")
    kinds_of_parameter = [parameter.kind for parameter in inspect.signature(decoder.forward).parameters.values()]
    if inspect.Parameter.VAR_KEYWORD not in kinds_of_parameter:
        _refuse(decoder, "passes no keyword arguments on to its layers")


@torch.no_grad()
def check_outputs(model: PreTrainedModel, decoder: PreTrainedModel, hook: ForwardHook) -> None:
    """Runs a few tokens, one row padded on the left, with the model's own attention and with phsa's dense policy."""
    parameter = next(decoder.parameters(), None)
    if parameter is None or parameter.device.type == "meta":
        return
    config, settings = decoder.config, decoder.config.phsa
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(config.vocab_size, (2, _TOKENS), generator=generator).to(parameter.device)
    mask = torch.ones_like(ids)
    mask[1, : _TOKENS // 3] = 0
    training = decoder.training
    decoder.eval()
    try:
        config.phsa = {"attention": "dense"}
        ours = decoder(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        model.set_attn_implementation(hook.previous or "sdpa")
        theirs = decoder(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    finally:
        config.phsa = settings
        model.set_attn_implementation("phsa")
        decoder.train(training)
    ours, theirs = ours[mask.bool()].double(), theirs[mask.bool()].double()
    error = float((ours - theirs).norm() / theirs.norm().clamp(min=1e-30))
    # Rounding of a deep model in bf16 stays below a few percent; a wrong mask or scale is far beyond.
    allowed = 1e-3 if parameter.dtype in (torch.float32, torch.float64) else 5e-2
    if not error <= allowed:
        raise ValueError(
            f"phsa: {type(decoder).__name__} computes something else than causal attention over all tokens: with every "
            f"block read its outputs differ by {error:.2g} (allowed: {allowed:g}). If you know better, pass check=False"
        )
