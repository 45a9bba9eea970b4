from __future__ import annotations

import ctypes
import json
from pathlib import Path

import numpy as np
import pytest

from phsa import ModelSettings, Settings, _library
from phsa.settings import resolve

RULE = json.loads((Path(__file__).parents[2] / "tests/data/attention_rule.json").read_text(encoding="utf-8"))


def test_presets_are_those_of_the_paper() -> None:
    small, large = Settings.preset(4096), Settings.preset(4097)
    assert (small.init, small.local, small.top_k, small.lam) == (16, 128, 16, 0.9)
    assert (large.init, large.local, large.top_k, large.lam) == (128, 512, 16, 0.9)


def test_the_block_size_follows_the_policy() -> None:
    assert Settings(policy="infllm2-64").block == 64
    assert Settings(policy="infllm2-64").replace(policy="phsa").block == 16
    assert Settings(block=32).replace(policy="quest").block == 32


def test_numpy_numbers_are_numbers() -> None:
    values = {"top_k": np.int64(2), "lam": np.float32(0.5), "init": np.int16(32), "local": np.uint64(64)}
    assert Settings(**values) == Settings(top_k=2, lam=0.5, init=32, local=64)
    assert json.loads(json.dumps(Settings(**values).to_json()))["top_k"] == 2
    assert Settings(lam=np.array([0.5, 1])).lam == Settings(lam=[0.5, 1]).lam == (0.5, 1)
    made = ModelSettings.make(Settings(), {"block": np.int64(32), "layers": {np.int64(1): {"top_k": np.int8(3)}}})
    assert made.base.block == 32 and made.for_layer(1).top_k == 3
    with pytest.raises(ValueError, match="top_k is True"):
        Settings(top_k=np.bool_(True))


def test_layers_override() -> None:
    settings = ModelSettings.make(Settings(), {"top_k": 4, "layers": {0: {"policy": "dense"}, "2-3": {"top_k": 8}}})
    assert [settings.for_layer(i).policy for i in range(3)] == ["dense", "phsa", "phsa"]
    assert [settings.for_layer(i).top_k for i in range(5)] == [4, 4, 8, 8, 4]
    assert ModelSettings.make(Settings(), settings.to_json()) == settings


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"topk": 3}, "'topk'; allowed: policy"),
        ({"top_k": True}, "top_k is True"),
        ({"lam": 0.5, "lambda": 0.5}, "lam is given twice"),
        ({"layers": {"x": {}}}, "key 'x'"),
        ({"layers": {"5-3": {}}}, "key '5-3'"),
        ({"layers": {"1-2": {}, 2: {}}}, "layer 2 is given twice"),
        ({"layers": {0: {"top_k": -3}}}, "top_k is -3"),
        ({"layers": {0: {"punctuation": "zh"}}}, "punctuation cannot differ"),
        ({"punctuation": ""}, "punctuation is ''"),
        ({"parts": 3}, "parts is 3; allowed: 1, 2, 4, 8"),
        ({"parts": True}, "parts is True"),
        ({"survivors": -1}, "survivors is -1"),
    ],
    ids=str,
)
def test_bad_settings_are_refused(values: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelSettings.make(Settings(), values)


@pytest.mark.parametrize("case", RULE, ids=[case["name"] for case in RULE])
def test_the_rule_is_that_of_the_table(case: dict) -> None:
    """ResolveAttention reads the same file in tests/engine_test.cc."""
    sources = {name: case.get(name) for name in ("carried", "settings", "arguments")}
    if "refused" in case:
        with pytest.raises(ValueError, match=case["refused"] + ".*phsa"):
            resolve(case.get("context", 8192), **sources)
        return
    found = resolve(case.get("context", 8192), **sources).to_json()
    expected = dict(case["expected"])
    for key, change in expected.pop("layers", {}).items():
        first, _, last = key.partition("-")
        for layer in range(int(first), int(last or first) + 1):
            assert found["layers"].pop(str(layer)) == change
    assert not found.pop("layers", {})
    assert {key: found[key] for key in expected} == expected


def test_names_of_python_and_of_json_mean_the_same() -> None:
    json_names = {"attention": "phsa", "lambda": 0.5, "init_tokens": 16, "layers": {"1": {"lambda": 0.25}}}
    python_names = {"policy": "phsa", "lam": 0.5, "init": 16, "layers": {1: {"lam": 0.25}}}
    assert resolve(4096, settings=json_names) == resolve(4096, settings=python_names)
    assert resolve(4096, settings=resolve(4096, settings=json_names)) == resolve(4096, settings=json_names)


def test_json_is_what_the_library_reads() -> None:
    """The configuration of a saved model must mean the same to the C++ engine."""

    class CSettings(ctypes.Structure):
        _fields_ = [
            ("struct_size", ctypes.c_uint32),
            ("policy", ctypes.c_int32),
            ("block_size", ctypes.c_int32),
            ("init_tokens", ctypes.c_int32),
            ("local_tokens", ctypes.c_int32),
            ("top_k", ctypes.c_int32),
            ("lam", ctypes.c_float),
            ("group_reduce", ctypes.c_int32),
            ("dense_below", ctypes.c_int32),
            ("head_lambda", ctypes.c_void_p),
            ("parts", ctypes.c_int32),
            ("survivors", ctypes.c_int32),
        ]

    values = {"top_k": 3, "lam": 0.75, "init": 32, "local": 64, "dense_below": 128, "group_reduce": "max"}
    values |= {"parts": 4, "survivors": 96}
    layers = {"1-2": {"policy": "quest"}, 4: {"block": 32, "parts": 8}}
    settings = ModelSettings.make(Settings(), {**values, "layers": layers})
    library = _library.load()
    text = json.dumps(settings.to_json()).encode()
    for layer in range(6):
        out, want = CSettings(), settings.for_layer(layer)
        assert library.phsa_settings_from_json(text, layer, ctypes.byref(out)) == 0, library.phsa_last_error()
        assert out.policy == {"phsa": 1, "quest": 5}[want.policy]
        assert (out.block_size, out.init_tokens, out.local_tokens) == (want.block, want.init, want.local)
        assert (out.top_k, out.lam, out.group_reduce, out.dense_below) == (want.top_k, 0.75, 1, want.dense_below)
        assert (out.parts, out.survivors) == (want.parts, want.survivors)
