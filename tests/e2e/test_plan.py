"""`phsa plan`: shares of weights and caches, by numbers that can be checked by hand."""

import json
import re

import pytest
from conftest import ROOT, run_phsa
from test_cli import write_gguf

gguf = pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", context=2048)


def plan(*args):
    done = run_phsa("plan", *args, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_cache_has_two_rows_a_token_layer_and_head_and_parts_a_block(tiny):
    info = json.loads(run_phsa("info", tiny, "--json").stdout)
    row = info["kv_heads"] * info["head_dim"] * 2 * info["layers"]  # bf16
    out = plan("-m", tiny, "-c", 1024, "--parts", 4, "-K", 2, "--init", 16, "--local", 32)
    assert out["dense"]["key_values"] == out["sparse"]["key_values"] == 2 * 1024 * row
    assert out["dense"]["representatives"] == 0
    assert out["sparse"]["representatives"] == 1024 // 16 * 4 * row
    assert out["dense"]["read_key_values"] == 2 * 1024 * row
    assert out["sparse"]["read_key_values"] == 2 * (16 + 32 + 16 + 2 * 16) * row
    assert out["context"] == 1024 and out["gpus"] == 1
    # A text longer than the model's own, on request.
    assert plan("-m", tiny)["context"] == 2048


@pytest.mark.parametrize("kv_type", ["bf16", "f32", "int8"])
def test_info_says_the_same_of_a_cache_as_the_plan(tiny, kv_type):
    """A C++ test, ServingNeeds.ACacheOfEveryType…, holds them to what the engine takes."""
    memory = json.loads(run_phsa("info", tiny, "--json").stdout)["memory"]
    out = plan("-m", tiny, "-c", 128_000, "--kv-type", kv_type)
    flags = 128_000
    assert memory["cache_of_1000_tokens"][kv_type] * 128 == out["dense"]["key_values"] + flags
    assert memory["representatives_of_1000_tokens"][kv_type] * 128 == out["sparse"]["representatives"]


def test_an_8_bit_cache_has_a_byte_a_channel_and_two_a_row(tiny):
    info = json.loads(run_phsa("info", tiny, "--json").stdout)
    rows = 2 * info["kv_heads"] * info["layers"]
    assert info["memory"]["cache_of_1000_tokens"]["int8"] == 1000 * (rows * (info["head_dim"] + 2) + 1)
    assert "int8, on the CPU" in run_phsa("info", tiny).stdout


def test_vllm_had_room_for_as_many_tokens_as_the_plan_says(smollm2):
    """What vLLM 0.32 said on a CPU, with 512 MiB for its cache of f32 in pages of 128 tokens (bench/vllm_check.py)."""
    said = (ROOT / "bench/results/vllm-0.32.0-smollm2-135m-float32-cpu.txt").read_text().split("four layers")[0]
    tokens = {
        mode: int(count.replace(",", "")) for mode, count in re.findall(r"(dense|all): .*KV cache size: ([\d,]+)", said)
    }
    # There each layer has room for the most parts that one has, and a byte a token for flags.
    out = plan("-m", smollm2, "-c", 128, "--parts", 8, "--kv-type", "f32", "--weights", "f32")
    page = out["dense"]["key_values"]
    assert (512 << 20) // page * 128 == tokens["dense"] == 11648
    page += out["sparse"]["representatives"] + 30 * 128
    assert (512 << 20) // page * 128 == tokens["all"] == 9216
    # The file that it loaded: 538,090,408 bytes with its header.
    assert 538_000_000 < out["dense"]["weights"] < 538_090_408


def test_for_people_it_is_a_table(tiny):
    done = run_phsa("plan", "-m", tiny, "--memory", 1, "--reserved", 0.5)
    assert done.returncode == 0, done.stderr
    for words in ("weights", "keys and values of a text", "representatives of a text", "texts that fit at once"):
        assert words in done.stdout
    assert "900.0 MB are used, 500.0 MB of them" in done.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--gpus", 7], "cannot share"),
        (["--gpus", 2, "--pipeline", 3], "a multiple of --pipeline"),
        (["--utilization", 2], "--utilization"),
        (["--kv-type", "q9"], "--kv-type"),
        (["--attention", "nothing"], "nothing"),
    ],
)
def test_what_cannot_be_is_refused(tiny, flags, words):
    done = run_phsa("plan", "-m", tiny, *flags)
    assert done.returncode == 2
    assert words in done.stderr
