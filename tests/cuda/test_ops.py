"""The decoder's operations on the GPU (src/ops/cuda) against float64 PyTorch.

scripts/test-cuda.sh builds the library and runs this file; PHSA_CUDA_KERNELS names the library where it lies elsewhere.
"""

import ctypes
import math
import os
import sys
from ctypes import c_bool, c_double, c_float, c_int32, c_int64, c_size_t, c_void_p
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from alone import run_tests, skip

if not torch.cuda.is_available():
    skip("needs a GPU")

TOP = 64
BF16 = 2.0**-8  # half a unit in the last place of bf16, relative
CUDA = "cuda"


class NormParams(ctypes.Structure):
    _fields_ = [
        ("m", c_int32),
        ("dim", c_int32),
        ("x", c_void_p),
        ("weight", c_void_p),
        ("eps", c_float),
        ("out", c_void_p),
    ]


class KeepParams(ctypes.Structure):
    _fields_ = [
        ("m", c_int32),
        ("x_dim", c_int32),
        ("y_dim", c_int32),
        ("rows", c_void_p),
        ("x", c_void_p),
        ("y", c_void_p),
        ("kept_x", c_void_p),
        ("kept_y", c_void_p),
    ]


class RowsParams(ctypes.Structure):
    _fields_ = [
        ("m", c_int32),
        ("half", c_int32),
        ("positions", c_void_p),
        ("frequencies", c_void_p),
        ("factor", c_float),
        ("cos_sin", c_void_p),
        ("flags", c_void_p),
        ("flag_rows", c_void_p),
        ("pages", c_void_p),
    ]


class HeadsParams(ctypes.Structure):
    _fields_ = [
        ("m", c_int32),
        ("num_q_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("qkv", c_void_p),
        ("cos_sin", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("eps", c_float),
        ("f16", c_bool),
        ("queries", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("cache_rows", c_void_p),
        ("cache_head_stride", c_int64),
    ]


class TopParams(ctypes.Structure):
    _fields_ = [
        ("m", c_int32),
        ("vocab", c_int32),
        ("logits", c_void_p),
        ("logits_stride", c_int64),
        ("asked", c_void_p),
        ("out", c_void_p),
        ("workspace", c_void_p),
    ]


class TopEntry(ctypes.Structure):
    _fields_ = [("token", c_int32), ("logit", c_float)]


class TopLogits(ctypes.Structure):
    _fields_ = [
        ("log_sum_exp", c_double),
        ("asked", c_float),
        ("finite", c_int32),
        ("count", c_int32),
        ("top", TopEntry * TOP),
    ]


class MatrixView(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("scales", c_void_p), ("factors", c_void_p)]


class FewRowsParams(ctypes.Structure):
    _fields_ = [
        ("result", c_int32),
        ("m", c_int32),
        ("n", c_int32),
        ("k", c_int32),
        ("weights", MatrixView),
        ("bias", c_void_p),
        ("x", c_void_p),
        ("norm", c_void_p),
        ("eps", c_float),
        ("y", c_void_p),
    ]


class SomeRowsParams(ctypes.Structure):
    _fields_ = [
        ("m", c_int32),
        ("n", c_int32),
        ("k", c_int32),
        ("weights", MatrixView),
        ("bias", c_void_p),
        ("x", c_void_p),
        ("y", c_void_p),
        ("add_to_f32", c_bool),
    ]


TO_BF16, SILU_MUL, ADD_TO_F32 = range(3)


def load_library():
    default = Path(__file__).resolve().parents[2] / "build/cuda/libphsa_cuda_kernels.so"
    library = ctypes.CDLL(os.environ.get("PHSA_CUDA_KERNELS", str(default)))
    library.phsa_ops_params_size.restype = c_size_t
    library.phsa_ops_top_workspace.restype = c_size_t
    structs = (NormParams, RowsParams, HeadsParams, TopParams, TopLogits, FewRowsParams, SomeRowsParams, KeepParams)
    for i, struct in enumerate(structs):
        assert library.phsa_ops_params_size(i) == ctypes.sizeof(struct), struct
    return library


LIBRARY = load_library()


def check(error):
    assert error == 0, f"CUDA error {error}"
    torch.cuda.synchronize()


def address(tensor):
    return c_void_p(tensor.data_ptr() if tensor is not None else None)


def norm64(x, weight, eps):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def assert_rounded(got, want, what, slack=1e-5):
    """`got` is `want` rounded once to its dtype, apart from sums in f32."""
    unit = 2.0**-11 if got.dtype == torch.float16 else BF16
    error = (got.double() - want).abs() - unit * want.abs()
    assert error.max().item() <= slack * want.abs().max().item(), f"{what}: off by {error.max().item()}"


def test_rows_that_are_kept_are_those_that_were_named():
    for m, x_dim, y_dim in ((1, 8, 64), (128, 576, 576), (5, 1536, 4096), (97, 5000, 8)):
        rows = torch.randperm(300, device=CUDA, dtype=torch.int32)[:m].contiguous()
        x = torch.randn(300, x_dim, device=CUDA)
        y = torch.randn(300, y_dim, device=CUDA).bfloat16()
        kept_x = torch.full((m + 1, x_dim), 7.0, device=CUDA)
        kept_y = torch.full((m + 1, y_dim), 7.0, device=CUDA, dtype=torch.bfloat16)
        pointers = (each.data_ptr() for each in (rows, x, y, kept_x, kept_y))
        check(LIBRARY.phsa_ops_keep(ctypes.byref(KeepParams(m, x_dim, y_dim, *pointers))))
        for kept, source in ((kept_x, x), (kept_y, y)):
            assert torch.equal(kept[:m], source[rows.long()])
            assert (kept[m] == 7).all()


def test_norm_of_all_rows_named_rows_and_embedded_tokens():
    for dim in (64, 576, 1024, 4096, 5000):
        m, vocab = 37, 211
        x = torch.randn(m, dim, device=CUDA) * 3
        weight = torch.rand(dim, device=CUDA) + 0.5
        embedding = torch.randn(vocab, dim, device=CUDA).bfloat16()
        tokens = torch.randint(vocab, (m,), device=CUDA, dtype=torch.int32)
        rows = torch.randperm(m, device=CUDA, dtype=torch.int32)[:11].contiguous()
        out = torch.full((m, dim), math.nan, device=CUDA, dtype=torch.bfloat16)
        params = NormParams(m, dim, x.data_ptr(), weight.data_ptr(), 1e-6, out.data_ptr())
        check(LIBRARY.phsa_ops_norm(ctypes.byref(params), None, None))
        assert_rounded(out, norm64(x, weight, 1e-6), f"norm of {dim}")
        params.m = 11
        check(LIBRARY.phsa_ops_norm(ctypes.byref(params), address(rows), None))
        assert_rounded(out[:11], norm64(x[rows.long()], weight, 1e-6), f"norm of named rows of {dim}")
        params.m = m
        check(LIBRARY.phsa_ops_norm(ctypes.byref(params), address(tokens), address(embedding)))
        assert torch.equal(x, embedding[tokens.long()].float())
        assert_rounded(out, norm64(x, weight, 1e-6), f"norm of embedded tokens of {dim}")


class Weights:
    """Random weights [matrices][n][k]: `values` are what the kernels multiply with, exactly, in float64."""

    def __init__(self, matrices, n, k, int8):
        values = torch.randn(matrices, n, k, device=CUDA) / k**0.5
        self.codes = self.scales = self.factors = None
        if int8:
            # Scales that spread over much of f16's range, and the powers of two that bring them back.
            self.codes = torch.randint(256, (matrices, n, k), device=CUDA, dtype=torch.uint8)
            powers = torch.randint(-22, -7, (matrices, n, 1), device=CUDA).double()
            self.factors = (2**powers).float()
            scales = (torch.rand(matrices, n, k // 32, device=CUDA) + 0.1) / (100 * k**0.5)
            self.scales = (scales / self.factors).half()
            scales = (self.scales.double() * self.factors).repeat_interleave(32, -1)
            self.values = (self.codes.double() - 128) * scales
        else:
            self.data = values.bfloat16()
            self.values = self.data.double()

    def view(self):
        if self.codes is None:
            return MatrixView(self.data.data_ptr())
        return MatrixView(self.codes.data_ptr(), self.scales.data_ptr(), self.factors.data_ptr())


def test_products_of_a_few_rows():
    # 96, 544 and 3008 columns leave lanes of the last stride without work, in int8 too.
    for n, k in ((1, 64), (9, 96), (1000, 576), (33, 544), (4096, 1024), (1024, 3072), (513, 3008), (37, 5632)):
        for m in (1, 2, 3, 4):
            for result in (TO_BF16, SILU_MUL, ADD_TO_F32):
                for biased in (False, True):
                    for int8 in (False, True):
                        check_few_rows(n, k, m, result, biased, int8)
    # More than fits into shared memory is refused, not wrong; so are groups of int8 weights that are not whole.
    assert LIBRARY.phsa_ops_few_rows(ctypes.byref(FewRowsParams(ADD_TO_F32, 4, 8, 8192))) != 0
    assert LIBRARY.phsa_ops_few_rows(ctypes.byref(FewRowsParams(ADD_TO_F32, 5, 8, 64))) != 0
    view = Weights(1, 8, 64, True).view()
    assert LIBRARY.phsa_ops_few_rows(ctypes.byref(FewRowsParams(ADD_TO_F32, 1, 8, 48, view))) != 0


def check_few_rows(n, k, m, result, biased, int8):
    name = f"{m} rows of {k} to {n}, result {result}, bias {biased}, int8 {int8}"
    matrices = 2 if result == SILU_MUL else 1
    weights = Weights(matrices, n, k, int8)
    bias = torch.randn(matrices, n, device=CUDA)
    norm = torch.rand(k, device=CUDA) + 0.5
    x = torch.randn(m, k, device=CUDA) * 2
    if result == ADD_TO_F32:
        x = x.bfloat16()
        y = torch.randn(m, n, device=CUDA)
        rows = x.double()
    else:
        bias = bias.bfloat16()
        y = torch.full((m, n), math.nan, device=CUDA, dtype=torch.bfloat16)
        rows = norm64(x, norm, 1e-6).bfloat16().double()
    want = torch.einsum("mk,ink->imn", rows, weights.values)
    if biased:
        want = want + bias.double()[:, None]
    want = want[0] / (1 + (-want[0]).exp()) * want[1] if result == SILU_MUL else want[0]
    if result == ADD_TO_F32:
        want = want + y.double()
    params = FewRowsParams(result, m, n, k, weights.view(), bias.data_ptr() if biased else None, x.data_ptr())
    params.norm, params.eps, params.y = norm.data_ptr(), 1e-6, y.data_ptr()
    check(LIBRARY.phsa_ops_few_rows(ctypes.byref(params)))
    # The result is rounded once, gate and up each once before that; a normed x may round to its neighbour.
    rounding = {TO_BF16: 1, SILU_MUL: 3, ADD_TO_F32: 0}[result] * BF16
    slack = 1e-5 if result == ADD_TO_F32 else 2e-3
    error = (y.double() - want).abs() - rounding * want.abs()
    assert error.max().item() <= slack * max(1.0, want.abs().max().item()), f"{name}: off by {error.max().item()}"


def test_products_of_some_rows():
    # From 2112 rows of weights on, blocks have 16 of them.
    for n, k in ((1, 32), (9, 96), (1000, 576), (1024, 3072), (2117, 64), (4096, 1024), (2200, 1056), (37, 8960)):
        for m in (1, 5, 8, 9, 16):
            for add_to_f32 in (False, True):
                for biased in (False, True):
                    check_some_rows(n, k, m, add_to_f32, biased)
    view = Weights(1, 8, 64, True).view()
    assert LIBRARY.phsa_ops_some_rows(ctypes.byref(SomeRowsParams(17, 8, 64, view))) != 0
    assert LIBRARY.phsa_ops_some_rows(ctypes.byref(SomeRowsParams(5, 8, 48, view))) != 0
    bf16 = Weights(1, 8, 64, False).view()
    assert LIBRARY.phsa_ops_some_rows(ctypes.byref(SomeRowsParams(5, 8, 64, bf16))) != 0


def check_some_rows(n, k, m, add_to_f32, biased):
    name = f"{m} rows of {k} to {n}, added {add_to_f32}, bias {biased}"
    dtype = torch.float32 if add_to_f32 else torch.bfloat16
    weights = Weights(1, n, k, True)
    x = (torch.randn(m, k, device=CUDA) * 2).bfloat16()
    bias = torch.randn(n, device=CUDA).to(dtype)
    y = torch.randn(m, n, device=CUDA).to(dtype)
    want = x.double() @ weights.values[0].T
    if biased:
        want = want + bias.double()
    if add_to_f32:
        want = want + y.double()
    params = SomeRowsParams(m, n, k, weights.view(), bias.data_ptr() if biased else None, x.data_ptr())
    params.y, params.add_to_f32 = y.data_ptr(), add_to_f32
    check(LIBRARY.phsa_ops_some_rows(ctypes.byref(params)))
    error = (y.double() - want).abs() - (0 if add_to_f32 else BF16) * want.abs()
    assert error.max().item() <= 1e-5 * max(1.0, want.abs().max().item()), f"{name}: off by {error.max().item()}"


def test_rows_of_products_have_the_same_bits_in_any_company():
    n, k = 100, 1056
    for call, kind, most, types in (
        (LIBRARY.phsa_ops_few_rows, FewRowsParams, 4, (False, True)),
        (LIBRARY.phsa_ops_some_rows, SomeRowsParams, 16, (True,)),
    ):
        for int8 in types:
            weights = Weights(1, n, k, int8)
            x = torch.randn(most, k, device=CUDA).bfloat16()
            results = []
            for first in (0, 1, most // 2, most - 1):
                y = torch.zeros(most - first, n, device=CUDA)
                params = kind(m=most - first, n=n, k=k, weights=weights.view(), x=x[first:].data_ptr(), y=y.data_ptr())
                if kind is FewRowsParams:
                    params.result = ADD_TO_F32
                else:
                    params.add_to_f32 = True
                check(call(ctypes.byref(params)))
                results.append(y)
            assert all(torch.equal(y, results[0][-len(y) :]) for y in results), f"{kind}, int8 {int8}"


def test_int8_weights_become_bf16():
    for n, k in ((1, 32), (7, 96), (1000, 576), (4096, 1024)):
        weights = Weights(1, n, k, True)
        out = torch.full((1, n, k), math.nan, device=CUDA, dtype=torch.bfloat16)
        view = weights.view()
        check(LIBRARY.phsa_ops_bf16_from_int8(ctypes.byref(view), n, k, address(out)))
        assert torch.equal(out, weights.values.float().bfloat16()), f"{n} × {k}"  # f32 holds them exactly
    assert LIBRARY.phsa_ops_bf16_from_int8(ctypes.byref(view), 1, 48, address(out)) != 0


def table(positions, frequencies, factor):
    angles = positions.double()[:, None] * frequencies[None, :]
    return torch.cat((angles.cos(), angles.sin()), 1) * factor


def test_angles_are_right_at_a_million_positions_and_flags_go_into_their_pages():
    m, half, factor = 300, 64, 1.25
    positions = torch.randint(1 << 20, (m,), device=CUDA, dtype=torch.int32)
    frequencies = 1e6 ** (-torch.arange(half, device=CUDA, dtype=torch.float64) / half)
    cos_sin = torch.full((m, 2 * half), math.nan, device=CUDA)
    flags = torch.randint(2, (m,), device=CUDA, dtype=torch.uint8)
    flag_rows = torch.randperm(5000, device=CUDA)[:m].contiguous()
    flag_rows[::7] = -1
    pages = torch.full((5000,), 9, device=CUDA, dtype=torch.uint8)
    params = RowsParams(m, half, positions.data_ptr(), frequencies.data_ptr(), factor, cos_sin.data_ptr())
    params.flags, params.flag_rows, params.pages = flags.data_ptr(), flag_rows.data_ptr(), pages.data_ptr()
    check(LIBRARY.phsa_ops_rows(ctypes.byref(params)))
    assert (cos_sin.double() - table(positions, frequencies, factor)).abs().max().item() < 1e-7 * factor
    want = torch.full_like(pages, 9)
    kept = flag_rows >= 0
    want[flag_rows[kept]] = flags[kept]
    assert torch.equal(pages, want)


def test_heads_are_normed_turned_and_put_into_the_cache():
    for dim, q_heads, kv_heads, dtype, normed in (
        (128, 16, 8, torch.bfloat16, True),
        (64, 9, 3, torch.bfloat16, False),
        (128, 12, 2, torch.float16, False),
        (64, 4, 1, torch.float16, True),
    ):
        m, heads = 53, q_heads + 2 * kv_heads
        qkv = torch.randn(m, heads, dim, device=CUDA).bfloat16()
        positions = torch.randint(100000, (m,), device=CUDA, dtype=torch.int32)
        frequencies = 1e4 ** (-torch.arange(dim // 2, device=CUDA, dtype=torch.float64) / (dim // 2))
        cos_sin = table(positions, frequencies, 1.0)
        turn = cos_sin.float()
        norms = [torch.rand(dim, device=CUDA) + 0.5 if normed else None for _ in range(2)]
        # Pages as the cache has them: [page][kv head][token][dim], keys and values apart.
        tokens = 16
        pages = torch.full((12, 2, kv_heads, tokens, dim), math.nan, device=CUDA, dtype=dtype)
        place = torch.randperm(12 * tokens, device=CUDA)[:m]
        cache_rows = (place // tokens) * pages.stride(0) + (place % tokens) * dim
        cache_rows[5] = -1
        queries = torch.full((m, q_heads, dim), math.nan, device=CUDA, dtype=dtype)
        params = HeadsParams(m, q_heads, kv_heads, dim, qkv.data_ptr(), turn.data_ptr())
        params.q_norm, params.k_norm = address(norms[0]), address(norms[1])
        params.eps, params.f16 = 1e-6, dtype == torch.float16
        params.queries, params.keys, params.values = queries.data_ptr(), pages.data_ptr(), pages[:, 1].data_ptr()
        params.cache_rows, params.cache_head_stride = cache_rows.data_ptr(), tokens * dim
        check(LIBRARY.phsa_ops_heads(ctypes.byref(params)))

        def rotated(x, norm, turn=cos_sin, half=dim // 2):
            x = x.double() if norm is None else norm64(x, norm, 1e-6)
            cos, sin = turn[:, None, :half], turn[:, None, half:]
            low, high = x[..., :half], x[..., half:]
            return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)

        name = f"{q_heads}/{kv_heads} heads of {dim}, {dtype}"
        assert_rounded(queries, rotated(qkv[:, :q_heads], norms[0]), f"queries, {name}")
        kept = cache_rows >= 0
        page, token = place[kept] // tokens, place[kept] % tokens
        keys = rotated(qkv[:, q_heads : q_heads + kv_heads], norms[1])[kept]
        assert_rounded(pages[page, 0, :, token], keys, f"keys, {name}")
        assert_rounded(pages[page, 1, :, token], qkv[:, q_heads + kv_heads :].double()[kept], f"values, {name}")
        assert torch.isnan(pages).sum().item() == pages.numel() - 2 * kv_heads * dim * int(kept.sum()), name


def test_gate_times_up():
    m, dim = 41, 1536
    gate_up = (torch.randn(m, 2, dim, device=CUDA) * 4).bfloat16()
    out = torch.full((m, dim), math.nan, device=CUDA, dtype=torch.bfloat16)
    check(LIBRARY.phsa_ops_silu_mul(address(gate_up), m, dim, address(out)))
    gate, up = gate_up.double().unbind(1)
    assert_rounded(out, gate / (1 + (-gate).exp()) * up, "silu")


def test_f16_becomes_bf16_in_place():
    x = torch.randn(8 * 1001, device=CUDA).half()
    want = x.float().bfloat16()
    check(LIBRARY.phsa_ops_bf16_from_f16(address(x), c_int64(x.numel())))
    assert torch.equal(x.view(torch.bfloat16), want)


def find_top(logits, asked, vocab=None):
    m, stride = logits.shape
    vocab = vocab or stride
    out = torch.full((m * ctypes.sizeof(TopLogits),), 0xEE, device=CUDA, dtype=torch.uint8)
    workspace = torch.empty(LIBRARY.phsa_ops_top_workspace(m, vocab), device=CUDA, dtype=torch.uint8)
    asked = torch.tensor(asked, device=CUDA, dtype=torch.int32)
    params = TopParams(m, vocab, logits.data_ptr(), stride, asked.data_ptr(), out.data_ptr(), workspace.data_ptr())
    check(LIBRARY.phsa_ops_top(ctypes.byref(params)))
    return (TopLogits * m).from_buffer_copy(out.cpu().numpy().tobytes())


def ranked(row):
    """Tokens by logit, the lower one first where two are equal; what is no number last."""
    values = row.tolist()
    return sorted(
        range(len(values)), key=lambda i: (math.isnan(values[i]), -values[i] if values[i] == values[i] else 0, i)
    )


def check_top(logits, vocab=None):
    vocab = vocab or logits.shape[1]
    asked = [i * 31 % vocab if i % 3 else -1 for i in range(logits.shape[0])]
    for i, row in enumerate(find_top(logits, asked, vocab)):
        own = logits[i, :vocab].cpu()
        want = ranked(own)[: min(TOP, vocab)]
        assert row.count == len(want)
        assert [row.top[j].token for j in range(row.count)] == want, f"row {i}"
        for j, token in enumerate(want):
            value = own[token].item()
            assert row.top[j].logit == value or math.isnan(value)
        finite = bool(own.isfinite().all())
        assert bool(row.finite) == finite
        if finite:
            assert abs(row.log_sum_exp - own.double().logsumexp(0).item()) < 1e-5
        elif own.isnan().any() or (own == math.inf).any():
            assert not math.isfinite(row.log_sum_exp)
        if asked[i] >= 0 and own.isfinite().all():
            assert row.asked == own[asked[i]].item()


def test_the_largest_logits_of_every_vocabulary():
    for vocab in (1, 5, 64, 65, 4096, 4097, 49152, 151936, 1 << 18):
        check_top(torch.randn(5, vocab, device=CUDA) * 6)


def test_the_largest_logits_of_rows_with_a_stride():
    check_top(torch.randn(3, 50048, device=CUDA), 50001)


def test_ties_go_to_the_lower_token():
    check_top(torch.zeros(2, 9000, device=CUDA))
    check_top(torch.randint(3, (4, 20000), device=CUDA).float())
    check_top((torch.randn(4, 60000, device=CUDA) * 2).bfloat16().float())


def test_logits_that_are_no_numbers_come_last_and_are_told():
    logits = torch.randn(5, 10000, device=CUDA)
    logits[0, 7] = math.nan
    logits[1] = math.nan
    logits[2, 9] = math.inf
    logits[3, 5] = -math.inf
    logits[4, 30:] = -math.inf
    check_top(logits)


def test_two_runs_have_the_same_bits():
    logits = torch.randn(7, 151936, device=CUDA)
    first, second = find_top(logits, [3] * 7), find_top(logits, [3] * 7)
    assert bytes(first) == bytes(second)


if __name__ == "__main__":
    sys.exit(run_tests(globals(), sys.argv[1:]))
