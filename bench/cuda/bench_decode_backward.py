"""Times decode and backward on the GPU against scaled_dot_product_attention with cuDNN and FlashAttention, same run.

Build with scripts/test-cuda.sh --build, then:
    python3 bench/cuda/bench_decode_backward.py [--help] [decode] [backward]
"""

import argparse
import json
import os
import sys
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "cuda"))
import forward_kernels as fk
import test_decode_backward as lib

BLOCK = lib.BLOCK
RESULTS = []


def report(**row):
    RESULTS.append(row)
    print("  ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), flush=True)


def time_graph(calls, repeats=30):
    """Median milliseconds of one call. All calls are captured into one graph; each touches its own inputs, so that
    none finds its data in the cache."""
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        graph.replay()
        torch.cuda.synchronize()
        times = []
        for _ in range(repeats):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / len(calls))
    return sorted(times)[len(times) // 2]


def time_calls(call, repeats=10):
    for _ in range(2):
        call()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


class DecodeBench:
    """A batch of equal lengths on random keys, laid out in pages of 256 in a shuffled order."""

    def __init__(self, batch, length, q_heads, kv_heads, dim=128, page_size=256, parts=1):
        g = torch.Generator(device="cuda").manual_seed(batch + length)
        pages = batch * length // page_size
        shape = (pages, page_size, kv_heads, dim)
        self.k = torch.empty(shape, device="cuda", dtype=torch.bfloat16)
        self.v = torch.empty(shape, device="cuda", dtype=torch.bfloat16)
        span = BLOCK // parts
        self.parts = parts
        self.reps = torch.empty(pages, page_size // span, kv_heads, dim, device="cuda", dtype=torch.bfloat16)
        for i in range(0, pages, 512):
            part = slice(i, min(i + 512, pages))
            self.k[part].normal_(generator=g)
            self.v[part].normal_(generator=g)
            self.reps[part] = self.k[part].float().unflatten(1, (-1, span)).mean(2).to(torch.bfloat16)
        self.q = torch.randn(batch, q_heads, dim, device="cuda", generator=g).mul_(3).to(torch.bfloat16)
        self.table = torch.randperm(pages, device="cuda", generator=g).to(torch.int32).view(batch, -1)
        self.lens = torch.full((batch,), length, device="cuda", dtype=torch.int32)
        self.out = torch.empty_like(self.q)
        self.lse = torch.empty(batch, q_heads, device="cuda")
        self.size = (batch, length, q_heads, kv_heads, dim, page_size)

    def call(self, top_k=16, init=128, local=512, dense_below=0):
        batch, length, q_heads, kv_heads, dim, page_size = self.size
        lams = torch.full((kv_heads,), 0.9, device="cuda")
        rules = (init // BLOCK, local // BLOCK, top_k, fk.blocks_for(dense_below), 0)
        p = fk.ForwardParams(
            fk.Shape(*rules, 2, q_heads, kv_heads, dim, kv_heads, False, self.parts, dim**-0.5),
            fk.Batch(batch, batch, 1, length, None, self.lens.data_ptr(), None, None, page_size),
            fk.rows(self.q),
            *(fk.rows(x, x.stride(0)) for x in (self.k, self.v, self.reps)),
            fk.rows(self.out),
            lam=lams.data_ptr(),
            lse=self.lse.data_ptr(),
        )
        p.batch.page_table, p.batch.page_table_stride = self.table.data_ptr(), self.table.stride(0)
        size = lib.LIBRARY.phsa_cuda_decode_workspace(p)
        workspace = torch.empty(size, device="cuda", dtype=torch.uint8)
        p.workspace, p.workspace_size = workspace.data_ptr(), size

        def run():
            status = lib.LIBRARY.phsa_cuda_decode(p, torch.cuda.current_stream().cuda_stream)
            assert status == 0, status
            return workspace, lams

        return run

    def dense(self, backend):
        """PyTorch's dense attention over the same bytes, read as one contiguous cache."""
        batch, length, _, kv_heads, dim, _ = self.size
        k, v = (x.view(batch, length, kv_heads, dim).transpose(1, 2) for x in (self.k, self.v))

        def run():
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(self.q[:, :, None], k, v, enable_gqa=True)

        return run


def stages(call, repeats=20):
    """Microseconds of each kernel, from the profiler."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    out = {}
    for event in profile.key_averages():
        name = event.key.replace("phsa::cuda::(anonymous namespace)::", "").replace("void ", "").split("(")[0]
        out[name] = out.get(name, 0) + event.device_time_total / repeats
    return {k: round(v, 2) for k, v in out.items() if v > 0}


def bench_decode(parts, settings):
    for batch, length, q_heads, kv_heads in (
        (1, 131072, 16, 8),
        (16, 131072, 16, 8),
        (1, 131072, 32, 8),
        (16, 131072, 32, 8),
        (1, 131072, 12, 2),
        (16, 131072, 12, 2),
        (1, 32768, 16, 8),
        (16, 32768, 16, 8),
        (16, 4096, 16, 8),
    ):
        bytes_read = batch * length * kv_heads * 128 * 2 // 16 * parts
        sets = max(1, min(10, 200_000_000 // bytes_read))  # several times the cache between two uses of a set
        data = [DecodeBench(batch, length, q_heads, kv_heads, parts=parts) for _ in range(sets)]
        method = dict(init=16, local=128, top_k=2) if length <= 4096 else settings
        sparse = time_graph([d.call(**method) for d in data])
        again = time_graph([d.call(**method) for d in data])
        own_dense = time_graph([d.call(top_k=0, dense_below=lib.DENSE) for d in data[:4]])
        row = dict(
            stage="decode",
            batch=batch,
            length=length,
            heads=f"{q_heads}/{kv_heads}",
            parts=parts,
            **method,
            sparse_ms=sparse,
            again_ms=again,
            own_dense_ms=own_dense,
        )
        for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
            try:
                row[f"{name}_ms"] = time_graph([d.dense(backend) for d in data[:4]])
            except RuntimeError as error:
                print(f"{name}: {str(error).splitlines()[0][:100]}")
        if "cudnn_ms" in row:
            row["against_cudnn"] = row["cudnn_ms"] / sparse
        reps = batch * length // BLOCK * parts * kv_heads * 256
        read = batch * (method["init"] + method["local"] + BLOCK * (method["top_k"] + 1)) * kv_heads * 512
        row["bytes_mb"] = (reps + read) / 1e6
        row["tb_per_s"] = (reps + read) / sparse / 1e9
        report(**row)
        if batch * length >= 131072:
            print("   stages (us):", stages(data[0].call(**method)))
        del data
        torch.cuda.empty_cache()


def time_dense(case, row):
    """PyTorch's dense forward and backward on the same inputs."""
    heads = [x.transpose(0, 1)[None].detach().requires_grad_() for x in (case.q, case.k, case.v)]
    d_out = case.d_out.transpose(0, 1)[None]

    def forward():
        return torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)

    for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
        with sdpa_kernel(backend):
            try:
                row[f"{name}_forward_ms"] = time_calls(forward, 5)
                out = forward()

                def backward(out=out):
                    torch.autograd.grad(out, heads, d_out, retain_graph=True)

                row[f"{name}_backward_ms"] = time_calls(backward, 5)
            except RuntimeError as error:
                print(f"{name}: {str(error).splitlines()[0][:100]}")


def bench_backward():
    for length, q_heads, kv_heads, method in (
        (16384, 16, 8, {}),
        (32768, 16, 8, {}),
        (32768, 32, 8, {}),
        (32768, 12, 2, {}),
        (4096, 16, 8, dict(top_k=2, init=16, local=128)),
        (65536, 16, 8, {}),
    ):
        case = lib.BackwardCase(lens=(length,), q_heads=q_heads, kv_heads=kv_heads, select_chunk=512, **method)
        row = dict(stage="backward", length=length, heads=f"{q_heads}/{kv_heads}")
        if length <= 16384:
            exact = case.reference(chunk=256)
            case.poison()
            case.run()
            row["error"] = max(case.errors(exact))
            del exact
        else:
            case.out.normal_()
            case.lse.fill_(10.0)
        case.poison()
        case.run()
        torch.cuda.synchronize()
        assert all(torch.isfinite(x).all() for x in (case.dq, case.dk, case.dv))
        row["workspace_mb"] = case.params.workspace_size / 1e6
        row["backward_ms"] = time_calls(case.run)
        for tile in (8, 64):
            lists = case.selection[length // 2 : length // 2 + 1024, 0].reshape(-1, tile * case.top_k).tolist()
            row[f"union_{tile}_over_k"] = sum(len(set(x) - {-1}) for x in lists) / len(lists) / case.top_k
        if length <= 32768:
            time_dense(case, row)
        if "cudnn_backward_ms" in row:
            row["backward_against_cudnn"] = row["cudnn_backward_ms"] / row["backward_ms"]
        report(**row)
        print("   stages (us):", stages(case.run, 5))
        del case
        torch.cuda.empty_cache()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("chosen", nargs="*", default=["decode", "backward"], help="decode, backward, once")
    for name, default in (("parts", 1), ("top-k", 16), ("init", 128), ("local", 512)):
        parser.add_argument(f"--{name}", type=int, default=default, help="of decode, from 32k on")
    args = parser.parse_args()
    chosen = args.chosen
    if "decode" in chosen:
        bench_decode(args.parts, dict(init=args.init, local=args.local, top_k=args.top_k))
    if "backward" in chosen:
        bench_backward()
    if "once" in chosen:  # for a profiler
        case = lib.BackwardCase(lens=(16384,), select_chunk=512)
        case.out.normal_()
        case.lse.fill_(10.0)
        case.run()
        DecodeBench(16, 131072, 16, 8).call()()
        torch.cuda.synchronize()
    out = Path(os.environ.get("OUT", Path(__file__).resolve().parents[1] / "results"))
    out.mkdir(parents=True, exist_ok=True)
    (out / "cuda_decode_backward.json").write_text(json.dumps(RESULTS, indent=1) + "\n")
