"""The forward pre-hook of a decoder: from token ids to flags, and the batch for the attention layers."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, StaticCache

from .. import punctuation as punctuation_sets
from ..settings import PUNCTUATION_SETS, ModelSettings, resolve
from .attention import make_batch, make_graph_batch, make_static_batch, padding_mask
from .cache import adopt


def find_decoder(model: PreTrainedModel) -> PreTrainedModel:
    """The module that embeds the tokens and runs the layers."""
    return model.get_decoder()


def settings_from_config(config: PreTrainedConfig) -> ModelSettings:
    """The settings that a configuration carries, over the defaults for its context length."""
    return resolve(context_of(config), carried=getattr(config, "phsa", None), policy="phsa")


def context_of(config: PreTrainedConfig) -> int:
    return getattr(config, "max_position_embeddings", None) or 1 << 20


def warn_where_unused(decoder: nn.Module) -> None:
    """A model that carries settings was made for them. If it runs with another attention, that is said once; not before
    it runs, because enable() may come between."""

    def look(module: nn.Module, args: tuple) -> None:
        handle.remove()
        used = str(module.config._attn_implementation)
        if getattr(module.config, "phsa", None) and not used.startswith("phsa"):
            warnings.warn(
                f"this model carries phsa's attention settings ({module.config.phsa.get('attention', 'phsa')}), but "
                f'runs with {used}. To use them load it with attn_implementation="phsa" or call '
                "phsa.hf.enable(model); phsa.hf.disable(model) drops them",
                stacklevel=2,
            )

    handle = decoder.register_forward_pre_hook(look)


def punctuation_ids(
    config: PreTrainedConfig,
    name: str | tuple[int, ...],
    given: str | Iterable[int] | None,
    tokenizer: Any,
    needed: bool,
) -> list[int] | None:
    """The token ids of a punctuation set: those listed, those that the configuration carries, or the tokenizer's.
    None where they are not needed and not at hand. `given`: what the user says; None: `name` is the configuration's."""
    if not isinstance(name, str):
        ids = sorted(set(name))
        if ids and not 0 <= ids[0] <= ids[-1] < config.vocab_size:
            raise ValueError(
                f"phsa: punctuation has ids from {ids[0]} to {ids[-1]}; allowed: 0 to {config.vocab_size - 1}"
            )
        return ids
    if name == "none":
        return []
    saved = getattr(config, "phsa_punctuation_ids", None)
    if saved is not None and tokenizer is None and (getattr(config, "phsa", None) or {}).get("punctuation") == name:
        return list(saved)
    if not needed and tokenizer is None:
        return None
    if given is None and name == "custom":
        raise ValueError("phsa: the configuration has a punctuation set of its own, but its ids are missing: give them")
    if given is None and name not in PUNCTUATION_SETS:
        # A model is data of others: it may name no file of this machine.
        raise ValueError(
            f"phsa: the configuration names the punctuation {name!r}; allowed there: {', '.join(PUNCTUATION_SETS)}. "
            "Give a file or ids with phsa.hf.enable(model, punctuation=…)"
        )
    if tokenizer is None:
        tokenizer = _load_tokenizer(config)
    return punctuation_sets.ids(tokenizer, name)


def _load_tokenizer(config: PreTrainedConfig) -> Any:
    from transformers import AutoTokenizer

    where = config._name_or_path
    try:
        if not where:
            raise OSError("the configuration does not say where the model came from")
        return AutoTokenizer.from_pretrained(where)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"phsa: no tokenizer was found for this model ({error}). The punctuation flags need one: call "
            'phsa.hf.enable(model, tokenizer=…), or give token ids as punctuation=[…], or punctuation="none"'
        ) from error


_PACKED_WINDOWS = (
    "phsa: packed sequences in a model with sliding windows; allowed: with position_ids that restart, without an "
    "attention mask and with use_cache=False"
)


class ForwardHook:
    """Called before the decoder's forward. One per enabled model, and nothing of it is shared."""

    _ATTRIBUTE = "_phsa_hook"

    def __init__(self) -> None:
        self.previous: str | None = None  # the attention implementation to go back to
        self.backend = "auto"
        self.handle: Any = None
        self._tables: dict[torch.device, Tensor] = {}
        self._parsed: tuple[dict, ModelSettings] | None = None
        self._table_key: tuple[str, list[int] | None] | None = None
        self._table_ids: list[int] | None = None

    @staticmethod
    def attached(decoder: nn.Module) -> ForwardHook | None:
        return getattr(decoder, ForwardHook._ATTRIBUTE, None)

    @staticmethod
    def attach(decoder: nn.Module) -> ForwardHook:
        hook = ForwardHook()
        hook.handle = decoder.register_forward_pre_hook(hook, with_kwargs=True)
        setattr(decoder, ForwardHook._ATTRIBUTE, hook)
        return hook

    def detach(self, decoder: nn.Module) -> None:
        self.handle.remove()
        delattr(decoder, ForwardHook._ATTRIBUTE)

    def settings(self, config: PreTrainedConfig) -> ModelSettings:
        """The configuration is the one place where settings live; this only spares parsing them for every token."""
        values = getattr(config, "phsa", None) or {}
        if self._parsed is None or self._parsed[0] != values:
            self._parsed = (dict(values), settings_from_config(config))
        return self._parsed[1]

    def _table(self, config: PreTrainedConfig, settings: ModelSettings, device: torch.device) -> Tensor:
        ids = getattr(config, "phsa_punctuation_ids", None)
        key = (settings.base.punctuation, ids)
        if key != self._table_key:
            if ids is None:
                ids = punctuation_ids(config, settings.base.punctuation, None, None, True)
            self._tables, self._table_key, self._table_ids = {}, key, ids
        if device not in self._tables:
            table = torch.zeros(config.vocab_size, dtype=torch.uint8)
            table[torch.tensor(self._table_ids, dtype=torch.long)] = 1
            self._tables[device] = table.to(device)
        return self._tables[device]

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        config = module.config
        if config._attn_implementation != "phsa" or "phsa_batch" in kwargs:
            return None
        # By name, whichever way they were passed.
        if args:
            names = list(inspect.signature(module.forward).parameters)
            kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
        given_flags = kwargs.pop("flags", None)
        settings = self.settings(config)

        input_ids, embeds = kwargs.get("input_ids"), kwargs.get("inputs_embeds")
        tokens = input_ids if input_ids is not None else embeds
        if tokens is None:
            return None  # the model says what is missing
        rows, q_len = tokens.shape[:2]
        cache = self._cache(module, kwargs)
        flags = None
        if settings.needs_flags:
            flags = self._flags(config, settings, input_ids, given_flags, rows, q_len, cache, tokens.device)
        bounds, positions = kwargs.get("cu_seq_lens_q"), kwargs.get("position_ids")
        attention_mask = kwargs.get("attention_mask")
        windows = "sliding_attention" in (getattr(config, "layer_types", None) or ())
        # transformers finds packed sequences for its own masks by the positions, without a cache and a mask.
        own_masks = cache is None and attention_mask is None and positions is not None
        if windows and bounds is not None and not own_masks:
            raise ValueError(_PACKED_WINDOWS)
        if isinstance(cache, StaticCache):
            if bounds is not None:
                raise ValueError("phsa: packed sequences in a static cache; allowed: with use_cache=False")
            mask = padding_mask(attention_mask)
            kwargs["phsa_batch"] = make_static_batch(
                settings, self.backend, flags, cache, mask, positions, tokens.device
            )
            return (), kwargs
        # Of windows, a mask and positions together a graph cannot see whether they go along.
        seen = not windows or attention_mask is None or positions is None
        if torch.compiler.is_compiling() and cache is None and seen and (bounds is None or attention_mask is None):
            mask = padding_mask(attention_mask)
            kwargs["phsa_batch"] = make_graph_batch(settings, self.backend, flags, mask, positions, bounds, rows, q_len)
            return (), kwargs
        kwargs["phsa_batch"] = make_batch(
            settings, self.backend, flags, cache, attention_mask, positions, bounds, rows, q_len
        )
        if windows and kwargs["phsa_batch"].packed and not own_masks:
            raise ValueError(_PACKED_WINDOWS)
        return (), kwargs

    @staticmethod
    def _cache(module: nn.Module, kwargs: dict[str, Any]) -> Any:
        cache = kwargs.get("past_key_values")
        if cache is None:
            use = kwargs.get("use_cache")
            use = getattr(module.config, "use_cache", False) if use is None else use
            if not use or (module.training and getattr(module, "gradient_checkpointing", False)):
                return None
            # What the model would do itself, too late for us.
            cache = kwargs["past_key_values"] = DynamicCache(config=module.config)
        return adopt(cache)

    def _flags(
        self,
        config: PreTrainedConfig,
        settings: ModelSettings,
        input_ids: Tensor | None,
        given: Tensor | None,
        rows: int,
        q_len: int,
        cache: Cache | None,
        device: torch.device,
    ) -> Tensor:
        if given is not None and (input_ids is None or cache is None or int(cache.get_seq_length()) == 0):
            flags = torch.as_tensor(given, device=device)
            if flags.shape != (rows, q_len):
                raise ValueError(f"phsa: flags have the shape {tuple(flags.shape)}; allowed: {(rows, q_len)}")
            return flags.ne(0).to(torch.uint8)
        if input_ids is None:
            raise ValueError(
                "phsa: inputs_embeds without input_ids: the punctuation flags cannot be known. Pass them as "
                "flags=(batch, tokens), 1 where a token is punctuation"
            )
        return self._table(config, settings, device)[input_ids]
