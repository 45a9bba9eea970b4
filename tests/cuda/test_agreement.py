"""The CPU engine's own queries and keys, given to the GPU's kernels: the lists must be the CPU's but for near-ties.

    PHSA_CAPTURES=FOLDER python3 tests/cuda/test_agreement.py

FOLDER has what `capture_of` (tests/capture_main.cc) wrote: *.safetensors, one layer of a model each, with q, k, reps,
flags and the CPU's lists. Whole engines differ more: there each side's bf16 rounds in other places, layer after layer.
"""

import os
import pathlib
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import forward_kernels as fk
import test_decode_backward as decode
from alone import over, run_tests, skip
from safetensors import safe_open

FOLDER = os.environ.get("PHSA_CAPTURES")
if FOLDER is None:
    skip("skipped: PHSA_CAPTURES names no folder", code=0)
CAPTURES = sorted(pathlib.Path(FOLDER).glob("*.safetensors"))
if not CAPTURES:
    raise SystemExit(f"PHSA_CAPTURES: there is no *.safetensors in {FOLDER}")
if not torch.cuda.is_available():
    skip("needs a GPU")
LIBRARY = fk.load_library()
ARCHITECTURES = [80, 90] if torch.cuda.get_device_capability()[0] == 9 else [80]


def load(name):
    with safe_open(pathlib.Path(FOLDER) / name, "pt", device="cuda") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118, no mapping
        return tensors, {key: float(value) for key, value in file.metadata().items()}


def forward(tensors, settings, lens):
    q, k, length = tensors["q"], tensors["k"], lens[0][0]
    assert settings["block"] == fk.BLOCK
    numbers = {name: int(settings[name]) for name in ("init", "local", "top_k")}
    q = q[q.shape[0] - length :].contiguous()
    return fk.Forward(LIBRARY, q, k, k, lens, flags=tensors["flags"], lam=settings["lambda"], **numbers)


def chunks(f, length=128):
    """Of the queries that have a choice, by chunks: (queries, float64 logarithms of the candidates' scores
    [query][head][block], what is a near-tie [query][head])."""
    reps = f.reps.double()
    blocks = torch.arange(reps.shape[0], device="cuda")
    q_len, kv_len = f.lens[0]
    for begin in range(0, q_len, length):
        rows = torch.arange(begin, min(begin + length, q_len), device="cuda")
        own = (kv_len - q_len + rows) // fk.BLOCK
        rows, own = (x[own - f.local_blocks - f.init_blocks > f.top_k] for x in (rows, own))
        if not len(rows):
            continue
        q = f.q[rows].double().unflatten(1, (f.heads_kv, -1))
        logits = torch.einsum("nhgd,thd->nhgt", q, reps) * f.scale
        hidden = blocks >= own[:, None]
        scores = logits.masked_fill(hidden[:, None, None], -torch.inf).log_softmax(-1).logsumexp(2)
        barred = (blocks < f.init_blocks) | (blocks >= (own - f.local_blocks)[:, None])
        size = torch.einsum("nhgd,thd->nhgt", q.abs(), reps.abs()).masked_fill(hidden[:, None, None], 0)
        near = fk.near_tie(size.amax((2, 3)) * f.scale, f.dim)
        yield rows, scores.masked_fill(barred[:, None], -torch.inf), near


def compare(f, lists, name):
    """Each list [query][head][slot] of the capture's queries against float64 over the same representatives: those that
    differ must be near-ties. Prints how many there are, and how many of the CPU's differ from them."""
    differing, gap, count, small = {}, {}, 0, 0
    for rows, scores, near in chunks(f):
        best = scores.sort(dim=-1, descending=True, stable=True)
        kth = best.values[..., f.top_k - 1]
        want = best.indices[..., : f.top_k].sort(-1).values
        count += kth.numel()
        small += int((kth < -90 * 0.6931).sum())
        for who, all_lists in lists.items():
            got = all_lists[rows].long()
            assert (got >= 0).all() and (got < scores.shape[-1]).all(), f"{name}: {who} chose no blocks"
            differs = (got != want).any(-1)
            differing[who] = differing.get(who, 0) + int(differs.sum())
            off = (kth - scores.gather(-1, got).amin(-1)) / near
            gap[who] = max(gap.get(who, 0.0), float(off.max()))
    first, *others = lists
    print(f"{name}: {count} lists with a choice, {small} with a K-th score below 2^-90")
    for who in lists:
        print(f"  {who}: {differing[who]} differ from float64, by up to {gap[who]:.3f} of what rounding allows")
    for who in others:
        print(f"  {who} and {first}: {int((lists[who] != lists[first]).any(-1).sum())} differ")
    assert count > 0
    for who in lists:
        assert gap[who] < 1, f"{name}: {who} chose a block that is {gap[who]} times a near-tie worse than the K-th"
        # Nearly all lists have no near-tie in their last place.
        assert differing[who] <= max(2, 0.002 * count), f"{name}: {differing[who]} of {count} lists of {who} differ"


@over(architecture=ARCHITECTURES, name=[path.name for path in CAPTURES])
def test_prefill_chooses_as_the_cpu_does_from_its_queries_and_keys(architecture, name):
    LIBRARY.phsa_cuda_set_architecture(architecture)
    tensors, settings = load(name)
    length = tensors["q"].shape[0]
    f = forward(tensors, settings, [(length, length)])
    # Representatives are sums in another order, rounded: to the neighbouring number at most, and rarely.
    f.represent()
    torch.cuda.synchronize()
    mine, theirs = f.reps.double(), tensors["reps"].double()
    step = 2.0**-7 if f.reps.dtype == torch.bfloat16 else 2.0**-10
    k = tensors["k"][: len(theirs) * fk.BLOCK].double().abs().unflatten(0, (-1, fk.BLOCK))
    sums = k.amax(1) * 32 * 2.0**-24  # where terms cancel, the sum's own rounding is larger than the last bit
    assert ((mine - theirs).abs() <= step * theirs.abs() + sums).all()
    different = (mine != theirs).double().mean().item()
    print(f"{name}: {different:.5%} of the elements of representatives differ")
    assert different < 0.005
    # From here on both sides have the CPU's.
    f.reps.copy_(tensors["reps"])
    f.select()
    torch.cuda.synchronize()
    compare(f, {"the CPU": tensors["selection"], "the GPU": f.selection}, name)


@over(name=[path.name for path in CAPTURES])
def test_decode_chooses_as_the_cpu_does_from_its_queries_and_keys(name):
    tensors, settings = load(name)
    length, q_heads, dim = tensors["q"].shape
    last = 64
    f = forward(tensors, settings, [(last, length)])
    f.reps.copy_(tensors["reps"])
    lists = torch.empty_like(f.selection)
    case = decode.DecodeCase(
        dtype=tensors["q"].dtype,
        dim=dim,
        q_heads=q_heads,
        kv_heads=tensors["k"].shape[1],
        lens=(length,),
        top_k=f.top_k,
        init=int(settings["init"]),
        local=int(settings["local"]),
        page_size=0,
        lam=settings["lambda"],
    )
    case.k.copy_(tensors["k"])
    case.flags.copy_(tensors["flags"])
    for i in range(last):
        case.r.copy_(tensors["reps"])
        case.q[0] = f.q[i]
        case.kv_lens.fill_(length - last + i + 1)
        case.run()
        lists[i] = case.selection[0]
    torch.cuda.synchronize()
    compare(f, {"the CPU": tensors["selection"][length - last :], "the GPU": lists}, name)


if __name__ == "__main__":
    sys.exit(run_tests(globals(), sys.argv[1:]))
