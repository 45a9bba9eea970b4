"""Times the forward beside a public sparse kernel in the same run: native sparse attention of flash-linear-attention.

That package (`pip install flash-linear-attention`, Triton) wants groups of 16 query heads and a power of two, so the
shape is 32 query and 2 KV heads. Both read the same number of tokens a query, choosing included: theirs attends to the
means of blocks of 64, takes the best 16 of those blocks by what these means weigh, and attends to them (the first and
the last two are always among them); ours has init 32, local 256 and as many chosen blocks of 16 as make up the rest.
Each output is checked before its time is printed: ours against float64 on some queries, theirs against its own
definition there, block for block.
"""

import argparse
import json
import pathlib
import statistics
import sys

import torch
from bench_forward import bench, time_ms
from torch.nn.attention import SDPBackend

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tests/cuda"))
import forward_kernels as fk

BLOCK, COUNT = 64, 16
INIT, LOCAL = 32, 256
TOP_K = (BLOCK * COUNT - INIT - LOCAL - 16) // 16  # our own block of 16 is read besides


def selected_reference(q, k, v, indices, query):
    """What `parallel_nsa` is to give for one query with a gate of one on the chosen blocks: (heads, head_dim)."""
    heads_kv = k.shape[1]
    group = q.shape[1] // heads_kv
    rows = []
    for h in range(heads_kv):
        blocks = sorted({b for b in indices[query, h].tolist() if 0 <= b <= query // BLOCK})
        tokens = torch.cat([torch.arange(b * BLOCK, min((b + 1) * BLOCK, query + 1)) for b in blocks]).to(q.device)
        keys, values = k[tokens, h].double(), v[tokens, h].double()
        weights = torch.softmax(q[query, h * group : (h + 1) * group].double() @ keys.T * q.shape[2] ** -0.5, -1)
        rows.append(weights @ values)
    return torch.cat(rows)


def public(q, k, v):
    """Milliseconds of all stages, of the chosen blocks alone, and the relative error of the latter."""
    from fla.ops.nsa.parallel import parallel_nsa, parallel_nsa_compression, parallel_nsa_topk
    from fla.ops.utils.pooling import mean_pooling

    q, k, v = (x[None].contiguous() for x in (q, k, v))
    ones = torch.ones(q.shape[:3], dtype=q.dtype, device=q.device)
    scale = q.shape[-1] ** -0.5

    def choose():
        keys, values = mean_pooling(k, BLOCK), mean_pooling(v, BLOCK)
        _, lse = parallel_nsa_compression(q=q, k=keys, v=values, TK=k.shape[1], block_size=BLOCK, scale=scale)
        return parallel_nsa_topk(q=q, k=keys, lse=lse, TK=k.shape[1], block_counts=COUNT, block_size=BLOCK, scale=scale)

    with torch.no_grad():
        indices = choose()
        alone = parallel_nsa(q, k, v, g_slc=ones, block_indices=indices, block_counts=COUNT, block_size=BLOCK)
        queries = [q.shape[1] // 3, q.shape[1] - 1]
        want = torch.stack([selected_reference(q[0], k[0], v[0], indices[0], i) for i in queries])
        error = fk.relative_error(alone[0, queries], want)
        assert error < 1e-2, error
        attend = time_ms(
            lambda: parallel_nsa(q, k, v, g_slc=ones, block_indices=indices, block_counts=COUNT, block_size=BLOCK)
        )
        whole = time_ms(lambda: parallel_nsa(q, k, v, g_cmp=ones, g_slc=ones, block_counts=COUNT, block_size=BLOCK))
    return {"nsa": whole, "nsa_attend": attend, "nsa_error": error}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lengths", default="8192,32768,131072")
    parser.add_argument("--heads", default="32/2")
    parser.add_argument("--parts", default="1,8")
    parser.add_argument("--json")
    args = parser.parse_args()
    library = fk.load_library()
    heads_q, heads_kv = map(int, args.heads.split("/"))
    rows = []
    print(f"{args.heads} heads x 128, bf16, {BLOCK * COUNT} tokens a query: cuDNN dense | public sparse | ours, ms")
    for length in map(int, args.lengths.split(",")):
        inputs = fk.make_inputs([(length, length)], heads_q, heads_kv, 128, torch.bfloat16)
        try:
            peer = public(*inputs[:3])
        except Exception as error:  # said, not hidden: a peer that fails is no peer
            peer = {"nsa_failed": f"{type(error).__name__}: {str(error)[:200]}"}
            print(length, peer, flush=True)
        for parts in map(int, args.parts.split(",")):
            settings = dict(init=INIT, local=LOCAL, top_k=TOP_K, parts=parts)
            row = bench(library, inputs, settings, {"cudnn": SDPBackend.CUDNN_ATTENTION}) | peer
            rows.append(row)
            nsa = row.get("nsa")
            beside = "" if nsa is None else f"| {nsa:.3f} (chosen blocks alone {row['nsa_attend']:.3f}) "
            ratio = "" if nsa is None else f", {nsa / row['forward']:.2f}x the public kernel's speed"
            print(
                f"{length:6d} parts {parts} | {row['cudnn']:.3f} {beside}| {row['forward']:.3f} "
                f"(represent {row['represent']:.3f} select {row['select']:.3f} attend {row['attend']:.3f}): "
                f"{row['cudnn'] / row['forward']:.2f}x dense{ratio}",
                flush=True,
            )
        torch.cuda.empty_cache()
    found = [row["nsa"] / row["forward"] for row in rows if "nsa" in row]
    if found:
        print(f"median {statistics.median(found):.2f}x the public kernel's speed")
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
