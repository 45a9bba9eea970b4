"""`phsa info` and `phsa models` as users run them: what they print, and how they fail."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf_files import write_out

gguf = pytest.importorskip("gguf", reason="the Python package gguf makes the files")
np = pytest.importorskip("numpy")


def small_gguf(path: Path) -> Path:
    """Width 32, 2 query heads and 1 KV head, 4 tokens, one layer; written by the package that others use."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("Small")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_tensor("token_embd.weight", np.ones((4, 32), dtype=np.float16))
    weights = gguf.quants.quantize(np.ones((32, 32), dtype=np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("blk.0.attn_q.weight", weights, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    write_out(writer)
    return path


def test_info_tells_what_the_package_gguf_has_written(phsa: Callable, tmp_path: Path) -> None:
    done = phsa("info", small_gguf(tmp_path / "small.gguf"), "--json", "--tensors", "--metadata")
    assert done.returncode == 0, done.stderr
    info = json.loads(done.stdout)
    assert info["format"] == "GGUF v3"
    assert info["name"] == "Small"
    assert (info["layers"], info["hidden"], info["vocab_size"], info["head_dim"]) == (1, 32, 4, 16)
    assert info["tokenizer"] is None
    assert info["tied_embeddings"] is True
    assert info["parameters"] == 4 * 32 + 32 * 32
    assert info["tensor_types"] == {"f16": {"tensors": 1, "bytes": 256}, "q8_0": {"tensors": 1, "bytes": 1088}}
    assert info["metadata"]["llama.context_length"] == "64"
    assert [tensor["shape"] for tensor in info["tensors"]] == [[4, 32], [32, 32]]


def test_info_for_people_has_the_same_facts(phsa: Callable, tmp_path: Path) -> None:
    done = phsa("info", small_gguf(tmp_path / "small.gguf"), "--tensors")
    assert done.returncode == 0, done.stderr
    assert "2 query heads, 1 KV heads of 16" in done.stdout
    assert '"blk.0.attn_q.weight"' in done.stdout


def test_a_bad_file_is_one_line_and_exit_code_2(phsa: Callable, tmp_path: Path) -> None:
    whole = small_gguf(tmp_path / "small.gguf").read_bytes()
    overlapping = bytearray(whole)
    at = whole.index(b"blk.0.attn_q.weight") + len("blk.0.attn_q.weight") + 4 + 16 + 4
    overlapping[at : at + 8] = struct.pack("<Q", 0)
    cases = {
        "is empty": b"",
        'begins with "NOPE"': b"NOPE" + whole[4:],
        "the file is cut": whole[:-100],
        "overlap at offset": bytes(overlapping),
        "the configuration says [4, 64]": whole.replace(
            b"llama.embedding_length" + struct.pack("<II", 4, 32), b"llama.embedding_length" + struct.pack("<II", 4, 64)
        ),
    }
    for message, content in cases.items():
        path = tmp_path / "bad.gguf"
        path.write_bytes(content)
        done = phsa("info", path)
        assert done.returncode == 2, message
        assert done.stdout == ""
        assert done.stderr.count("\n") == 1
        assert message in done.stderr


def test_models_lists_what_can_be_had_and_what_is_here(phsa: Callable, tmp_path: Path) -> None:
    env = {"PHSA_CACHE": str(tmp_path / "cache"), "HF_HUB_CACHE": str(tmp_path / "hub")}
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    small_gguf(snapshot / "small.gguf")
    listed = json.loads(phsa("models", "--json", env=env).stdout)
    assert [(model["name"], model["here"]) for model in listed["packaged"]] == [
        ("smollm2-135m", False),
        ("qwen2.5-coder-0.5b", False),
        ("qwen2.5-coder-1.5b", False),
    ]
    assert listed["hugging_face"] == [{"name": "org/name", "path": str(snapshot / "small.gguf")}]
    assert phsa("models", "path", "org/name", env=env).stdout == f"{snapshot / 'small.gguf'}\n"
    assert "phsa models fetch smollm2-135m" in phsa("models", env=env).stdout

    missing = phsa("info", "smollm2-135m", env=env)
    assert missing.returncode == 2
    assert "phsa models fetch smollm2-135m" in missing.stderr
    misspelt = phsa("models", "fetch", "smollm", env=env)
    assert misspelt.returncode == 2
    assert "allowed: smollm2-135m, qwen2.5-coder-0.5b, qwen2.5-coder-1.5b" in misspelt.stderr


def test_a_fetch_that_cannot_work_says_what_to_do(phsa: Callable, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'ERROR: No matching distribution found' >&2\nexit 1\n")
    python.chmod(0o755)
    env = {"PHSA_CACHE": str(tmp_path / "cache"), "PHSA_PYTHON": str(python)}
    done = phsa("models", "fetch", "smollm2-135m", env=env)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "ERROR: No matching distribution found; check the network" in done.stderr
    assert [path.name for path in (tmp_path / "cache" / "models").iterdir()] == ["smollm2-135m.lock"]
