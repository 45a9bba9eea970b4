"""phsa.LLM on a GPU against phsa.LLM on the CPU.

    PYTHONPATH=python PHSA_LIBRARY_PATH=build/cuda-release/lib PHSA_TEST_MODEL=MODEL python3 tests/cuda/test_python.py

The engine's module must have been built with CUDA (-DPHSA_CUDA=ON -DPHSA_PYTHON=...) for this interpreter. Needs no
torch.
"""

import functools
import os
import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from alone import over, run_tests, skip

MODEL = os.environ.get("PHSA_TEST_MODEL")
if MODEL is None:
    skip("skipped: PHSA_TEST_MODEL names no model", code=0)
try:
    import phsa
except ImportError as error:
    skip(f"skipped: {error}", code=0)

TEXT = (pathlib.Path(__file__).resolve().parents[2] / "bench/data/from_sand_hill_to_pine.txt").read_text("utf-8")
SPARSE = {"top_k": 8, "init": 16, "local": 128}
MEAN_DIFFERENCE = 0.1  # of log-probabilities, between two places that round to bf16


@functools.cache
def llm(device):
    return phsa.LLM(MODEL, device=device, weights="bf16", kv_type="bf16", context=4096)


def use(attention):
    for device in ("cpu", "cuda"):
        llm(device).set_attention(attention, **(SPARSE if attention != "dense" else {}))


def test_it_runs_on_the_gpu():
    assert llm("cuda").device != "cpu"  # it is the GPU's name
    assert llm("cpu").device == "cpu"


@over(attention=("dense", "phsa"))
def test_scores_are_those_of_the_cpu(attention):
    use(attention)
    pairs = [(TEXT[begin : begin + 6000], TEXT[begin + 6000 : begin + 6400]) for begin in (0, 10000, 20000)]
    cpu, gpu = (llm(device).loglikelihood(pairs) for device in ("cpu", "cuda"))
    differences = [np.abs(a.tokens - b.tokens).mean() for a, b in zip(cpu, gpu, strict=True)]
    print(attention, "mean difference of a token's log-probability:", differences)
    assert max(differences) < MEAN_DIFFERENCE


@over(attention=("dense", "phsa"))
def test_answers_begin_as_those_of_the_cpu(attention):
    use(attention)
    prompts = [TEXT[begin : begin + 4000] for begin in (0, 30000, 60000)]
    options = {"max_tokens": 16, "temperature": 0, "ignore_eos": True}
    cpu, gpu = (llm(device).generate(prompts, **options) for device in ("cpu", "cuda"))
    alone = [llm("cuda").generate(prompt, **options) for prompt in prompts]
    for a, b, c in zip(cpu, gpu, alone, strict=True):
        print(repr(a.text), repr(b.text))
        assert len(b.tokens) == len(c.tokens) == 16
        assert a.tokens[0] == b.tokens[0] == c.tokens[0]


def test_all_logits_are_those_of_the_cpu():
    use("phsa")
    ids = llm("cpu").tokenize(TEXT[:3000])
    cpu, gpu = (llm(device).logits(ids)[-1] for device in ("cpu", "cuda"))
    print("logits differ by", np.abs(cpu - gpu).mean(), "of", cpu.std())
    assert np.abs(cpu - gpu).mean() < 0.05 * cpu.std()


if __name__ == "__main__":
    sys.exit(run_tests(globals(), sys.argv[1:]))
