"""Sparse attention in Hugging Face models.

    import phsa.hf
    model = AutoModelForCausalLM.from_pretrained(name)
    phsa.hf.enable(model, top_k=16, lam=0.9, punctuation="en")

or, with the settings that a model's configuration carries (or the defaults),

    import phsa.hf
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="phsa")

Importing this module makes "phsa" known to transformers as an attention implementation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

try:
    import transformers
    from torch import nn
except ImportError as error:
    raise ImportError("phsa.hf needs PyTorch and transformers: pip install torch transformers") from error

from transformers import AttentionInterface, GenerationMixin, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from ..settings import PUNCTUATION_SETS, AttentionSettings, ModelSettings, read_settings, resolve
from . import adapters
from .attention import attention_function, mask_function
from .cache import PhsaLayer
from .checks import check_config, check_outputs
from .hook import ForwardHook, context_of, find_decoder, punctuation_ids, settings_from_config, warn_where_unused

__all__ = ["PhsaLayer", "disable", "enable", "settings_of"]

NAME = "phsa"
_Model = TypeVar("_Model", bound=nn.Module)


def _unwrap(model: nn.Module) -> PreTrainedModel:
    """The model of transformers inside torch.compile's or PEFT's."""
    model = getattr(model, "_orig_mod", model)
    if not isinstance(model, PreTrainedModel) and hasattr(model, "get_base_model"):
        model = model.get_base_model()
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"phsa: {type(model).__name__} is not a model of transformers (PreTrainedModel)")
    return model


def enable(
    model: _Model,
    *,
    top_k: int | None = None,
    lam: float | tuple[float, ...] | list[float] | None = None,
    init: int | None = None,
    local: int | None = None,
    block: int | None = None,
    policy: str | None = None,
    punctuation: str | Iterable[int] | None = None,
    group_reduce: str | None = None,
    dense_below: int | None = None,
    parts: int | None = None,
    survivors: int | None = None,
    preset: str | None = None,
    layers: Mapping[int | str, Mapping[str, Any]] | None = None,
    settings: AttentionSettings | None = None,
    tokenizer: Any = None,
    backend: str = "auto",
    check: bool = True,
) -> _Model:
    """Makes a model attend sparsely, and writes the settings into its configuration, to be saved with it.

    What is not given is taken from ``settings``, then from what the model's configuration carries, then from the
    paper's preset for the model's context length (K = 16, lambda = 0.9): docs/settings.md.

    Args:
        punctuation: a named set (en, zh, en+zh, sentence, pure, none), a file of ids or strings, or token ids.
        preset: the paper's init and local by name, paper-4k or paper-32k, where they are not given.
        layers: other settings for some layers: ``{0: {"policy": "dense"}, "3-5": {"top_k": 32}}``.
        settings: all of it in one: a mapping, ``phsa.Settings``, ``phsa.ModelSettings`` or a JSON file.
        tokenizer: that of the model. None: it is loaded from where the model came from.
        backend: auto, cpu, cuda or torch, as in phsa.ops.phsa_attention.
        check: whether to run a few tokens through the model and compare with its own attention.

    Returns the model. Raises ValueError for a model whose attention phsa would get wrong.
    """
    decoder = find_decoder(_unwrap(model))
    check_config(decoder)
    if punctuation is not None and not isinstance(punctuation, str):
        punctuation = tuple(int(index) for index in punctuation)
    given = {
        "top_k": top_k,
        "lam": lam,
        "init": init,
        "local": local,
        "block": block,
        "policy": policy,
        "group_reduce": group_reduce,
        "dense_below": dense_below,
        "parts": parts,
        "survivors": survivors,
        "preset": preset,
        "layers": layers,
        "punctuation": punctuation,
    }
    values = read_settings(settings)
    config = decoder.config
    carried = getattr(config, "phsa", None)
    resolved = resolve(context_of(config), carried=carried, settings=values, arguments=given, policy=NAME)
    _check_layers(resolved, config)
    asked = punctuation if punctuation is not None else values.get("punctuation")
    ids = punctuation_ids(config, resolved.base.punctuation, asked, tokenizer, resolved.needs_flags)

    _switch_on(model, resolved, ids, backend, check)
    return model


def _switch_on(model: nn.Module, settings: ModelSettings, ids: Sequence[int] | None, backend: str, check: bool) -> None:
    """Writes the settings into the model's configuration and lets it attend so; where that fails all is as before."""
    inner = _unwrap(model)
    decoder = find_decoder(inner)
    config = decoder.config
    previous = config._attn_implementation
    hook = ForwardHook.attached(decoder) or ForwardHook.attach(decoder)
    if previous != NAME:
        hook.previous = previous
    hook.backend = backend
    before = {name: getattr(config, name, None) for name in ("phsa", "phsa_punctuation_ids")}
    config.phsa = settings.to_json()
    if config.phsa["punctuation"] not in PUNCTUATION_SETS:
        config.phsa["punctuation"] = "custom"  # its ids lie beside it; a file's name means nothing elsewhere
    _set(config, "phsa_punctuation_ids", ids)
    try:
        inner.set_attn_implementation(NAME)
        if check:
            check_outputs(inner, decoder, hook)
    except BaseException:
        if previous != NAME:
            disable(model)
        for name, value in before.items():
            _set(config, name, value)
        raise


def disable(model: _Model) -> _Model:
    """Gives a model its own attention back and takes the settings out of its configuration."""
    inner = _unwrap(model)
    decoder = find_decoder(inner)
    hook = ForwardHook.attached(decoder)
    if hook is not None:
        hook.detach(decoder)
    if decoder.config._attn_implementation == NAME:
        inner.set_attn_implementation(hook.previous if hook is not None and hook.previous else "sdpa")
    for name in ("phsa", "phsa_punctuation_ids"):
        _set(decoder.config, name, None)
    return model


def _set(config: transformers.PreTrainedConfig, name: str, value: Any) -> None:
    """Sets or, with None, removes an entry of a configuration."""
    if value is not None:
        setattr(config, name, value)
    elif hasattr(config, name):
        delattr(config, name)


def settings_of(model: nn.Module) -> ModelSettings:
    """The settings that a model has, or would have if it were enabled now."""
    return settings_from_config(find_decoder(_unwrap(model)).config)


def _check_layers(settings: ModelSettings, config: transformers.PreTrainedConfig) -> None:
    count = config.num_hidden_layers
    for layer in settings.layers:
        if layer >= count:
            raise ValueError(f"settings: layers has layer {layer}; this model has 0 to {count - 1}")
        kinds = getattr(config, "layer_types", None) or ()
        if layer < len(kinds) and kinds[layer] == "sliding_attention":
            raise ValueError(f"settings: layers has layer {layer}, which attends within a window and keeps it")
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    for one in (settings.base, *settings.layers.values()):
        if isinstance(one.lam, tuple) and len(one.lam) not in (1, heads):
            raise ValueError(f"settings: lam lists {len(one.lam)} values; allowed: one, or one per KV head ({heads})")


def _attach_when_asked(method: Callable) -> Callable:
    """A model that is built or set to attn_implementation="phsa" needs its hook too; transformers has no place to say
    so, which is why two of its methods are wrapped."""

    @functools.wraps(method)
    def wrapper(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        carries = getattr(self.config, "phsa", None) and method.__name__ == "post_init"
        if carries and self.config._attn_implementation != NAME and find_decoder(self) is self:
            warn_where_unused(self)
        if self.config._attn_implementation == NAME:
            decoder = find_decoder(self)
            if decoder.config._attn_implementation == NAME and ForwardHook.attached(decoder) is None:
                check_config(decoder)
                ForwardHook.attach(decoder)
        return result

    wrapper._phsa = True  # type: ignore[attr-defined]
    return wrapper


def _refuse_continuous_batching(method: Callable) -> Callable:
    """transformers accepts its own attention only there, and where FlashAttention is installed it changes to that by
    itself: the answers would be those of dense attention."""

    @functools.wraps(method)
    def wrapper(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        if self.config._attn_implementation == NAME:
            raise ValueError(
                "phsa: generate_batch and continuous batching keep keys in a paged cache of transformers' own, without "
                "flags and representatives; allowed: generate() with a padded batch, phsa.LLM.generate(prompts), which "
                "batches continuously, or phsa.hf.disable(model) for dense attention"
            )
        return method(self, *args, **kwargs)

    wrapper._phsa = True  # type: ignore[attr-defined]
    return wrapper


def _register() -> None:
    AttentionInterface.register(NAME, attention_function)
    AttentionMaskInterface.register(NAME, mask_function)
    adapters.register()
    for name in ("post_init", "set_attn_implementation"):
        method = getattr(PreTrainedModel, name)
        if not hasattr(method, "_phsa"):
            setattr(PreTrainedModel, name, _attach_when_asked(method))
    # The one that generate_batch and the context manager go through.
    batching = getattr(GenerationMixin, "init_continuous_batching", None)
    if batching is not None and not hasattr(batching, "_phsa"):
        GenerationMixin.init_continuous_batching = _refuse_continuous_batching(batching)


_register()
