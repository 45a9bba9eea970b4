"""The sequences of a step as one row of packed tokens, and passages repeated in some of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .config import Data
from .loss import IGNORED
from .shards import Sequences


@dataclass
class Batch:
    tokens: Tensor  # (1, tokens)
    positions: Tensor  # (1, tokens), from 0 in each piece
    bounds: Tensor  # (pieces + 1,), on the CPU: kernels are planned there
    labels: Tensor  # (tokens,): the next token, IGNORED at the end of each piece
    predicted: int  # labels that are not IGNORED
    # With context parallelism `tokens`, `positions` and `labels` are this process's share of the row.
    row: Tensor | None = None  # (tokens of the row,)
    context: Any = None  # the ContextAttention of a pass

    @staticmethod
    def of(pieces: list[np.ndarray]) -> Batch:
        """One row of all pieces; none sees another. Of a negative number, ~id, the token is read but not learned."""
        lengths = [len(piece) for piece in pieces]
        bounds = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        tokens = np.concatenate(pieces).astype(np.int64)
        learned = tokens >= 0
        tokens = np.where(learned, tokens, ~tokens)
        labels = np.append(np.where(learned, tokens, IGNORED)[1:], IGNORED)
        labels[bounds[1:] - 1] = IGNORED
        positions = np.concatenate([np.arange(length) for length in lengths])
        return Batch(
            tokens=torch.from_numpy(tokens)[None],
            positions=torch.from_numpy(positions)[None],
            bounds=torch.from_numpy(bounds),
            labels=torch.from_numpy(labels),
            predicted=int((labels != IGNORED).sum()),
        )

    def to(self, device: torch.device) -> Batch:
        tokens, positions, labels, row = (
            None if x is None else x.to(device, non_blocking=True)
            for x in (self.tokens, self.positions, self.labels, self.row)
        )
        return replace(self, tokens=tokens, positions=positions, labels=labels, row=row)


def repeat_passages(pieces: list[np.ndarray], data: Data, generator: np.random.Generator) -> list[np.ndarray]:
    """One document of the same length whose last part repeats passages of the part before it, in any order: text that
    is told by nothing but what was read long before."""
    tokens = np.concatenate(pieces)
    first = len(tokens) - int(len(tokens) * data.repeat_part)
    out = [tokens[:first]]
    left = len(tokens) - first
    while left > 0:
        length = min(int(generator.integers(data.repeat_min, data.repeat_max + 1)), left, first)
        begin = int(generator.integers(0, first - length + 1))
        out.append(tokens[begin : begin + length])
        left -= length
    return [np.concatenate(out)]


class Batches:
    """The training sequences by number. Which ones a step reads depends on nothing but its number and the seed, so a
    run that was stopped, or one on another number of processes, reads the same."""

    def __init__(self, sequences: Sequences, data: Data, seed: int) -> None:
        self._sequences = sequences
        self._data = data
        self._seed = seed

    def pieces(self, index: int) -> list[np.ndarray]:
        pieces = self._sequences[index]
        if self._data.repeat_share > 0:
            generator = np.random.default_rng((self._seed, 0x7E9EA7, index))
            if generator.random() < self._data.repeat_share:
                return repeat_passages(pieces, self._data, generator)
        return pieces

    def of_step(self, step: int, batch: int, micro_batch: int, rank: int, world: int) -> list[Batch]:
        """This process's part of a step, in micro-batches. Every process has as many as the others."""
        mine = range(step * batch + rank, (step + 1) * batch, world)
        return [
            Batch.of([piece for index in mine[begin : begin + micro_batch] for piece in self.pieces(index)])
            for begin in range(0, len(mine), micro_batch)
        ]
