"""Checkpoints that survive anything: written beside the others, flushed, and only then given their name.

A checkpoint holds the trained weights and the optimizer's state in PyTorch's distributed format, which any number of
processes can read, and `run.json`: the step and the configuration.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from .files import sync, sync_tree, write_json

_NAME = re.compile(r"step-(\d{8})")
_OPTIONS = StateDictOptions(ignore_frozen_params=True)


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read; those that were there before still are."""


def complete(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name) and (path / "run.json").is_file())


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


@contextmanager
def _quiet() -> Iterator[None]:
    """DCP warns that there is no process group; one process needs none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def trained_weights(model: nn.Module, options: StateDictOptions) -> dict[str, Any]:
    """What is trained, by name. A weight that is tied to another counts once."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {name: value for name, value in get_model_state_dict(model, options=options).items() if name in trained}


def _state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    return {
        "model": trained_weights(model, _OPTIONS),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=_OPTIONS),
    }


def save(
    folder: Path, step: int, run: dict[str, Any], model: nn.Module, optimizer: Optimizer, keep: int, rank: int
) -> None:
    """Collective. Older checkpoints but the last `keep` go once the new one is on the disk."""
    final = folder / f"step-{step:08d}"
    partial = folder / f"{final.name}.partial"
    try:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        _barrier()
        with _quiet():
            dcp.save(_state(model, optimizer), checkpoint_id=partial)
        if rank == 0:
            write_json(partial / "run.json", {**run, "step": step})
            sync_tree(partial)
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            sync(folder)
            for old in complete(folder)[:-keep]:
                shutil.rmtree(old)
    except (Exception, CheckpointException) as error:  # DCP's own is not an Exception
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        last = complete(folder)
        kept = f"the last complete checkpoint is {last[-1]}" if last else "there is no earlier checkpoint"
        raise CheckpointError(f"{final} cannot be written ({_cause(error)}); {kept}") from error
    _barrier()


def _cause(error: BaseException) -> str:
    """The innermost reason, in one line."""
    failures = getattr(error, "failures", None)
    if failures:
        first = next(iter(failures.values()))
        error = first[0] if isinstance(first, tuple) else first
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}".splitlines()[0]


def read_run(checkpoint: Path) -> dict[str, Any]:
    try:
        return json.loads((checkpoint / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{checkpoint}/run.json cannot be read: {error}") from None


def load(checkpoint: Path, model: nn.Module, optimizer: Optimizer | None) -> None:
    """Collective; onto any number of processes. Without an optimizer: the weights alone."""
    state: dict[str, Any] = (
        {"model": trained_weights(model, _OPTIONS)} if optimizer is None else _state(model, optimizer)
    )
    try:
        with _quiet():
            dcp.load(state, checkpoint_id=checkpoint)
    except (Exception, CheckpointException) as error:  # DCP's own is not an Exception
        raise CheckpointError(
            f"{checkpoint} cannot be read ({_cause(error)}); remove this folder to go on from the one before it"
        ) from error
    options = StateDictOptions(ignore_frozen_params=True, strict=False)
    set_model_state_dict(model, state["model"], options=options)
    if optimizer is not None:
        set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
