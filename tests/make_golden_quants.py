"""Writes tests/golden_quants.inc: blocks of every type and what the Python package gguf makes of them.

python tests/make_golden_quants.py > tests/golden_quants.inc
"""

import gguf
import numpy as np

rng = np.random.default_rng(1)
print("// Made by make_golden_quants.py: type, blocks, and the f32 that the Python package gguf makes of them.")
for name in [
    "F32",
    "F16",
    "BF16",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "Q2_K",
    "Q3_K",
    "IQ4_NL",
    "IQ4_XS",
    "MXFP4",
]:
    kind = gguf.GGMLQuantizationType[name]
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    if elements == 1:
        values = np.array([0.0, -0.0, 1.0, -2.5, 3e-5, 1e-7, 65504.0, -1 / 3], dtype=np.float32)
        blocks = gguf.quants.quantize(values, kind).view(np.uint8)
    else:
        blocks = rng.integers(0, 256, size=(2 if elements == 32 else 1, size), dtype=np.uint8)
        scales = np.array([0.017, -0.31], dtype=np.float16).view(np.uint8)
        at = size - 2 if name in ("Q6_K", "Q3_K") else size - 4 if name == "Q2_K" else 0
        width = 4 if name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K", "Q2_K") else 2
        if name == "MXFP4":
            blocks[:, 0] = [1, 120]  # powers of two: one below f32's normal numbers
        else:
            blocks[:, at : at + width] = scales[:width]
    floats = gguf.quants.dequantize(blocks, kind).astype(np.float32)
    print(f'{{"{name.lower()}", "{blocks.tobytes().hex()}",\n "{floats.tobytes().hex()}"}},')
