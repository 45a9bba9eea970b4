"""The specification once more, in float64 and plain loops, one query at a time. Slow, and easy to check by eye."""

from __future__ import annotations

import math

import numpy as np
import torch

from phsa import Settings


def representatives(k: np.ndarray, flags: np.ndarray, s: Settings, lam: float) -> np.ndarray:
    """k: (tokens, head_dim)"""
    m = s.block
    if s.policy == "infllm2-64":
        count = (len(k) - 32) // 16 + 1 if len(k) >= 32 else 0
        return np.array([k[16 * j : 16 * j + 32].mean(0) for j in range(count)]).reshape(count, -1)
    rows = []
    for t in range(len(k) // m):
        keys, marks = k[t * m : (t + 1) * m], flags[t * m : (t + 1) * m]
        if s.policy == "quest":
            rows.append(np.concatenate([keys.max(0), keys.min(0)]))
            continue
        mean = keys.mean(0)
        marked = keys[marks != 0].mean(0) if marks.any() and s.policy == "phsa" else mean
        rows.append(lam * mean + (1 - lam) * marked)
    return np.array(rows).reshape(len(rows), -1)


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def _log_softmax(x: np.ndarray) -> np.ndarray:
    return x - x.max() - math.log(np.exp(x - x.max()).sum())


def part_log_scores(
    q: np.ndarray, k: np.ndarray, flags: np.ndarray, lam: float, coarse: dict[int, float], position: int, s: Settings,
    scale: float,
) -> dict[int, float]:  # fmt: skip
    """The candidates that one mean each leaves, with the logarithms of their scores by parts."""
    m, size = s.block, s.block // s.parts
    own = position // m
    left = sorted(coarse, key=lambda t: (-coarse[t], t))[: max(s.survivors, s.top_k) if s.survivors else None]
    always = [t for t in range(own) if t < math.ceil(s.init / m) or t >= own - math.ceil(s.local / m)]
    fine = sorted({*left, *always}) if s.survivors else list(range(own))
    scores: dict[int, list[float]] = {t: [] for t in left}
    for head in q:
        logits = []
        for t in fine:
            for p in range(s.parts):
                run = range(t * m + p * size, t * m + (p + 1) * size)
                mean = sum(k[i] for i in run) / size
                marked = [k[i] for i in run if flags[i] and s.policy == "phsa"]
                rep = lam * mean + (1 - lam) * (sum(marked) / len(marked) if marked else mean)
                logits.append(float(head @ rep) * scale)
        share = _log_softmax(np.array(logits)).reshape(len(fine), s.parts)
        for t, of_block in zip(fine, share, strict=True):
            if t in scores:
                scores[t].append(np.logaddexp.reduce(of_block))
    return {t: max(all_) if s.group_reduce == "max" else np.logaddexp.reduce(all_) for t, all_ in scores.items()}


def log_scores(q: np.ndarray, reps: np.ndarray, position: int, s: Settings, scale: float) -> dict[int, float]:
    """The candidates, with the logarithms of their scores. q: (heads that share a choice, head_dim)"""
    m = s.block
    own = position // m
    init, local = math.ceil(s.init / m), math.ceil(s.local / m)
    candidates = list(range(init, max(init, own - local)))
    if s.policy in ("dense", "streaming") or not candidates or s.top_k == 0 or own * m < s.dense_below:
        return {}
    d = q.shape[1]
    stride, span = (16, 32) if s.policy == "infllm2-64" else (m, m)
    visible = [j for j in range(len(reps)) if stride * j + span <= own * m]
    if s.policy == "quest":
        hi, lo = reps[visible, :d], reps[visible, d:]
        score = np.array([np.maximum(h * hi, h * lo).sum(1) for h in q])
    else:
        score = q @ reps[visible].T
    share = np.array([_log_softmax(row * scale) for row in score])
    group = share.max(0) if s.group_reduce == "max" else np.logaddexp.reduce(share)
    if s.policy == "infllm2-64":
        return {t: max(group[j] for j in range(max(0, 4 * t - 1), min(4 * t + 4, len(visible)))) for t in candidates}
    return {t: group[t] for t in candidates}


def _choose(
    q: np.ndarray, reps: np.ndarray, position: int, s: Settings, scale: float, k: np.ndarray, flags: np.ndarray,
    lam: float,
) -> list[int]:  # fmt: skip
    value = log_scores(q, reps, position, s, scale)
    if s.parts > 1 and s.policy in ("phsa", "infllm2") and value:
        value = part_log_scores(q, k, flags, lam, value, position, s, scale)
    return sorted(sorted(value, key=lambda t: (-value[t], t))[: s.top_k])


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    flags: torch.Tensor | None,
    s: Settings,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, list[list[list[int]]]]:
    """One sequence whose queries are its last positions. Returns out, lse and the lists [query][choosing head]."""
    qs, ks, vs = (x.detach().double().numpy() for x in (q, k, v))
    marks = np.zeros(len(ks)) if flags is None else flags.numpy()
    scale = 1 / math.sqrt(qs.shape[2]) if scale is None else scale
    m = s.block
    group = qs.shape[1] // ks.shape[1]
    out, lse = np.zeros_like(qs), np.zeros(qs.shape[:2])
    lists: list[list[list[int]]] = []
    lams = s.lam if isinstance(s.lam, tuple) else (s.lam,) * ks.shape[1]
    reps = [representatives(ks[:, h], marks, s, lams[h]) for h in range(ks.shape[1])]
    for i in range(len(qs)):
        position = len(ks) - len(qs) + i
        own = position // m
        lists.append([])
        for h in range(qs.shape[1]):
            kv = h // group
            heads = [h] if s.group_reduce == "none" else list(range(kv * group, (kv + 1) * group))
            chosen = _choose(qs[i, heads], reps[kv], position, s, scale, ks[:, kv], marks, lams[kv])
            if s.group_reduce == "none" or h % group == 0:
                lists[-1].append(chosen)
            blocks = set(chosen)
            blocks |= set(range(min(math.ceil(s.init / m), own + 1)))
            blocks |= set(range(max(0, own - math.ceil(s.local / m)), own + 1))
            everything = s.policy == "dense" or own * m < s.dense_below
            read = [t for t in range(position + 1) if everything or t // m in blocks]
            score = ks[read, kv] @ qs[i, h] * scale
            lse[i, h] = score.max() + math.log(np.exp(score - score.max()).sum())
            out[i, h] = _softmax(score) @ vs[read, kv]
    return torch.from_numpy(out), torch.from_numpy(lse), lists
