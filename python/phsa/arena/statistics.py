"""Intervals of scores, of differences on the same samples, and of ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

Z = 1.959963984540054


def is_binary(scores: Sequence[float]) -> bool:
    return all(score in (0.0, 1.0) for score in scores)


def interval(scores: Sequence[float]) -> tuple[float, float]:
    """95 %, of a mean: Wilson's where scores are right or wrong, else the normal one."""
    n, mean = len(scores), sum(scores) / len(scores)
    if is_binary(scores):
        middle = (mean + Z * Z / (2 * n)) / (1 + Z * Z / n)
        half = Z / (1 + Z * Z / n) * math.sqrt(mean * (1 - mean) / n + Z * Z / (4 * n * n))
        return max(0.0, middle - half), min(1.0, middle + half)
    if n < 2:
        return mean, mean
    half = Z * math.sqrt(sum((x - mean) ** 2 for x in scores) / (n - 1) / n)
    return mean - half, mean + half


def difference(a: Sequence[float], b: Sequence[float]) -> tuple[float, float, float]:
    """Of means on the same samples, a less b, with 95 %: Bonett and Price's where scores are right or wrong (as `phsa
    niah` has it), else the normal one over the samples' differences."""
    n = len(a)
    change = [x - y for x, y in zip(a, b, strict=True)]
    mean = sum(change) / n
    if is_binary(a) and is_binary(b):
        better = (sum(x > 0 for x in change) + 1) / (n + 2)
        worse = (sum(x < 0 for x in change) + 1) / (n + 2)
        middle = better - worse
        half = Z * math.sqrt(max(0.0, better + worse - middle * middle) / (n + 2))
        return mean, max(-1.0, middle - half), min(1.0, middle + half)
    if n < 2:
        return mean, -math.inf, math.inf
    half = Z * math.sqrt(sum((x - mean) ** 2 for x in change) / (n - 1) / n)
    return mean, mean - half, mean + half


def ranks(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """1 for the highest of each column; equals share the mean of their ranks. values: (rules, columns)."""
    above = (values[None, :, :] > values[:, None, :] + 1e-12).sum(1)
    equal = (np.abs(values[None, :, :] - values[:, None, :]) <= 1e-12).sum(1)
    return above + (equal + 1) / 2


def mean_ranks(
    tables: Sequence[Mapping[str, Sequence[float]]], draws: int, seed: int = 1
) -> dict[str, tuple[float, float, float]]:
    """Each rule's mean rank over tables, with the 2.5 % and 97.5 % of draws of the samples with replacement. A table
    has the scores of the same samples, in one order, by rule; all have the same rules. A draw takes the same samples
    for all rules: ranks are paired."""
    rules = sorted(tables[0])
    generator = np.random.default_rng(seed)
    data = [np.array([table[rule] for rule in rules]) for table in tables]  # (rules, samples)
    found = ranks(np.stack([x.mean(1) for x in data], 1)).mean(1)
    drawn = np.empty((draws, len(rules)))
    for i in range(draws):
        means = [x[:, generator.integers(x.shape[1], size=x.shape[1])].mean(1) for x in data]
        drawn[i] = ranks(np.stack(means, 1)).mean(1)
    low, high = np.percentile(drawn, [2.5, 97.5], axis=0)
    return {rule: (float(found[i]), float(low[i]), float(high[i])) for i, rule in enumerate(rules)}
