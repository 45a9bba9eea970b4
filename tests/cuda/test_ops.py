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


class GateParams(ctypes.Structure):
    _fields_ = [("kind", c_int32), ("alpha", c_float), ("limit", c_float)]


PRODUCT = [
    ("m", c_int32),
    ("n", c_int32),
    ("k", c_int32),
    ("weights", MatrixView),
    ("bias", c_void_p),
    ("x", c_void_p),
]


class FewRowsParams(ctypes.Structure):
    _fields_ = [
        ("result", c_int32),
        *PRODUCT,
        ("norm", c_void_p),
        ("eps", c_float),
        ("y", c_void_p),
        ("scale", c_float),
        ("gate", GateParams),
    ]


class SomeRowsParams(ctypes.Structure):
    _fields_ = [
        *PRODUCT,
        ("y", c_void_p),
        ("result", c_int32),
        ("scale", c_float),
    ]


class AddNormParams(ctypes.Structure):
    _fields_ = [
        ("m", c_int32),
        ("dim", c_int32),
        ("y", c_void_p),
        ("weight", c_void_p),
        ("eps", c_float),
        ("x", c_void_p),
    ]


class RouteParams(ctypes.Structure):
    _fields_ = [
        ("m", c_int32),
        ("dim", c_int32),
        ("num_experts", c_int32),
        ("taken", c_int32),
        ("x", c_void_p),
        ("norm", c_void_p),
        ("eps", c_float),
        ("router", c_void_p),
        ("bias", c_void_p),
        ("normalized", c_bool),
        ("normed", c_void_p),
        ("logits", c_void_p),
        ("experts", c_void_p),
        ("weights", c_void_p),
    ]


class GroupParams(ctypes.Structure):
    _fields_ = [
        ("pairs", c_int32),
        ("num_experts", c_int32),
        ("experts", c_void_p),
        ("order", c_void_p),
        ("starts", c_void_p),
        ("tiles", c_void_p),
    ]


class GroupedParams(ctypes.Structure):
    _fields_ = [
        ("groups", GroupParams),
        ("n", c_int32),
        ("k", c_int32),
        ("pairs_of_row", c_int32),
        ("x", c_void_p),
        ("weights", c_void_p),
        ("bias", c_void_p),
        ("y", c_void_p),
        ("f32", c_bool),
    ]


class CombineParams(ctypes.Structure):
    _fields_ = [
        ("m", c_int32),
        ("dim", c_int32),
        ("taken", c_int32),
        ("x", c_void_p),
        ("weights", c_void_p),
        ("scale", c_float),
        ("add", c_bool),
        ("y", c_void_p),
    ]


TO_BF16, GATE_MUL, ADD_TO_F32, TO_F32 = range(4)
SOME_BF16, SOME_F32, SOME_ADD = range(3)
GATES = {"silu": (0, 0.0, 0.0), "gelu": (1, 0.0, 0.0), "clamped": (2, 1.702, 2.0)}


def gated(kind, gate, up):
    if kind == "silu":
        return gate * gate.sigmoid() * up
    if kind == "gelu":
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    _, alpha, limit = GATES[kind]
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * (alpha * gate).sigmoid() * (up + 1)


def load_library():
    default = Path(__file__).resolve().parents[2] / "build/cuda/libphsa_cuda_kernels.so"
    library = ctypes.CDLL(os.environ.get("PHSA_CUDA_KERNELS", str(default)))
    library.phsa_ops_params_size.restype = c_size_t
    library.phsa_ops_top_workspace.restype = c_size_t
    structs = (NormParams, RowsParams, HeadsParams, TopParams, TopLogits, FewRowsParams, SomeRowsParams, KeepParams)
    structs += (AddNormParams, GateParams, RouteParams, GroupedParams, CombineParams)
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
        check(LIBRARY.phsa_ops_norm(ctypes.byref(params), None, None, c_float(1)))
        assert_rounded(out, norm64(x, weight, 1e-6), f"norm of {dim}")
        params.m = 11
        check(LIBRARY.phsa_ops_norm(ctypes.byref(params), address(rows), None, c_float(1)))
        assert_rounded(out[:11], norm64(x[rows.long()], weight, 1e-6), f"norm of named rows of {dim}")
        params.m = m
        for scale in (1.0, 33.9375):
            check(LIBRARY.phsa_ops_norm(ctypes.byref(params), address(tokens), address(embedding), c_float(scale)))
            assert torch.equal(x, embedding[tokens.long()].float() * scale)
            assert_rounded(out, norm64(x, weight, 1e-6), f"norm of embedded tokens of {dim}, scaled by {scale}")


def test_norms_behind_a_product_are_added():
    for dim in (64, 576, 4096, 5000):
        y, x = torch.randn(37, dim, device=CUDA) * 3, torch.randn(37, dim, device=CUDA)
        weight = torch.rand(dim, device=CUDA) + 0.5
        want = x.double() + norm64(y, weight, 1e-6)
        check(
            LIBRARY.phsa_ops_add_norm(
                ctypes.byref(AddNormParams(37, dim, y.data_ptr(), weight.data_ptr(), 1e-6, x.data_ptr()))
            )
        )
        assert (x.double() - want).abs().max().item() < 1e-5


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
            for result in (TO_BF16, GATE_MUL, ADD_TO_F32, TO_F32):
                for biased in (False, True):
                    for int8 in (False, True):
                        check_few_rows(n, k, m, result, biased, int8)
        for kind in ("gelu", "clamped"):
            check_few_rows(n, k, 2, GATE_MUL, True, False, kind)
    # More than fits into shared memory is refused, not wrong; so are groups of int8 weights that are not whole.
    assert LIBRARY.phsa_ops_few_rows(ctypes.byref(FewRowsParams(ADD_TO_F32, 4, 8, 8192))) != 0
    assert LIBRARY.phsa_ops_few_rows(ctypes.byref(FewRowsParams(ADD_TO_F32, 5, 8, 64))) != 0
    view = Weights(1, 8, 64, True).view()
    assert LIBRARY.phsa_ops_few_rows(ctypes.byref(FewRowsParams(ADD_TO_F32, 1, 8, 48, view))) != 0


def check_few_rows(n, k, m, result, biased, int8, gate="silu"):
    name = f"{m} rows of {k} to {n}, result {result}, bias {biased}, int8 {int8}, {gate}"
    matrices = 2 if result == GATE_MUL else 1
    to_f32 = result in (ADD_TO_F32, TO_F32)
    scale = 0.37
    weights = Weights(matrices, n, k, int8)
    bias = torch.randn(matrices, n, device=CUDA)
    norm = torch.rand(k, device=CUDA) + 0.5
    x = torch.randn(m, k, device=CUDA) * 2
    if to_f32:
        x = x.bfloat16()
        y = torch.randn(m, n, device=CUDA)
        rows = x.double()
    else:
        bias = bias.bfloat16()
        y = torch.full((m, n), math.nan, device=CUDA, dtype=torch.bfloat16)
        rows = norm64(x, norm, 1e-6).bfloat16().double()
    want = torch.einsum("mk,ink->imn", rows, weights.values)
    if to_f32:
        want = want * scale
    if biased:
        want = want + bias.double()[:, None]
    halves = [half.bfloat16().double() for half in want]
    want = gated(gate, *halves) if result == GATE_MUL else want[0]
    if result == ADD_TO_F32:
        want = want + y.double()
    params = FewRowsParams(result, m, n, k, weights.view(), bias.data_ptr() if biased else None, x.data_ptr())
    params.norm, params.eps, params.y, params.scale = norm.data_ptr(), 1e-6, y.data_ptr(), scale
    params.gate = GateParams(*GATES[gate])
    check(LIBRARY.phsa_ops_few_rows(ctypes.byref(params)))
    # The result is rounded once, gate and up each once before that; a normed x may round to its neighbour.
    rounding = {TO_BF16: 1, GATE_MUL: 3, ADD_TO_F32: 0, TO_F32: 0}[result] * BF16
    slack = 1e-5 if to_f32 else 2e-2 if gate == "clamped" else 4e-3
    error = (y.double() - want).abs() - rounding * want.abs()
    assert error.max().item() <= slack * max(1.0, want.abs().max().item()), f"{name}: off by {error.max().item()}"


def test_products_of_some_rows():
    # From 2112 rows of weights on, blocks have 16 of them.
    for n, k in ((1, 32), (9, 96), (1000, 576), (1024, 3072), (2117, 64), (4096, 1024), (2200, 1056), (37, 8960)):
        for m in (1, 5, 8, 9, 16):
            for result in (SOME_BF16, SOME_F32, SOME_ADD):
                for biased in (False, True):
                    check_some_rows(n, k, m, result, biased)
    view = Weights(1, 8, 64, True).view()
    assert LIBRARY.phsa_ops_some_rows(ctypes.byref(SomeRowsParams(17, 8, 64, view))) != 0
    assert LIBRARY.phsa_ops_some_rows(ctypes.byref(SomeRowsParams(5, 8, 48, view))) != 0
    bf16 = Weights(1, 8, 64, False).view()
    assert LIBRARY.phsa_ops_some_rows(ctypes.byref(SomeRowsParams(5, 8, 64, bf16))) != 0


def check_some_rows(n, k, m, result, biased):
    name = f"{m} rows of {k} to {n}, result {result}, bias {biased}"
    to_f32, scale = result != SOME_BF16, 0.37
    dtype = torch.float32 if to_f32 else torch.bfloat16
    weights = Weights(1, n, k, True)
    x = (torch.randn(m, k, device=CUDA) * 2).bfloat16()
    bias = torch.randn(n, device=CUDA).to(dtype)
    y = torch.randn(m, n, device=CUDA).to(dtype)
    want = x.double() @ weights.values[0].T * (scale if to_f32 else 1)
    if biased:
        want = want + bias.double()
    if result == SOME_ADD:
        want = want + y.double()
    params = SomeRowsParams(m, n, k, weights.view(), bias.data_ptr() if biased else None, x.data_ptr())
    params.y, params.result, params.scale = y.data_ptr(), result, scale
    check(LIBRARY.phsa_ops_some_rows(ctypes.byref(params)))
    error = (y.double() - want).abs() - (0 if to_f32 else BF16) * want.abs()
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
                params.result, params.scale = ADD_TO_F32 if kind is FewRowsParams else SOME_ADD, 1.0
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
        (80, 6, 2, torch.bfloat16, True),
        (96, 5, 1, torch.float16, False),
        (96, 8, 8, torch.bfloat16, True),
        (256, 4, 1, torch.bfloat16, True),
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
    for kind, of_kind in GATES.items():
        out = torch.full((m, dim), math.nan, device=CUDA, dtype=torch.bfloat16)
        params = GateParams(*of_kind)
        check(LIBRARY.phsa_ops_gate_mul(ctypes.byref(params), address(gate_up), c_int64(m), dim, address(out)))
        assert_rounded(out, gated(kind, *gate_up.double().unbind(1)), kind)


def experts_of(m, num_experts, taken):
    """Experts as a router chooses them: each row's are different, some experts have many rows, some have none."""
    scores = torch.randn(m, num_experts, device=CUDA) + torch.randn(num_experts, device=CUDA) * 2
    return scores.topk(taken, dim=1).indices.int().contiguous()


def grouped(experts, num_experts):
    pairs = experts.numel()
    order = torch.full((pairs,), -7, device=CUDA, dtype=torch.int32)
    starts = torch.full((num_experts + 1,), -7, device=CUDA, dtype=torch.int32)
    tiles = torch.full((LIBRARY.phsa_ops_most_tiles(pairs, num_experts), 2), -7, device=CUDA, dtype=torch.int32)
    pointers = (each.data_ptr() for each in (experts, order, starts, tiles))
    params = GroupParams(pairs, num_experts, *pointers)
    check(LIBRARY.phsa_ops_group(ctypes.byref(params)))
    params.keep = (experts, order, starts, tiles)
    return params


def test_rows_go_to_the_experts_of_the_largest_softmax_values():
    for m, dim, num_experts, taken, normalized, biased in (
        (1, 64, 8, 2, True, False),
        (37, 2048, 128, 8, True, False),
        (5, 2880, 32, 4, True, True),
        (300, 576, 60, 6, False, True),
        (2, 6000, 1024, 64, False, False),
        (3, 12160, 7, 7, True, True),
    ):
        x = torch.randn(m, dim, device=CUDA) * 3
        norm = torch.rand(dim, device=CUDA) + 0.5
        router = torch.randn(num_experts, dim, device=CUDA) / dim**0.5
        bias = torch.randn(num_experts, device=CUDA) if biased else None
        router[1], bias_of = router[0], bias
        if biased:
            bias_of[1] = bias_of[0]  # a tie, which the lower one wins
        normed = torch.full((m, dim), math.nan, device=CUDA, dtype=torch.bfloat16)
        logits = torch.full((m, num_experts), math.nan, device=CUDA)
        experts = torch.full((m, taken), -1, device=CUDA, dtype=torch.int32)
        weights = torch.full((m, taken), math.nan, device=CUDA)
        params = RouteParams(m, dim, num_experts, taken, x.data_ptr(), norm.data_ptr(), 1e-6, router.data_ptr())
        params.bias, params.normalized, params.normed = address(bias), normalized, normed.data_ptr()
        params.logits, params.experts, params.weights = logits.data_ptr(), experts.data_ptr(), weights.data_ptr()
        check(LIBRARY.phsa_ops_route(ctypes.byref(params)))
        exact = norm64(x, norm, 1e-6)
        assert_rounded(normed, exact, "the norm before experts")
        want = exact @ router.double().T + (bias.double() if biased else 0)
        name = f"{m} rows of {dim}, {taken} of {num_experts} experts"
        assert (logits.double() - want).abs().max().item() < 1e-4, name
        # Which ones: by the logits that the kernel has, so that near-ties mean nothing.
        ranks = [sorted(range(num_experts), key=lambda e, row=row: (-row[e], e))[:taken] for row in logits.tolist()]
        assert experts.tolist() == ranks, name
        shares = logits.double().softmax(1).gather(1, experts.long())
        if normalized:
            shares = shares / shares.sum(1, keepdim=True)
        assert (weights.double() - shares).abs().max().item() < 1e-5, name
    router[2] = math.nan  # the least likely, and nothing hangs
    check(LIBRARY.phsa_ops_route(ctypes.byref(params)))
    assert (experts[:, -1] == 2).all()


def test_products_of_experts():
    for m, num_experts, taken, n, k in (
        (1, 8, 3, 192, 128),
        (3, 128, 8, 1536, 2048),
        (16, 128, 8, 2048, 768),
        (200, 32, 4, 200, 136),
        (1000, 8, 3, 264, 96),
        (900, 5, 1, 128, 64),
    ):
        for f32 in (False, True):
            experts = experts_of(m, num_experts, taken)
            pairs = experts.numel()
            weights = (torch.randn(num_experts, n, k, device=CUDA) / k**0.5).bfloat16()
            bias = torch.randn(num_experts, n, device=CUDA) if f32 else None
            # Rows for all pairs of a token, and a row for each pair.
            for pairs_of_row in (taken, 1):
                x = (torch.randn(pairs // pairs_of_row, k, device=CUDA) * 2).bfloat16()
                y = torch.full((pairs, n), math.nan, device=CUDA, dtype=torch.float32 if f32 else torch.bfloat16)
                params = GroupedParams(grouped(experts, num_experts), n, k, pairs_of_row, x.data_ptr())
                params.weights, params.bias, params.y = weights.data_ptr(), address(bias), y.data_ptr()
                params.f32 = f32
                check(LIBRARY.phsa_ops_grouped(ctypes.byref(params)))
                of_pair = experts.flatten().long()
                want = torch.empty(pairs, n, device=CUDA, dtype=torch.float64)
                rows = x.double().repeat_interleave(pairs_of_row, 0)
                for expert in range(num_experts):
                    mine = of_pair == expert
                    want[mine] = rows[mine] @ weights[expert].double().T + (bias[expert].double() if f32 else 0)
                error = (y.double() - want).abs() - (0 if f32 else BF16) * want.abs()
                name = f"{m} rows of {k} to {n}, {taken} of {num_experts} experts, f32 {f32}, {pairs_of_row} a row"
                assert error.max().item() <= 1e-5 * max(1.0, want.abs().max().item()), name
                # Alone, a row has the same bits, where its tile has the same size.
                if f32 and pairs_of_row == taken and m == 16:
                    alone = torch.full_like(y[:taken], math.nan)
                    one = experts[:1].contiguous()
                    params = GroupedParams(grouped(one, num_experts), n, k, taken, x.data_ptr())
                    params.weights, params.bias, params.y = weights.data_ptr(), address(bias), alone.data_ptr()
                    params.f32 = True
                    check(LIBRARY.phsa_ops_grouped(ctypes.byref(params)))
                    assert torch.equal(alone, y[:taken]), name


def test_what_experts_give_is_weighed_and_added():
    for m, dim, taken in ((1, 64, 2), (37, 2048, 8), (200, 136, 4)):
        x, weights = torch.randn(m * taken, dim, device=CUDA), torch.rand(m, taken, device=CUDA)
        sums = (x.double().view(m, taken, dim) * weights.double()[..., None]).sum(1) * 0.37
        for add in (False, True):
            y = torch.randn(m, dim, device=CUDA)
            want = sums + (y.double() if add else 0)
            params = CombineParams(m, dim, taken, x.data_ptr(), weights.data_ptr(), 0.37, add, y.data_ptr())
            check(LIBRARY.phsa_ops_combine(ctypes.byref(params)))
            assert (y.double() - want).abs().max().item() < 1e-5


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
