"""Decode and backward on the GPU against plain float32 and float64 PyTorch.

scripts/test-cuda.sh builds the library (--build alone) that this loads, or PHSA_CUDA_KERNELS names it.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
import forward_kernels as fk
from alone import over, run_tests, skip
from forward_kernels import ARCHITECTURES, BLOCK, DENSE, DTYPES, rounding

GROUP_SUM, GROUP_MAX = 0, 1

if not torch.cuda.is_available():
    skip("needs a GPU")

LIBRARY = fk.load_library()


def drifting(tokens, heads, dim, factor, size, generator):
    """Rows that drift over the tokens, as those of a model do: neighbours choose alike."""
    noise = torch.randn(tokens, heads, dim, device="cuda", generator=generator)
    # A first-order filter as a convolution that ends where the factor's power is below 0.001.
    steps = min(tokens, int(7 / (1 - factor)))
    kernel = factor ** torch.arange(steps - 1, -1, -1, device="cuda", dtype=torch.float32)
    padded = torch.nn.functional.pad(noise.permute(1, 2, 0).reshape(heads * dim, 1, tokens), (steps - 1, 0))
    rows = torch.nn.functional.conv1d(padded, kernel.view(1, 1, -1)) * (1 - factor**2) ** 0.5 * size
    return rows.view(heads, dim, tokens).permute(2, 0, 1).contiguous()


def drifting_queries(tokens, heads, dim, generator):
    """Queries whose choices overlap as those of a model do (docs: distinct blocks in a tile of 8, 16, 32, 64, 128
    queries over K): 3.0, 4.3, 6.0, 8.5, 12.2 here, 2.8, 4.1, 6.0, 8.9, 13.1 of Qwen2.5-Coder-1.5B at 32k."""
    slow, fast = drifting(tokens, heads, dim, 0.995, 1.5, generator), drifting(tokens, heads, dim, 0.5, 1.5, generator)
    return 0.8**0.5 * slow + 0.2**0.5 * fast


def representatives(k, flags, lam, parts=1):
    """k [tokens][heads][dim], flags [tokens] -> [rows][heads][dim] in float32; a row has BLOCK / parts tokens."""
    span = BLOCK // parts
    rows = k.shape[0] // span
    keys = k[: rows * span].float().view(rows, span, *k.shape[1:])
    flag = flags[: rows * span].view(rows, span).float()
    count = flag.sum(1, keepdim=True)
    weight = torch.where(count > 0, lam / span + (1 - lam) * flag / count.clamp(min=1), 1 / span)
    return torch.einsum("bi,bihd->bhd", weight, keys)


class DecodeCase:
    def __init__(
        self,
        dtype=torch.bfloat16,
        dim=128,
        q_heads=16,
        kv_heads=8,
        lens=(1000,),
        top_k=16,
        init=128,
        local=512,
        page_size=64,
        dense_below=0,
        lam=0.9,
        reduce=GROUP_SUM,
        max_kv_len=None,
        seed=1,
        sharpness=1.5,
        parts=1,
        window=0,
        sinks=False,
    ):
        g = torch.Generator(device="cuda").manual_seed(seed)
        self.parts, self.span = parts, BLOCK // parts
        self.dtype, self.dim, self.q_heads, self.kv_heads = dtype, dim, q_heads, kv_heads
        self.lens, self.top_k, self.init, self.local = list(lens), top_k, init // BLOCK, local // BLOCK
        self.page_size, self.dense_below, self.lam, self.reduce = page_size, dense_below, lam, reduce
        rules = (self.init, self.local, top_k, fk.blocks_for(dense_below), 0)
        if window:
            rules = fk.window_rules(window)
            self.init, self.local, self.top_k, *_ = rules
            top_k = 0
        self.window = window
        self.sinks = torch.randn(q_heads, device="cuda", generator=g) * 3 if sinks else None
        self.max_kv_len = max_kv_len or max(lens)
        nseq = len(lens)
        self.q = (torch.randn(nseq, q_heads, dim, device="cuda", generator=g) * sharpness).to(dtype)
        self.ks = [drifting(n, kv_heads, dim, 0.95, 1.0, g).to(dtype) if n else None for n in lens]
        self.vs = [torch.randn(n, kv_heads, dim, device="cuda", generator=g).to(dtype) if n else None for n in lens]
        self.fs = [(torch.rand(n, device="cuda", generator=g) < 0.12).to(torch.uint8) if n else None for n in lens]
        self.reps = [
            representatives(k, f, lam, parts).to(dtype) if n else None
            for k, f, n in zip(self.ks, self.fs, lens, strict=True)
        ]
        nan = float("nan")
        if page_size:
            per_page = page_size // self.span
            pages = [-(-n // page_size) for n in lens]
            total = sum(pages) + 3
            order = torch.randperm(total, generator=torch.Generator().manual_seed(seed)).tolist()
            self.k = torch.full((total, page_size, kv_heads, dim), nan, device="cuda", dtype=dtype)
            self.v = self.k.clone()
            self.r = torch.full((total, per_page, kv_heads, dim), nan, device="cuda", dtype=dtype)
            self.flags = torch.full((total, page_size), 1, device="cuda", dtype=torch.uint8)
            self.table = torch.full((nseq, max(pages) + 1), 2**30, device="cuda", dtype=torch.int32)
            at = 0
            self.rep_at = []
            for s, n in enumerate(lens):
                mine = order[at : at + pages[s]]
                at += pages[s]
                if not n:
                    self.rep_at.append(None)
                    continue
                self.table[s, : pages[s]] = torch.tensor(mine, device="cuda", dtype=torch.int32)
                index = torch.tensor(mine, device="cuda")
                token = torch.arange(n, device="cuda")
                where = (index[token // page_size], token % page_size)
                self.k[where], self.v[where], self.flags[where] = self.ks[s], self.vs[s], self.fs[s]
                row = torch.arange(self.reps[s].shape[0], device="cuda")
                where = (index[row // per_page], row % per_page)
                # The representative that the new token completes is the kernel's to write.
                rows = self.reps[s].clone()
                if n % self.span == 0:
                    rows[-1] = nan
                self.r[where] = rows
                self.rep_at.append(tuple(x[-1] for x in where) if len(row) else None)
            self.starts = self.rep_starts = None
        else:
            self.k = torch.cat([x for x in self.ks if x is not None])
            self.v = torch.cat([x for x in self.vs if x is not None])
            self.flags = torch.cat([x for x in self.fs if x is not None])
            rows = [r.clone() for r in self.reps if r is not None]
            for r, n in zip(rows, [n for n in lens if n], strict=True):
                if n % self.span == 0:
                    r[-1] = nan
            self.r = (
                torch.cat(rows)
                if sum(len(r) for r in rows)
                else torch.zeros(1, kv_heads, dim, device="cuda", dtype=dtype)
            )
            starts, reps = [0], [0]
            for n in lens:
                starts.append(starts[-1] + n)
                reps.append(reps[-1] + n // self.span)
            self.rep_at = [(reps[s + 1] - 1,) if n >= self.span else None for s, n in enumerate(lens)]
            self.starts = torch.tensor(starts[:-1], device="cuda", dtype=torch.int64)
            self.rep_starts = torch.tensor(reps[:-1], device="cuda", dtype=torch.int64)
            self.table = None
        self.kv_lens = torch.tensor(lens, device="cuda", dtype=torch.int32)
        self.out = torch.full_like(self.q, nan)
        self.lse = torch.full((nseq, q_heads), nan, device="cuda")
        self.selection = torch.full((nseq, kv_heads, top_k), -7, device="cuda", dtype=torch.int32)
        self.lams = torch.full((kv_heads,), lam, device="cuda")
        contiguous = [x.data_ptr() for x in (self.starts, self.rep_starts)] if not page_size else [None, None]
        table = (self.table.data_ptr(), self.table.stride(0)) if page_size else (None, 0)
        p = fk.ForwardParams(
            fk.Shape(*rules, DTYPES[dtype], q_heads, kv_heads, dim, kv_heads, reduce == GROUP_MAX, parts, dim**-0.5),
            fk.Batch(nseq, nseq, 1, self.max_kv_len, None, self.kv_lens.data_ptr(), *contiguous, page_size, *table),
            fk.rows(self.q),
            *(fk.rows(x, x.stride(0)) for x in (self.k, self.v, self.r)),
            fk.rows(self.out),
            self.flags.data_ptr(),
            self.flags.stride(0),
            self.lams.data_ptr(),
            self.sinks.data_ptr() if sinks else None,
            self.lse.data_ptr(),
            self.selection.data_ptr() if top_k else None,
        )
        size = LIBRARY.phsa_cuda_decode_workspace(p)
        assert size > 0
        # Whatever was in the workspace before must not matter.
        self.workspace = torch.full((size,), 255, device="cuda", dtype=torch.uint8)
        p.workspace, p.workspace_size = self.workspace.data_ptr(), size
        self.params = p

    def run(self):
        status = LIBRARY.phsa_cuda_decode(self.params, torch.cuda.current_stream().cuda_stream)
        assert status == 0, f"CUDA error {status}"

    def group_scores(self, s):
        """Logarithms of the scores of all blocks, and what rounding may move their differences by."""
        n = self.lens[s]
        own = (n - 1) // BLOCK
        group = self.q_heads // self.kv_heads
        q = self.q[s].double().view(self.kv_heads, group, self.dim)
        reps = self.reps[s][: own * self.parts].double()
        logits = torch.einsum("hgd,thd->hgt", q, reps) * self.dim**-0.5
        soft = logits.log_softmax(-1).unflatten(-1, (own, self.parts)).logsumexp(-1)
        return soft.amax(1) if self.reduce == GROUP_MAX else soft.logsumexp(1), rounding(q, reps, self.dim**-0.5)

    def check(self, outputs=True):
        """Returns (selections that differ by rounding, worst error over that of the same dtype's dense attention)."""
        differing, worst = 0, 0.0
        group = self.q_heads // self.kv_heads
        for s, n in enumerate(self.lens):
            if n == 0:
                assert (self.out[s] == 0).all()
                continue
            own = (n - 1) // BLOCK
            dense = n - 1 < self.dense_below
            lo = min(self.init, own + 1)
            hi = max(lo, own - self.local)
            want = min(self.top_k, hi - lo)
            selection = (
                self.selection[s].long()
                if self.top_k
                else torch.empty(self.kv_heads, 0, dtype=torch.long, device="cuda")
            )
            if dense:
                assert (selection == -1).all()
                blocks = torch.arange(own + 1, device="cuda").expand(self.kv_heads, -1)
            else:
                assert (selection[:, want:] == -1).all()
                mine = selection[:, :want]
                assert ((mine >= lo) & (mine < hi)).all() and (mine.diff(dim=-1) > 0).all()
                if 0 < want < hi - lo:
                    scores, near = self.group_scores(s)
                    scores = scores[:, lo:hi]
                    ref = scores.sort(dim=-1, descending=True, stable=True).indices[:, :want].sort(-1).values + lo
                    for h in (mine != ref).any(-1).nonzero().flatten().tolist():
                        a = scores[h][mine[h] - lo].sort().values
                        b = scores[h][ref[h] - lo].sort().values
                        assert ((a - b).abs() <= near[h]).all(), (s, h, mine[h], ref[h], a - b, near[h])
                        differing += 1
                fixed = torch.tensor(sorted({*range(lo), *range(max(0, own - self.local), own + 1)}), device="cuda")
                blocks = torch.cat([fixed.expand(self.kv_heads, -1), mine], 1).sort(-1).values
            if not outputs:
                continue
            tokens = (blocks[:, :, None] * BLOCK + torch.arange(BLOCK, device="cuda")).flatten(1)
            first = max(0, n - self.window) if self.window else 0
            tokens = tokens[(tokens < n) & (tokens >= first)].view(self.kv_heads, -1)
            heads = torch.arange(self.kv_heads, device="cuda")[:, None]
            k, v = self.ks[s][tokens, heads], self.vs[s][tokens, heads]
            q = self.q[s].view(self.kv_heads, group, self.dim)
            logits = torch.einsum("hgd,htd->hgt", q.double(), k.double()) * self.dim**-0.5
            same = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None]).view(
                self.q_heads, self.dim
            )
            if self.sinks is not None:  # one more key, without a value
                share = torch.sigmoid(logits.logsumexp(-1).flatten() - self.sinks.double())[:, None]
                logits = torch.cat([logits, self.sinks.double().view(self.kv_heads, group, 1)], -1)
                v, same = torch.cat([v, torch.zeros_like(v[:, :1])], 1), (same * share).to(same.dtype)
            exact = torch.einsum("hgt,htd->hgd", logits.softmax(-1), v.double()).view(self.q_heads, self.dim)
            error = (self.out[s].double() - exact).norm() / exact.norm()
            usual = (same.double() - exact).norm() / exact.norm()
            assert torch.isfinite(self.out[s]).all()
            assert error <= 2 * usual + 1e-6, (s, n, error, usual)
            worst = max(worst, (error / usual.clamp(min=1e-6)).item())
            torch.testing.assert_close(self.lse[s].double(), logits.logsumexp(-1).flatten(), atol=1e-3, rtol=1e-4)
            if self.rep_at[s] is not None and n % self.span == 0:
                rep = self.r[self.rep_at[s]].float()
                exact_rep = representatives(self.ks[s], self.fs[s], self.lam, self.parts)[-1]
                step = 2.0**-8 if self.dtype == torch.bfloat16 else 2.0**-11
                assert ((rep - exact_rep).abs() <= step * exact_rep.abs() * 1.01 + 1e-6).all()
        return differing, worst


DECODE_CASES = {
    "contiguous": dict(lens=(4000, 1, 15, 16, 17, 700, 2048), page_size=0),
    "pages": dict(lens=(5000, 0, 33, 4096, 1024, 657), page_size=64, max_kv_len=9000),
    "page_of_one_block": dict(lens=(3000, 2999), page_size=16),
    "page_of_48": dict(lens=(3000, 6001), page_size=48),
    "half": dict(lens=(5000, 3007), dtype=torch.float16),
    "dim_64": dict(lens=(5000, 3008), dim=64, q_heads=9, kv_heads=3),
    "half_64": dict(lens=(5008, 3007), dim=64, dtype=torch.float16),
    "group_1": dict(lens=(5000,), q_heads=4, kv_heads=4),
    "group_6": dict(lens=(16000, 400), q_heads=12, kv_heads=2),
    "group_16": dict(lens=(7000, 9000), q_heads=16, kv_heads=1),
    "group_16_of_64": dict(lens=(7000,), q_heads=32, kv_heads=2, dim=64),
    "k_0": dict(lens=(4000, 100), top_k=0),
    "k_1": dict(lens=(4000, 100), top_k=1, init=16, local=128),
    "k_64": dict(lens=(40000, 2000), top_k=64),
    "no_init": dict(lens=(4000,), init=0),
    "no_local": dict(lens=(4000, 4001), local=0),
    "maximum": dict(lens=(8000,), reduce=GROUP_MAX),
    "dense": dict(lens=(8000, 70000, 3), top_k=0, dense_below=DENSE),
    "dense_below": dict(lens=(3000, 2048, 2049, 6000), dense_below=2048),
    "long": dict(lens=(600000,), q_heads=4, kv_heads=2, page_size=1024),
    "all_scores_equal": dict(lens=(30000,), sharpness=0),
    "parts_2": dict(lens=(5000, 0, 33, 4096, 1024, 657, 7), page_size=64, max_kv_len=9000, parts=2),
    "parts_4": dict(lens=(16000, 400, 2012), q_heads=12, kv_heads=2, parts=4),
    "parts_8": dict(lens=(5000, 3008, 2002), dim=64, q_heads=9, kv_heads=3, parts=8),
    "parts_8_contiguous": dict(lens=(4000, 1, 15, 16, 17, 700, 2048), page_size=0, parts=8),
    "parts_4_group_16": dict(lens=(7000, 9000), q_heads=16, kv_heads=1, parts=4, dtype=torch.float16),
    "parts_2_page_of_one_block": dict(lens=(3000, 2999), page_size=16, parts=2),
    "parts_8_k_64": dict(lens=(40000, 2000), top_k=64, parts=8),
    "parts_4_maximum": dict(lens=(8000,), reduce=GROUP_MAX, parts=4),
    "parts_8_long": dict(lens=(600000,), q_heads=4, kv_heads=2, page_size=1024, parts=8),
    "parts_4_all_scores_equal": dict(lens=(30000,), sharpness=0, parts=4),
    "dim_80": dict(lens=(5000, 3008, 7), dim=80, q_heads=10, kv_heads=2),
    "dim_80_half": dict(lens=(5000, 3008), dim=80, q_heads=32, kv_heads=2, dtype=torch.float16, parts=4),
    "dim_96": dict(lens=(5000, 3008, 1), dim=96, q_heads=8, kv_heads=8, page_size=0),
    "dim_96_parts_8": dict(lens=(5000, 3008), dim=96, q_heads=12, kv_heads=4, parts=8),
    "dim_256": dict(lens=(5000, 3008, 19), dim=256, q_heads=4, kv_heads=1),
    "dim_256_group_16": dict(lens=(2500, 2008), dim=256, q_heads=16, kv_heads=1, dtype=torch.float16),
    "dim_256_parts_2": dict(lens=(5000, 0, 3008), dim=256, q_heads=8, kv_heads=4, parts=2, page_size=0),
    "dim_256_dense": dict(lens=(8000, 70000, 3), dim=256, q_heads=4, kv_heads=1, top_k=0, dense_below=DENSE),
    "window": dict(lens=(8000, 0, 3, 511, 512, 513, 1040), window=512),
    "window_of_one": dict(lens=(800, 16, 17, 1), window=1),
    "window_of_17": dict(lens=(800, 16, 17, 18, 31, 32, 33, 47, 48, 49), window=17, page_size=16),
    "window_beyond_the_text": dict(lens=(300, 40), window=5000),
    "window_sinks": dict(lens=(3000, 100, 129, 128), window=128, sinks=True, dim=64, q_heads=64, kv_heads=8),
    "window_sinks_half": dict(lens=(3000, 7), window=100, sinks=True, dtype=torch.float16, q_heads=16, kv_heads=1),
    "window_256": dict(lens=(3000, 511, 700), window=512, dim=256, q_heads=4, kv_heads=1),
    "window_96": dict(lens=(3000, 2047, 2048), window=2047, dim=96, q_heads=32, kv_heads=32),
    "dense_sinks": dict(lens=(3000, 0, 40000), top_k=0, dense_below=DENSE, sinks=True, dim=64, q_heads=64, kv_heads=8),
    "sinks": dict(lens=(5000, 30), sinks=True),
    "group_3": dict(lens=(5000,), q_heads=6, kv_heads=2),
    "group_5": dict(lens=(5000,), q_heads=10, kv_heads=2, dim=64),
    "group_7": dict(lens=(5000,), q_heads=14, kv_heads=2, dim=80),
    "group_9": dict(lens=(3000,), q_heads=9, kv_heads=1),
    "group_12": dict(lens=(3000,), q_heads=24, kv_heads=2, dim=96),
}


@over(name=DECODE_CASES, architecture=ARCHITECTURES)
def test_decode_matches_the_reference_and_repeats_its_bits(name, architecture):
    LIBRARY.phsa_cuda_set_architecture(architecture)
    case = DecodeCase(**DECODE_CASES[name])
    case.run()
    torch.cuda.synchronize()
    differing, worst = case.check()
    print(f"{name}: {differing} selections differ by rounding, error {worst:.2f} of dense")
    first = (case.out.clone(), case.lse.clone(), case.selection.clone())
    case.out.fill_(float("nan"))
    case.run()
    torch.cuda.synchronize()
    for a, b in zip(first, (case.out, case.lse, case.selection), strict=True):
        assert torch.equal(a, b)
    if name.endswith("all_scores_equal"):
        assert (case.selection == torch.arange(8, 24, device="cuda")).all()


@over(
    sharpness=[30, 300, 3000],
    reduce=[GROUP_SUM, GROUP_MAX],
    heads=[(4, 4, 128), (12, 2, 128), (9, 3, 64), (16, 1, 64)],
    parts=[1, 4],
    architecture=ARCHITECTURES,
)
def test_decode_ranks_scores_further_apart_than_f32_reaches(sharpness, reduce, heads, parts, architecture):
    LIBRARY.phsa_cuda_set_architecture(architecture)
    q_heads, kv_heads, dim = heads
    shape = dict(q_heads=q_heads, kv_heads=kv_heads, dim=dim, init=16, local=64, top_k=12, parts=parts)
    case = DecodeCase(lens=(4000, 1501, 40000), sharpness=sharpness, reduce=reduce, **shape)
    case.run()
    torch.cuda.synchronize()
    differing, _ = case.check(outputs=False)
    print(f"{differing} selections differ by rounding")


@over(architecture=ARCHITECTURES)
def test_decode_ranks_them_in_a_cache_too_long_for_shared_memory(architecture):
    LIBRARY.phsa_cuda_set_architecture(architecture)
    case = DecodeCase(lens=(600000, 2000), q_heads=4, kv_heads=2, page_size=1024, sharpness=3000)
    case.run()
    torch.cuda.synchronize()
    case.check(outputs=False)


@over(
    settings=[
        {},
        dict(parts=8),
        dict(top_k=0, dense_below=DENSE),
        dict(window=700),
        dict(top_k=0, dense_below=DENSE, dim=256),
    ],
    architecture=ARCHITECTURES,
)
def test_decode_of_a_sequence_has_the_same_bits_in_any_batch(settings, architecture):
    """A batch of one is joined by a cluster on Hopper, a batch of three is not."""
    LIBRARY.phsa_cuda_set_architecture(architecture)
    alone = DecodeCase(lens=(5000,), max_kv_len=9000, **settings)
    alone.run()
    batch = DecodeCase(lens=(5000,) * 3, max_kv_len=9000, seed=5, **settings)
    batch.q[1] = alone.q[0]
    for to, one in ((batch.k, alone.k), (batch.v, alone.v), (batch.r, alone.r)):
        to[batch.table[1, :79].long()] = one[alone.table[0, :79].long()]
    batch.run()
    torch.cuda.synchronize()
    assert torch.equal(alone.out[0], batch.out[1]) and torch.equal(alone.selection[0], batch.selection[1])


@over(
    settings=[dict(parts=1), dict(parts=8), dict(top_k=0, dense_below=DENSE), dict(window=100, sinks=True)],
    architecture=ARCHITECTURES,
)
def test_decode_in_a_graph_follows_the_lengths(settings, architecture):
    """One graph, replayed while the sequences grow token by token over a block's end."""
    LIBRARY.phsa_cuda_set_architecture(architecture)
    long = DecodeCase(lens=(3010, 1500), seed=3, **settings)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        long.run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            long.run()
    for shorter in (30, 20, 5, 1, 0):
        lens = [n - shorter for n in (3010, 1500)]
        long.kv_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        long.lens = lens
        long.out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        full = long.rep_at
        long.rep_at = [None, None]
        long.check()
        long.rep_at = full


def select(q, k, flags, top_k, init, local, lam, dense_below=0, chunk=2048, each_head=False):
    """The selection of one sequence, [token][choosing head][top_k], by the method's own words, in float32."""
    tokens, kv_heads, dim = k.shape
    reps = representatives(k, flags, lam).to(k.dtype).float()
    if each_head:
        reps, kv_heads = reps.repeat_interleave(q.shape[1] // kv_heads, 1), q.shape[1]
    group = q.shape[1] // kv_heads
    out = torch.full((tokens, kv_heads, top_k), -1, device="cuda", dtype=torch.int32)
    blocks = torch.arange(reps.shape[0], device="cuda")
    for first in range(0, tokens, chunk):
        position = torch.arange(first, min(first + chunk, tokens), device="cuda")
        own = (position // BLOCK)[:, None]
        logits = torch.einsum("nhgd,thd->hgnt", q[position].float().unflatten(1, (kv_heads, group)), reps) * dim**-0.5
        scores = logits.masked_fill(blocks >= own, -torch.inf).softmax(-1).sum(1).nan_to_num(0)
        allowed = (blocks >= init) & (blocks < own - local) & (position >= dense_below)[:, None]
        scores = scores.masked_fill(~allowed, -1)
        best = scores.topk(min(top_k, scores.shape[-1]), -1)
        chosen = torch.where(best.values >= 0, best.indices, 2**30).sort(-1).values
        chosen = torch.where(chosen == 2**30, -1, chosen).to(torch.int32)
        out[position, :, : chosen.shape[-1]] = chosen.transpose(0, 1)
    return out


def visible_blocks(selection, position, blocks, kv_heads, init, local, dense_below):
    """[kv_head][position][block]: what the queries at `position` read."""
    own = (position // BLOCK)[:, None]
    block = torch.arange(blocks, device="cuda")
    band = (block < init) | (block >= own - local) | (position < dense_below)[:, None]
    out = (band & (block <= own)).expand(kv_heads, -1, -1).clone()
    if selection.shape[-1]:
        index = selection[position].long().transpose(0, 1)
        extra = torch.zeros(kv_heads, len(position), blocks + 1, device="cuda", dtype=torch.bool)
        extra.scatter_(2, torch.where(index < 0, blocks, index), True)
        out |= extra[..., :blocks]
    return out


def reference_gradients(q, k, v, d_out, selection, init, local, dense_below, chunk=1024, dtype=torch.float32):
    """One sequence: out, lse, dq, dk, dv by autograd over chunks of queries, the selection a constant."""
    tokens, kv_heads, dim = k.shape
    group = q.shape[1] // kv_heads
    blocks = -(-tokens // BLOCK)
    choosers = max(selection.shape[1] // kv_heads, 1)  # heads of a KV head that choose apart
    k, v = (x.to(dtype).requires_grad_() for x in (k, v))
    outs, sums, dq = [], [], []
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for first in range(0, tokens, chunk):
        position = torch.arange(first, min(first + chunk, tokens), device="cuda")
        seen = visible_blocks(selection, position, blocks, kv_heads * choosers, init, local, dense_below)
        seen = seen.repeat_interleave(BLOCK, -1)[..., :tokens] & (
            torch.arange(tokens, device="cuda") <= position[:, None]
        )
        part = q[position].to(dtype).requires_grad_()
        logits = torch.einsum("nhgd,thd->hgnt", part.unflatten(1, (kv_heads, group)), k) * dim**-0.5
        seen = seen.unflatten(0, (kv_heads, choosers)).repeat_interleave(group // choosers, 1)
        logits = logits.masked_fill(~seen, -torch.inf)
        out = torch.einsum("hgnt,thd->nhgd", logits.softmax(-1), v).flatten(1, 2)
        grads = torch.autograd.grad(out, (part, k, v), d_out[position].to(dtype))
        outs.append(out.detach())
        sums.append(logits.detach().float().logsumexp(-1).permute(2, 0, 1).flatten(1))
        dq.append(grads[0])
        dk += grads[1]
        dv += grads[2]
    return torch.cat(outs), torch.cat(sums), torch.cat(dq), dk, dv


class BackwardCase:
    def __init__(
        self,
        dtype=torch.bfloat16,
        dim=128,
        q_heads=16,
        kv_heads=8,
        lens=(1000,),
        top_k=16,
        init=128,
        local=512,
        dense_below=0,
        lam=0.9,
        seed=1,
        select_chunk=2048,
        each_head=False,
    ):
        g = torch.Generator(device="cuda").manual_seed(seed)
        self.lens, self.top_k, self.dense_below, self.dtype = list(lens), top_k, dense_below, dtype
        self.init, self.local = init // BLOCK, local // BLOCK
        total = sum(lens)
        # One buffer for all three, as a model's projection leaves them: strides are not those of the heads alone.
        self.qkv = torch.empty(total, q_heads + 2 * kv_heads, dim, device="cuda", dtype=dtype)
        self.q, self.k, self.v = self.qkv.split([q_heads, kv_heads, kv_heads], 1)
        self.flags = (torch.rand(total, device="cuda", generator=g) < 0.12).to(torch.uint8)
        choosers = q_heads if each_head else kv_heads
        self.selection = torch.full((total, choosers, top_k), -1, device="cuda", dtype=torch.int32)
        self.slices, at = [], 0
        for n in lens:
            part = slice(at, at + n)
            self.slices.append(part)
            at += n
            self.q[part] = drifting_queries(n, q_heads, dim, g).to(dtype)
            self.k[part] = drifting(n, kv_heads, dim, 0.95, 1.0, g).to(dtype)
            self.v[part] = torch.randn(n, kv_heads, dim, device="cuda", generator=g).to(dtype)
            if top_k:
                self.selection[part] = select(
                    self.q[part],
                    self.k[part],
                    self.flags[part],
                    top_k,
                    self.init,
                    self.local,
                    lam,
                    dense_below,
                    select_chunk,
                    each_head,
                )
        self.d_out = torch.randn(total, q_heads, dim, device="cuda", generator=g).to(dtype)
        self.out, self.lse = torch.empty_like(self.d_out), torch.empty(total, q_heads, device="cuda")
        self.cu = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], device="cuda", dtype=torch.int32)
        self.dq, self.dk, self.dv = (torch.empty(x.shape, device="cuda", dtype=dtype) for x in (self.q, self.k, self.v))
        rules = (self.init, self.local, top_k, fk.blocks_for(dense_below), 0)
        p = fk.BackwardParams(
            fk.Shape(*rules, DTYPES[dtype], q_heads, kv_heads, dim, choosers, False, 1, dim**-0.5),
            fk.Batch(len(lens), total, max(lens), max(lens), self.cu.data_ptr()),
            *map(fk.rows, (self.q, self.k, self.v, self.out, self.d_out, self.dq, self.dk, self.dv)),
            self.lse.data_ptr(),
            self.selection.data_ptr() if top_k else None,
        )
        size = LIBRARY.phsa_cuda_backward_workspace(p)
        assert size > 0
        self.workspace = torch.full((size,), 255, device="cuda", dtype=torch.uint8)
        p.workspace, p.workspace_size = self.workspace.data_ptr(), size
        self.params = p

    def reference(self, dtype=torch.float32, chunk=1024):
        """Gradients of every sequence; sets out and lse where the reference is float32."""
        grads = []
        for part in self.slices:
            out, lse, *g = reference_gradients(
                self.q[part],
                self.k[part],
                self.v[part],
                self.d_out[part],
                self.selection[part],
                self.init,
                self.local,
                self.dense_below,
                chunk,
                dtype,
            )
            if dtype == torch.float32:
                self.out[part], self.lse[part] = out.to(self.dtype), lse
            grads.append(g)
        return [torch.cat(x) for x in zip(*grads, strict=True)]

    def run(self):
        status = LIBRARY.phsa_cuda_backward(self.params, torch.cuda.current_stream().cuda_stream)
        assert status == 0, f"CUDA error {status}"

    def poison(self):
        for x in (self.dq, self.dk, self.dv):
            x.fill_(float("nan"))

    def errors(self, exact):
        return [
            ((a.float() - b).norm() / b.norm()).item() for a, b in zip((self.dq, self.dk, self.dv), exact, strict=True)
        ]


BACKWARD_CASES = {
    "plain": dict(lens=(1500,), init=32, local=64),
    "packed": dict(lens=(700, 1, 37, 16, 1030, 128, 129), init=32, local=64),
    "half": dict(lens=(1500,), init=32, local=64, dtype=torch.float16),
    "dim_64": dict(lens=(1500, 300), init=32, local=64, dim=64, q_heads=9, kv_heads=3),
    "half_64": dict(lens=(1100,), init=16, local=128, dim=64, dtype=torch.float16, top_k=2),
    "group_1": dict(lens=(1300,), init=32, local=64, q_heads=3, kv_heads=3),
    "group_6": dict(lens=(1300, 50), init=32, local=64, q_heads=12, kv_heads=2),
    "group_16": dict(lens=(1300,), init=32, local=64, q_heads=16, kv_heads=1),
    "group_5_k_64": dict(lens=(3000,), init=0, local=0, q_heads=5, kv_heads=1, top_k=64),
    "k_0": dict(lens=(1500, 20), init=32, local=64, top_k=0),
    "dense": dict(lens=(900, 300), top_k=0, dense_below=DENSE),
    "dense_below": dict(lens=(1700, 300), init=32, local=64, dense_below=512),
    "many_ranges": dict(lens=(5000, 4500), init=272, local=32, q_heads=2, kv_heads=1),
    "paper_32k_setting": dict(lens=(4096,)),
    "each_head": dict(lens=(1500, 300), init=32, local=64, q_heads=6, kv_heads=2, top_k=5, each_head=True),
    "each_head_64": dict(lens=(1500,), init=16, local=32, q_heads=16, kv_heads=1, dim=64, top_k=9, each_head=True),
    "dim_80": dict(lens=(1500, 37), init=32, local=64, dim=80, q_heads=10, kv_heads=2),
    "dim_96": dict(lens=(1500, 37), init=32, local=64, dim=96, q_heads=4, kv_heads=4, dtype=torch.float16),
    "dim_256": dict(lens=(1200, 37), init=32, local=64, dim=256, q_heads=4, kv_heads=1),
    "dim_256_dense": dict(lens=(700, 300), top_k=0, dense_below=DENSE, dim=256, q_heads=8, kv_heads=4),
    "dim_256_each_head": dict(lens=(1100,), init=16, local=32, dim=256, q_heads=4, kv_heads=2, each_head=True),
    "group_3": dict(lens=(1300,), init=32, local=64, q_heads=6, kv_heads=2),
    "group_7": dict(lens=(1300,), init=32, local=64, q_heads=14, kv_heads=2, dim=64),
    "group_9": dict(lens=(1300,), init=32, local=64, q_heads=9, kv_heads=1),
}


@over(name=BACKWARD_CASES)
def test_backward_matches_autograd_and_repeats_its_bits(name):
    case = BackwardCase(**BACKWARD_CASES[name])
    exact = case.reference()
    case.poison()
    case.run()
    torch.cuda.synchronize()
    errors = case.errors(exact)
    # The same computation by PyTorch in the same dtype, for scale.
    usual = [((a.float() - b).norm() / b.norm()).item() for a, b in zip(case.reference(case.dtype), exact, strict=True)]
    shown = [" ".join(f"{x:.1e}" for x in row) for row in (errors, usual)]
    print(f"{name}: errors {shown[0]}, PyTorch in this dtype {shown[1]}")
    for x in (case.dq, case.dk, case.dv):
        assert torch.isfinite(x).all()
    for mine, theirs in zip(errors, usual, strict=True):
        assert mine <= 2 * theirs, (errors, usual)
    first = [x.clone() for x in (case.dq, case.dk, case.dv)]
    case.poison()
    case.workspace.fill_(127)
    case.run()
    torch.cuda.synchronize()
    for a, b in zip(first, (case.dq, case.dk, case.dv), strict=True):
        assert torch.equal(a, b)


@over(name=BACKWARD_CASES)
def test_plain_backward_matches_autograd(name):
    """The kernels for GPUs without Hopper's instructions, on this one."""
    case = BackwardCase(**BACKWARD_CASES[name])
    exact = case.reference()
    case.poison()
    LIBRARY.phsa_cuda_set_architecture(80)
    try:
        case.run()
        torch.cuda.synchronize()
    finally:
        LIBRARY.phsa_cuda_set_architecture(0)
    limit = 1e-2 if case.dtype == torch.bfloat16 else 1.5e-3
    assert all(error <= limit for error in case.errors(exact)), case.errors(exact)  # a NaN fails too


def run_once():
    """Short runs of every kernel, for compute-sanitizer: --kernel-name kns=phsa leaves PyTorch's own kernels alone."""
    for case in (
        DecodeCase(lens=(2500, 0, 1600), max_kv_len=3000),
        DecodeCase(lens=(1700,), q_heads=16, kv_heads=1, page_size=0),
        DecodeCase(lens=(900,), dim=64, dtype=torch.float16, top_k=0, dense_below=DENSE),
        DecodeCase(lens=(300, 40), dim=80, q_heads=10, kv_heads=2),
        DecodeCase(lens=(300, 40), dim=256, q_heads=16, kv_heads=1, init=16, local=32, top_k=3),
        DecodeCase(lens=(300, 0, 40), window=33, sinks=True, dim=96, q_heads=4, kv_heads=4),
        BackwardCase(lens=(200, 5), init=16, local=32, q_heads=4, kv_heads=2, dim=80, top_k=3),
        BackwardCase(lens=(200, 5), init=16, local=32, q_heads=4, kv_heads=2, dim=256, top_k=3, each_head=True),
        BackwardCase(lens=(1200, 300, 5), init=32, local=64, q_heads=4, kv_heads=2),
        BackwardCase(lens=(2500,), init=16, local=32, q_heads=3, kv_heads=1, dim=64, dtype=torch.float16),
        BackwardCase(lens=(300,), q_heads=2, kv_heads=2, top_k=0, dense_below=DENSE),
    ):
        if isinstance(case, BackwardCase):
            case.out.zero_()
            case.lse.fill_(10.0)
        LIBRARY.phsa_cuda_set_architecture(80)
        case.run()
        LIBRARY.phsa_cuda_set_architecture(0)
        case.run()
    torch.cuda.synchronize()
    return 0


if __name__ == "__main__":
    sys.exit(run_once() if sys.argv[1:] == ["once"] else run_tests(globals(), sys.argv[1:]))
