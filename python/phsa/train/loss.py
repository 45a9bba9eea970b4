"""The loss, a slice of the tokens at a time: the logits of 32k tokens and 150k words would fill 20 GB."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # a label that is not predicted
_SLICE_BYTES = 1 << 30  # of one slice's logits in float32


class _SlicedLoss(torch.autograd.Function):
    """The gradient is known as soon as the loss is, so it is computed along with it and the logits are dropped."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # (tokens, width)
        weight: Tensor,  # (words, width)
        labels: Tensor,  # (tokens,)
        teacher: Tensor | None,  # (tokens, width)
        teacher_weight: Tensor | None,
        next_token: float,
        distill: float,
    ) -> tuple[Tensor, Tensor]:
        step = max(1, _SLICE_BYTES // (4 * weight.shape[0]))
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        d_hidden = torch.empty_like(hidden) if need_hidden else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None
        nll = torch.zeros((), dtype=torch.float64, device=hidden.device)
        divergence = torch.zeros_like(nll)
        # Logits are what costs: each line below reads or writes words times tokens of them, and no more than it must.
        for begin in range(0, hidden.shape[0], step):
            part = slice(begin, begin + step)
            label = labels[part].clamp(min=0).unsqueeze(1)
            counts = (labels[part] != IGNORED).unsqueeze(1)
            log_p = F.log_softmax(F.linear(hidden[part], weight), dim=-1, dtype=torch.float32)
            right = log_p.gather(1, label)
            nll -= (right * counts).sum(dtype=torch.float64)
            teacher_p = None
            if teacher is not None and distill:
                teacher_log_p = F.log_softmax(F.linear(teacher[part], teacher_weight), dim=-1, dtype=torch.float32)
                teacher_p = teacher_log_p.exp()
                divergence += ((teacher_log_p.sub_(log_p).mul_(teacher_p)).sum(1, keepdim=True) * counts).sum(
                    dtype=torch.float64
                )
                del teacher_log_p
            if not need_hidden and not need_weight:
                continue
            # The gradient by the logits, next_token * (p - one at the label) + distill * (p - the teacher's p).
            if teacher_p is None:
                d_logits = torch.exp(log_p, out=torch.empty_like(log_p, dtype=hidden.dtype))
                d_logits.scatter_(1, label, torch.expm1(right).to(hidden.dtype))
                if next_token != 1:
                    d_logits.mul_(next_token)
            else:
                d_logits = log_p.exp_().mul_(next_token + distill).sub_(teacher_p, alpha=distill)
                d_logits.scatter_add_(1, label, torch.full_like(right, -next_token))
                d_logits = d_logits.to(hidden.dtype)
            del log_p, teacher_p
            if d_hidden is not None:
                d_hidden[part] = (d_logits @ weight).mul_(counts)
            if d_weight is not None:
                d_weight += (d_logits.t() @ (hidden[part] * counts)).float()
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.weight_dtype = weight.dtype
        ctx.weights = (next_token, distill)
        return nll, divergence

    @staticmethod
    def backward(ctx: Any, d_nll: Tensor, d_divergence: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight = ctx.saved_tensors
        # The caller adds the two with the weights given above and one common factor; that factor is what arrives.
        next_token, distill = ctx.weights
        factor = d_nll / next_token if next_token else d_divergence / distill
        if d_hidden is not None:
            d_hidden = d_hidden * factor
        if d_weight is not None:
            d_weight = (d_weight * factor).to(ctx.weight_dtype)
        return d_hidden, d_weight, None, None, None, None, None


def sliced_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    teacher: Tensor | None = None,
    teacher_weight: Tensor | None = None,
    next_token: float = 1.0,
    distill: float = 0.0,
    factor: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns factor * (next_token * nll + distill * divergence), to be differentiated, and both sums over the tokens
    whose label is not IGNORED: the next-token loss, and the divergence of the teacher's distribution from ours."""
    nll, divergence = _SlicedLoss.apply(hidden, weight, labels, teacher, teacher_weight, next_token, distill)
    loss = factor * (next_token * nll + distill * divergence)
    return loss, nll.detach(), divergence.detach()
