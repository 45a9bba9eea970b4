from __future__ import annotations

import itertools
import multiprocessing
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import oracle
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import phsa
from phsa import Settings, _build, _fallback, _library, ops
from phsa.settings import POLICIES

BACKENDS = ["cpu", "torch"]
# The kernels have no float64; where PyTorch is tested, it leaves no room for near ties to turn.
DTYPE = {"cpu": torch.float32, "torch": torch.float64}
SMALL = {"top_k": 2, "lam": 0.6, "init": 16, "local": 32}


def make(
    tokens: int, q_heads: int = 4, kv_heads: int = 2, head_dim: int = 64, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q = torch.randn(tokens, q_heads, head_dim).to(dtype)
    k = torch.randn(tokens, kv_heads, head_dim).to(dtype)
    v = torch.randn(tokens, kv_heads, head_dim).to(dtype)
    return q, k, v, (torch.rand(tokens) < 0.15).to(torch.uint8)


def options(policy: str, **changes: object) -> dict:
    out = {**SMALL, "policy": policy, **changes}
    if policy == "infllm2-64":
        out["block"] = 64
        if "dense_below" in out:
            out["dense_below"] = 64
    return out


def lists_of(selection: Tensor) -> list[list[list[int]]]:
    return [[[block for block in head if block >= 0] for head in query] for query in selection.tolist()]


def agreeing(got: Tensor, want: list[list[list[int]]]) -> Tensor:
    """The queries with the expected lists. In f32, rounding may turn a near tie, but hardly more than one."""
    lists = lists_of(got) if got.shape[-1] else want
    same = torch.tensor([a == b for a, b in zip(lists, want, strict=True)])
    assert (~same).sum() <= 1
    return same


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("group_reduce", ["sum", "max", "none"])
def test_agrees_with_the_specification(backend: str, policy: str, group_reduce: str) -> None:
    q, k, v, flags = make(390 if policy == "infllm2-64" else 180, dtype=DTYPE[backend])
    kwargs = options(policy, group_reduce=group_reduce, dense_below=64 if group_reduce == "max" else 0)
    out, lse, selection = ops.phsa_attention(q, k, v, flags, **kwargs, return_selection=True, backend=backend)
    want_out, want_lse, want_lists = oracle.attention(q, k, v, flags, Settings(**kwargs))
    same = agreeing(selection, want_lists)
    assert any(any(heads) for heads in want_lists) == (policy not in ("dense", "streaming"))
    torch.testing.assert_close(out[same].double(), want_out[same], atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(lse[same].double(), want_lse[same], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "change",
    [
        {"block": 32, "local": 64, "init": 32},
        {"block": 64, "local": 64, "init": 0},
        {"init": 0, "local": 0},
        {"init": 48, "local": 0, "top_k": 1},
        {"top_k": 0},
        {"head_lambda": (0.2, 1.0)},
        {"scale": 0.3},
    ],
    ids=str,
)
def test_agrees_with_the_specification_for_other_settings(backend: str, change: dict) -> None:
    q, k, v, flags = make(260, q_heads=6, dtype=DTYPE[backend])
    kwargs = {**SMALL, **change}
    out, lse, selection = ops.phsa_attention(q, k, v, flags, **kwargs, return_selection=True, backend=backend)
    scale = kwargs.pop("scale", None)
    kwargs["lam"] = kwargs.pop("head_lambda", kwargs["lam"])
    want_out, want_lse, want_lists = oracle.attention(q, k, v, flags, Settings(**kwargs), scale)
    same = agreeing(selection, want_lists)
    torch.testing.assert_close(out[same].double(), want_out[same], atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(lse[same].double(), want_lse[same], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "change",
    [
        {"parts": 2},
        {"parts": 4, "survivors": 3},
        {"parts": 4, "survivors": 3, "group_reduce": "max"},
        {"parts": 2, "survivors": 4, "group_reduce": "none"},
        {"parts": 8, "survivors": 2, "top_k": 1},
        {"parts": 4, "survivors": 0, "group_reduce": "none"},
        {"parts": 4, "survivors": 4, "head_lambda": (0.2, 1.0)},
        {"parts": 2, "survivors": 3, "policy": "infllm2", "group_reduce": "max"},
        {"parts": 8, "survivors": 2, "block": 32, "init": 0, "local": 32, "top_k": 1},
        {"parts": 4, "survivors": 3, "dense_below": 160},
    ],
    ids=str,
)
def test_parts_agree_with_the_specification(backend: str, change: dict) -> None:
    q, k, v, flags = make(230, dtype=DTYPE[backend])
    kwargs = {**SMALL, **change}
    out, lse, selection = ops.phsa_attention(q, k, v, flags, **kwargs, return_selection=True, backend=backend)
    kwargs["lam"] = kwargs.pop("head_lambda", kwargs["lam"])
    want_out, want_lse, want_lists = oracle.attention(q, k, v, flags, Settings(**kwargs))
    same = agreeing(selection, want_lists)
    torch.testing.assert_close(out[same].double(), want_out[same], atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(lse[same].double(), want_lse[same], atol=2e-6, rtol=1e-5)
    # Parts are of consequence here: one mean chooses otherwise.
    _, _, lists = oracle.attention(q, k, v, flags, Settings(**{**kwargs, "parts": 1}))
    assert lists != want_lists


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_needle_across_two_blocks_is_found_whole_by_parts(backend: str) -> None:
    q, k, v, _ = make(1024, q_heads=2, kv_heads=1, dtype=DTYPE[backend])
    needle = torch.randn(64, dtype=q.dtype)
    needle *= 8 / needle.norm()
    k *= 0.4
    k[510:514] += needle  # two tokens of block 31, two of block 32
    # What else is in the second block points the other way, so that its mean says nothing of the needle.
    k[514:528] -= needle / 7
    q[-1] = needle * 2
    kwargs = {**SMALL, "top_k": 2, "return_selection": True, "backend": backend}
    chosen = {n: ops.phsa_attention(q, k, v, **kwargs, parts=n)[2][-1, 0].tolist() for n in (1, 8)}
    assert chosen[8] == [31, 32]
    assert 32 not in chosen[1]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("survivors", [0, 5])
def test_parts_choose_the_same_in_chunks_and_packed(backend: str, survivors: int) -> None:
    q, k, v, flags = make(420, dtype=DTYPE[backend])
    kwargs = {**SMALL, "parts": 4, "survivors": survivors, "return_selection": True, "backend": backend}
    whole = ops.phsa_attention(q, k, v, flags, **kwargs)
    for begin, end in itertools.pairwise([0, 1, 2, 130, 131, 300, 419, 420]):
        part = ops.phsa_attention(q[begin:end], k[:end], v[:end], flags[:end], **kwargs)
        slots = part[2].shape[-1]
        assert torch.equal(part[2], whole[2][begin:end, :, :slots])
        torch.testing.assert_close(part[0], whole[0][begin:end], atol=1e-6, rtol=1e-5)
    front = make(37, dtype=DTYPE[backend])
    both = [torch.cat(pair) for pair in zip(front, (q, k, v, flags), strict=True)]
    packed = ops.phsa_attention(*both, cu_seqlens=[0, 37, 457], **kwargs)
    assert torch.equal(packed[2][37:, :, : whole[2].shape[-1]], whole[2])
    torch.testing.assert_close(packed[0][37:], whole[0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_parts_have_the_gradients_of_the_selected_tokens(backend: str) -> None:
    expect_gradients_of_the_selected_tokens(backend, {**SMALL, "parts": 4, "survivors": 6})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("parts", "survivors"), [(2, 0), (4, 8), (8, 8)])
def test_kernels_agree_with_pytorch_on_parts(dtype: torch.dtype, parts: int, survivors: int) -> None:
    q, k, v, flags = make(700, 6, 2, dtype=dtype)
    kwargs = {**SMALL, "parts": parts, "survivors": survivors, "top_k": 3}
    kwargs |= {"cu_seqlens": [0, 17, 300, 300, 700], "return_selection": True}
    d_out = torch.randn(q.shape).to(dtype)
    results = []
    for backend in BACKENDS:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out, lse, selection = ops.phsa_attention(*leaves, flags, **kwargs, backend=backend)
        results.append((out, lse, selection, torch.autograd.grad(out, leaves, d_out)))
    (out, lse, selection, grads), (want_out, want_lse, want_selection, want_grads) = results
    # Sums in another order may round a representative to the neighbouring number and so turn a near tie.
    same = (selection == want_selection).all(-1)
    assert same.double().mean() > (0.998 if dtype == torch.float32 else 0.98)
    rows = same.all(-1)
    error = 2e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out[rows].float(), want_out[rows].float(), atol=error, rtol=error)
    torch.testing.assert_close(lse[rows], want_lse[rows], atol=2e-5, rtol=1e-5)
    if rows.all():
        for a, b in zip(grads, want_grads, strict=True):
            assert (a.double() - b.double()).norm() <= (1e-5 if dtype == torch.float32 else 2e-2) * b.double().norm()


def test_scores_of_parts_agree_between_backends() -> None:
    q, k, _, flags = make(390)
    kwargs = {**SMALL, "parts": 4, "survivors": 6}
    selection, scores = ops.select(q, k, flags, **kwargs, backend="cpu")
    selection_torch, scores_torch = ops.select(q, k, flags, **kwargs, backend="torch")
    same = agreeing(selection, lists_of(selection_torch))
    torch.testing.assert_close(scores[same], scores_torch[same], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("head_dim", "heads"), [(64, (3, 3)), (80, (8, 1)), (96, (6, 2)), (128, (4, 4)), (256, (2, 1))]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("policy", ["phsa", "infllm2-64", "quest"])
def test_kernels_agree_with_pytorch(head_dim: int, heads: tuple[int, int], dtype: torch.dtype, policy: str) -> None:
    q, k, v, flags = make(500, *heads, head_dim, dtype)
    kwargs = options(policy, cu_seqlens=[0, 17, 300, 300, 500], return_selection=True)
    got = ops.phsa_attention(q, k, v, flags, **kwargs, backend="cpu")
    want = ops.phsa_attention(q, k, v, flags, **kwargs, backend="torch")
    exact = ops.phsa_attention(*(x.double() for x in (q, k, v)), flags, **kwargs, backend="torch")
    # Sums in another order may round a representative to the neighbouring number and so turn a near tie.
    same = (got[2] == want[2]).all(-1)
    assert same.double().mean() > (0.999 if dtype == torch.float32 else 0.99)
    rows = same.all(-1) & (got[2] == exact[2]).all(-1).all(-1)
    assert rows.double().mean() > (0.999 if dtype == torch.float32 else 0.8)
    # Not worse than a small multiple of the error of the same computation in the same type.
    error = (want[0][rows].double() - exact[0][rows]).abs().max()
    assert (got[0][rows].double() - exact[0][rows]).abs().max() <= 4 * error + 1e-6
    torch.testing.assert_close(got[1][rows].double(), exact[1][rows], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("policy", ["phsa", "quest", "infllm2-64"])
def test_top_k_that_covers_everything_is_dense_attention(backend: str, policy: str) -> None:
    q, k, v, flags = make(700, dtype=DTYPE[backend])
    out, _ = ops.phsa_attention(q, k, v, flags, **options(policy, top_k=65536), backend=backend)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(out, dense[0].transpose(0, 1), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("policy", ["phsa", "infllm2-64", "quest"])
@pytest.mark.parametrize("group_reduce", ["sum", "max", "none"])
def test_scores_further_apart_than_float32_reaches_are_ranked(backend: str, policy: str, group_reduce: str) -> None:
    q, k, _, flags = make(500 if policy == "infllm2-64" else 240)
    q *= 2000
    kwargs = options(policy, group_reduce=group_reduce)
    selection, scores = ops.select(q, k, flags, **kwargs, backend=backend)
    assert (scores[selection >= 0] == 0).any()
    settings = Settings(**kwargs)
    reps = [oracle.representatives(k[:, h].double().numpy(), flags.numpy(), settings, settings.lam) for h in range(2)]
    heads = q.double().unflatten(1, (selection.shape[1], -1)).numpy()
    for i, lists in enumerate(lists_of(selection)):
        for h, chosen in enumerate(lists):
            value = oracle.log_scores(heads[i, h], reps[h * 2 // len(lists)], i, settings, 64**-0.5)
            assert len(chosen) == min(2, len(value))
            left = [x for t, x in value.items() if t not in chosen]
            # 0.1: what f32 loses of scores of thousands. Blocks that one head each is sure of have equal sums.
            assert not left or min(value[t] for t in chosen) >= max(left) - 0.1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("policy", ["phsa", "infllm2-64", "quest"])
def test_ties_go_to_the_lower_block(backend: str, policy: str) -> None:
    q, k, v, _ = make(1024)
    k = k[:16].repeat(64, 1, 1)  # all blocks alike
    _, _, selection = ops.phsa_attention(q, k, v, **options(policy, init=64), return_selection=True, backend=backend)
    first = 64 // (64 if policy == "infllm2-64" else 16)
    assert (selection[-64:] == torch.tensor([first, first + 1])).all()


def test_the_kernels_run_where_they_can(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: object) -> None:
        raise AssertionError("PyTorch was used")

    monkeypatch.setattr(_fallback, "forward", forbidden)
    monkeypatch.setattr(_fallback, "backward", forbidden)
    monkeypatch.setattr(_fallback, "write_reps", forbidden)
    q, k, v, flags = make(100)
    ops.phsa_attention(q.requires_grad_(), k, v, flags, **SMALL)[0].sum().backward()
    ops.representatives(k, flags)
    ops.select(q.detach(), k, flags)
    for other in (q.double(), q[..., :48]):
        with pytest.raises(AssertionError, match="PyTorch was used"):
            keys = torch.zeros(100, 2, other.shape[-1], dtype=other.dtype)
            ops.phsa_attention(other.detach(), keys, keys, flags, **SMALL)


@pytest.mark.parametrize("backend", BACKENDS)
def test_mean_pooling_is_lambda_1_or_no_flags(backend: str) -> None:
    q, k, v, flags = make(600, dtype=DTYPE[backend])
    want = ops.phsa_attention(q, k, v, flags, **options("infllm2"), backend=backend)[0]
    for given, lam in ((flags, 1.0), (None, 0.3), (torch.zeros_like(flags), 0.3)):
        got = ops.phsa_attention(q, k, v, given, **options("phsa", lam=lam), backend=backend)[0]
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)
    assert not torch.allclose(ops.phsa_attention(q, k, v, flags, **options("phsa"), backend=backend)[0], want)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("policy", POLICIES)
def test_chunks_of_any_size_choose_and_compute_the_same(backend: str, policy: str) -> None:
    q, k, v, flags = make(330, dtype=DTYPE[backend])
    kwargs = options(policy, return_selection=True, backend=backend)
    whole = ops.phsa_attention(q, k, v, flags, **kwargs)
    for cuts in ([0, 1, 2, 130, 131, 330], [*range(0, 330, 48), 330]):
        for begin, end in itertools.pairwise(cuts):
            part = ops.phsa_attention(q[begin:end], k[:end], v[:end], flags[:end], **kwargs)
            slots = part[2].shape[-1]
            assert torch.equal(part[2], whole[2][begin:end, :, :slots])
            assert (whole[2][begin:end, :, slots:] == -1).all()
            torch.testing.assert_close(part[0], whole[0][begin:end], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("policy", ["phsa", "infllm2-64"])
def test_packed_sequences_are_each_alone(backend: str, policy: str) -> None:
    q, k, v, flags = make(700, dtype=DTYPE[backend])
    cuts = [0, 200, 201, 201, 470, 700]
    kwargs = options(policy, backend=backend)
    packed = ops.phsa_attention(q, k, v, flags, cu_seqlens=torch.tensor(cuts, dtype=torch.int32), **kwargs)
    for begin, end in itertools.pairwise(cuts):
        if begin == end:
            continue
        alone = ops.phsa_attention(*(x[begin:end] for x in (q, k, v, flags)), **kwargs)
        torch.testing.assert_close(packed[0][begin:end], alone[0], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(packed[1][begin:end], alone[1], atol=1e-6, rtol=1e-5)


def test_the_number_of_threads_changes_nothing() -> None:
    q, k, v, flags = make(900)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            out, lse = ops.phsa_attention(*leaves, flags, **SMALL, backend="cpu")
            out.square().sum().backward()
            results.append((out.detach(), lse, *(x.grad for x in leaves)))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_tensors_give_the_same_and_are_not_changed(backend: str) -> None:
    tokens = 300
    fused = torch.randn(tokens, 4 + 2 + 2, 80)[..., :64]
    q, k, v = fused[:, :4], fused[:, 4:6], fused[:, 6:]
    by_head = torch.randn(2, tokens, 64).transpose(0, 1)
    flags = (torch.rand(tokens) < 0.2).to(torch.uint8)
    for keys in (k, by_head):
        got = ops.phsa_attention(q, keys, v, flags, **SMALL, backend=backend)
        want = ops.phsa_attention(q.contiguous(), keys.contiguous(), v.contiguous(), flags, **SMALL, backend=backend)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_batch_of_equal_lengths_is_packed(backend: str) -> None:
    q, k, v, flags = make(600)
    kwargs = {**SMALL, "return_selection": True, "backend": backend}
    packed = ops.phsa_attention(q, k, v, flags, cu_seqlens=[0, 300, 600], **kwargs)
    four = ops.phsa_attention(*(x.unflatten(0, (2, 300)) for x in (q, k, v, flags)), **kwargs)
    assert four[0].shape == (2, 300, 4, 64)
    assert all(torch.equal(a.flatten(0, 1), b) for a, b in zip(four, packed, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("policy", ["phsa", "infllm2-64", "quest"])
def test_representatives_and_selection_alone(backend: str, policy: str) -> None:
    q, k, _, flags = make(390, dtype=DTYPE[backend])
    kwargs = options(policy)
    settings = Settings(**kwargs)
    cuts = [0, 150, 390]
    one = {"lam": kwargs["lam"], "block": kwargs.get("block"), "policy": policy, "backend": backend}
    reps = ops.representatives(k, flags, cu_seqlens=cuts, **one)
    want = [
        torch.stack(
            [
                torch.from_numpy(oracle.representatives(k[b:e, h].double().numpy(), flags[b:e].numpy(), settings, 0.6))
                for h in range(2)
            ],
            dim=1,
        )
        for b, e in itertools.pairwise(cuts)
    ]
    torch.testing.assert_close(reps.double(), torch.cat(want), atol=1e-6, rtol=1e-5)
    assert torch.equal(ops.representatives(k[:150], flags[:150], **one), reps[: len(want[0])])

    selection, scores = ops.select(q, k, flags, cu_seqlens=cuts, **kwargs, backend=backend)
    again = ops.phsa_attention(q, k, k, flags, cu_seqlens=cuts, **kwargs, return_selection=True, backend=backend)
    assert torch.equal(selection, again[2])
    assert ((scores > 0) == (selection >= 0)).all()


def test_scores_agree_between_backends() -> None:
    q, k, _, flags = make(390)
    selection, scores = ops.select(q, k, flags, **SMALL, backend="cpu")
    selection_torch, scores_torch = ops.select(q, k, flags, **SMALL, backend="torch")
    same = agreeing(selection, lists_of(selection_torch))
    torch.testing.assert_close(scores[same], scores_torch[same], atol=1e-6, rtol=1e-4)


def test_representatives_keep_the_type_of_the_keys() -> None:
    _, k, _, flags = make(160, dtype=torch.bfloat16)
    for backend in BACKENDS:
        reps = ops.representatives(k, flags, lam=0.5, backend=backend)
        exact = ops.representatives(k.double(), flags, lam=0.5)
        assert reps.dtype == torch.bfloat16
        torch.testing.assert_close(reps.double(), exact, atol=1e-6, rtol=2**-8)


def gradients_by_mask(
    q: Tensor, k: Tensor, v: Tensor, selection: Tensor, settings: Settings, d_out: Tensor
) -> tuple[Tensor, ...]:
    """Autograd through dense attention under the mask that a selection stands for, in float64."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    tokens, heads = q.shape[:2]
    m = settings.block
    block = torch.arange(tokens) // m
    always = (block[None] < settings.init // m) | (block[None] >= (block - settings.local // m)[:, None])
    mask = always[:, None].repeat(1, selection.shape[1], 1)
    for i, chosen in enumerate(lists_of(selection)):
        for h, blocks in enumerate(chosen):
            for t in blocks:
                mask[i, h, t * m : (t + 1) * m] = True
    mask &= torch.ones(tokens, tokens, dtype=torch.bool).tril()[:, None]
    mask = mask.repeat_interleave(heads // selection.shape[1], dim=1)
    group = heads // k.shape[1]
    score = torch.einsum("ihd,jhd->ihj", q, k.repeat_interleave(group, 1)) * q.shape[2] ** -0.5
    weight = score.masked_fill(~mask, -torch.inf).softmax(-1)
    out = torch.einsum("ihj,jhd->ihd", weight, v.repeat_interleave(group, 1))
    return torch.autograd.grad(out, (q, k, v), d_out.double())


def expect_gradients_of_the_selected_tokens(backend: str, kwargs: dict) -> None:
    q, k, v, flags = make(300, dtype=DTYPE[backend])
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, _, selection = ops.phsa_attention(*leaves, flags, **kwargs, return_selection=True, backend=backend)
    d_out = torch.randn_like(out)
    got = torch.autograd.grad(out, leaves, d_out)
    want = gradients_by_mask(q, k, v, selection, Settings(**kwargs), d_out)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("policy", ["phsa", "quest", "streaming"])
@pytest.mark.parametrize("group_reduce", ["sum", "none"])
def test_gradients_are_those_of_the_selected_tokens(backend: str, policy: str, group_reduce: str) -> None:
    expect_gradients_of_the_selected_tokens(backend, options(policy, group_reduce=group_reduce))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_kernels_agree_with_pytorch(policy: str, dtype: torch.dtype) -> None:
    q, k, v, flags = make(400, dtype=dtype)
    kwargs = options(policy, cu_seqlens=[0, 100, 400], dense_below=64)
    d_out = torch.randn(q.shape).to(dtype)
    results = []
    for backend in BACKENDS:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out, _ = ops.phsa_attention(*leaves, flags, **kwargs, backend=backend)
        results.append(torch.autograd.grad(out, leaves, d_out))
    for a, b in zip(*results, strict=True):
        error = (a.double() - b.double()).norm() / b.double().norm()
        assert error < (1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_chunk_has_gradients_too(backend: str) -> None:
    q, k, v, flags = make(300, dtype=DTYPE[backend])
    d_out = torch.randn(100, 4, 64, dtype=DTYPE[backend])
    grads = []
    for queries in (q, q[200:]):
        leaves = [x.clone().requires_grad_() for x in (queries, k, v)]
        out, _ = ops.phsa_attention(*leaves, flags, **SMALL, backend=backend)
        grads.append(torch.autograd.grad(out[-100:], leaves, d_out))
    torch.testing.assert_close(grads[0][0][200:], grads[1][0], atol=1e-5, rtol=1e-4)
    for a, b in zip(grads[0][1:], grads[1][1:], strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_gradcheck_in_float64() -> None:
    q, k, v, flags = make(36, q_heads=2, kv_heads=1, head_dim=2, dtype=torch.float64)

    def attend(*leaves: Tensor) -> Tensor:
        return ops.phsa_attention(*leaves, flags, top_k=1, lam=0.5, init=0, local=0)[0]

    assert torch.autograd.gradcheck(attend, tuple(x.requires_grad_() for x in (q, k, v)))


@pytest.mark.filterwarnings("ignore:Input #. requires gradient and is not a double")
def test_gradcheck_of_the_kernels_in_float32() -> None:
    q, k, v, flags = make(70, q_heads=2, kv_heads=1)

    def attend(*leaves: Tensor) -> Tensor:
        return ops.phsa_attention(*leaves, flags, top_k=1, lam=0.5, init=16, local=0, backend="cpu")[0]

    leaves = tuple((0.3 * x).requires_grad_() for x in (q, k, v))
    assert torch.autograd.gradcheck(attend, leaves, eps=1e-2, atol=2e-3, rtol=2e-2, fast_mode=True)


def operator_arguments(backend: str, grad: bool) -> tuple:
    dtype = torch.float32 if backend == "cpu" else torch.float64
    q, k, v, flags = make(100, dtype=dtype)
    lens = torch.tensor([40, 60], dtype=torch.int32)
    settings = ("phsa", 16, 16, 16, 1, [0.5], "sum", 0, 1, 64, 0.125, backend)
    return (*(x.requires_grad_(grad) for x in (q, k, v)), flags, lens, lens, *settings)


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_casts_the_inputs_as_sdpa_does_and_nothing_inside(backend: str) -> None:
    q, k, v, flags = make(600)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    with torch.autocast("cpu", torch.bfloat16):
        sdpa = torch.nn.functional.scaled_dot_product_attention(q[None], q[None], q[None])
        out, lse, chosen = ops.phsa_attention(*inputs, flags, **SMALL, return_selection=True, backend=backend)
        selection, _ = ops.select(q, k, flags, **SMALL, backend=backend)
        # What RoPE leaves in f32 and what is in the lower type already go together.
        mixed, _ = ops.phsa_attention(q, k, v.bfloat16(), flags, **SMALL, backend=backend)
        exact, _ = ops.phsa_attention(*(x.double() for x in (q, k, v)), flags, **SMALL, backend="torch")
    assert out.dtype == sdpa.dtype == torch.bfloat16 and lse.dtype == torch.float32 and exact.dtype == torch.float64
    low = [x.bfloat16().requires_grad_() for x in (q, k, v)]
    want, want_lse, want_chosen = ops.phsa_attention(*low, flags, **SMALL, return_selection=True, backend=backend)
    assert torch.equal(chosen, want_chosen) and torch.equal(selection, want_chosen)
    assert torch.equal(out, want) and torch.equal(lse, want_lse) and torch.equal(mixed, want)
    d_out = torch.randn_like(out)
    with torch.autocast("cpu", torch.bfloat16):
        grads = torch.autograd.grad(out, inputs, d_out)
    for got, theirs in zip(grads, torch.autograd.grad(want, low, d_out), strict=True):
        assert got.dtype == torch.float32 and torch.equal(got.bfloat16(), theirs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tokens_have_a_gradient(backend: str) -> None:
    for q_shape, kv_shape in (((0, 4), (0, 2)), ((0, 4), (50, 2)), ((0, 30, 4), (0, 30, 2)), ((3, 0, 4), (3, 0, 2))):
        q, k, v = (torch.randn(*shape, 64, requires_grad=True) for shape in (q_shape, kv_shape, kv_shape))
        out, _ = ops.phsa_attention(q, k, v, **SMALL, backend=backend)
        out.sum().backward()
        for x in (q, k, v):
            assert x.grad.shape == x.shape and not x.grad.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_flags_and_numpy_scalars_are_taken(backend: str) -> None:
    q, k, v, flags = make(200)
    want, _ = ops.phsa_attention(q, k, v, flags, **SMALL, scale=0.25, backend=backend)
    strided = flags.repeat_interleave(2).bool()[::2]
    scalars = {
        "top_k": np.int64(2),
        "lam": np.float32(0.6),
        "init": np.int32(16),
        "local": np.uint8(32),
        "scale": np.float32(0.25),
        "cu_seqlens": np.array([0, 200]),
    }
    got, _ = ops.phsa_attention(q, k, v, strided, **scalars, backend=backend)
    torch.testing.assert_close(got, want)
    assert Settings(top_k=np.int16(4), lam=(np.float32(0.5), 1)).to_json()["lambda"] == [0.5, 1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_transforms_of_torch_func_work_or_are_refused_by_name(backend: str) -> None:
    q, k, v, flags = make(150, dtype=DTYPE[backend])
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]

    def loss(q: Tensor, k: Tensor, v: Tensor, flags: Tensor = flags) -> Tensor:
        return ops.phsa_attention(q, k, v, flags, **SMALL, backend=backend)[0].square().sum()

    loss(*inputs).backward()
    for got, x in zip(torch.func.grad(loss, argnums=(0, 1, 2))(q, k, v), inputs, strict=True):
        assert torch.equal(got, x.grad)
    # A dimension that is mapped over is a batch, which has one call; what is not mapped is shared.
    batch = [torch.stack((x, x.flip(0), 2 * x), dim) for x, dim in ((q, 0), (k, 1))]
    turned = torch.stack((flags, flags.flip(0), 1 - flags))
    mapped = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)), in_dims=(0, 1, None, 0))(*batch, v, turned)
    for index in range(3):
        alone = torch.func.grad(loss, argnums=(0, 1))(batch[0][index], batch[1][:, index], v, turned[index])
        for got, want in zip(mapped, alone, strict=True):
            torch.testing.assert_close(got[index], want)
    chosen = torch.func.vmap(lambda q: ops.select(q, k, flags, **SMALL, backend=backend)[0])(batch[0])
    assert torch.equal(chosen[1], ops.select(batch[0][1], k, flags, **SMALL, backend=backend)[0])
    reps = torch.func.vmap(lambda k: ops.representatives(k, flags, backend=backend), in_dims=1)(batch[1])
    assert torch.equal(reps[2], ops.representatives(batch[1][:, 2], flags, backend=backend))
    with pytest.raises(NotImplementedError, match="no derivative in forward mode"):
        torch.func.jvp(loss, (q, k, v), (q, k, v))
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.func.grad(lambda q: torch.func.grad(loss)(q, k, v).sum())(q)


def test_a_compiled_graph_refuses_sequences_that_do_not_begin_at_0() -> None:
    q, k, v, _ = make(100)
    compiled = torch.compile(
        lambda starts: ops.phsa_attention(q, k, v, **SMALL, cu_seqlens=starts)[0], fullgraph=True, backend="eager"
    )
    assert torch.equal(
        compiled(torch.tensor([0, 60, 100])), ops.phsa_attention(q, k, v, **SMALL, cu_seqlens=[0, 60, 100])[0]
    )
    with pytest.raises(ValueError, match="lengths sum to 120"):
        compiled(torch.tensor([20, 60, 120]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_opcheck(backend: str) -> None:
    args = operator_arguments(backend, True)
    torch.library.opcheck(torch.ops.phsa.attention.default, args)
    q, k, v, flags, lens, _, *settings = operator_arguments(backend, False)
    out, lse, selection = torch.ops.phsa.attention(q, k, v, flags, lens, lens, *settings)
    torch.library.opcheck(
        torch.ops.phsa.attention_backward.default,
        (torch.randn_like(out), q, k, v, out, lse, selection, lens, lens, *settings),
    )
    torch.library.opcheck(torch.ops.phsa.select.default, (q, k, flags, lens, lens, *settings))
    torch.library.opcheck(torch.ops.phsa.represent.default, (k, flags, None, "phsa", 16, [0.5], backend))
    torch.library.opcheck(torch.ops.phsa.represent.default, (k, flags, lens, "quest", 16, [0.5], backend))
    reps = k.new_zeros((6, 2, 64))
    starts = torch.tensor([0, 40]), torch.tensor([0, 3])
    torch.library.opcheck(
        torch.ops.phsa.attention_cached.default, (q, k, v, flags, reps, lens, lens, *starts, *settings)
    )


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_into_one_graph(dynamic: bool) -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, flags: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, ...]:
        out, lse = ops.phsa_attention(q * 2, k, v, flags, cu_seqlens=cu_seqlens, **SMALL)
        (chosen, _), reps = ops.select(q, k, flags, **SMALL), ops.representatives(k, flags)
        return out.sin(), lse, chosen, reps

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens in (200, 230):
        q, k, v, flags = make(tokens)
        cu_seqlens = torch.tensor([0, 70, tokens], dtype=torch.int32)
        results = []
        for function in (step, compiled):
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            outputs = function(*leaves, flags, cu_seqlens)
            outputs[0].sum().backward()
            results.append((*(x.detach() for x in outputs), *(x.grad for x in leaves)))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)


def _attend_in_child(seed: int) -> Tensor:
    torch.manual_seed(seed)
    q, k, v, flags = make(600)
    return ops.phsa_attention(q, k, v, flags, **SMALL, backend="cpu")[0]


def _send_from_child(connection: object) -> None:
    connection.send(_attend_in_child(3).numpy().tobytes())
    connection.close()


@pytest.mark.usefixtures("two_threads")
def test_works_in_a_forked_child_after_its_parent_used_threads() -> None:
    want = _attend_in_child(3).numpy().tobytes()  # the parent's pool runs
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send_from_child, args=(sender,))
    child.start()
    try:
        assert receiver.poll(60), "the child hangs"
        assert receiver.recv() == want
        child.join(60)
        assert child.exitcode == 0
    finally:
        child.kill()
    assert _attend_in_child(3).numpy().tobytes() == want


class _Dataset(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return _attend_in_child(index)


@pytest.mark.usefixtures("two_threads")
def test_works_in_data_loader_workers() -> None:
    _attend_in_child(0)  # the parent's pool runs
    loader = torch.utils.data.DataLoader(_Dataset(), num_workers=2, batch_size=None, timeout=60)
    for index, out in enumerate(loader):
        assert torch.equal(out, _attend_in_child(index))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": -1}, "top_k is -1; allowed: 0 to 65536"),
        ({"top_k": 1.5}, "top_k is 1.5"),
        ({"lam": 1.5}, "lam is 1.5; allowed: a number from 0 to 1"),
        ({"lam": float("nan")}, "lam is nan"),
        ({"head_lambda": (0.5, 0.5, 0.5)}, "one per KV head"),
        ({"block": 24}, "block is 24; allowed: 16, 32, 64"),
        ({"init": 20}, "init is 20; allowed: multiples of 16"),
        ({"local": -16}, "local is -16"),
        ({"dense_below": 3}, "dense_below is 3"),
        ({"policy": "sepllm"}, "allowed: " + ", ".join(POLICIES)),
        ({"policy": "infllm2-64", "block": 16}, "64 with infllm2-64"),
        ({"group_reduce": "mean"}, "allowed: sum, max, none"),
        ({"scale": -1.0}, "scale is -1.0"),
        ({"backend": "gpu"}, "allowed: auto, cpu, cuda, torch"),
        ({"cu_seqlens": [0, 50]}, "from 0 to 50; allowed: from 0 to the number of tokens, 100"),
        ({"cu_seqlens": [20, 60, 120]}, "from 20 to 120; allowed: from 0"),
        ({"cu_seqlens": torch.tensor([1, 100])}, "from 1 to 100; allowed: from 0"),
        ({"cu_seqlens": [0, 70, 60, 100]}, "sequence 1"),
        ({"cu_seqlens": [0]}, "sequences \\+ 1"),
        ({"cu_seqlens": torch.tensor([0.0, 100.0])}, "int32"),
        ({"q_lens": [100]}, "go together"),
        ({"q_lens": [100], "kv_lens": [90]}, "key lengths sum to 90"),
        ({"q_lens": [60, 40], "kv_lens": [40, 60]}, "0 <= queries <= keys"),
    ],
    ids=str,
)
def test_bad_settings_are_refused_with_what_is_allowed(change: dict, message: str) -> None:
    q, k, v, flags = make(100)
    with pytest.raises(ValueError, match=message):
        ops.phsa_attention(q, k, v, flags, **{**SMALL, **change})


def test_bad_tensors_are_refused() -> None:
    q, k, v, flags = make(100)
    bad = {
        "head_dim": (q[..., :32], k, v, flags),
        "multiple of the 3 KV heads": (q, torch.randn(100, 3, 64), torch.randn(100, 3, 64), flags),
        "v has the shape": (q, k, v[:50], flags),
        "flags have the shape": (q, k, v, flags[:50]),
        "flags are torch.float32": (q, k, v, flags.float()),
        "k is torch.bfloat16": (q, k.bfloat16(), v, flags),
        "100 queries but 50 keys": (q, k[:50], v[:50], flags[:50]),
        "allowed: 3": (q[0], k[0], v[0], None),
        "q is torch.int32": (q.int(), k.int(), v.int(), flags),
    }
    for message, args in bad.items():
        with pytest.raises(ValueError, match=message):
            ops.phsa_attention(*args, **SMALL)
    with pytest.raises(ValueError, match=r"the cpu backend has torch\.float64"):
        ops.phsa_attention(q.double(), k.double(), v.double(), flags, **SMALL, backend="cpu")
    with pytest.raises(ValueError, match="which has none"):
        ops.representatives(k, flags, policy="dense")


def test_the_library_judges_settings_too() -> None:
    q, k, v, flags = make(100)
    lens = torch.tensor([100], dtype=torch.int32)
    start = torch.tensor([0])
    out, lse = torch.empty_like(q), torch.empty(100, 4)
    selection = torch.empty(100, 2, 1, dtype=torch.int32)

    def forward(block: int, out: Tensor) -> None:
        settings = (1, block, 16, 16, 1, 0.5, None, 0, 0, 1, 0)
        args = (q, k, v, flags, None, lens, lens, start, start, *settings, 0.125)
        ops._kernel("forward", q.device, args, (out, lse, selection, None))

    with pytest.raises(ValueError, match="block_size is 17; allowed: 16, 32, 64"):
        forward(17, out)
    with pytest.raises(ValueError, match="out has another shape"):
        forward(16, out[:50])
    forward(16, out)


@pytest.mark.parametrize("policy", POLICIES)
def test_pytorch_keeps_to_the_device_of_its_tensors(policy: str) -> None:
    """Every operation checks devices, also on tensors that are only described: no GPU is needed for that."""
    settings = Settings(**options(policy, dense_below=64, init=64))
    slots = _fallback.Blocks.of(settings).top_k
    width = _fallback.Blocks.of(settings).rep_width(64)
    with FakeTensorMode() as mode, torch.device("cuda"):
        q, k = torch.empty(600, 4, 64, dtype=torch.bfloat16), torch.empty(600, 2, 64, dtype=torch.bfloat16)
        flags, reps = torch.empty(600, dtype=torch.uint8), torch.empty(60, 2, width, dtype=torch.bfloat16)
        out, lse = torch.empty_like(q), torch.empty(600, 4)
        selection, scores = torch.empty(600, 2, slots, dtype=torch.int32), torch.empty(600, 2, slots)
    with mode:
        seqs = [_fallback.Sequence(0, 600, 0, 600, 0)]
        _fallback.write_reps(k, flags, reps, seqs, settings)
        _fallback.forward(q, k, k, flags, None, seqs, settings, 0.125, out, lse, selection, scores)
        grads = _fallback.backward(q, k, k, out, lse, selection, out, seqs, settings, 0.125)
    assert all(grad.device.type == "cuda" for grad in grads)


def test_tiles_cover_every_query_once_and_stay_small() -> None:
    for settings in (
        Settings(),
        Settings(top_k=0, init=0, local=0),
        Settings(policy="dense"),
        Settings(policy="infllm2-64"),
        Settings(top_k=4096, dense_below=2048),
    ):
        blocks = _fallback.Blocks.of(settings)
        for q_len, kv_len in ((1, 1), (5000, 5000), (777, 70000), (1, 70000)):
            row = 0
            for tile in _fallback.tiles(q_len, kv_len, blocks, 16, 8, 128, blocks.top_k):
                assert tile.row == row and tile.queries > 0 and tile.position == kv_len - q_len + row
                for position in (tile.position, tile.position + tile.queries - 1):
                    assert blocks.reads_all(position // blocks.block) == tile.everything
                if tile.everything:
                    assert tile.queries == 1 or tile.queries * 16 * kv_len <= _fallback._TILE_ELEMENTS
                row += tile.queries
            assert row == q_len


def test_the_package_says_what_is_missing_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import phsa; assert phsa.Settings().top_k == 16\n"
        "import phsa.punctuation\n"
        "try:\n  import phsa.ops\n"
        "except ImportError as error:\n  print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "phsa.ops needs PyTorch" in done.stdout


def test_the_operators_are_compiled_at_first_use_where_the_installation_has_none(tmp_path: Path) -> None:
    library = _library.find("libphsa.so")
    assert library is not None
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / f"libphsa.so.{_library.ABI_VERSION}").symlink_to(library.resolve())
    code = (
        "import torch; from phsa import ops; torch.manual_seed(0)\n"
        "q = torch.randn(300, 2, 64)\n"
        "same = [ops.phsa_attention(q, q, q, top_k=1, init=16, local=16, backend=b)[0] for b in ('cpu', 'torch')]\n"
        "torch.testing.assert_close(*same)\n"
        "print(ops.backends()[0], ops.missing_kernels())\n"
    )
    env = {**os.environ, "PHSA_LIBRARY_PATH": str(tmp_path / "lib"), "PHSA_CACHE": str(tmp_path / "cache")}
    env |= {"PYTHONPATH": str(Path(phsa.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    env.pop("PHSA_TORCH", None)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout == "cpu None\n" and "compiling the PyTorch operators, once" in done.stderr, done.stderr
    (built,) = (tmp_path / "cache/torch").glob("*/libphsa_torch.so")
    assert built.stat().st_mode & 0o777 == 0o755


def test_without_kernels_the_reason_is_said_once_and_pytorch_runs(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PHSA_CACHE", str(tmp_path))
    monkeypatch.delenv("PHSA_TORCH", raising=False)
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(_build.BuildError, match=r"cannot be compiled \(no message\); all of it is in .*/log"):
        _build.operators()
    monkeypatch.setenv("CXX", "")
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(_build.BuildError, match="no C\\+\\+ compiler: install one"):
        _build.operators()
    monkeypatch.setenv("PHSA_TORCH", "off")
    with pytest.raises(_build.BuildError, match="PHSA_TORCH is OFF"):
        _build.operators()
    monkeypatch.setattr(ops, "_load", lambda: "there is no compiler")
    ops._warn.cache_clear()
    q, k, v, flags = make(60)
    with pytest.warns(UserWarning, match="plain PyTorch is many times slower: there is no compiler"):
        ops.phsa_attention(q, k, v, flags, **SMALL)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ops.phsa_attention(q, k, v, flags, **SMALL)
    with pytest.raises(RuntimeError, match="the cpu backend is not there: there is no compiler"):
        ops.phsa_attention(q, k, v, flags, **SMALL, backend="cpu")


def test_targets_can_be_listed_and_chosen() -> None:
    names = phsa.targets()
    assert names[-1] == "reference" and phsa.target() in names
    q, k, v, flags = make(200)
    used = phsa.target()
    results = []
    try:
        for name in names:
            phsa.set_target(name)
            assert phsa.target() == name
            results.append(ops.phsa_attention(q, k, v, flags, **SMALL, backend="cpu")[0])
        with pytest.raises(ValueError, match="allowed"):
            phsa.set_target("abacus")
    finally:
        phsa.set_target(used)
    for out in results:
        close = torch.isclose(out, results[-1], atol=2e-6, rtol=1e-5).flatten(1).all(1)
        assert (~close).sum() <= 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("policy", ["dense", "phsa"])
@pytest.mark.parametrize("lengths", [{}, {"cu_seqlens": [0, 70, 70, 200]}, {"batch": True}], ids=str)
def test_the_eager_way_gives_the_bits_of_the_operator(backend: str, policy: str, lengths: dict) -> None:
    inputs = make(200, dtype=DTYPE[backend])
    lengths = dict(lengths)
    if lengths.pop("batch", False):
        inputs = tuple(x.unflatten(0, (2, 100)) for x in inputs)
    kwargs = {**options(policy), **lengths, "backend": backend, "return_selection": True}
    runs = []
    for eager in (True, False):
        leaves = [x.clone().requires_grad_() for x in inputs[:3]]
        with pytest.MonkeyPatch.context() as patch:
            if not eager:
                patch.setattr(ops, "_is_eager", lambda *tensors: False)
            out, lse, selection = ops.phsa_attention(*leaves, inputs[3], **kwargs)
        assert out.requires_grad and not lse.requires_grad
        (out * torch.arange(out.numel()).view(out.shape)).sum().backward()
        without = ops.phsa_attention(*inputs, **kwargs)
        assert not without[0].requires_grad
        runs.append([out.detach(), lse, selection, *(x.grad for x in leaves), *without])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_a_call_is_checked_once_and_anew_where_anything_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    take = ops._Call.prepare
    monkeypatch.setattr(ops._Call, "prepare", lambda call: checked.append(1) or take(call))
    monkeypatch.setattr(ops, "_PREPARED", {})
    q, k, v, flags = make(100)
    first = ops.phsa_attention(q, k, v, flags, **SMALL)
    again = ops.phsa_attention(q.clone(), k, v, flags, **SMALL)
    assert len(checked) == 1
    assert torch.equal(first[0], again[0])
    for changes in (
        {"top_k": 1},
        {"lam": 0.7},
        {"lam": [0.6, 0.7]},
        {"scale": 0.5},
        {"policy": "dense"},
        {"group_reduce": "max"},
        {"backend": "torch"},
        {"cu_seqlens": [0, 50, 100]},
        {"cu_seqlens": torch.tensor([0, 51, 100])},
        {"q_lens": [100], "kv_lens": [100]},
    ):
        before = len(checked)
        for _ in range(2):
            ops.phsa_attention(q, k, v, flags, **{**SMALL, **changes})
        assert len(checked) == before + 1, changes
    # What was refused once is refused again.
    for _ in range(2):
        with pytest.raises(ValueError, match="cu_seqlens goes from 0 to 99"):
            ops.phsa_attention(q, k, v, flags, **SMALL, cu_seqlens=[0, 99])
        with pytest.raises(ValueError, match="k has 3 dimensions, q has 4"):
            ops.phsa_attention(q[None], k, v, flags, **SMALL)
        with pytest.raises(ValueError, match="top_k"):
            ops.phsa_attention(q, k, v, flags, top_k=-1)


def test_the_number_of_prepared_calls_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_MOST_PREPARED", 3)
    monkeypatch.setattr(ops, "_PREPARED", {})
    for tokens in range(20, 30):
        q, k, v, flags = make(tokens)
        ops.phsa_attention(q, k, v, flags, **SMALL)
        assert len(ops._PREPARED) <= 3


def test_a_second_derivative_is_refused_in_eager_mode_too() -> None:
    q, k, v, flags = make(40)
    q.requires_grad_()
    out, _ = ops.phsa_attention(q, k, v, flags, **SMALL)
    (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        grad.sum().backward()
