"""The kernels' structs through ctypes, the forward, structured random inputs, and a float64 reference.

The shared library is named by PHSA_CUDA_KERNELS, or lies in build/cuda/ as scripts/test-cuda.sh builds it.
"""

import ctypes
import os
import pathlib

import torch

BLOCK = 16
# What SetArchitecture takes here: the plain kernels, and those for Hopper.
ARCHITECTURES = [80, 90] if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9 else [80]


class Batch(ctypes.Structure):
    _fields_ = [
        ("num_seqs", ctypes.c_int32),
        ("total_q", ctypes.c_int32),
        ("max_q_len", ctypes.c_int32),
        ("max_kv_len", ctypes.c_int32),
        ("cu_q", ctypes.c_void_p),
        ("kv_lens", ctypes.c_void_p),
        ("kv_starts", ctypes.c_void_p),
        ("rep_starts", ctypes.c_void_p),
        ("page_size", ctypes.c_int32),
        ("page_table", ctypes.c_void_p),
        ("page_table_stride", ctypes.c_int64),
    ]


class Rows(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("token_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("page_stride", ctypes.c_int64),
    ]


class Shape(ctypes.Structure):
    _fields_ = [
        ("init_blocks", ctypes.c_int32),
        ("local_blocks", ctypes.c_int32),
        ("top_k", ctypes.c_int32),
        ("dense_blocks", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("num_q_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("selection_heads", ctypes.c_int32),
        ("group_max", ctypes.c_bool),
        ("parts", ctypes.c_int32),
        ("scale", ctypes.c_float),
    ]


class ForwardParams(ctypes.Structure):
    _fields_ = [
        ("shape", Shape),
        ("batch", Batch),
        ("q", Rows),
        ("k", Rows),
        ("v", Rows),
        ("reps", Rows),
        ("out", Rows),
        ("flags", ctypes.c_void_p),
        ("flags_page_stride", ctypes.c_int64),
        ("lam", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("lse", ctypes.c_void_p),
        ("selection", ctypes.c_void_p),
        ("selection_scores", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("workspace_size", ctypes.c_size_t),
    ]


class BackwardParams(ctypes.Structure):
    _fields_ = [
        ("shape", Shape),
        ("batch", Batch),
        *((name, Rows) for name in ("q", "k", "v", "out", "d_out", "d_q", "d_k", "d_v")),
        ("lse", ctypes.c_void_p),
        ("selection", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("workspace_size", ctypes.c_size_t),
    ]


DTYPES = {torch.float16: 1, torch.bfloat16: 2}
DENSE = 2**31 - 1  # dense_blocks where every query reads everything


def blocks_for(tokens):
    """Dense blocks of dense_below."""
    return DENSE if tokens == DENSE else -(-tokens // BLOCK)


def window_rules(window):
    """init_blocks, local_blocks, top_k, dense_blocks, window of dense attention with a window."""
    return 0, -(-(window - 1) // BLOCK), 0, 0, window


def load_library():
    default = pathlib.Path(__file__).resolve().parents[2] / "build/cuda/libphsa_cuda_kernels.so"
    library = ctypes.CDLL(os.environ.get("PHSA_CUDA_KERNELS", str(default)))
    library.phsa_cuda_params_size.restype = ctypes.c_size_t
    library.phsa_cuda_backward_params_size.restype = ctypes.c_size_t
    library.phsa_cuda_unsupported.restype = ctypes.c_char_p
    out_of_date = "this file's mirror of the parameters is out of date"
    assert library.phsa_cuda_params_size() == ctypes.sizeof(ForwardParams), out_of_date
    assert library.phsa_cuda_backward_params_size() == ctypes.sizeof(BackwardParams), out_of_date
    for name, params in (("select", ForwardParams), ("decode", ForwardParams), ("backward", BackwardParams)):
        workspace = getattr(library, f"phsa_cuda_{name}_workspace")
        workspace.restype = ctypes.c_size_t
        workspace.argtypes = [ctypes.POINTER(params)]
    library.phsa_cuda_decode.argtypes = [ctypes.POINTER(ForwardParams), ctypes.c_void_p]
    library.phsa_cuda_backward.argtypes = [ctypes.POINTER(BackwardParams), ctypes.c_void_p]
    return library


def rows(x, page_stride=0):
    """x: [..., token, head, dim]."""
    return Rows(x.data_ptr(), x.stride(-3), x.stride(-2), page_stride)


class Forward:
    """One batch with everything that the kernels need. Sequences are (q_len, kv_len); `page_size` scatters the keys."""

    def __init__(
        self,
        library,
        q,
        k,
        v,
        lens,
        *,
        init=128,
        local=512,
        top_k=16,
        dense_below=0,
        flags=None,
        lam=0.9,
        group_reduce="sum",
        want_scores=False,
        page_size=0,
        parts=1,
        window=0,
        sinks=None,
    ):
        self.parts = parts
        self.library = library
        self.q, self.lens, self.top_k = q, lens, top_k
        self.init_blocks, self.local_blocks, self.dense_below = init // BLOCK, local // BLOCK, dense_below
        self.window, self.sinks = window, sinks
        rules = (self.init_blocks, self.local_blocks, top_k, blocks_for(dense_below), 0)
        if window:
            rules = window_rules(window)
            self.init_blocks, self.local_blocks, self.top_k, *_ = rules
            self.dense_below = top_k = 0
        self.group_reduce = group_reduce
        device = q.device
        heads_q, heads_kv, dim = q.shape[1], k.shape[1], q.shape[2]
        self.heads_q, self.heads_kv, self.dim = heads_q, heads_kv, dim
        self.selection_heads = heads_q if group_reduce == "none" else heads_kv
        self.scale = dim**-0.5
        self.k, self.v, self.flags = k, v, flags
        q_lens = [n for n, _ in lens]
        kv_lens = [n for _, n in lens]

        def starts(values):
            out = [0]
            for x in values:
                out.append(out[-1] + x)
            return out

        self.q_starts, self.kv_starts = starts(q_lens), starts(kv_lens)
        self.rep_starts = starts([n // (BLOCK // parts) for n in kv_lens])  # also those of a block that is not complete
        self.cu_q = torch.tensor(self.q_starts, dtype=torch.int32, device=device)
        self.d_kv_lens = torch.tensor(kv_lens, dtype=torch.int32, device=device)
        self.d_kv_starts = torch.tensor(self.kv_starts[:-1], dtype=torch.int64, device=device)
        self.d_rep_starts = torch.tensor(self.rep_starts[:-1], dtype=torch.int64, device=device)
        self.lam = torch.full((heads_kv,), float(lam), device=device)
        self.out = torch.full_like(q, float("nan"))
        self.lse = torch.full((q.shape[0], heads_q), float("nan"), device=device)
        self.selection = torch.full((q.shape[0], self.selection_heads, top_k), -7, dtype=torch.int32, device=device)
        self.scores = None
        if want_scores:
            self.scores = torch.full(self.selection.shape, float("nan"), device=device)
        nan = float("nan")
        self.page_size = page_size
        batch = Batch(
            len(lens),
            q.shape[0],
            max(q_lens),
            max(kv_lens),
            self.cu_q.data_ptr(),
            self.d_kv_lens.data_ptr(),
            self.d_kv_starts.data_ptr(),
            self.d_rep_starts.data_ptr(),
            page_size,
            None,
            0,
        )
        if page_size == 0:
            self.reps = torch.full((max(self.rep_starts[-1], 1), heads_kv, dim), nan, dtype=q.dtype, device=device)
            rows_k, rows_v, rows_reps, flags_page_stride = rows(k), rows(v), rows(self.reps), 0
            d_flags = flags
        else:
            pages = [(n + page_size - 1) // page_size for n in kv_lens]
            table = torch.full((len(lens), max(pages)), -1, dtype=torch.int32)
            order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(1)).to(torch.int32)
            self.paged_k = torch.full((sum(pages), page_size, heads_kv, dim), nan, dtype=q.dtype, device=device)
            self.paged_v = self.paged_k.clone()
            self.paged_flags = torch.zeros((sum(pages), page_size), dtype=torch.uint8, device=device)
            self.reps = torch.full(
                (sum(pages), page_size // BLOCK * parts, heads_kv, dim), nan, dtype=q.dtype, device=device
            )
            used = 0
            for s, n in enumerate(kv_lens):
                for i in range(pages[s]):
                    page = int(order[used])
                    used += 1
                    table[s, i] = page
                    count = min(page_size, n - i * page_size)
                    at = self.kv_starts[s] + i * page_size
                    self.paged_k[page, :count] = k[at : at + count]
                    self.paged_v[page, :count] = v[at : at + count]
                    if flags is not None:
                        self.paged_flags[page, :count] = flags[at : at + count]
            self.table = table.to(device)
            batch.page_table, batch.page_table_stride = self.table.data_ptr(), self.table.stride(0)
            rows_k, rows_v = (rows(x, x.stride(0)) for x in (self.paged_k, self.paged_v))
            rows_reps = rows(self.reps, self.reps.stride(0))
            d_flags, flags_page_stride = (self.paged_flags if flags is not None else None), page_size
        shape = Shape(
            *rules,
            DTYPES[q.dtype],
            heads_q,
            heads_kv,
            dim,
            self.selection_heads,
            group_reduce == "max",
            parts,
            self.scale,
        )
        self.d_flags = d_flags
        self.params = ForwardParams(
            shape,
            batch,
            rows(q),
            rows_k,
            rows_v,
            rows_reps,
            rows(self.out),
            d_flags.data_ptr() if d_flags is not None else None,
            flags_page_stride,
            self.lam.data_ptr(),
            sinks.data_ptr() if sinks is not None else None,
            self.lse.data_ptr(),
            self.selection.data_ptr() if top_k else None,
            self.scores.data_ptr() if want_scores else None,
            None,
            0,
        )
        error = library.phsa_cuda_unsupported(ctypes.byref(self.params))
        if error:
            raise ValueError(error.decode())
        size = library.phsa_cuda_select_workspace(ctypes.byref(self.params))
        self.workspace = torch.empty(max(size, 16), dtype=torch.uint8, device=device)
        self.params.workspace, self.params.workspace_size = self.workspace.data_ptr(), size

    def _call(self, function, *args):
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        error = function(ctypes.byref(self.params), *args, stream)
        if error:
            raise RuntimeError(f"CUDA error {error}")

    def represent(self):
        self._call(self.library.phsa_cuda_represent, 1)

    def select(self):
        self._call(self.library.phsa_cuda_select)

    def attend(self):
        self._call(self.library.phsa_cuda_attend)

    def run(self):
        if self.top_k:
            self.represent()
            self.select()
        self.attend()

    def rep_rows(self, s):
        """The representatives of the complete blocks of sequence s, [row][kv_head][dim]."""
        if self.page_size == 0:
            return self.reps[self.rep_starts[s] :][: self.lens[s][1] // BLOCK * self.parts]
        rows = self.reps[self.table[s].long().clamp(min=0)].flatten(0, 1)
        return rows[: self.lens[s][1] // BLOCK * self.parts]


def drift(length, heads, dim, factor, size, generator, dtype, device="cuda"):
    """Rows that drift from token to token: AR(1) with that factor. Neighbouring queries then choose alike."""
    chunk = 64
    count = (length + chunk - 1) // chunk
    noise = torch.randn(count, chunk, heads * dim, generator=generator, device=device)
    noise *= (1 - factor * factor) ** 0.5
    steps = torch.arange(chunk, device=device, dtype=torch.float32)
    lag = steps[:, None] - steps[None, :]
    inside = torch.where(lag >= 0, factor ** lag.clamp(min=0), torch.zeros_like(lag))
    out = torch.einsum("ij,njd->nid", inside, noise)
    carry = torch.randn(heads * dim, generator=generator, device=device)
    decay = (factor ** (steps + 1))[:, None]
    for i in range(count):
        out[i] += decay * carry
        carry = out[i, -1].clone()
    return (out.reshape(-1, heads, dim)[:length] * size).to(dtype)


def make_inputs(lens, heads_q, heads_kv, dim, dtype, seed=0, punctuation=0.15):
    generator = torch.Generator("cuda").manual_seed(seed)
    total_q, total_kv = sum(n for n, _ in lens), sum(n for _, n in lens)
    # Two speeds of drift, so that neighbours choose as alike as a real model's queries do: distinct blocks of 8, 16,
    # 32, 64 and 128 neighbours are 2.6, 3.9, 6.1, 9.6 and 14.7 K at 32k; Qwen2.5-Coder-1.5B has 2.8, 4.1, 6.0, 8.9 and
    # 13.1.
    q = drift(total_q, heads_q, dim, 0.999, 1.2, generator, torch.float32)
    q = (q + drift(total_q, heads_q, dim, 0.9, 0.9, generator, torch.float32)).to(dtype)
    k = drift(total_kv, heads_kv, dim, 0.95, 1.0, generator, dtype)
    v = torch.randn(total_kv, heads_kv, dim, generator=generator, device="cuda").to(dtype)
    flags = (torch.rand(total_kv, generator=generator, device="cuda") < punctuation).to(torch.uint8)
    return q, k, v, flags


def reference_reps(f, s):
    start, end = f.kv_starts[s], f.kv_starts[s] + f.lens[s][1] // BLOCK * BLOCK
    span = BLOCK // f.parts
    k = f.k[start:end].double().unflatten(0, (-1, span))
    mean = k.mean(1)
    if f.flags is None:
        return mean
    flag = f.flags[start:end].double().unflatten(0, (-1, span))[..., None, None]
    count = flag.sum(1)
    marked = torch.where(count > 0, (k * flag).sum(1) / count.clamp(min=1), mean)
    lam = f.lam.double()[None, :, None]
    return lam * mean + (1 - lam) * marked


def rounding(q, reps, scale):
    """How far rounding may move the difference of two logarithms of scores: [heads]. q: [heads][group][dim], reps:
    [block][heads][dim].

    A product of vectors is summed in f32, 16 terms at a time by instructions that cut the sum to its last bit (2^-23 of
    the largest partial sum, at most M = Σ|q·rep|) and may lose as much among the 16: dim / 8 · 2^-23 · M · scale. Two
    blocks' scores are off by that, and two heads' log-sum-exps. What follows (a multiplication, a difference, a
    logarithm: a few times 2^-24 of numbers below 2 · M · scale) is small beside it.
    """
    return near_tie(torch.einsum("hgd,thd->hgt", q.abs(), reps.abs()).amax((1, 2)) * scale, q.shape[-1])


def near_tie(size, dim):
    """The same from M · scale."""
    return 4 * dim / 8 * 2**-23 * size


def check_selection(f, s, queries):
    """Compares the lists of some queries of sequence s with float64 scores over the same representatives.

    Returns (lists checked, lists that differ, largest gap of a differing block). The gap is that of the logarithms of
    the scores of the worst block chosen and of the worst that should be, over what rounding may move them by
    (`rounding`): up to 1 it is a near-tie.
    """
    q_len, kv_len = f.lens[s]
    if f.top_k == 0:
        return 0, 0, 0.0
    reps = f.rep_rows(s).double()
    heads = f.selection_heads
    group = f.heads_q // heads
    reps = reps.repeat_interleave(heads // f.heads_kv, dim=1)
    blocks = torch.arange(reps.shape[0] // f.parts, device="cuda")
    checked = differing = 0
    gap = 0.0
    for i in queries:
        b = (kv_len - q_len + i) // BLOCK
        end = max(f.init_blocks, b - f.local_blocks)
        count = min(end - f.init_blocks, f.top_k)
        got = f.selection[f.q_starts[s] + i]
        if b * BLOCK < f.dense_below:
            assert (got == -1).all()
            continue
        assert (got[:, count:] == -1).all(), (i, got)
        if count == 0:
            continue
        got = got[:, :count].long()
        assert (got >= f.init_blocks).all() and (got < end).all(), (i, got)
        assert (got[:, 1:] > got[:, :-1]).all(), (i, got)
        q = f.q[f.q_starts[s] + i].double().unflatten(0, (heads, group))
        visible = reps[: b * f.parts]
        p = torch.log_softmax(torch.einsum("hgd,thd->hgt", q, visible) * f.scale, -1)
        p = p.unflatten(-1, (b, f.parts)).logsumexp(-1)
        p = p.amax(1) if f.group_reduce == "max" else p.logsumexp(1)
        p[:, (blocks[:b] < f.init_blocks) | (blocks[:b] >= end)] = float("-inf")
        order = torch.sort(p, dim=1, descending=True, stable=True).indices[:, :count]
        want = torch.sort(order, dim=1).values
        checked += heads
        wrong = (got != want).any(1)
        if wrong.any():
            differing += int(wrong.sum())
            kth = p.gather(1, order[:, -1:])
            low = p.gather(1, got).amin(1, keepdim=True)
            gap = max(gap, float(((kth - low)[:, 0] / rounding(q, visible, f.scale))[wrong].max()))
        if f.scores is not None:
            scores = f.scores[f.q_starts[s] + i]
            relative = 2e-3 + float(rounding(q, visible, f.scale).max())
            assert torch.allclose(scores[:, :count].double(), p.gather(1, got).exp(), rtol=relative, atol=1e-7)
            assert (scores[:, count:] == 0).all()
    return checked, differing, gap


def reference_attention(f, s, queries):
    """out and lse, float64, of some queries of sequence s with the lists that the kernels wrote."""
    q_len, kv_len = f.lens[s]
    k = f.k[f.kv_starts[s] : f.kv_starts[s + 1]].double()
    v = f.v[f.kv_starts[s] : f.kv_starts[s + 1]].double()
    group = f.heads_q // f.selection_heads
    repeat = f.selection_heads // f.heads_kv
    out, lse = [], []
    token_block = torch.arange(kv_len, device="cuda") // BLOCK
    for i in queries:
        position = kv_len - q_len + i
        b = position // BLOCK
        reads = torch.zeros(f.selection_heads, (kv_len + BLOCK - 1) // BLOCK, dtype=torch.bool, device="cuda")
        if b * BLOCK < f.dense_below:
            reads[:] = True
        else:
            reads[:, : f.init_blocks] = True
            reads[:, max(0, b - f.local_blocks) : b + 1] = True
            if f.top_k:
                chosen = f.selection[f.q_starts[s] + i].long()
                for h in range(f.selection_heads):
                    reads[h, chosen[h][chosen[h] >= 0]] = True
        mask = reads[:, token_block]
        mask[:, position + 1 :] = False
        if f.window:
            mask[:, : max(0, position + 1 - f.window)] = False
        tokens = mask.any(0).nonzero().flatten()
        q = f.q[f.q_starts[s] + i].double().unflatten(0, (f.selection_heads, group))
        keys = k[tokens].repeat_interleave(repeat, dim=1)
        values = v[tokens].repeat_interleave(repeat, dim=1)
        x = torch.einsum("hgd,thd->hgt", q, keys) * f.scale
        x.masked_fill_(~mask[:, tokens][:, None], float("-inf"))
        if f.sinks is not None:  # one more key, without a value
            sinks = f.sinks.double().view(f.selection_heads, group, 1)
            x, values = torch.cat([x, sinks], -1), torch.cat([values, torch.zeros_like(values[:1])])
        lse.append(torch.logsumexp(x, -1).flatten())
        out.append(torch.einsum("hgt,thd->hgd", torch.softmax(x, -1), values).flatten(0, 1))
    return torch.stack(out), torch.stack(lse)


def relative_error(got, want):
    return float((got.double() - want).norm() / want.norm())
