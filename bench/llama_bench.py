"""Times `phsa` against llama.cpp on the same file, machine and threads, in alternating rounds.

    python bench/llama_bench.py --model MODEL.gguf [--phsa build/release/bin/phsa] [--prompts 512,4096] [--generate 32]
        [--depths 0] [--threads 0] [--rounds 2] [--repeats 2] [--weights auto] [--attention dense,infllm2,phsa]
        [--text FILE]

llama.cpp comes with the Python package llama-cpp-python, which builds it for this machine; it is driven as its own
llama-bench does: flash attention on, batches of 2048 in steps of 512, an f16 cache. The best of all rounds counts on
both sides. First the results are compared: perplexity and most likely tokens over the first 512 tokens of a text, with
dense attention. Prints JSON lines, then a markdown table with our speed over llama.cpp's in brackets.
"""

import argparse
import ctypes
import json
import os
import pathlib
import random
import subprocess
import sys
import time

import llama_cpp
import numpy as np

TEXT = pathlib.Path(__file__).parent / "data/from_sand_hill_to_pine.txt"
CHECK_TOKENS = 512


class Llama:
    """llama.cpp through its C interface, without the package's own Python on the measured path."""

    def __init__(self, path: str, context: int, threads: int):
        llama_cpp.llama_log_set(SILENT, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        model_params.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), model_params)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = context
        params.n_batch = 2048
        params.n_ubatch = 512
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = 1  # on
        params.offload_kqv = False
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        self.memory = llama_cpp.llama_get_memory(self.context)
        vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.vocab = llama_cpp.llama_vocab_n_tokens(vocab)
        begins = llama_cpp.llama_vocab_get_add_bos(vocab)
        self.begin = [llama_cpp.llama_vocab_bos(vocab)] if begins else []  # as phsa perplexity begins

    def clear(self):
        llama_cpp.llama_memory_clear(self.memory, True)

    def truncate(self, length: int):
        llama_cpp.llama_memory_seq_rm(self.memory, 0, length, -1)

    def read(self, tokens: list[int], step: int = 2048):
        array = (llama_cpp.llama_token * len(tokens))(*tokens)
        for first in range(0, len(tokens), step):
            count = min(step, len(tokens) - first)
            at = ctypes.cast(ctypes.byref(array, first * ctypes.sizeof(llama_cpp.llama_token)), TOKEN_POINTER)
            if llama_cpp.llama_decode(self.context, llama_cpp.llama_batch_get_one(at, count)) != 0:
                raise RuntimeError("llama_decode failed")

    def logits(self, tokens: list[int]) -> np.ndarray:
        """[tokens][vocab]: one token after the other, as its decode computes them."""
        self.clear()
        rows = []
        for token in tokens:
            self.read([token])
            rows.append(np.ctypeslib.as_array(llama_cpp.llama_get_logits(self.context), (self.vocab,)).copy())
        return np.stack(rows)


SILENT = llama_cpp.llama_log_callback(lambda level, text, data: None)
TOKEN_POINTER = ctypes.POINTER(llama_cpp.llama_token)


def phsa(args, *more: str) -> list[dict]:
    command = [args.phsa, *more, "-m", args.model, "-t", str(args.threads), "--weights", args.weights, "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"llama_bench: {' '.join(command)} failed: {done.stderr.strip()}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(args, llama: Llama):
    ids = subprocess.run(
        [args.phsa, "tokenize", args.model, "-f", args.text, "--ids", "--no-special"], capture_output=True, text=True
    ).stdout.split()
    tokens = (llama.begin + [int(i) for i in ids])[:CHECK_TOKENS]
    logits = llama.logits(tokens).astype(np.float64)
    targets = logits[np.arange(CHECK_TOKENS - 1), tokens[1:]]
    top = logits.max(axis=1, keepdims=True)
    loss = (np.log(np.exp(logits - top).sum(axis=1)) + top[:, 0])[:-1] - targets
    dense = ("--attention", "dense")
    ours = phsa(args, "perplexity", "-f", args.text, "-c", str(CHECK_TOKENS), "--top-tokens", *dense)[0]
    result = {
        "check": "perplexity",
        "tokens": CHECK_TOKENS,
        "llama_cpp": float(np.exp(loss.mean())),
        "phsa": ours["ppl"],
        "equal_top_tokens": float((logits.argmax(axis=1) == np.array(ours["top_tokens"])).mean()),
    }
    print(json.dumps(result), flush=True)
    if abs(result["phsa"] / result["llama_cpp"] - 1) > 0.05 or result["equal_top_tokens"] < 0.85:
        sys.exit("llama_bench: the two do not compute the same model; their speeds cannot be compared")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--phsa", default="build/release/bin/phsa")
    parser.add_argument("--prompts", default="512,4096")
    parser.add_argument("--generate", default="32")
    parser.add_argument("--depths", default="0")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--attention", default="dense")
    parser.add_argument("--text", default=str(TEXT))
    args = parser.parse_args()
    args.threads = args.threads or len(os.sched_getaffinity(0))
    prompts = [int(n) for n in args.prompts.split(",") if int(n)]
    generate = [int(n) for n in args.generate.split(",") if int(n)]
    depths = [int(n) for n in args.depths.split(",")]
    policies = args.attention.split(",")
    tests = [(kind, n, d) for d in depths for kind, list_ in (("pp", prompts), ("tg", generate)) for n in list_]
    context = max(d + n for _, n, d in tests)

    llama = Llama(args.model, max(context, CHECK_TOKENS), args.threads)
    check(args, llama)
    generator = random.Random(1)
    tokens = [generator.randrange(llama.vocab) for _ in range(context)]
    theirs = dict.fromkeys(tests, 0.0)
    ours = {(policy, test): 0.0 for policy in policies for test in tests}
    ours_info = {}
    for _ in range(args.rounds):
        lists = ("-p", ",".join(map(str, prompts or [0])), "-n", ",".join(map(str, generate or [0])))
        flags = ("-d", args.depths, "-r", str(args.repeats), "--attention", args.attention)
        for row in phsa(args, "bench", *lists, *flags):
            key = (row["attention"], (row["test"], row["tokens"], row["depth"]))
            ours[key] = max(ours[key], row["tokens_per_s"])
            ours_info[row["attention"]] = row
        for test in tests:
            kind, count, depth = test
            llama.clear()
            if depth:
                llama.read(tokens[:depth])
            step = 2048 if kind == "pp" else 1
            llama.read(tokens[depth : depth + min(count, step)], step)  # unmeasured, as on our side
            for _ in range(args.repeats):
                llama.truncate(depth)
                start = time.perf_counter()
                llama.read(tokens[depth : depth + count], step)
                # The logits are read so that no part of the work can be put off.
                llama_cpp.llama_get_logits(llama.context)
                theirs[test] = max(theirs[test], count / (time.perf_counter() - start))
    for policy in policies:
        info = ours_info[policy]
        for test in tests:
            line = {
                "model": info["model"],
                "attention": policy,
                "top_k": info.get("top_k"),
                "weights_mode": args.weights,
                "weights": info["weights"],
                "test": test[0],
                "tokens": test[1],
                "depth": test[2],
                "threads": args.threads,
                "phsa": round(ours[policy, test], 2),
                "llama_cpp": round(theirs[test], 2),
                "ratio": round(ours[policy, test] / theirs[test], 3),
                "llama_cpp_python": llama_cpp.__version__,
            }
            print(json.dumps(line), flush=True)
    print(f"\n{info['model']}, --weights {args.weights}, {args.threads} threads, tokens/s:\n")
    print("| test | depth | llama.cpp |", " | ".join(policies), "|\n|---|---|---|" + "---|" * len(policies))
    for test in tests:
        kind, count, depth = test
        cells = [f"{ours[p, test]:.1f} ({ours[p, test] / theirs[test]:.2f}×)" for p in policies]
        print(f"| {kind}{count} | {depth} | {theirs[test]:.1f} |", " | ".join(cells), "|")
    return 0


if __name__ == "__main__":
    sys.exit(main())
