"""What a run is made of, as digests: a stopped run goes on with the same model and the same tokens, wherever they lie
now. And where a new run may begin: with the weights of another one."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import checkpoints
from .config import ConfigError, Lora
from .shards import Shards

_SAMPLES = 64  # values of each weight


def _hex(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]


@torch.no_grad()
def of_weights(model: nn.Module) -> str:
    """Names and shapes of all weights, and some values of each: two models of one shape differ in these, too."""
    parts = []
    for name, parameter in sorted(model.named_parameters()):
        flat = parameter.detach().flatten()
        some = flat[:: max(1, flat.numel() // _SAMPLES)][:_SAMPLES].to("cpu", torch.float32)
        parts += [f"{name} {tuple(parameter.shape)}".encode(), some.contiguous().numpy().tobytes()]
    return _hex(*parts)


def of_tokens(shards: Shards) -> str:
    return _hex(json.dumps([shards.digests, shards.vocab_size, shards.punctuation]).encode(), shards.offsets.tobytes())


def _flat(values: dict[str, Any], place: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            out |= _flat(value, f"{place}{name}.")
        else:
            out[place + name] = list(value) if isinstance(value, tuple) else value
    return out


# Digests need not be known both times: a held-out text may be added, and earlier versions wrote none.
_MAYBE = ("data.train", "data.held_out", "model.weights")


def check(out: Path, checkpoint: Path, now: dict[str, Any]) -> None:
    """Refuses to go on from a checkpoint of another run. `now` may still lack digests."""
    before, now = _flat(checkpoints.read_run(checkpoint)["identity"]), _flat(now)
    changed = [
        name
        for name, value in now.items()
        if value != before.get(name) and not (name in _MAYBE and None in (value, before.get(name)))
    ]
    if changed:
        details = ", ".join(f"{name} was {before.get(name)!r} and is {now[name]!r}" for name in changed)
        raise ConfigError(
            f"{out} holds a run with another {', '.join(changed)} ({details}); give another folder as out, where "
            f"init_from = {json.dumps(str(out))} begins with the weights of this one, or remove it"
        )


class Lock:
    """One trainer at a time in a folder. The lock goes with the process, however that ends."""

    def __init__(self, folder: Path) -> None:
        self._made = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._handle: int | None = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._handle)
            raise ConfigError(f"another trainer is at work in {folder}; wait for it, or give another folder") from None
        except OSError:
            pass  # a file system without locks

    def release(self, failed: bool = False) -> None:
        if self._handle is None:
            return
        os.close(self._handle)
        self._handle = None
        if failed and self._made and not any(self._folder.iterdir()):
            self._folder.rmdir()


@dataclass(frozen=True)
class Start:
    """Weights to begin with."""

    kind: str  # checkpoint, adapter, model
    folder: Path


def find_start(path: str, lora: Lora | None) -> Start:
    """What init_from names: a run's folder (its last checkpoint, or what it left), one of its checkpoints, an adapter,
    or a model."""
    folder = Path(path)
    found = checkpoints.complete(folder / "checkpoints")
    if found:
        folder = found[-1]
    elif (folder / "final").is_dir():
        folder = folder / "final"
    if (folder / "run.json").is_file():
        before = checkpoints.read_run(folder)["identity"]["lora"]
        _check_lora(path, lora, before and Lora(before["rank"], before["alpha"], tuple(before["targets"])))
        return Start("checkpoint", folder)
    if (folder / "adapter_config.json").is_file():
        before = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        _check_lora(path, lora, Lora(before["r"], float(before["lora_alpha"]), tuple(before["target_modules"])))
        return Start("adapter", folder)
    if (folder / "config.json").is_file():
        if lora is not None:
            raise ConfigError(f"init_from is {path!r}, a whole model; allowed with [lora]: an adapter. Or model.path")
        return Start("model", folder)
    raise ConfigError(f"init_from is {path!r}; allowed: the folder of a run, of a checkpoint, an adapter or a model")


def _check_lora(path: str, now: Lora | None, before: Lora | None) -> None:
    def shape(lora: Lora | None) -> str:
        if lora is None:
            return "all weights"
        return f"an adapter of rank {lora.rank}, alpha {lora.alpha:g}, for {', '.join(sorted(lora.targets))}"

    if shape(now) != shape(before):
        raise ConfigError(f"init_from is {path!r}, which trained {shape(before)}; this run trains {shape(now)}")
