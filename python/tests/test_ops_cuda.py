"""The CUDA kernels behind the operators and the C ABI. What needs no GPU is tested everywhere."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from phsa import Settings, _library, ops

SMALL = {"top_k": 3, "lam": 0.6, "init": 16, "local": 32}
needs_gpu = pytest.mark.skipif("cuda" not in ops.backends(), reason="needs a CUDA device and a build for it")


def make(
    tokens: int, q_heads: int = 4, kv_heads: int = 2, head_dim: int = 128, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    q, k, v = (torch.randn(tokens, heads, head_dim, generator=generator) for heads in (q_heads, kv_heads, kv_heads))
    flags = (torch.rand(tokens, generator=generator) < 0.15).to(torch.uint8)
    return (*(x.to("cuda", dtype) for x in (q, k, v)), flags.cuda())


def relative_error(got: Tensor, want: Tensor) -> float:
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm())


# ---------------------------------------------------------------------------------------------------------------------
# Without a GPU.


def test_tensors_on_the_cpu_are_refused_by_the_cuda_backend() -> None:
    q, k = torch.randn(100, 4, 64).bfloat16(), torch.randn(100, 2, 64).bfloat16()
    with pytest.raises(ValueError, match=r"the cuda backend has torch.bfloat16 on cpu; allowed: tensors on a CUDA"):
        ops.phsa_attention(q, k, k, **SMALL, backend="cuda")


@pytest.mark.skipif(
    ops.missing_kernels() is not None or not _library.has_cuda(), reason="needs a build with CUDA, but no GPU"
)
@pytest.mark.parametrize(
    ("tensors", "settings", "message"),
    [
        ({}, {}, None),
        ({"dtype": torch.float32}, {}, "dtype: the CUDA kernels take bf16 and fp16"),
        ({"dtype": torch.float64}, {}, "torch.float64; allowed: float16, bfloat16"),
        ({"head_dim": 80}, {}, None),
        ({"head_dim": 256}, {}, None),
        ({"head_dim": 72}, {}, "head_dim is 72; allowed: 64, 80, 96, 128, 256"),
        ({"q_heads": 34}, {}, "group: the CUDA kernels take up to 16 query heads a KV head"),
        ({"keys": 1 << 20}, {}, None),
        ({"keys": 1 << 21}, {}, "kv_len: the CUDA kernels take up to 1048576 tokens"),
        ({}, {"policy": "quest"}, "the CUDA kernels take the policies dense, phsa, infllm2 and streaming"),
        ({}, {"block": 32, "init": 32}, "block_size is 32; the CUDA kernels take 16"),
        ({}, {"top_k": 65}, "top_k: the CUDA kernels take 0 to 64"),
        ({}, {"parts": 4}, None),
        ({}, {"parts": 4, "survivors": 64}, "survivors is 64; the CUDA kernels score the parts of all blocks (0)"),
        ({}, {"group_reduce": "none"}, None),
        ({}, {"lam": (0.5, 0.9)}, None),
    ],
    ids=str,
)
def test_what_the_cuda_kernels_cannot_do_is_named_by_the_library(
    tensors: dict, settings: dict, message: str | None
) -> None:
    sizes = {"dtype": torch.bfloat16, "q_heads": 4, "kv_heads": 2, "head_dim": 64, "keys": 32, **tensors}
    assert ops._misfit("cuda", *sizes.values(), Settings(**{**SMALL, "block": 16, **settings})) == message


class _CSettings(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        *((name, ctypes.c_int32) for name in ("policy", "block_size", "init_tokens", "local_tokens", "top_k")),
        ("lambda_", ctypes.c_float),
        ("group_reduce", ctypes.c_int32),
        ("dense_below", ctypes.c_int32),
        ("head_lambda", ctypes.c_void_p),
        ("parts", ctypes.c_int32),
        ("survivors", ctypes.c_int32),
    ]


class _CPlanDesc(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("settings", ctypes.POINTER(_CSettings)),
        *((name, ctypes.c_int32) for name in ("dtype", "num_q_heads", "num_kv_heads", "head_dim", "num_seqs")),
        *((name, ctypes.c_void_p) for name in ("q_lens", "kv_lens", "kv_starts", "rep_starts")),
        ("page_size", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("max_threads", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("device", ctypes.c_int32),
    ]


def plan(
    tokens: int, head_dim: int = 128, dtype: int = 2, struct_size: int = 0, device: int = 1
) -> tuple[int, str, int]:
    """The status, message and workspace size of a plan with 16 and 8 heads for one sequence."""
    library = _library.load()
    library.phsa_plan_workspace_size.restype = ctypes.c_size_t
    library.phsa_plan_workspace_size.argtypes = [ctypes.c_void_p]
    library.phsa_plan_destroy.argtypes = [ctypes.c_void_p]
    settings = _CSettings(ctypes.sizeof(_CSettings), 1, 16, 128, 512, 16, 0.9, parts=1, survivors=0)
    lens = (ctypes.c_int32 * 1)(tokens)
    desc = _CPlanDesc(
        struct_size or ctypes.sizeof(_CPlanDesc), ctypes.pointer(settings), dtype, 16, 8, head_dim, 1,
        ctypes.addressof(lens), ctypes.addressof(lens), device=device,
    )  # fmt: skip
    handle = ctypes.c_void_p()
    status = library.phsa_plan_create(ctypes.byref(desc), ctypes.byref(handle))
    if status != 0:
        return status, library.phsa_last_error().decode(), 0
    size = library.phsa_plan_workspace_size(handle)
    library.phsa_plan_destroy(handle)
    return status, "", size


def test_a_caller_with_an_older_header_gets_a_plan_for_the_cpu() -> None:
    old = plan(1000, struct_size=_CPlanDesc.device.offset, device=1)  # a field that such a caller does not have
    assert old == plan(1000, device=0)
    assert old[0] == 0
    status, message, _ = plan(1000, struct_size=_CPlanDesc.device.offset - 4)
    assert status == 2
    assert "struct_size is 84; allowed: 88, 96 or 104" in message


def test_an_unknown_device_is_refused() -> None:
    status, message, _ = plan(1000, device=7)
    assert status == 2
    assert "device is 7; allowed: 0 (the CPU), 1 (CUDA)" in message


@pytest.mark.skipif(_library.has_cuda(), reason="this build has CUDA")
def test_a_build_without_cuda_says_so() -> None:
    status, message, _ = plan(1000)
    assert status == 3
    assert "this build has no CUDA" in message


@pytest.mark.skipif(not _library.has_cuda(), reason="this build has no CUDA")
def test_a_plan_for_cuda_has_a_bounded_workspace_and_refuses_by_name() -> None:
    sizes = [plan(tokens)[2] for tokens in (0, 1000, 4096, 32768, 131072)]
    assert sizes == sorted(sizes)
    assert 0 < sizes[0] < sizes[1]
    assert sizes[-1] <= 1 << 30
    assert all(plan(1000, head_dim=dim)[0] == 0 for dim in (64, 80, 96, 128, 256))
    assert plan(1000, dtype=0) == (3, "plan: dtype: the CUDA kernels take bf16 and fp16", 0)


# ---------------------------------------------------------------------------------------------------------------------
# With one. Each test compares with plain PyTorch in float64 on the same values.


@needs_gpu
@pytest.mark.parametrize("policy", ["dense", "phsa", "infllm2", "streaming"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("parts", "group_reduce"), [(1, "sum"), (4, "sum"), (1, "none")])
def test_forward_and_backward_agree_with_pytorch(
    policy: str, dtype: torch.dtype, head_dim: int, parts: int, group_reduce: str
) -> None:
    if policy not in ("phsa", "infllm2") and (parts > 1 or group_reduce != "sum"):
        pytest.skip("this policy chooses nothing")
    q, k, v, flags = make(700, head_dim=head_dim, dtype=dtype)
    kwargs = {
        **SMALL,
        "policy": policy,
        "parts": parts,
        "group_reduce": group_reduce,
        "cu_seqlens": [0, 250, 700],
        "return_selection": True,
    }
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse, selection = ops.phsa_attention(*leaves, flags, **kwargs, backend="cuda")
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    want, want_lse, want_selection = ops.phsa_attention(*exact, flags, **kwargs, backend="torch")
    # Representatives are rounded to the cache's type here and not there: near ties may turn.
    assert (selection != want_selection).any(-1).float().mean() < 0.05
    same = ~(selection != want_selection).any(-1).any(-1)
    assert relative_error(out[same], want[same]) < 6e-3
    assert (lse[same] - want_lse[same]).abs().max() < 5e-3
    d_out = torch.randn_like(out)
    d_out[~same] = 0
    out.backward(d_out)
    want.backward(d_out.double())
    for got, reference in zip(leaves, exact, strict=True):
        assert relative_error(got.grad, reference.grad) < 1.5e-2


@needs_gpu
def test_two_runs_give_the_same_bits() -> None:
    q, k, v, flags = make(3000, q_heads=16, kv_heads=8)
    runs = []
    for _ in range(2):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out, lse, selection = ops.phsa_attention(*leaves, flags, top_k=8, return_selection=True, backend="cuda")
        out.backward(torch.ones_like(out))
        runs.append([out.detach(), lse, selection, *(x.grad for x in leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@needs_gpu
@pytest.mark.parametrize("parts", [1, 2, 8])
def test_representatives_and_selection_alone(parts: int) -> None:
    q, k, _, flags = make(900)
    got = ops.representatives(k, flags, lam=0.6, cu_seqlens=[0, 400, 900], backend="cuda")
    want = ops.representatives(k.double(), flags, lam=0.6, cu_seqlens=[0, 400, 900], backend="torch")
    assert relative_error(got, want) < 3e-3
    small = {**SMALL, "parts": parts, "cu_seqlens": [0, 400, 900]}
    selection, scores = ops.select(q, k, flags, **small, backend="cuda")
    again = ops.phsa_attention(q, k, k, flags, **small, return_selection=True, backend="cuda")
    assert torch.equal(selection, again[2])
    assert ((scores > 0) == (selection >= 0)).all()


@needs_gpu
@pytest.mark.parametrize("step", [1, 100])
@pytest.mark.parametrize("parts", [1, 4])
def test_a_cache_gives_what_one_pass_gives(step: int, parts: int) -> None:
    """Decoding (one query) and chunks, on representatives that are kept."""
    tokens = 640
    q, k, v, flags = make(tokens, q_heads=8)
    settings = ("phsa", 16, 16, 32, 3, [0.6], "sum", 0, parts, 0, 128**-0.5, "cuda")
    whole, _ = ops.phsa_attention(q, k, v, flags, **SMALL, parts=parts, backend="cuda")
    reps = torch.full((tokens // 16 * parts, 2, 128), float("nan"), dtype=q.dtype, device="cuda")
    zero = torch.tensor([0])
    for begin in range(0, tokens, step):
        end = begin + step if begin + step <= tokens else tokens
        if step == 1 and begin == 0:
            end = 500  # a prompt first
        elif step == 1 and begin < 500:
            continue
        lens = torch.tensor([end - begin], dtype=torch.int32), torch.tensor([end], dtype=torch.int32)
        out, _, _ = ops._attention_cached(q[begin:end], k, v, flags, reps, *lens, zero, zero, *settings)
        assert relative_error(out, whole[begin:end]) < 6e-3


@needs_gpu
def test_a_cuda_graph_replays_it() -> None:
    q, k, v, flags = make(2000, q_heads=16, kv_heads=8)
    call = lambda: ops.phsa_attention(q, k, v, flags, top_k=8, backend="cuda")[0]  # noqa: E731
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    fresh = torch.randn(q.shape, device="cuda").to(q.dtype)
    q.copy_(fresh)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, call())


@needs_gpu
def test_rows_that_the_kernels_cannot_load_are_copied_first() -> None:
    q, k, v, flags = make(300, head_dim=64)
    odd = torch.empty(300, 4, 65, dtype=q.dtype, device="cuda")[..., 1:]
    odd.copy_(q)
    want = ops.phsa_attention(q, k, v, flags, **SMALL, backend="cuda")[0]
    assert torch.equal(ops.phsa_attention(odd, k, v, flags, **SMALL, backend="cuda")[0], want)


@needs_gpu
def test_auto_takes_pytorch_for_what_the_kernels_cannot_do() -> None:
    q, k, v, flags = make(300, head_dim=64, dtype=torch.float32)
    got = ops.phsa_attention(q, k, v, flags, **SMALL)
    want = ops.phsa_attention(q, k, v, flags, **SMALL, backend="torch")
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@needs_gpu
def test_paged_decode_reads_its_lengths_when_a_graph_is_replayed() -> None:
    """As phsa.vllm calls it: keys and values side by side, heads inside tokens, lengths on the device."""
    generator = torch.Generator().manual_seed(3)
    pages, page_size, heads, kv_heads, head_dim = 64, 16, 4, 2, 128
    cache = torch.randn(pages, page_size, kv_heads, 2 * head_dim, generator=generator).to("cuda", torch.bfloat16)
    k, v = cache.split(head_dim, dim=-1)
    reps = torch.zeros(pages, 1, kv_heads, head_dim, dtype=torch.bfloat16, device="cuda")
    flags = (torch.rand(pages, page_size, generator=generator) < 0.15).to("cuda", torch.uint8)
    table = torch.randperm(pages, generator=generator)[:60].reshape(2, 30).to("cuda", torch.int32)
    settings = Settings(**SMALL)
    options = {"settings": settings, "page_table": table, "reps": reps, "flags": flags}
    # What was prefilled: all representatives.
    whole = torch.tensor([400, 300], dtype=torch.int32)
    q = torch.randn(700, heads, head_dim, generator=generator).to("cuda", torch.bfloat16)
    ops.paged_attention(q, k, v, q_lens=whole, kv_lens=whole, out=torch.empty_like(q), **options)

    q = torch.randn(2, heads, head_dim, generator=generator).to("cuda", torch.bfloat16)
    out = torch.empty_like(q)
    ones = torch.ones(2, dtype=torch.int32)
    lens = torch.tensor([400, 300], dtype=torch.int32, device="cuda")

    def decode() -> None:
        ops.paged_attention(q, k, v, q_lens=ones, kv_lens=ones * 480, device_lens=lens, out=out, **options)

    decode()  # before it is captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode()
    for lengths in ([400, 300], [401, 290], [250, 0]):
        lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        for i, length in enumerate(lengths):
            if length == 0:
                assert (out[i] == 0).all()
                continue
            rows = table[i].long()
            keys, values, marks = (x[rows].flatten(0, 1)[:length] for x in (k, v, flags))
            want, _ = ops.phsa_attention(
                q[i : i + 1], keys.contiguous(), values.contiguous(), marks.contiguous(), **SMALL
            )
            assert relative_error(out[i], want[0]) < 2e-2
