"""Throughput inside vLLM: its own attention against phsa's plugin, and our own engine beside both.

    python bench/vllm_bench.py --model FOLDER [--dtype bfloat16] [--lengths 2048,32768] [--batches 1,16] [--tokens 64]
        [--modes dense,phsa,engine] [--settings JSON] [--program build/release/bin/phsa] [--rounds 3] [--memory MB]

FOLDER: a Hugging Face folder (`phsa export -m qwen2.5-coder-1.5b --type bf16 --out FOLDER`); the interpreter is the one
that has vLLM (docs/vllm.md). Modes, each in a process of its own, one after the other:
  dense    vLLM as it comes
  phsa     vLLM with the plugin; --settings as PHSA_SETTINGS has them, else what the model carries
  engine   `phsa bench` with the same settings; prefill there is one text's, whatever the batch
Prompts are stretches of a text, each from another place, so that no prefix is shared; prefix caching is off. Prefill is
the time to the first tokens of all prompts of a batch that come at once; decode the tokens after the first ones. Best
of --rounds, after a first that does not count. A prompt of another length than asked for, or an answer of another
number of tokens, ends the run. Prints a JSON line for each case and a table with ratios to vLLM's dense attention.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
MODES = ("dense", "phsa", "engine")
TEXT = HERE / "data/from_sand_hill_to_pine.txt"


def cases(args: argparse.Namespace) -> list[tuple[int, int]]:
    return [(length, batch) for length in args.lengths for batch in args.batches]


def prompts(ids: list[int], length: int, batch: int, turn: int) -> list[list[int]]:
    """Stretches that begin at places of their own; a text that is too short begins again."""
    ids = ids * (2 + length // len(ids))
    step = max(1, (len(ids) - length) // (batch + 1))
    return [ids[(begin := (i * step + 7 * turn) % (len(ids) - length)) : begin + length] for i in range(batch)]


def in_vllm(args: argparse.Namespace) -> None:
    """One mode, in this process: a line for each case."""
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    if args.mode == "phsa" and args.settings:
        os.environ["PHSA_SETTINGS"] = args.settings
    import vllm

    most = max(args.lengths) + args.tokens + 16
    memory = {"kv_cache_memory_bytes": args.memory << 20} if args.memory else {}
    llm = vllm.LLM(
        args.model,
        dtype=args.dtype,
        max_model_len=most,
        max_num_seqs=max(args.batches),
        enable_prefix_caching=False,
        enforce_eager=args.eager,
        **memory,
        **({"attention_backend": "CUSTOM"} if args.mode == "phsa" else {}),
    )
    ids = llm.get_tokenizer().encode(TEXT.read_text(encoding="utf-8"))

    def seconds(batch: list[list[int]], tokens: int) -> float:
        sampling = vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        begin = time.perf_counter()
        done = llm.generate([{"prompt_token_ids": one} for one in batch], sampling, use_tqdm=False)
        took = time.perf_counter() - begin
        for asked, one in zip(batch, done, strict=True):
            if len(one.prompt_token_ids) != len(asked) or len(one.outputs[0].token_ids) != tokens:
                sys.exit(f"{len(one.prompt_token_ids)} tokens read of {len(asked)}, {one.outputs[0].token_ids} written")
        return took

    for length, batch in cases(args):
        first, whole = [], []
        for turn in range(args.rounds + 1):
            texts = prompts(ids, length, batch, turn)
            first.append(seconds(texts, 1))
            whole.append(seconds(texts, 1 + args.tokens))
        prefill, decode = min(first[1:]), min(whole[1:]) - min(first[1:])
        row = {"mode": args.mode, "tokens": length, "batch": batch, "first_token_s": prefill}
        row |= {"prefill_tokens_per_s": batch * length / prefill}
        # On a machine so busy that more tokens took less time nothing is said of decode.
        row |= {"decode_tokens_per_s": batch * args.tokens / decode if decode > 0 else None}
        print("RESULT " + json.dumps({**row, "version": vllm.__version__}), flush=True)


def in_engine(args: argparse.Namespace) -> list[dict]:
    command = [args.program, "bench", "-m", args.model, "-r", args.rounds, "--json", "-q", "-f", TEXT]
    command += ["--attention", args.engine_attention]
    if args.device:
        command += ["--device", args.device]
    if args.settings and args.engine_attention != "dense":
        with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
            file.write(args.settings)
        command += ["--phsa-config", file.name]
    kind = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[args.dtype]
    command += ["--kv-type", kind, "--weights", "f32" if kind == "f32" else "bf16"]

    def run(*more: object) -> list[dict]:
        done = subprocess.run([str(part) for part in (*command, *more)], capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(done.stderr)
        return [json.loads(line) for line in done.stdout.splitlines()]

    rows = []
    for length in args.lengths:
        (prefill,) = run("-p", length, "-n", 0)
        for batch in args.batches:
            (decode,) = run("-p", 0, "-n", args.tokens, "-d", length, "-b", batch)
            rate = prefill["tokens_per_s"]
            row = {"mode": "engine", "tokens": length, "batch": batch, "first_token_s": batch * length / rate}
            row |= {"prefill_tokens_per_s": rate, "decode_tokens_per_s": decode["tokens_per_s"]}
            rows.append(row)
    return rows


def run_mode(mode: str, args: argparse.Namespace) -> list[dict]:
    if mode == "engine":
        return in_engine(args)
    done = subprocess.run(
        [sys.executable, __file__, *sys.argv[1:], "--mode", mode],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines = done.stdout.splitlines()
    for line in lines:
        if "phsa:" in line:
            print(f"# {mode}: {line[line.find('phsa:') :]}")
    if done.returncode != 0:
        sys.exit("\n".join(lines[-40:]))
    return [json.loads(line[line.find("{") :]) for line in lines if "RESULT {" in line]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--lengths", type=numbers, default=[2048, 32768])
    parser.add_argument("--batches", type=numbers, default=[1, 16])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--settings", help="of the plugin and the engine, as JSON")
    parser.add_argument("--engine-attention", default="phsa")
    parser.add_argument("--program", default=str(HERE.parent / "build/release/bin/phsa"))
    parser.add_argument("--device", help="of the engine: cpu, cuda; default: a GPU if there is one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", type=int, help="MB of vLLM's cache, where it shall not choose")
    parser.add_argument("--eager", action="store_true", help="vLLM without graphs and compilation")
    parser.add_argument("--mode", choices=MODES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.mode:
        in_vllm(args)
        return
    rows = []
    for mode in args.modes.split(","):
        if mode not in MODES:
            parser.error(f"--modes: {mode}; there are {', '.join(MODES)}")
        for row in run_mode(mode, args):
            rows.append(row)
            print(json.dumps(row), flush=True)
    dense = {(row["tokens"], row["batch"]): row for row in rows if row["mode"] == "dense"}
    print(f"\n{pathlib.Path(args.model).name}, {args.dtype}, {os.cpu_count()} cores of {platform.machine()}\n")
    print("| | tokens | batch | first token, s | prefill, tokens/s | decode, tokens/s |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        peer = dense.get((row["tokens"], row["batch"]))
        cells = []
        for name in ("prefill_tokens_per_s", "decode_tokens_per_s"):
            known = peer and row is not peer and row[name] and peer[name]
            ratio = f" ({row[name] / peer[name]:.2f}×)" if known else ""
            cells.append(f"{row[name]:.1f}{ratio}" if row[name] else "–")
        name = {"dense": "vLLM", "phsa": "vLLM with the plugin", "engine": "our engine"}[row["mode"]]
        print(f"| {name} | {row['tokens']} | {row['batch']} | {row['first_token_s']:.3f} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
