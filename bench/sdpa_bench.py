"""Times our attention against torch's scaled_dot_product_attention on the CPU, in one run, on the same values.

    PYTHONPATH=python python bench/sdpa_bench.py [--lengths 4096,8192,16384,32768] [--dtype float32,bfloat16]
                                                 [--heads 16/8] [--dim 128] [--repeat 3] [--backward-up-to 8192]

Prints one JSON line per measurement. `against_sdpa` is SDPA's time over ours: our dense path must not be below 1. The
dense output and gradients are compared with SDPA's; `error` is the largest difference over the largest value.
Each side gets its own natural layout: (heads, tokens, dim) for SDPA, (tokens, heads, dim) for ours.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

from phsa.ops import backends, phsa_attention


def best_ms(run: Callable[[], object], repeat: int) -> float:
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def drift(tokens: int, heads: int, dim: int, memory: float, size: float, seed: int) -> torch.Tensor:
    """(tokens, heads, dim): each row a little different from the last, as neighbouring tokens of a text are."""
    noise = torch.randn(tokens, heads, dim, generator=torch.Generator().manual_seed(seed))
    fresh = (1 - memory**2) ** 0.5
    state = noise[0]
    rows = [state * size]
    for i in range(1, tokens):
        state = memory * state + fresh * noise[i]
        rows.append(state * size)
    return torch.stack(rows)


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    ours, theirs = ours.float(), theirs.float()
    return float((ours - theirs).abs().max() / theirs.abs().max())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="4096,8192,16384,32768")
    parser.add_argument("--dtype", default="float32,bfloat16")
    parser.add_argument("--heads", default="16/8")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--backward-up-to", type=int, default=8192)
    args = parser.parse_args()
    if "cpu" not in backends():
        print("sdpa_bench: the operators' library is not built; see docs/python.md", file=sys.stderr)
        return 1
    q_heads, kv_heads = map(int, args.heads.split("/"))
    settings = {"top_k": 16, "lam": 0.9, "init": 128, "local": 512, "block": 16}
    failed = False

    for dtype_name in args.dtype.split(","):
        dtype = getattr(torch, dtype_name)
        # The products run in the inputs' type: a bf16 result is good to a few units of its last place.
        tolerance = 2e-2 if dtype != torch.float32 else 1e-4
        for tokens in map(int, args.lengths.split(",")):
            q = drift(tokens, q_heads, args.dim, 0.95, 1.5, 1).to(dtype)
            k = drift(tokens, kv_heads, args.dim, 0.95, 1.0, 2).to(dtype)
            v = drift(tokens, kv_heads, args.dim, 0.0, 1.0, 3).to(dtype)
            flags = torch.rand(tokens, generator=torch.Generator().manual_seed(4)) < 0.12
            repeat = args.repeat if tokens <= 16384 else 1
            theirs = [x.transpose(0, 1).contiguous().unsqueeze(0) for x in (q, k, v)]

            def sdpa(tensors: list[torch.Tensor]) -> torch.Tensor:
                return scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True)

            def ours(policy: str, tensors: list[torch.Tensor], punctuation: torch.Tensor) -> torch.Tensor:
                return phsa_attention(*tensors, punctuation, policy=policy, **settings)[0]

            with torch.no_grad():
                reference = sdpa(theirs)[0].transpose(0, 1)
                sdpa_ms = best_ms(lambda: sdpa(theirs), repeat)
                for policy in ("dense", "phsa"):
                    out = ours(policy, [q, k, v], flags)
                    ms = best_ms(lambda policy=policy: ours(policy, [q, k, v], flags), repeat)
                    error = relative_error(out, reference) if policy == "dense" else None
                    failed |= error is not None and not error < tolerance
                    report("forward", dtype_name, policy, tokens, ms, sdpa_ms, error)

            if tokens > args.backward_up_to:
                continue
            gradient = drift(tokens, q_heads, args.dim, 0.0, 1.0, 5).to(dtype)
            leaves = [x.clone().requires_grad_() for x in theirs]

            def sdpa_both() -> list[torch.Tensor]:
                out = sdpa(leaves)
                return torch.autograd.grad(out, leaves, gradient.transpose(0, 1).unsqueeze(0))

            expected = [g[0].transpose(0, 1) for g in sdpa_both()]
            sdpa_ms = best_ms(sdpa_both, min(2, repeat))
            own = [x.clone().requires_grad_() for x in (q, k, v)]
            for policy in ("dense", "phsa"):

                def both(policy: str = policy) -> list[torch.Tensor]:
                    return torch.autograd.grad(ours(policy, own, flags), own, gradient)

                got = both()
                ms = best_ms(both, min(2, repeat))
                error = None
                if policy == "dense":
                    error = max(relative_error(g, e) for g, e in zip(got, expected, strict=True))
                    failed |= not error < 2 * tolerance
                report("forward+backward", dtype_name, policy, tokens, ms, sdpa_ms, error)
    if failed:
        print("sdpa_bench: a result differs from SDPA's by more than rounding", file=sys.stderr)
    return int(failed)


def report(test: str, dtype: str, policy: str, tokens: int, ms: float, sdpa_ms: float, error: float | None) -> None:
    line = {
        "test": test,
        "dtype": dtype,
        "attention": policy,
        "tokens": tokens,
        "ms": round(ms, 2),
        "sdpa_ms": round(sdpa_ms, 2),
        "against_sdpa": round(sdpa_ms / ms, 3),
        "error": error,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    sys.exit(main())
