"""Functions in several processes with a process group between them. They are forked from a server that has imported
PyTorch and transformers once, so starting them takes a tenth of a second and not ten."""

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch.distributed.fsdp", "transformers", "phsa.train.loop"])


def _run(function: Callable[..., None], rank: int, world: int, store: str, said: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    handle = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    function(rank, world, *args)
    dist.destroy_process_group()


class Processes:
    """`function(rank, world, *args)` in `world` processes; what they say is in a file in the new `folder`."""

    def __init__(self, folder: Path, world: int, function: Callable[..., None], *args: Any) -> None:
        folder.mkdir(parents=True)
        self._said = folder / "said"
        self._all: list[BaseProcess] = [
            _CONTEXT.Process(
                target=_run, args=(function, rank, world, str(folder / "store"), str(self._said), args), daemon=True
            )
            for rank in range(world)
        ]
        for process in self._all:
            process.start()

    @property
    def running(self) -> bool:
        return any(process.is_alive() for process in self._all)

    def said(self) -> str:
        return self._said.read_text() if self._said.exists() else ""

    def kill(self) -> int:
        """All at once, as a power cut would; returns how many were still there."""
        for process in self._all:
            process.kill()
        for process in self._all:
            process.join()
        return sum(process.exitcode == -9 for process in self._all)

    def finish(self, seconds: float = 120) -> None:
        for process in self._all:
            process.join(seconds)
        codes = [process.exitcode for process in self._all]
        if codes != [0] * len(codes):
            self.kill()
            raise AssertionError(f"the processes ended with {codes}:\n{self.said()[-4000:]}")


def run(folder: Path, world: int, function: Callable[..., None], *args: Any) -> None:
    Processes(folder, world, function, *args).finish()
