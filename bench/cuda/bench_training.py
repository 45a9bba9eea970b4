"""Times forward + backward of the PyTorch operator, as training calls it, against scaled_dot_product_attention with
cuDNN and FlashAttention in the same run.

    PYTHONPATH=python PHSA_LIBRARY_PATH=build/release/lib python3 bench/cuda/bench_training.py

All gradients are checked at 2,048 tokens, and the output and the gradient of some queries at each timed length, against
float64 over the blocks that were chosen.
"""

import argparse
import json
import pathlib
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tests/cuda"))
import forward_kernels as fk
from bench_forward import PAPER_4K, PAPER_32K, time_ms

from phsa.ops import phsa_attention

BLOCK = 16
CASES = [  # tokens, query heads, KV heads, settings, goal
    (4096, 16, 8, PAPER_4K, None),
    (4096, 16, 8, PAPER_32K, None),
    (16384, 16, 8, PAPER_32K, 2.0),
    (32768, 16, 8, PAPER_32K, 3.5),
    (32768, 32, 8, PAPER_32K, None),
    (32768, 12, 2, PAPER_32K, None),
]


def gradients(call, tensors, d_out):
    return torch.autograd.grad(call(), tensors, d_out)


def reads(selection, t, settings):
    """Whether query t of a choosing head with this list reads each of the keys up to its own."""
    read = torch.zeros(t + 1, dtype=torch.bool, device="cuda")
    read[: settings["init"]] = True
    read[max(0, t // BLOCK * BLOCK - settings["local"]) :] = True
    for chosen in selection.tolist():
        if chosen >= 0:
            read[chosen * BLOCK : (chosen + 1) * BLOCK] = True
    return read


def check_whole(heads_q, heads_kv, settings, length=2048):
    """Largest relative error of dQ, dK and dV, by float64 over what was chosen."""
    q, k, v, flags = fk.make_inputs([(length, length)], heads_q, heads_kv, 128, torch.bfloat16)
    d_out = torch.randn_like(q)
    tensors = [x.detach().requires_grad_() for x in (q, k, v)]
    out, _, selection = phsa_attention(*tensors, flags, backend="cuda", return_selection=True, **settings)
    got = torch.autograd.grad(out, tensors, d_out)
    selection = selection.cpu()
    mask = torch.zeros(heads_kv, length, length, dtype=torch.bool, device="cuda")
    for t in range(length):
        for h in range(heads_kv):
            mask[h, t, : t + 1] = reads(selection[t, h], t, settings)
    exact = [x.double().transpose(0, 1).detach().requires_grad_() for x in (q, k, v)]
    group = heads_q // heads_kv
    keys, values, mask = (x.repeat_interleave(group, 0) for x in (exact[1], exact[2], mask))
    scores = (exact[0] @ keys.transpose(1, 2) * q.shape[2] ** -0.5).masked_fill(~mask, -torch.inf)
    want = torch.autograd.grad(scores.softmax(-1) @ values, exact, d_out.double().transpose(0, 1))
    return max(fk.relative_error(a, b.transpose(0, 1)) for a, b in zip(got, want, strict=True))


def check_queries(q, k, v, out, d_q, d_out, selection, settings, queries):
    """Relative error of the output and of dQ, by float64 over what each of these queries reads."""
    group, scale = q.shape[1] // k.shape[1], q.shape[2] ** -0.5
    got_out, want_out, got_d, want_d = [], [], [], []
    for t in queries:
        for h in range(k.shape[1]):
            read = reads(selection[t, h], t, settings)
            keys, values = k[: t + 1, h][read].double(), v[: t + 1, h][read].double()
            heads = slice(h * group, (h + 1) * group)
            p = (q[t, heads].double() @ keys.T * scale).softmax(-1)
            d_p = d_out[t, heads].double() @ values.T
            want_out.append(p @ values)
            want_d.append((p * (d_p - (p * d_p).sum(-1, keepdim=True))) @ keys * scale)
            got_out.append(out[t, heads])
            got_d.append(d_q[t, heads])
    return (
        fk.relative_error(torch.cat(got_out), torch.cat(want_out)),
        fk.relative_error(torch.cat(got_d), torch.cat(want_d)),
    )


def bench(length, heads_q, heads_kv, settings):
    q, k, v, flags = fk.make_inputs([(length, length)], heads_q, heads_kv, 128, torch.bfloat16)
    tensors = [x.detach().requires_grad_() for x in (q, k, v)]
    d_out = torch.randn_like(q)

    def sparse():
        return phsa_attention(*tensors, flags, backend="cuda", **settings)[0]

    row = dict(tokens=length, heads=f"{heads_q}/{heads_kv}", **settings)
    row["error_2048"] = check_whole(heads_q, heads_kv, settings)
    out, _, selection = phsa_attention(*tensors, flags, backend="cuda", return_selection=True, **settings)
    d_q, d_k, d_v = torch.autograd.grad(out, tensors, d_out)
    out = out.detach()
    again = gradients(sparse, tensors, d_out)
    row["same_bits"] = all(torch.equal(a, b) for a, b in zip((d_q, d_k, d_v), again, strict=True))
    queries = [*torch.randint(length, (16,), generator=torch.Generator().manual_seed(3)).tolist(), length - 1]
    row["error_out"], row["error_dq"] = check_queries(q, k, v, out, d_q, d_out, selection, settings, queries)
    assert row["same_bits"], "two runs differ"
    assert max(row["error_out"], row["error_dq"], row["error_2048"]) < 2e-2, row

    row["forward"] = time_ms(lambda: sparse().detach())
    row["both"] = time_ms(lambda: gradients(sparse, tensors, d_out))
    heads = [x.transpose(0, 1)[None].detach().requires_grad_() for x in (q, k, v)]
    d_heads = d_out.transpose(0, 1)[None]

    def dense():
        return torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)

    for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
        with sdpa_kernel(backend):
            row[f"{name}_forward"] = time_ms(lambda: dense().detach())
            row[name] = time_ms(lambda: gradients(dense, heads, d_heads))
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, help="a file for the rows")
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, head_dim 128; ms of forward + backward")
    print("heads tokens K | forward, both | cuDNN forward, both | ratio, goal | FlashAttention both, ratio | errors")
    rows = []
    for *shape, goal in CASES:
        row = bench(*shape)
        rows.append(row)
        print(
            f"{row['heads']:>5} {row['tokens']:6d} {row['top_k']:2d} | {row['forward']:.3f} {row['both']:.3f} | "
            f"{row['cudnn_forward']:.3f} {row['cudnn']:.3f} | {row['cudnn'] / row['both']:.2f}x"
            f"{f' (goal {goal})' if goal else ''} | {row['flash']:.3f} {row['flash'] / row['both']:.2f}x | "
            f"out {row['error_out']:.1e} dQ {row['error_dq']:.1e} all at 2,048 {row['error_2048']:.1e}, "
            f"equal bits in two runs",
            flush=True,
        )
        torch.cuda.empty_cache()
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
