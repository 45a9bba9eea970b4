"""Which tokens a query reads: the settings of one attention layer, and of all layers of a model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

POLICIES = ("dense", "phsa", "infllm2", "infllm2-64", "streaming", "quest")
GROUP_REDUCES = ("sum", "max", "none")
BLOCKS = (16, 32, 64)
MAX_TOKENS = 1 << 30
MAX_TOP_K = 65536

# The names in JSON are those of docs/settings.md, which the C++ library reads too; in Python they are shorter.
_JSON_NAMES = {
    "policy": "attention",
    "block": "block_size",
    "init": "init_tokens",
    "local": "local_tokens",
    "top_k": "top_k",
    "lam": "lambda",
    "group_reduce": "group_reduce",
    "dense_below": "dense_below",
    "punctuation": "punctuation",
}
_PYTHON_NAMES = {name: python for python, name in _JSON_NAMES.items()}


def _refuse(name: str, value: object, allowed: str) -> None:
    raise ValueError(f"settings: {name} is {value!r}; allowed: {allowed}")


def _plain(value: Any) -> Any:
    """NumPy's numbers, and tensors with one element, as Python's; lists and arrays as tuples."""
    if isinstance(value, (bool, int, float, str)) or value is None:
        return value
    if hasattr(value, "tolist"):
        value = value.tolist()
    return tuple(_plain(one) for one in value) if isinstance(value, (list, tuple)) else value


def _check_int(name: str, value: object, allowed: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        _refuse(name, value, allowed)


def _check_lam(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        _refuse(name, value, "a number from 0 to 1")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of one attention layer. The defaults are the paper's 32k setting with the best measured lambda.

    ``lam`` is a number, or a tuple of one number per KV head. ``block`` is None for the policy's own block size: 64
    for ``infllm2-64``, 16 for the others. All token counts are multiples of the block size.
    """

    policy: str = "phsa"
    top_k: int = 16
    lam: float | tuple[float, ...] = 0.9
    init: int = 128
    local: int = 512
    block: int | None = None
    group_reduce: str = "sum"
    dense_below: int = 0
    punctuation: str = "en"

    def __post_init__(self) -> None:
        for name in _JSON_NAMES:
            object.__setattr__(self, name, _plain(getattr(self, name)))
        if self.block is None:
            object.__setattr__(self, "block", 64 if self.policy == "infllm2-64" else 16)
        self._validate()

    def _validate(self) -> None:
        if self.policy not in POLICIES:
            _refuse("policy", self.policy, ", ".join(POLICIES))
        if self.group_reduce not in GROUP_REDUCES:
            _refuse("group_reduce", self.group_reduce, ", ".join(GROUP_REDUCES))
        if self.policy == "infllm2-64" and self.block != 64:
            _refuse("block", self.block, "64 with infllm2-64")
        if self.block not in BLOCKS or isinstance(self.block, bool):
            _refuse("block", self.block, "16, 32, 64")
        # infllm2-64 rounds init and local up to its blocks, so that it can be given the budgets of the others.
        unit = 16 if self.policy == "infllm2-64" else self.block
        for name, multiple in (("init", unit), ("local", unit), ("dense_below", self.block)):
            value = getattr(self, name)
            allowed = f"multiples of {multiple} from 0 to {MAX_TOKENS}"
            _check_int(name, value, allowed)
            if not 0 <= value <= MAX_TOKENS or value % multiple:
                _refuse(name, value, allowed)
        _check_int("top_k", self.top_k, f"0 to {MAX_TOP_K}")
        if not 0 <= self.top_k <= MAX_TOP_K:
            _refuse("top_k", self.top_k, f"0 to {MAX_TOP_K}")
        if isinstance(self.lam, tuple):
            if not self.lam:
                _refuse("lam", self.lam, "a number from 0 to 1, or a list of them, one per KV head")
            for head, value in enumerate(self.lam):
                _check_lam(f"lam[{head}]", value)
        else:
            _check_lam("lam", self.lam)
        if not isinstance(self.punctuation, str) or not self.punctuation:
            _refuse("punctuation", self.punctuation, "the name of a set, or of a file")

    @property
    def needs_flags(self) -> bool:
        """Whether punctuation makes a difference."""
        lams = self.lam if isinstance(self.lam, tuple) else (self.lam,)
        return self.policy == "phsa" and self.top_k > 0 and any(lam < 1 for lam in lams)

    @staticmethod
    def preset(context: int, **changes: Any) -> Settings:
        """The paper's 4k setting up to 4096 tokens of context, its 32k setting above."""
        small = {"init": 16, "local": 128} if context <= 4096 else {}
        return Settings(**{**small, **changes})

    def replace(self, **changes: Any) -> Settings:
        """A copy with changes. The block size follows the policy unless it is given."""
        unknown = set(changes) - set(_JSON_NAMES)
        if unknown:
            _refuse("a setting", sorted(unknown)[0], ", ".join(_JSON_NAMES))
        if changes.get("policy", self.policy) != self.policy and "block" not in changes:
            changes["block"] = None if "infllm2-64" in (changes["policy"], self.policy) else self.block
        return dataclasses.replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        out = {name: getattr(self, python) for python, name in _JSON_NAMES.items()}
        if isinstance(self.lam, tuple):
            out["lambda"] = list(self.lam)
        return out


def _from_names(values: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Takes the names of Python and those of JSON."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        name = key if key in _JSON_NAMES else _PYTHON_NAMES.get(key)
        if name is None:
            _refuse(f"{place}a setting", key, ", ".join(_JSON_NAMES))
        if name in out:
            raise ValueError(f"settings: {place}{name} is given twice")
        out[name] = value
    return out


def _layer_range(key: object) -> range:
    """``3``, ``"3"`` or ``"3-5"``, both ends included."""
    first, dash, last = str(key).partition("-")
    if not first.isdigit() or (dash and not last.isdigit()) or isinstance(key, bool):
        raise ValueError(f'settings: layers has the key {key!r}; allowed: a layer (3) or a range ("3-5")')
    out = range(int(first), int(last or first) + 1)
    if not out:
        raise ValueError(f'settings: layers has the key {key!r}; allowed: a layer (3) or a range ("3-5")')
    return out


@dataclass(frozen=True)
class ModelSettings:
    """One setting for all layers of a model, and overrides for some of them."""

    base: Settings = field(default_factory=Settings)
    layers: Mapping[int, Settings] = field(default_factory=dict)

    def for_layer(self, layer: int) -> Settings:
        return self.layers.get(layer, self.base)

    @property
    def needs_flags(self) -> bool:
        return any(settings.needs_flags for settings in (self.base, *self.layers.values()))

    @staticmethod
    def make(base: Settings, values: Mapping[str, Any]) -> ModelSettings:
        """``values`` over ``base``; ``layers`` in it holds overrides: ``{0: {"policy": "dense"}, "3-5": …}``."""
        values = dict(values)
        overrides = values.pop("layers", None) or {}
        base = base.replace(**_from_names(values, ""))
        layers: dict[int, Settings] = {}
        for key, changes in overrides.items():
            settings = base.replace(**_from_names(changes, f"layers {key!r}: "))
            if settings.punctuation != base.punctuation:
                raise ValueError(f"settings: layers {key!r}: punctuation cannot differ between layers")
            for layer in _layer_range(key):
                if layer in layers:
                    raise ValueError(f"settings: layer {layer} is given twice in layers")
                layers[layer] = settings
        return ModelSettings(base, layers)

    def to_json(self) -> dict[str, Any]:
        """What docs/settings.md describes, for a model's configuration."""
        out = self.base.to_json()
        layers = {}
        for layer, settings in sorted(self.layers.items()):
            layers[str(layer)] = {name: value for name, value in settings.to_json().items() if value != out[name]}
        if layers:
            out["layers"] = layers
        return out


def default_scale(head_dim: int) -> float:
    return 1.0 / math.sqrt(head_dim)
