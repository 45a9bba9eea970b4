"""Speed of the trainer: tokens a second and share of the GPU's peak, PHSA against SDPA, everything included.

    python bench/train_bench.py                                   # the shape of Qwen3-0.6B, 4k and 32k, on the GPU
    python bench/train_bench.py --shape tiny --lengths 256 --device cpu

The weights are random and so are the tokens: the arithmetic is that of a real run. Every method trains the same steps
from the same weights, and the losses of the first step are compared: with K = all they would be equal, with K = 16 they
must be close, or the work that is timed is not the same.
"""

import argparse
import csv
import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))

SHAPES = {
    "qwen3-0.6b": dict(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8
    )
    | dict(head_dim=128, vocab_size=151936, tie_word_embeddings=True),
    "tiny": dict(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    | dict(head_dim=64, vocab_size=1000, tie_word_embeddings=True),
}


def write_model(folder: Path, shape: dict, context: int) -> int:
    """Returns the number of weights that a token is multiplied with."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(1)
    config = Qwen3Config(**shape, max_position_embeddings=context, rope_theta=1e6)
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def write_tokens(folder: Path, vocabulary: int, length: int, count: int) -> None:
    folder.mkdir(parents=True)
    tokens = np.random.default_rng(1).integers(0, vocabulary, length * count).astype("<u4")
    tokens.tofile(folder / "shard-00000.tokens")
    (np.arange(count + 1) * length).astype("<u8").tofile(folder / "shard-00000.offsets")
    digest = hashlib.sha256((folder / "shard-00000.tokens").read_bytes()).hexdigest()
    marks = list(range(0, vocabulary, 9))  # every ninth token is punctuation, as in prose
    index = {
        "format": "phsa tokens 1",
        "dtype": "uint32",
        "vocab_size": vocabulary,
        "end": None,
        "tokenizer": {"name": "random", "sha256": ""},
        "punctuation": {"en": marks, "en+zh": marks},
        "documents": count,
        "tokens": len(tokens),
        "sources": [],
        "shards": [{"file": "shard-00000", "documents": count, "tokens": len(tokens), "sha256": digest}],
    }
    (folder / "index.json").write_text(json.dumps(index))


def run(folder: Path, name: str, length: int, method: str, args: argparse.Namespace) -> tuple[float, float, float]:
    """Best tokens a second, the first loss, and gigabytes of device memory."""
    out = folder / f"{name}-{length}"
    batch = max(1, args.batch_tokens // length)
    config = out.with_suffix(".toml")
    config.write_text(
        f"""out = "{out}"
device = "{args.device}"
[model]
path = "{folder / "model"}"
gradient_checkpointing = {str(args.checkpointing).lower()}
compile = {str(args.compile).lower()}
[attention]
method = "{method}"
top_k = 16
init = 128
local = 512
[data]
train = "{folder / f"tokens-{length}"}"
length = {length}
{"[lora]" if args.lora else ""}
[optimizer]
steps = {args.steps}
batch = {batch}
micro_batch = {batch}
learning_rate = 1e-5
[checkpoint]
every = 0
"""
    )
    code = (
        "import sys, torch\nfrom phsa.train import loop\nfrom phsa.train.__main__ import main\n"
        # What comes after the last step is not what is timed.
        "loop.Run.save_checkpoint = loop.Run.save_final = loop.plot = lambda *a: None\n"
        "code = main()\n"
        "print('peak', torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0)\n"
        "sys.exit(code)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    done = subprocess.run(
        [sys.executable, "-c", code, str(config), "--quiet"], env=environment, capture_output=True, text=True
    )
    if done.returncode != 0:
        sys.exit(done.stderr[-3000:])
    with (out / "log.csv").open() as file:
        rows = list(csv.DictReader(file))
    speed = max(float(row["tokens_per_second"]) for row in rows[1:])
    return speed, float(rows[0]["loss"]), float(done.stdout.split("peak")[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--lengths", default="4096,32768")
    parser.add_argument("--batch-tokens", type=int, default=32768, help="of a step")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--methods", default="dense,infllm2,phsa")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--peak", type=float, default=989.0, help="TFLOP/s of the device in bf16 (H100, H200: 989)")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--lora", action="store_true")
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    lengths = [int(length) for length in args.lengths.split(",")]
    how = [name for name in ("compile", "checkpointing", "lora") if getattr(args, name)]
    what = f"{args.shape}, {args.device}, {args.batch_tokens} tokens a step, K = 16, init 128, local 512"
    print(f"{what}; {', '.join(how) or 'plain'}")
    print(f"{'length':>7} {'method':>8} {'tokens/s':>9} {'× dense':>8} {'peak':>6} {'memory':>8} {'first loss':>10}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        weights = write_model(folder / "model", shape, max(lengths))
        for length in lengths:
            write_tokens(
                folder / f"tokens-{length}",
                shape["vocab_size"],
                length,
                max(2, args.batch_tokens // length) * args.steps,
            )
            dense = None
            for method in args.methods.split(","):
                speed, loss, memory = run(folder, method, length, method, args)
                if method == "dense":
                    dense = speed, loss
                # Six FLOPs a weight, or four where the weights are frozen, and twelve for each channel of each key that
                # a query reads; choosing the blocks, and what checkpointing computes twice, is not counted.
                heads = shape["num_attention_heads"] * shape["head_dim"]
                most = length if method == "dense" else 128 + 512 + 16 * 16 + 8
                read = np.minimum(np.arange(1, length + 1), most).mean()
                attention = 12 * shape["num_hidden_layers"] * heads * read
                flops = (4 if args.lora else 6) * weights + attention
                share = speed * flops / (args.peak * 1e12)
                ratio = speed / dense[0] if dense else math.nan
                print(
                    f"{length:7d} {method:>8} {speed:9,.0f} {ratio:8.2f} {share:6.1%} {memory:6.1f} GB {loss:10.4f}",
                    flush=True,
                )
                if dense and abs(loss - dense[1]) > 0.02 * dense[1]:
                    sys.exit(f"{method}: the first loss is {loss}, dense attention's {dense[1]}: not the same work")


if __name__ == "__main__":
    main()
