"""The lists that the CPU's kernels choose from a real model's queries and keys, against float64."""

import os
import subprocess

import pytest
import torch
from conftest import BIN, ROOT
from safetensors import safe_open

BLOCK = 16


def capture(model, tokens, layers, out):
    """What tests/capture_main.cc writes: {layer: (tensors, settings)}."""
    env = {**os.environ, "PHSA_BIN_DIR": str(BIN.resolve())}
    script = [ROOT / "scripts/capture-attention.sh", model, str(tokens), ",".join(map(str, layers)), out]
    subprocess.run(script, env=env, check=True, timeout=600)
    found = {}
    for layer in layers:
        with safe_open(f"{out}-{layer}.safetensors", "pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118, no mapping
            found[layer] = tensors, {key: float(value) for key, value in file.metadata().items()}
    return found


def compare(tensors, settings):
    """(lists with a choice, lists that differ from float64's, the largest gap over what f32 may lose)."""
    q, reps, lists = tensors["q"].double(), tensors["reps"].double(), tensors["selection"].long()
    init, local = (int(settings[name]) // BLOCK for name in ("init", "local"))
    top_k, (tokens, _, dim) = lists.shape[-1], q.shape
    own = torch.arange(tokens) // BLOCK
    rows = (own - local - init > top_k).nonzero().flatten()
    own, blocks = own[rows, None], torch.arange(len(reps))
    q = q[rows].unflatten(1, (reps.shape[1], -1)) * dim**-0.5
    hidden = (blocks >= own)[:, None, None]
    logits = torch.einsum("nhgd,thd->nhgt", q, reps).masked_fill(hidden, -torch.inf)
    scores = logits.log_softmax(-1).logsumexp(2)
    scores = scores.masked_fill(((blocks < init) | (blocks >= own - local))[:, None], -torch.inf)
    best = scores.topk(top_k, -1)
    want, got = best.indices.sort(-1).values, lists[rows]
    # As in tests/attention_test.cc: a product of vectors, summed in f32 or by bf16 instructions, may be off by 32 units
    # of the last place of |q|·|k|; two blocks' scores are, and two heads' log-sum-exps.
    size = q.norm(dim=-1).amax(2) * reps.norm(dim=-1).amax(0)
    near = 4 * (32 * size + 64) * 2**-24
    gap = (best.values[..., -1] - scores.gather(-1, got).amin(-1)) / near
    return got.shape[0] * got.shape[1], int((got != want).any(-1).sum()), float(gap.max())


@pytest.fixture(scope="module")
def captured(smollm2, tmp_path_factory):
    return capture(smollm2, 600, (0, 15, 29), tmp_path_factory.mktemp("captures") / "smollm2")


def test_lists_of_a_real_model_are_those_of_float64_but_for_near_ties(captured):
    for layer, (tensors, settings) in captured.items():
        lists, differing, gap = compare(tensors, settings)
        print(f"layer {layer}: {differing} of {lists} lists differ, by up to {gap:.3f} of what rounding allows")
        assert lists > 900
        assert differing <= 0.002 * lists
        assert gap < 1
