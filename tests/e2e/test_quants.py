"""Every tensor type becomes numbers bit for bit as the Python package gguf makes them."""

import subprocess

import numpy as np
import pytest
from conftest import BIN

gguf = pytest.importorskip("gguf", reason="the Python package gguf is what we compare with")

BLOCKS = 500
# Where the f16 scales of a block are, in 16-bit words.
SCALES = {
    "q4_0": [0],
    "q4_1": [0, 1],
    "q5_0": [0],
    "q5_1": [0, 1],
    "q8_0": [0],
    "q4_k": [0, 1],
    "q5_k": [0, 1],
    "q6_k": [104],
    "q2_k": [40, 41],
    "q3_k": [54],
    "iq4_nl": [0],
    "iq4_xs": [0],
}


def random_blocks(name: str, rng: np.random.Generator) -> np.ndarray:
    """Random bytes; every number that is stored as such is finite, denormals and both zeros included."""
    kind = gguf.GGMLQuantizationType[name.upper()]
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    if name == "f32":
        floats = rng.integers(0, 2**32, size=20_000, dtype=np.uint32).view(np.float32)
        return floats[np.isfinite(floats)].view(np.uint8)
    if name in ("f16", "bf16"):
        exponent = 0x7C00 if name == "f16" else 0x7F80
        words = np.arange(2**16, dtype=np.uint16)
        return words[(words & exponent) != exponent].view(np.uint8)
    if name == "mxfp4":  # a power of two in front; the largest ones are no finite numbers times 6
        blocks = rng.integers(0, 256, size=(BLOCKS, block_bytes), dtype=np.uint8)
        blocks[:253, 0] = range(253)
        blocks[253:, 0] %= 253
        return blocks
    words = rng.integers(0, 2**16, size=(BLOCKS, block_bytes // 2), dtype=np.uint16)
    for column in SCALES[name]:
        scales = words[:, column]
        scales[(scales & 0x7C00) == 0x7C00] ^= 0x4000
        scales[:4] = [0, 0x8000, 1, 0x83FF]
    return words.view(np.uint8)


@pytest.mark.parametrize("name", ["f32", "f16", "bf16", *SCALES, "mxfp4"])
def test_dequantises_bit_for_bit_as_gguf(name: str) -> None:
    blocks = random_blocks(name, np.random.default_rng(0))
    wanted = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name.upper()]).reshape(-1)
    output = subprocess.run(
        [BIN / "dequantize", name], input=blocks.tobytes(), stdout=subprocess.PIPE, check=True
    ).stdout
    got = np.frombuffer(output, dtype=np.float32)
    assert got.size == wanted.size > 10_000
    assert np.isfinite(wanted).all()
    np.testing.assert_array_equal(got.view(np.uint32), wanted.view(np.uint32))
