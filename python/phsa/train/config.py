"""What a training run is told: one TOML file, every key checked before anything is loaded."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomllib

from ..policies import TABLE
from ..settings import ModelSettings, resolve, with_preset

METHODS = ("dense", "infllm2", "phsa")
TRAINING_TOP_K_DEFAULT = 2
REPORTS = ("tensorboard", "wandb")
DTYPES = ("float32", "bfloat16")
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class ConfigError(ValueError):
    """A training run that cannot be: what is wrong, and what is allowed."""


@dataclass
class Model:
    path: str = ""  # a Hugging Face folder or name, a name of `phsa models`, or a .gguf file
    dtype: str = "bfloat16"  # what is multiplied; what is trained is kept in float32
    gradient_checkpointing: bool = False
    compile: bool = False  # torch.compile, layer by layer


@dataclass
class Attention:
    method: str = "phsa"
    # None, here and below: what the model carries, else K = 2 and the paper's setting for the length of the sequences.
    top_k: int | None = None
    lam: float | None = None  # `lambda` in the file
    punctuation: str | None = None
    init: int | None = None
    local: int | None = None
    dense_below: int | None = None
    parts: int | None = None
    survivors: int | None = None
    preset: str | None = None  # paper-4k or paper-32k: the paper's init and local, where they are not given
    backend: str = "auto"
    layers: dict[str, Any] = field(default_factory=dict)  # other settings for some layers, as in docs/settings.md

    def settings(self, length: int, carried: Mapping[str, Any] | None = None) -> ModelSettings:
        """As they are written into the trained model: complete. `carried`: the settings of the model to train."""
        names = ("top_k", "lam", "punctuation", "init", "local", "dense_below", "parts", "survivors", "preset")
        given = with_preset({name: getattr(self, name) for name in names if getattr(self, name) is not None})
        if not TABLE[self.method].weighs:
            given.pop("lam", None)
        if self.layers:
            given["layers"] = self.layers
        if "top_k" not in given and "top_k" not in (carried or {}):
            given["top_k"] = TRAINING_TOP_K_DEFAULT
        settings = resolve(length, carried=carried, settings={"policy": self.method, **given})
        return dataclasses.replace(settings, tested_tokens=length)


@dataclass
class Data:
    train: str = ""  # a folder of `phsa prepare`, one that `datasets` saved, or a file of JSON lines
    held_out: str | None = None
    length: int = 4096  # tokens of a sequence
    # Long-range copying: in this share of the sequences the last part repeats passages of the part before it.
    repeat_share: float = 0.0
    repeat_part: float = 0.25
    repeat_min: int = 16
    repeat_max: int = 128


@dataclass
class Lora:
    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = LORA_TARGETS
    save_dtype: str = "float32"


@dataclass
class Optimizer:
    steps: int = 0
    batch: int = 8  # sequences of a step, over all processes
    micro_batch: int = 1  # sequences that a process reads at once
    learning_rate: float = 1e-4
    final_learning_rate: float = 0.1  # the cosine's end, as a share of learning_rate
    warmup: int = 0  # steps
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0  # the gradient's norm; 0: no clipping


@dataclass
class Distill:
    weight: float = 0.0  # of the divergence from the same model with dense attention
    next_token: float = 1.0  # of the next-token loss


@dataclass
class Evaluate:
    every: int = 0  # steps; 0: at the end only
    sequences: int = 4  # of the held-out text
    niah: str | None = None  # a file of `phsa niah --forced --export`
    niah_samples: int = 20
    niah_batch_tokens: int = 1  # of samples that are read at once, one at least


@dataclass
class Checkpoint:
    every: int = 100  # steps; 0: at the end only
    keep: int = 2


@dataclass
class Config:
    out: str = ""  # the run's folder
    init_from: str | None = None  # a run, a checkpoint, an adapter or a model to begin with; None: model.path as it is
    seed: int = 1
    device: str = "auto"
    threads: int | None = None  # of torch on the CPU; None: torch decides
    context_parallel: int = 1  # processes that share the tokens of a sequence
    report_to: tuple[str, ...] = ()  # tensorboard, wandb
    model: Model = field(default_factory=Model)
    attention: Attention = field(default_factory=Attention)
    data: Data = field(default_factory=Data)
    lora: Lora | None = None  # without it every weight is trained
    optimizer: Optimizer = field(default_factory=Optimizer)
    distill: Distill = field(default_factory=Distill)
    evaluate: Evaluate = field(default_factory=Evaluate)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def identity(self) -> dict[str, Any]:
        """What must be the same for a stopped run to be continued with the same losses. How often it is looked at or
        saved, how it is spread over processes and where its files lie may change; what is in them may not, of which
        `identity.py` adds digests."""
        out = self.to_json()
        for name in ("out", "device", "threads", "context_parallel", "report_to", "evaluate", "checkpoint"):
            del out[name]
        del out["optimizer"]["micro_batch"]
        for name in ("gradient_checkpointing", "compile", "path"):
            del out["model"][name]
        for name in ("train", "held_out"):
            del out["data"][name]
        del out["attention"]["backend"]
        return out


_FILE_NAMES = {"lam": "lambda"}  # a word of Python


def _convert(place: str, value: Any, kind: Any) -> Any:
    """`value` of a TOML file as the field's type."""
    if isinstance(kind, types.UnionType):
        kinds = [one for one in typing.get_args(kind) if one is not types.NoneType]
        return _convert(place, value, kinds[0])
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise ConfigError(f"{place} is {value!r}; allowed: a table [{place}]")
        return _make(kind, value, place)
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise ConfigError(f"{place} is {value!r}; allowed: a list of names")
        return tuple(value)
    if typing.get_origin(kind) is dict:
        if not isinstance(value, dict) or not all(isinstance(one, dict) for one in value.values()):
            raise ConfigError(f'{place} is {value!r}; allowed: tables by layer, as "0-3" = {{ top_k = 8 }}')
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
        raise ConfigError(f"{place} is {value!r}; allowed: {names[kind]}")
    return value


def _make(kind: Any, values: dict[str, Any], place: str = "") -> Any:
    hints = typing.get_type_hints(kind)
    known = {_FILE_NAMES.get(one.name, one.name): one.name for one in dataclasses.fields(kind)}
    out = {}
    for key, value in values.items():
        if key not in known:
            where = f"[{place}]" if place else "the file"
            raise ConfigError(f"{where} has the key {key!r}; allowed: {', '.join(known)}")
        out[known[key]] = _convert(f"{place}.{key}" if place else key, value, hints[known[key]])
    return kind(**out)


def _check(config: Config) -> None:
    def require(good: bool, name: str, value: object, allowed: str) -> None:
        if not good:
            raise ConfigError(f"{name} is {value!r}; allowed: {allowed}")

    for name, value in (("out", config.out), ("model.path", config.model.path), ("data.train", config.data.train)):
        if not value:
            raise ConfigError(f"{name} is missing")
    require(config.context_parallel >= 1, "context_parallel", config.context_parallel, "1 and up")
    attention, data, optimizer = config.attention, config.data, config.optimizer
    require(attention.method in METHODS, "attention.method", attention.method, ", ".join(METHODS))
    for name in config.report_to:
        require(name in REPORTS, "report_to", name, ", ".join(REPORTS))
    require(config.model.dtype in DTYPES, "model.dtype", config.model.dtype, ", ".join(DTYPES))
    require(data.length >= 16, "data.length", data.length, "16 and up")
    for name in ("repeat_share", "repeat_part"):
        value = getattr(data, name)
        require(0 <= value <= (1 if name == "repeat_share" else 0.5), f"data.{name}", value, "0 to 1; a part to 0.5")
    require(1 <= data.repeat_min <= data.repeat_max, "data.repeat_min", data.repeat_min, "1 to repeat_max")
    require(optimizer.steps > 0, "optimizer.steps", optimizer.steps, "1 and up")
    require(optimizer.batch > 0, "optimizer.batch", optimizer.batch, "1 and up")
    require(optimizer.micro_batch > 0, "optimizer.micro_batch", optimizer.micro_batch, "1 and up")
    require(optimizer.learning_rate > 0, "optimizer.learning_rate", optimizer.learning_rate, "above 0")
    value = optimizer.final_learning_rate
    require(0 <= value <= 1, "optimizer.final_learning_rate", value, "0 to 1, a share of learning_rate")
    require(optimizer.warmup >= 0, "optimizer.warmup", optimizer.warmup, "0 and up")
    for name in ("beta1", "beta2"):
        require(0 <= getattr(optimizer, name) < 1, f"optimizer.{name}", getattr(optimizer, name), "0 to below 1")
    for name in ("weight_decay", "clip"):
        require(getattr(optimizer, name) >= 0, f"optimizer.{name}", getattr(optimizer, name), "0 and up")
    for name in ("weight", "next_token"):
        require(getattr(config.distill, name) >= 0, f"distill.{name}", getattr(config.distill, name), "0 and up")
    if config.distill.weight == 0 and config.distill.next_token == 0:
        raise ConfigError("distill.weight and distill.next_token are both 0: there is nothing to learn")
    if config.lora is not None:
        require(config.lora.rank > 0, "lora.rank", config.lora.rank, "1 and up")
        require(bool(config.lora.targets), "lora.targets", config.lora.targets, "names of linear layers")
        saved = ("float32", "float16", "bfloat16")
        require(config.lora.save_dtype in saved, "lora.save_dtype", config.lora.save_dtype, ", ".join(saved))
    require(config.checkpoint.keep > 0, "checkpoint.keep", config.checkpoint.keep, "1 and up")
    for place, value in (("checkpoint", config.checkpoint.every), ("evaluate", config.evaluate.every)):
        require(value >= 0, f"{place}.every", value, "0 and up")
    require(config.evaluate.sequences > 0, "evaluate.sequences", config.evaluate.sequences, "1 and up")
    try:
        attention.settings(data.length)
    except ValueError as error:
        raise ConfigError(f"attention: {error}") from None


def _set(values: dict[str, Any], change: str) -> None:
    """`optimizer.steps=100` into the values of a file."""
    name, equals, text = change.partition("=")
    if not equals:
        raise ConfigError(f"--set {change!r}; allowed: KEY=VALUE, as in optimizer.steps=100")
    *tables, key = name.strip().split(".")
    try:
        value = tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        value = text.strip()  # a text without its quotes
    for table in tables:
        values = values.setdefault(table, {})
        if not isinstance(values, dict):
            raise ConfigError(f"--set {change!r}: {table} is not a table")
    values[key] = value


def read(path: str | Path, changes: Sequence[str] = ()) -> Config:
    """The configuration in a file. Paths in it are relative to the current folder."""
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None
    try:
        for change in changes:
            _set(values, change)
        config = _make(Config, values)
        _check(config)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return config
