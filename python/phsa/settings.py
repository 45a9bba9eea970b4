"""Which tokens a query reads: the settings of one attention layer, and of all layers of a model."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypedDict

from ._setting_table import SETTINGS, Setting
from .policies import OWN, TABLE

POLICIES = tuple(TABLE)
_MAX_FILE_BYTES = 16 << 20
PUNCTUATION_SETS = ("en", "zh", "en+zh", "sentence", "pure", "none")

# By the names of Python: `lambda` is a word of its own, and a policy is what JSON and flags call attention.
SETTING_OF = {setting.python or setting.name: setting for setting in SETTINGS}
GROUP_REDUCES = SETTING_OF["group_reduce"].choices
_JSON_NAMES = {python: setting.name for python, setting in SETTING_OF.items()}
_PYTHON_NAMES = {
    name: python for python, setting in SETTING_OF.items() for name in (setting.name, setting.old_name) if name
}
# The paper's settings by name: the context that each is for.
PRESETS = {"paper-4k": 4096, "paper-32k": 32768}


def _refuse(name: str, value: object, allowed: str) -> None:
    raise ValueError(f"settings: {name} is {value!r}; allowed: {allowed}")


def is_dense(policy: object) -> bool:
    return isinstance(policy, str) and policy in TABLE and TABLE[policy].dense


def _allowed(setting: Setting, unit: int) -> str:
    if setting.choices:
        return ", ".join(map(str, setting.choices))
    return f"multiples of {unit} from 0 to {setting.high}" if setting.of_blocks else f"0 to {setting.high}"


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
    for ``infllm2-64``, 16 for the others. All token counts are multiples of the block size. ``punctuation`` names a
    set or a file, or is a tuple of token ids. ``parts`` is how many representatives a block has where blocks are
    chosen, for ``phsa`` and ``infllm2``; ``survivors`` how many blocks one representative each leaves for them (0:
    all), at least ``top_k``.
    """

    policy: str = OWN
    top_k: int = 16
    lam: float | tuple[float, ...] = 0.9
    init: int = 128
    local: int = 512
    block: int | None = None
    group_reduce: str = "sum"
    dense_below: int = 0
    punctuation: str | tuple[int, ...] = "en+zh"
    parts: int = 1
    survivors: int = 0

    def __post_init__(self) -> None:
        for name in _JSON_NAMES:
            object.__setattr__(self, name, _plain(getattr(self, name)))
        if self.block is None:
            object.__setattr__(self, "block", TABLE[self.policy].block() if self.policy in POLICIES else 16)
        self._validate()

    def _validate(self) -> None:
        if self.policy not in POLICIES:
            _refuse("policy", self.policy, ", ".join(POLICIES))
        policy = TABLE[self.policy]
        if policy.block_size and self.block != policy.block_size:
            _refuse("block", self.block, f"{policy.block_size} with {policy.name}")
        for name, setting in SETTING_OF.items():
            if setting.kind not in ("int", "name"):
                continue
            value = getattr(self, name)
            unit = policy.budget_unit(self.block) if name in ("init", "local") else self.block
            allowed = _allowed(setting, unit)
            if setting.kind == "int":
                _check_int(name, value, allowed)
            if setting.choices:
                if value not in setting.choices:
                    _refuse(name, value, allowed)
            elif not 0 <= value <= setting.high or (setting.of_blocks and value % unit):
                _refuse(name, value, allowed)
        if isinstance(self.lam, tuple):
            if not self.lam:
                _refuse("lam", self.lam, "a number from 0 to 1, or a list of them, one per KV head")
            for head, value in enumerate(self.lam):
                _check_lam(f"lam[{head}]", value)
        else:
            _check_lam("lam", self.lam)
        if isinstance(self.punctuation, tuple):
            for index in self.punctuation:
                _check_int("punctuation", index, "token ids")
        elif not isinstance(self.punctuation, str) or not self.punctuation:
            _refuse("punctuation", self.punctuation, "the name of a set or of a file, or token ids")

    @property
    def needs_flags(self) -> bool:
        """Whether punctuation makes a difference."""
        lams = self.lam if isinstance(self.lam, tuple) else (self.lam,)
        return TABLE[self.policy].weighs and self.top_k > 0 and any(lam < 1 for lam in lams)

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
            own = any(TABLE[name].block_size for name in (changes["policy"], self.policy) if name in POLICIES)
            changes["block"] = None if own else self.block
        return dataclasses.replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        out = {name: getattr(self, python) for python, name in _JSON_NAMES.items()}
        for name in ("lambda", "punctuation"):
            if isinstance(out[name], tuple):
                out[name] = list(out[name])
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
    """One setting for all layers of a model, and overrides for some of them.

    ``tested_tokens`` is the longest text that whoever made the model tested it with; nothing is computed with it.
    """

    base: Settings = field(default_factory=Settings)
    layers: Mapping[int, Settings] = field(default_factory=dict)
    tested_tokens: int | None = None

    def for_layer(self, layer: int) -> Settings:
        return self.layers.get(layer, self.base)

    @property
    def needs_flags(self) -> bool:
        return any(settings.needs_flags for settings in (self.base, *self.layers.values()))

    @staticmethod
    def make(base: Settings, values: Mapping[str, Any]) -> ModelSettings:
        """``values`` over ``base``; ``layers`` in it holds overrides: ``{0: {"policy": "dense"}, "3-5": …}``."""
        merged = _Merged(base)
        merged.add(values)
        return merged.finish()

    def to_json(self) -> dict[str, Any]:
        """What docs/settings.md describes, for a model's configuration."""
        out = self.base.to_json()
        layers = {}
        for layer, settings in sorted(self.layers.items()):
            layers[str(layer)] = {name: value for name, value in settings.to_json().items() if value != out[name]}
        if layers:
            out["layers"] = layers
        if self.tested_tokens is not None:
            out["tested_tokens"] = self.tested_tokens
        return out


class _Merged:
    """Settings as they grow from source to source: src/engine/attention_choice.h has the rule in words, and
    tests/data/attention_rule.json holds both to it."""

    def __init__(self, preset: Settings) -> None:
        self.preset = self.base = preset
        self.carries_dense = False  # settings of a model that attends densely by default
        self.layers: dict[int, Settings] = {}
        self.tested_tokens: int | None = None

    def _change(self, one: Settings, values: Mapping[str, Any], own_policy: bool = False) -> Settings:
        changes = dict(values)
        policy = changes.pop("policy", one.policy)
        if policy == one.policy or own_policy:
            return dataclasses.replace(one, **changes)
        if policy not in POLICIES:
            _refuse("policy", policy, ", ".join(POLICIES))
        # What belongs to a policy comes and goes with it.
        new, old = TABLE[policy], TABLE[one.policy]
        if new.plain_means or old.plain_means:
            changes.setdefault("lam", 1.0 if new.plain_means else self.preset.lam)
        usual = self.preset.block or 16
        if new.block(usual) != old.block(usual):
            changes.setdefault("block", new.block(usual))
        # Those of a model that attends densely by default are for whoever asks for the policy that they are for.
        if not old.dense or (self.carries_dense and policy != OWN):
            for name in ("parts", "survivors"):
                changes.setdefault(name, getattr(self.preset, name))
        return dataclasses.replace(one, policy=policy, **changes)

    def add(self, source: Mapping[str, Any]) -> None:
        values = dict(source)
        layers = values.pop("layers", None)
        tested = values.pop("tested_tokens", None)
        if tested is not None:
            _check_int("tested_tokens", tested, "1 and up")
            if tested < 1:
                _refuse("tested_tokens", tested, "1 and up")
            self.tested_tokens = tested
        values = _from_names(values, "")
        was = self.base.policy
        if "policy" in values and is_dense(values["policy"]):
            self.layers = {}
        self.base = self._change(self.base, values)
        if layers is None:
            self.layers = {
                layer: self._change(one, values, own_policy=one.policy != was) for layer, one in self.layers.items()
            }
            return
        self.layers = {}
        for key, changes in layers.items():
            one = self._change(self.base, _from_names(changes, f"layers {key!r}: "))
            if one.punctuation != self.base.punctuation:
                raise ValueError(f"settings: layers {key!r}: punctuation cannot differ between layers")
            for layer in _layer_range(key):
                if layer in self.layers:
                    raise ValueError(f"settings: layer {layer} is given twice in layers")
                self.layers[layer] = one

    def finish(self) -> ModelSettings:
        layers = {layer: one for layer, one in self.layers.items() if one != self.base}
        return ModelSettings(self.base, layers, self.tested_tokens)


class AttentionOptions(TypedDict, total=False):
    """The settings that ``phsa.LLM`` takes as arguments; docs/settings.md explains them."""

    top_k: int | None
    lam: float | None
    punctuation: str | None
    init: int | None
    local: int | None
    block: int | None
    dense_below: int | None
    parts: int | None
    survivors: int | None
    preset: str | None
    group_reduce: str | None


AttentionSettings: TypeAlias = Mapping[str, Any] | Settings | ModelSettings | str | os.PathLike[str]


def settings_text(settings: str | os.PathLike[str]) -> str:
    """What stands in a file of settings."""
    with Path(settings).open("rb") as file:
        content = file.read(_MAX_FILE_BYTES + 1)
    if len(content) > _MAX_FILE_BYTES:
        raise ValueError(f"{os.fspath(settings)}: more than {_MAX_FILE_BYTES} bytes; this is no file of settings")
    return content.decode()


def read_settings(settings: AttentionSettings | None) -> dict[str, Any]:
    """What somebody gave as settings, with the names of docs/settings.md; only what was said."""
    if settings is None:
        return {}
    if isinstance(settings, (Settings, ModelSettings)):
        return settings.to_json()
    values = settings
    if not isinstance(values, Mapping):
        values = json.loads(settings_text(settings))
        if not isinstance(values, dict):
            raise ValueError(f"{os.fspath(settings)}: allowed: a JSON object of settings")
    return {
        name: value
        if name != "layers" or not isinstance(value, Mapping)
        else {str(key): _with_json_names(one) if isinstance(one, Mapping) else one for key, one in value.items()}
        for name, value in _with_json_names(values).items()
    }


def _with_json_names(values: Mapping[str, Any]) -> dict[str, Any]:
    out = {}
    for key, value in values.items():
        name = _JSON_NAMES.get(_PYTHON_NAMES.get(key, key), key)
        if name in out:
            raise ValueError(f"settings: {name} is given twice, as {key} too")
        out[name] = value
    return out


def with_preset(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The paper's init and local, and its one representative a block, where ``preset`` names them."""
    out = dict(arguments)
    preset = out.pop("preset", None)
    if preset is None:
        return out
    if preset not in PRESETS:
        _refuse("preset", preset, ", ".join(PRESETS))
    paper = Settings.preset(PRESETS[preset])
    return {"init": paper.init, "local": paper.local, "parts": paper.parts, **out}


def resolve(
    context: int,
    *,
    carried: Mapping[str, Any] | None = None,
    settings: AttentionSettings | None = None,
    arguments: Mapping[str, Any] | None = None,
    policy: str = "dense",
) -> ModelSettings:
    """The settings that come of all who have a say: arguments count first, then ``settings``, then what a model or
    adapter carries, then the preset for the context.

    ``policy`` is the one where nobody names one. A setting that then has nothing to act on is an error. ``preset``
    among the arguments is one of ``PRESETS``: the paper's init and local, and one representative a block.
    """
    merged = _Merged(Settings.preset(context, policy=policy))
    if carried:
        merged.add({"policy": OWN, **carried} if "attention" not in carried else carried)
        merged.carries_dense = is_dense(merged.base.policy)
    given = read_settings(settings)
    merged.add(given)
    arguments = {name: value for name, value in (arguments or {}).items() if value is not None}
    merged.add(with_preset(arguments))
    out = merged.finish()
    if all(is_dense(one.policy) for one in (out.base, *out.layers.values())):
        named = [{*values} & {"policy", "attention"} for values in (given, arguments)]
        unused = {*arguments} - {"policy", "attention"} or ({*given} - {"tested_tokens"} if not any(named) else set())
        if unused:
            raise ValueError(
                f"settings: {sorted(unused)[0]} has no effect: the attention is dense; name a policy, such as {OWN}, "
                "or leave it out"
            )
    return out


def default_scale(head_dim: int) -> float:
    return 1.0 / math.sqrt(head_dim)
