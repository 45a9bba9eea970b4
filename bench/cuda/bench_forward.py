"""Times every stage of the CUDA forward and the whole, against dense attention in the same run.

Each shape's selections and outputs are checked against float64 on some queries before its times are printed.
"""

import argparse
import json
import pathlib
import statistics
import sys

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tests/cuda"))
import forward_kernels as fk

PAPER_32K = dict(init=128, local=512, top_k=16)
PAPER_4K = dict(init=16, local=128, top_k=2)
GRAPH_LENGTH = 32768  # longer calls have no launch gaps worth timing


def time_ms(function, budget_ms=60.0):
    """Median over runs, events around each, the L2 left as the run before left it (from 16k on inputs are larger)."""
    function()
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    function()
    end.record()
    torch.cuda.synchronize()
    runs = int(min(30, max(5, budget_ms / max(start.elapsed_time(end), 1e-3))))
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(runs)]
    for a, b in events:
        a.record()
        function()
        b.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in events)


def graph_ms(function):
    """The same in a CUDA graph: without the launch gaps, which matter at 4k."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            function()
    return time_ms(graph.replay) / 10


def distinct_per_tile(selection, tile=64):
    """Distinct chosen blocks of `tile` neighbouring queries, over K."""
    length, heads, top_k = selection.shape
    found = []
    for start in range(length // 2, length - tile, max(tile, length // 16)):
        for h in range(heads):
            found.append(selection[start : start + tile, h].unique().numel() / top_k)
    return statistics.mean(found) if found else 0.0


def kernel_times(function):
    """Device time per kernel, where the profiler works."""
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            function()
            torch.cuda.synchronize()
        times = {}
        for event in profile.key_averages():
            for name in ("Represent", "Statistics", "Choose", "Attend"):
                if name in event.key:
                    times[name] = times.get(name, 0.0) + event.device_time_total / 1e3
        return times
    except Exception as error:  # a profiler that does not start must not stop the benchmark
        return {"profiler": str(error)}


def load_captured(path):
    """q, k, v and flags of one layer, as capture.py wrote them."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in ("q", "k", "v", "flags")}

    def join(name):
        low, high = arrays[name]
        words = low.astype(np.uint16) | (high.astype(np.uint16) << 8)
        return torch.from_numpy(words.view(np.int16)).view(torch.bfloat16).cuda()

    return join("q"), join("k"), join("v"), torch.from_numpy(arrays["flags"].copy()).cuda()


def bench(library, inputs, settings, dense, check=16):
    q, k, v, flags = inputs
    length, heads_q, heads_kv = q.shape[0], q.shape[1], k.shape[1]
    lens = [(length, length)]
    f = fk.Forward(library, q, k, v, lens, flags=flags, **settings)
    f.run()
    torch.cuda.synchronize()
    queries = torch.randint(length, (check,), generator=torch.Generator().manual_seed(3)).tolist()
    queries.append(length - 1)
    checked, differing, gap = fk.check_selection(f, 0, queries)
    want, _ = fk.reference_attention(f, 0, queries)
    error = fk.relative_error(f.out[queries], want)
    assert gap < 1 and error < 6e-3, (gap, error)
    row = dict(
        length=length,
        heads_q=heads_q,
        heads_kv=heads_kv,
        **settings,
        lists_checked=checked,
        lists_differing=differing,
        gap=gap,
        error=error,
        distinct_64=distinct_per_tile(f.selection) if f.top_k else 0,
        workspace_mib=f.workspace.numel() / 2**20,
    )
    row["represent"] = time_ms(f.represent)
    row["select"] = time_ms(f.select)
    row["attend"] = time_ms(f.attend)
    row["forward"] = time_ms(f.run)
    graphs = length <= GRAPH_LENGTH
    if graphs:
        row["forward_graph"] = graph_ms(f.run)
    row["kernels"] = kernel_times(f.run)
    qd, kd, vd = (x.transpose(0, 1)[None] for x in (q, k, v))
    for name, backend in dense.items():
        with sdpa_kernel(backend):
            call = lambda: torch.nn.functional.scaled_dot_product_attention(  # noqa: E731
                qd, kd, vd, is_causal=True, enable_gqa=True
            )
            row[name] = time_ms(call)
            if name == "cudnn" and graphs:
                row["cudnn_graph"] = graph_ms(call)
    return row


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lengths", default="4096,16384,32768,65536,131072")
    parser.add_argument("--heads", default="16/8")
    parser.add_argument("--settings", default="32k", choices=["32k", "4k"])
    parser.add_argument("-K", help="a list, with --parts each with each: in place of the setting's")
    parser.add_argument("--parts", default="1")
    parser.add_argument("--init", type=int)
    parser.add_argument("--local", type=int)
    parser.add_argument("--architecture", type=int, default=0)
    parser.add_argument("--flash", action="store_true")
    parser.add_argument("--no-dense", action="store_true")
    parser.add_argument("--captured", help="a file of capture.py; its length and heads are used in place of the lists")
    parser.add_argument("--json")
    args = parser.parse_args()
    library = fk.load_library()
    library.phsa_cuda_set_architecture(args.architecture)
    dense = {} if args.no_dense else {"cudnn": SDPBackend.CUDNN_ATTENTION}
    if args.flash:
        dense["flash"] = SDPBackend.FLASH_ATTENTION
    rows = []
    print("heads length | represent select attend | forward (graph) ms | cudnn (graph) ms, ratio | flash | checks")
    base = dict(PAPER_32K if args.settings == "32k" else PAPER_4K)
    if args.init is not None:
        base["init"] = args.init
    if args.local is not None:
        base["local"] = args.local
    chosen = [
        dict(base, top_k=top_k, parts=int(parts))
        for parts in args.parts.split(",")
        for top_k in (map(int, args.K.split(",")) if args.K else [base["top_k"]])
    ]

    def inputs():
        if args.captured:
            yield load_captured(args.captured)
            return
        for heads in args.heads.split(","):
            heads_q, heads_kv = map(int, heads.split("/"))
            for length in map(int, args.lengths.split(",")):
                yield fk.make_inputs([(length, length)], heads_q, heads_kv, 128, torch.bfloat16)

    for tensors, settings in ((tensors, settings) for tensors in inputs() for settings in chosen):
        r = bench(library, tensors, settings, dense)
        rows.append(r)
        if len(chosen) > 1 or args.parts != "1":
            print(f"init {r['init']} local {r['local']} K {r['top_k']} parts {r['parts']}: ", end="")
        heads = f"{r['heads_q']}/{r['heads_kv']}"
        kernels = " ".join(f"{a} {b:.3f}" if isinstance(b, float) else f"{a} {b}" for a, b in r["kernels"].items())
        cudnn = r.get("cudnn", 0.0)
        print(
            f"{heads} {r['length']:6d} | {r['represent']:.3f} {r['select']:.3f} {r['attend']:.3f} | {r['forward']:.3f} "
            f"({r.get('forward_graph', 0.0):.3f}) | {cudnn:.3f} ({r.get('cudnn_graph', 0.0):.3f}) "
            f"{cudnn / r['forward']:.2f}x | {r.get('flash', 0.0):.3f} | distinct {r['distinct_64']:.1f}K differing "
            f"{r['lists_differing']}/{r['lists_checked']} gap {r['gap']:.1e} error {r['error']:.1e} "
            f"{r['workspace_mib']:.0f} MiB | {kernels}",
            flush=True,
        )
        torch.cuda.empty_cache()
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
