"""Whether vLLM with the plugin gives vLLM's own texts where everything is chosen, and our engine's where it is not.

    python bench/vllm_check.py --model FOLDER --program build/release/bin/phsa > bench/results/…

FOLDER: a Hugging Face folder, such as `phsa export -m smollm2-135m --type f32 --out FOLDER` writes. On vLLM's CPU
platform. Each mode starts vLLM once, in a process of its own:
  dense    vLLM's own attention
  all      the plugin with a K that takes every block
  sparse   the plugin with the settings that the model carries, without prefix caching
  cached   the same with prefix caching, all prompts asked twice
and, with --tiny, dense and all as above, and sparse settings with a lambda for each KV head in
  one      one process
  two      two that share the heads (tensor parallelism)
Prompts are longer than what a step reads, so that they go in chunks, beside others that decode already. Two of them
share most of their text. A text that differs is a near-tie where the two likeliest tokens at the first difference
are closer than --tie in log-probability in vLLM.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
MODES = ("dense", "all", "sparse", "cached")
TINY_MODES = ("dense", "all", "one", "two")
# A lambda for each KV head: two processes have one each.
TINY_SETTINGS = '{"top_k": 4, "init_tokens": 16, "local_tokens": 32, "lambda": [0.1, 0.9]}'


def prompts(characters: int) -> list[str]:
    lighthouse = (HERE / "data/lighthouse.txt").read_text()[:characters]
    stories = (HERE / "data/from_sand_hill_to_pine.txt").read_text()
    return [
        f"{lighthouse}\n\nIn short, the lighthouse",
        "The capital of France is",
        f"{lighthouse}\n\nThe keeper of the lighthouse was",
        stories[4000 : 4000 + characters // 2],
        stories[60000 : 60000 + characters],
    ]


def serve(args: argparse.Namespace) -> None:
    """One mode, in this process: prints a line of JSON."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # nothing runs often enough here to be worth compiling
    if args.mode == "all":
        os.environ["PHSA_SETTINGS"] = '{"top_k": 65536}'
    if args.mode in ("one", "two"):
        os.environ["PHSA_SETTINGS"] = TINY_SETTINGS
    import vllm

    sparse = {} if args.mode == "dense" else {"attention_backend": "CUSTOM"}
    llm = vllm.LLM(
        args.model,
        dtype=args.dtype,
        enforce_eager=True,
        max_model_len=4096,
        kv_cache_memory_bytes=args.memory << 20,
        max_num_batched_tokens=512,
        max_num_seqs=4,
        enable_prefix_caching=args.mode == "cached",
        tensor_parallel_size=2 if args.mode == "two" else 1,
        **sparse,
    )
    sampling = vllm.SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True, logprobs=2)
    texts: list[list[dict]] = []
    begin = time.monotonic()
    for _ in range(2 if args.mode == "cached" else 1):
        outputs = llm.generate(prompts(args.characters), sampling, use_tqdm=False)
        texts.append(
            [
                {
                    "prompt_tokens": len(one.prompt_token_ids),
                    "cached_tokens": one.num_cached_tokens,
                    "text": one.outputs[0].text,
                    "logprob": one.outputs[0].cumulative_logprob,
                    "ids": list(one.outputs[0].token_ids),
                    "gaps": [
                        (lambda best: best[0] - best[1])(sorted((v.logprob for v in at.values()), reverse=True))
                        for at in one.outputs[0].logprobs
                    ],
                }
                for one in outputs
            ]
        )
    print("RESULT " + json.dumps({"version": vllm.__version__, "seconds": time.monotonic() - begin, "texts": texts}))


def write_tiny(folder: Path, tokenizer: Path) -> None:
    """Four layers with random weights, two with windows: how the plugin and vLLM's own backend share a cache."""
    import shutil

    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=49152,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        query_pre_attn_scalar=64,
        sliding_window=64,
        max_position_embeddings=4096,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    model = Gemma3ForCausalLM(config).float()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder / name)


def run_mode(mode: str, args: argparse.Namespace) -> dict:
    command = [sys.executable, __file__, "--mode", mode, "--model", args.model, "--dtype", args.dtype]
    command += ["--tokens", str(args.tokens), "--characters", str(args.characters), "--memory", str(args.memory)]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = done.stdout.splitlines() + done.stderr.splitlines()
    result = next((line for line in lines if line.startswith("RESULT ")), None)
    if result is None:
        sys.exit("\n".join(lines[-40:]))
    for line in lines:
        if "phsa:" in line or "KV cache size" in line:
            print(f"  {mode}: {line[line.find(']') + 2 :]}")
    out = json.loads(result.removeprefix("RESULT "))
    print(f"  {mode}: {out['seconds']:.1f} s", flush=True)
    return out


def engine(prompt: str, args: argparse.Namespace) -> str:
    kind = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[args.dtype]
    weights = "f32" if kind == "f32" else "bf16"
    command = [args.program, "run", "-m", args.model, "--raw", "-p", "-", "--temp", "0", "-n", str(args.tokens)]
    command += ["--attention", "phsa", "--weights", weights, "--kv-type", kind, "-c", "4096", "--ignore-eos", "--json"]
    done = subprocess.run([*map(str, command), "-q"], input=prompt, capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout)
    return answer.get("text", answer.get("answer"))


def compare(name: str, ours: list[dict], theirs: list[str], tie: float) -> bool:
    same = ties = 0
    for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if one["text"] == other:
            same += 1
            continue
        at = next((i for i, (a, b) in enumerate(zip(one["text"], other, strict=False)) if a != b), len(other))
        # The token that begins at or before the first character that differs.
        share = at / max(1, len(one["text"]))
        token = min(range(len(one["ids"])), key=lambda i: one["gaps"][i] if i <= share * len(one["ids"]) + 4 else 99)
        gap = one["gaps"][token]
        ties += gap < tie
        print(f"    prompt {index}: differs at character {at} of {len(other)}; least gap up to there {gap:.4f}")
    print(f"{name}: {same} of {len(ours)} texts the same, {ties} of the others near-ties", flush=True)
    return same + ties == len(ours)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--program", default=str(HERE.parent / "build/release/bin/phsa"))
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--characters", type=int, default=8000)
    parser.add_argument("--memory", type=int, default=1024, help="MiB of the KV cache")
    parser.add_argument("--tiny", action="store_true", help="a tiny model with windows and the tokenizer of --model")
    parser.add_argument("--tie", type=float, default=0.02)
    parser.add_argument("--mode", choices=(*MODES, *TINY_MODES), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.mode:
        serve(args)
        return
    name = Path(args.model).name
    if args.tiny:
        folder = Path(tempfile.mkdtemp())
        write_tiny(folder, Path(args.model))
        args.model = str(folder)
        name = "four layers, two of them with windows of 64 tokens"
    print(f"{name}, {args.dtype}, {args.tokens} tokens, on {platform.machine()} ({os.cpu_count()} cores)")
    results = {mode: run_mode(mode, args) for mode in (TINY_MODES if args.tiny else MODES)}
    dense = results["dense"]["texts"][0]
    lengths = ", ".join(str(one["prompt_tokens"]) for one in dense)
    print(f"vLLM {results['dense']['version']}; prompts of {lengths} tokens")
    wanted = [one["text"] for one in dense]
    good = [compare("all, against vLLM's dense", results["all"]["texts"][0], wanted, args.tie)]
    if args.tiny:
        one, two = ([text["logprob"] for text in results[mode]["texts"][0]] for mode in ("one", "two"))
        apart = max(abs(a - b) for a, b in zip(one, two, strict=True))
        changed = max(abs(a - text["logprob"]) for a, text in zip(one, dense, strict=True))
        print(f"two processes, against one: texts' log-probabilities differ by {apart:.1e}; dense: {changed:.1e}")
        good.append(apart < 1e-3 * max(map(abs, one)))
    else:
        sparse = results["sparse"]["texts"][0]
        alone = [one["text"] for one in sparse]
        first, again = results["cached"]["texts"]
        cached = [one["cached_tokens"] for one in again]
        engines = [engine(one, args) for one in prompts(args.characters)]
        good += [
            compare("sparse, against our engine", sparse, engines, args.tie),
            compare("prefix caching on, against off", first, alone, args.tie),
            compare(f"asked again ({cached} tokens from the cache), against off", again, alone, args.tie),
            cached[0] > 0,
        ]
        changed = sum(a != b for a, b in zip(alone, wanted, strict=True))
        print(f"sparse, against vLLM's dense: {changed} of {len(sparse)} texts differ, as they may")
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
