"""Writes a model's queries, keys and values (after RoPE) and the punctuation flags of a text, for bench_forward.py.

    python bench/cuda/capture.py MODEL.gguf TEXT --tokens 16384 --layers 3,14 --out FOLDER

One file per layer, layerN.npz. bf16 values are stored as two planes of bytes, low and high: the high ones compress
to about a half.
"""

import argparse
import pathlib
import sys

import numpy as np
import torch
import transformers
from transformers.integrations.sdpa_attention import sdpa_attention_forward

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "python"))
from phsa.punctuation import flag_table


class Done(Exception):
    """All layers that were asked for have run."""


def planes(x):
    """[1, head, token, dim] in any float type: bytes [plane][token][head][dim]."""
    words = x[0].transpose(0, 1).to(torch.bfloat16).contiguous().view(torch.int16).numpy().view(np.uint16)
    return np.stack([(words & 0xFF).astype(np.uint8), (words >> 8).astype(np.uint8)])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("text", type=pathlib.Path)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--layers", default="3,14")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    args = parser.parse_args()
    layers = sorted(int(layer) for layer in args.layers.split(","))
    args.out.mkdir(parents=True, exist_ok=True)

    files = dict(pretrained_model_name_or_path=str(args.model.parent), gguf_file=args.model.name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**files)
    ids = tokenizer(args.text.read_text(encoding="utf-8"), return_tensors="pt").input_ids[:, : args.tokens]
    if ids.shape[1] < args.tokens:
        sys.exit(f"{args.text} has {ids.shape[1]} tokens; --tokens asks for {args.tokens}")
    model = transformers.AutoModelForCausalLM.from_pretrained(**files, dtype=torch.bfloat16)
    table = np.frombuffer(flag_table(tokenizer, "en", model.config.vocab_size), dtype=np.uint8)
    flags = table[ids[0].numpy()]

    def attention(module, query, key, value, attention_mask, **rest):
        if module.layer_idx in layers:
            path = args.out / f"layer{module.layer_idx}.npz"
            np.savez_compressed(path, q=planes(query), k=planes(key), v=planes(value), flags=flags)
            print(path, path.stat().st_size, flush=True)
            if module.layer_idx == layers[-1]:
                raise Done
        return sdpa_attention_forward(module, query, key, value, attention_mask, **rest)

    transformers.AttentionInterface.register("capture", attention)
    transformers.masking_utils.AttentionMaskInterface.register("capture", transformers.masking_utils.sdpa_mask)
    model.set_attn_implementation("capture")
    try:
        with torch.inference_mode():
            model.model(ids, use_cache=False)
    except Done:
        return


if __name__ == "__main__":
    main()
