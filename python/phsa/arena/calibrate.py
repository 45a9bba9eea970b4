"""What Double Sparsity and HashAttention learn of a model beforehand, from a text that is in no task."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

BITS = 32
_FORMAT = 1


@dataclass
class Bits:
    """Learned signs: three linear layers for the keys of each KV head and for the queries of each query head."""

    keys: list[tuple[Tensor, Tensor]]  # weight (kv_heads, in, out), bias (kv_heads, 1, out)
    queries: list[tuple[Tensor, Tensor]]

    @staticmethod
    def random(kv_heads: int, q_heads: int, width: int, generator: torch.Generator) -> Bits:
        def layers(heads: int) -> list[tuple[Tensor, Tensor]]:
            sizes = [(width, width), (width, width), (width, BITS)]
            return [
                (torch.randn((heads, a, b), generator=generator) * a**-0.5, torch.zeros(heads, 1, b)) for a, b in sizes
            ]

        return Bits(layers(kv_heads), layers(q_heads))

    def to(self, device: torch.device) -> Bits:
        if self.keys[0][0].device != device:
            self.keys, self.queries = ([(a.to(device), b.to(device)) for a, b in x] for x in (self.keys, self.queries))
        return self

    def parameters(self) -> list[Tensor]:
        return [x for pair in (*self.keys, *self.queries) for x in pair]

    @staticmethod
    def _through(layers: list[tuple[Tensor, Tensor]], x: Tensor) -> Tensor:
        # Keys differ in size from model to model and head to head; what counts is where they point.
        x = nn.functional.normalize(x.float(), dim=-1) * x.shape[-1] ** 0.5
        for i, (weight, bias) in enumerate(layers):
            x = x @ weight + bias
            if i < len(layers) - 1:
                x = nn.functional.silu(x)
        return x

    def soft(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self._through(self.queries, q).tanh(), self._through(self.keys, k).tanh()

    @torch.no_grad()
    def key_bits(self, k: Tensor) -> Tensor:
        """(kv_heads, tokens, 32), each −1 or 1"""
        return torch.where(self._through(self.keys, k) > 0, 1, -1).to(torch.int8)

    @torch.no_grad()
    def query_bits(self, q: Tensor) -> Tensor:
        return torch.where(self._through(self.queries, q) > 0, 1, -1).to(torch.int8)


@dataclass
class LayerCalibration:
    channels: Tensor  # (kv_heads, head_dim): channels, the one with the largest products first
    hash: Bits | None = None


def heavy_channels(q: Tensor, k: Tensor) -> Tensor:
    """Channels of each KV head by the mean size of their products. q: (q_heads, n, d); k: (kv_heads, n, d)."""
    product = q.float().abs().mean(1).unflatten(0, (k.shape[0], -1)).mean(1) * k.float().abs().mean(1)
    return product.argsort(dim=-1, descending=True)


def train_bits(
    q: Tensor, k: Tensor, v: Tensor, scale: float, steps: int = 300, pivots: int = 64, seed: int = 1
) -> Bits:
    """Bits that tell the tokens which matter to a query (its `pivots` largest of weight times the value's length) from
    the others: logistic loss on the product of the softened bits, the few weighted up. Queries see what lies before
    them. Returns them on the CPU."""
    q_heads, tokens, width = q.shape
    kv_heads = k.shape[0]
    group = q_heads // kv_heads
    generator = torch.Generator().manual_seed(seed)
    bits = Bits.random(kv_heads, q_heads, width, generator).to(q.device)
    sharpness = torch.full((q_heads, 1, 1), 0.2, device=q.device)
    offset = torch.zeros((q_heads, 1, 1), device=q.device)
    parameters = [x.requires_grad_() for x in (*bits.parameters(), sharpness, offset)]
    optimizer = torch.optim.Adam(parameters, lr=2e-3)
    length = v.float().norm(dim=-1).repeat_interleave(group, 0)[:, None]
    few = min(pivots, max(1, tokens // 8))
    index = torch.arange(tokens, device=q.device)
    q, k = q.float(), k.float()
    with torch.enable_grad():
        for _ in range(steps):
            rows = torch.randint(tokens // 2, tokens, (64,), generator=generator).to(q.device)
            seen = index <= rows[:, None]
            with torch.no_grad():
                product = (q[:, rows] @ k.repeat_interleave(group, 0).transpose(1, 2)) * scale
                weight = product.masked_fill(~seen, -torch.inf).softmax(-1) * length
                wanted = torch.zeros_like(weight).scatter_(-1, weight.topk(few, dim=-1).indices, 1.0)
            of_q, of_k = bits.soft(q[:, rows], k)
            logit = (of_q @ of_k.repeat_interleave(group, 0).transpose(1, 2)) * sharpness + offset
            rare = (seen.sum(-1, keepdim=True).float() - few).clamp(min=1) / few
            loss = nn.functional.binary_cross_entropy_with_logits(logit, wanted, reduction="none")
            loss = loss * torch.where(wanted > 0, rare, 1.0)
            optimizer.zero_grad()
            (loss * seen).sum().div(seen.sum() * q_heads).backward()
            optimizer.step()
    for x in parameters:
        x.requires_grad_(False)
    return bits.to(torch.device("cpu"))


def calibrate(
    model: PreTrainedModel, tokens: list[int], with_hash: bool, steps: int, cache: Path | None, fingerprint: str
) -> list[LayerCalibration]:
    """One reading of the text with dense attention, then layer by layer; from `cache` where it holds this already."""
    text = hashlib.sha256(repr(tokens).encode()).hexdigest()[:16]
    stamp = {"format": _FORMAT, "model": fingerprint, "text": text, "steps": steps if with_hash else 0}
    if cache is not None and cache.exists():
        saved: dict[str, Any] = torch.load(cache, weights_only=True)
        known = saved.pop("stamp", None)
        if known == stamp or (not with_hash and known is not None and {**known, "steps": 0} == stamp):
            return [_load(saved[str(layer)]) for layer in range(len(saved))]
    from .attend import Pass, read

    found: list[LayerCalibration] = []

    def look(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
        assert layer == len(found)
        learned = train_bits(q, k, v, scale, steps, seed=1 + layer) if with_hash else None
        found.append(LayerCalibration(heavy_channels(q, k).cpu(), learned))

    read(model, Pass.dense(len(tokens), observer=look), tokens, None)
    if cache is not None:
        torch.save({"stamp": stamp, **{str(i): _plain(one) for i, one in enumerate(found)}}, cache)
    return found


def _plain(one: LayerCalibration) -> dict[str, Any]:
    out: dict[str, Any] = {"channels": one.channels}
    if one.hash is not None:
        out["keys"], out["queries"] = ([list(pair) for pair in x] for x in (one.hash.keys, one.hash.queries))
    return out


def _load(saved: dict[str, Any]) -> LayerCalibration:
    bits = None
    if "keys" in saved:
        bits = Bits(*([(a, b) for a, b in saved[name]] for name in ("keys", "queries")))
    return LayerCalibration(saved["channels"], bits)
