"""Compares `phsa`'s perplexity and logits of a GGUF file with those that transformers has from the same file, whose
weights it writes out as f32.

    python bench/perplexity_check.py --model MODEL.gguf [--name NAME] [--text FILE] [--bytes 12000] [--tokens 2000]
        [--phsa build/release/bin/phsa] [--threads 0]

The first bytes of the text are cut into tokens by phsa, after the begin token where the model expects one. `logits_of`,
a program of the tests, lies beside phsa. Prints JSON; bench/results/ keeps Gemma-3-270m's and Qwen2.5-Coder-0.5B's.
"""

import argparse
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import torch
import transformers

TEXT = pathlib.Path(__file__).parent / "data/from_sand_hill_to_pine.txt"
EACH = 50  # of the rows of logits that are compared


def phsa(args, *more) -> str:
    done = subprocess.run([args.phsa, *map(str, more)], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"perplexity_check: {done.args} failed: {done.stderr.strip()}")
    return done.stdout


def our_rows(args, ids):
    """The logits of one token after the other, in f32."""
    program = pathlib.Path(args.phsa).with_name("logits_of")
    command = [program, args.model, "f32", "f32", "256", str(args.threads)]
    with (
        tempfile.TemporaryFile() as given,
        subprocess.Popen(command, stdin=given, stdout=subprocess.PIPE, bufsize=1 << 20) as running,
    ):
        given.write(" ".join(map(str, ids)).encode())
        given.seek(0)
        vocab = yield
        for _ in ids:
            yield np.frombuffer(running.stdout.read(4 * vocab), np.float32)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--name")
    parser.add_argument("--text", default=str(TEXT))
    parser.add_argument("--bytes", type=int, default=12000)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--phsa", default="build/release/bin/phsa")
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args()
    args.threads = args.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(args.threads)
    path = pathlib.Path(args.model)

    text = pathlib.Path(args.text).read_bytes()[: args.bytes].decode("utf-8", errors="ignore")
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "text.txt"
        file.write_text(text, encoding="utf-8")
        ids = [int(i) for i in phsa(args, "tokenize", path, "-f", file, "--ids", "--no-special").split()]
        common = ["perplexity", "-m", path, "-c", args.tokens, "-f", file, "-t", args.threads, "--json"]
        common += ["--attention", "dense"]
        exact = json.loads(phsa(args, *common, "--weights", "f32", "--kv-type", "f32"))
        auto = json.loads(phsa(args, *common))

    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    metadata = json.loads(phsa(args, "info", path, "--json", "--metadata"))["metadata"]
    begins = metadata.get("tokenizer.ggml.add_bos_token") == "true"
    ids = (([tokenizer.bos_token_id] if begins else []) + ids)[: args.tokens]
    if len(ids) < args.tokens:
        sys.exit(f"perplexity_check: the text has {len(ids)} tokens, --tokens asks for {args.tokens}: raise --bytes")
    rows = our_rows(args, ids)
    next(rows)
    losses, our_losses, difference, largest = [], [], 0.0, 0.0
    with torch.no_grad():
        states = model.model(torch.tensor([ids])).last_hidden_state[0]
        for at, state in enumerate(states):
            theirs = model.lm_head(state).numpy()
            ours = rows.send(len(theirs)) if at == 0 else next(rows)
            if at % EACH == 0:
                difference = max(difference, float(np.abs(ours - theirs).max()))
                largest = max(largest, float(np.abs(theirs).max()))
            if at + 1 < len(ids):
                for logits, out in ((theirs, losses), (ours, our_losses)):
                    wide = logits.astype(np.float64)
                    top = wide.max()
                    out.append(float(np.log(np.exp(wide - top).sum()) + top - wide[ids[at + 1]]))

    arguments = f"-c {args.tokens} -f text.txt --attention dense"
    result = {
        "model": f"{args.name or path.name}, GGUF, sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}",
        "text": f"the first {args.bytes:,} bytes of {pathlib.Path(args.text).name}, "
        f"{'the begin token and ' if begins else ''}the first {args.tokens - begins:,} tokens",
        "tokens": args.tokens,
        "commands": [
            f"phsa perplexity -m {path.name} {arguments} --weights f32 --kv-type f32 --json",
            f"phsa perplexity -m {path.name} {arguments} --json",
            f"transformers {transformers.__version__}: AutoModelForCausalLM.from_pretrained(folder, gguf_file=..., "
            "dtype=torch.float32)",
        ],
        "perplexity": {
            "phsa, f32": round(exact["ppl"], 6),
            f"phsa, auto ({auto['weights']}; KV {auto['kv_type']})": round(auto["ppl"], 6),
            "transformers, f32": round(float(np.exp(np.mean(losses))), 6),
        },
        f"logits of every {EACH}th token, largest difference over largest logit, f32": difference / largest,
        "largest difference of a token's loss, f32": float(np.abs(np.subtract(losses, our_losses)).max()),
    }
    print(json.dumps(result, indent=2, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
