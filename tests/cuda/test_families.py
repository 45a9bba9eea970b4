"""Every architecture on a GPU: logits of small random models, dense and with PHSA, in chunks and by graphs.

    PHSA_BIN_DIR=build/cuda-release/bin python3 tests/cuda/test_families.py [part of a test's name …]

The folder has a `logits_of` with CUDA in it, and cuBLASLt must be where the loader finds it. The models are made here
(tests/e2e/families.py); GGUF files too where there is the package gguf, or PHSA_TEST_GGUF names a folder of them.

What bf16 costs is measured on the CPU, against f32; the GPU may cost a little more, as it rounds in other places. With
PHSA near-ties of blocks fall otherwise there, on either side: such a row is ten times as far off as the others, and one
text has more of them than the next (granite on the CPU: means of 0.0042 to 0.0113 for four texts). So three texts
are read, and two numbers compared: the lower quartile of the rows, which is what rounding costs where the same blocks
are chosen, and the mean, which grows with the rows that choose others. With one block less or more for each query the
CPU's mean is 8 to 15 times as large, its lower quartile 20 to 44 times.
"""

import functools
import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/e2e"), str(ROOT / "tests/cuda")]
import families  # noqa: E402
from alone import over, run_tests, skip, skip_test  # noqa: E402

BIN = pathlib.Path(os.environ.get("PHSA_BIN_DIR", ROOT / "build/release/bin"))
GGUF = os.environ.get("PHSA_TEST_GGUF")
FOLDER = tempfile.TemporaryDirectory(prefix="phsa-families-")
HOST = "PHSA_HOST_GPU" in os.environ  # tests/host_gpu.cc plays the GPU: for who writes these tests
PROGRAM = "logits_of_gpu" if HOST else "logits_of"
TIMES_THE_ERROR = 1.75  # that bf16 has on the CPU; on what plays a GPU 1.27 at most, with experts 1.41
PHSA = {"attention": "phsa", "init": 16, "local": 32, "top_k": 2, "punctuation": "none"}

if not torch.cuda.is_available() and not HOST:
    skip("skipped: needs a GPU", code=0)
if not (BIN / "logits_of").exists():
    skip(f"skipped: there is no {BIN / 'logits_of'}; PHSA_BIN_DIR names the folder of one with CUDA", code=0)


@functools.cache
def model(name, kind):
    path = pathlib.Path(FOLDER.name) / name
    made = families.make_model(name, path, torch.bfloat16)
    if kind == "safetensors":
        return path
    if GGUF:
        given = pathlib.Path(GGUF) / f"{name}.gguf"
        if not given.exists():
            skip_test(f"PHSA_TEST_GGUF has no {name}.gguf")
        return given
    if families.CASES[name][0] not in families.GGUF:
        skip_test("GGUF has no such architecture")
    if importlib.util.find_spec("gguf") is None:
        skip_test("there is no package gguf to make the file with")
    return families.make_gguf(name, made.float(), path / "model.gguf")


@over(kind=("safetensors", "gguf"), name=families.ON_GPU)
def test_logits_of_families(kind, name):
    path = model(name, kind)
    texts = [
        torch.randint(
            0, families.VOCAB, (150 if HOST else 500,), generator=torch.Generator().manual_seed(seed)
        ).tolist()
        for seed in (13, 14, 15)
    ]
    threads = os.cpu_count()
    for settings in (None, PHSA) if families.has_full_layers(name) else (None,):
        some = texts if settings else texts[:1]
        want = [families.our_logits(BIN, path, ids, threads=threads, settings=settings) for ids in some]

        def errors(*args, settings=settings, some=some, want=want, **kwargs):
            got = [families.our_logits(BIN, path, ids, *args, settings=settings, **kwargs) for ids in some]
            assert all(np.isfinite(logits).all() for logits in got), "a logit is no number"
            rows = np.abs(np.concatenate(got) - np.concatenate(want)).mean(axis=1)
            return {"mean": rows.mean(), **({"lower quartile": np.quantile(rows, 0.25)} if settings else {})}

        limits = errors("bf16", "bf16", threads=threads)
        # Prefill in one chunk, in odd ones, by the products of a few rows; decode by graphs.
        for chunk, kv_type in ((500, "bf16"), (77, "f16"), (3, "bf16"), (1, "bf16")):
            got = errors("bf16", kv_type, chunk, program=PROGRAM, device="cuda")
            words = f"{'PHSA' if settings else 'dense'}, chunks of {chunk}, {kv_type}: off by "
            words += "; ".join(f"{got[key]:.5f}, the CPU by {limit:.5f} ({key})" for key, limit in limits.items())
            print(words)
            assert all(got[key] <= TIMES_THE_ERROR * limit for key, limit in limits.items()), words


@over(name=("gemma3", "glm4", "granite"))
def test_int8_weights_of_families(name):
    """Where norms and scales come behind products that int8 weights have kernels of their own for."""
    path = model(name, "safetensors")
    ids = torch.randint(0, families.VOCAB, (150,), generator=torch.Generator().manual_seed(14)).tolist()
    want = families.our_logits(BIN, path, ids)
    limit = np.abs(families.our_logits(BIN, path, ids, "int8", "bf16") - want).mean()
    for chunk in (150, 12, 3, 1):
        got = families.our_logits(BIN, path, ids, "int8", "bf16", chunk, program=PROGRAM, device="cuda")
        error = np.abs(got - want).mean()
        words = f"chunks of {chunk}: off by {error:.5f}, the CPU by {limit:.5f}"
        print(words)
        assert error <= TIMES_THE_ERROR * limit, words


def test_what_has_no_kernels_is_refused():
    done = subprocess.run(
        [BIN / PROGRAM, model("qwen3moe", "safetensors"), "int8", "bf16", "8", "1"],
        input=b"1 2 3",
        capture_output=True,
        env={**os.environ, "PHSA_DEVICE": "cuda"},
    )
    assert done.returncode == 2 and b"--weights bf16" in done.stderr, done.stderr


if __name__ == "__main__":
    sys.exit(run_tests(globals(), sys.argv[1:]))
