"""How `phsa` scales with cores on a CPU: prefill and decode for several numbers of threads, beside llama.cpp.

    python bench/cpu_scaling.py --model smollm2-135m [--phsa build/release/bin/phsa] [--threads 1,4,16]
        [--prompts 512,4096] [--depths 0,4000] [--generate 32] [--attention dense,phsa] [--seconds 180]

Prints a JSON line for each measurement as it comes (`program`, `attention`, `threads`, `test`, `tokens`, `depth`,
`tokens_per_s`), then a markdown table: tokens/s, in brackets times llama.cpp with the same threads, and what the most
threads are worth beside one. The most threads are measured first and one thread last, and nothing begins after
`--seconds`. llama.cpp is measured where the Python package llama-cpp-python can be imported (flash attention on).
Prompts of more than 1,024 tokens are left out on few threads, and so are llama.cpp's depths: they would take most of
the time.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time

try:
    import llama_bench
except ImportError:
    llama_bench = None


LONG = 1024  # tokens of a prompt that few threads do not read


def phsa(args, threads: int, prompts: str, generate: str, depth: str) -> list[dict]:
    command = [args.phsa, "bench", "-m", args.model, "-t", str(threads), "--attention", args.attention, "--json"]
    command += ["-p", prompts or "0", "-n", generate, "-d", depth, "-r", "2"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"cpu_scaling: {' '.join(command)} failed: {done.stderr.strip()}")
    return [json.loads(line) for line in done.stdout.splitlines()]


class Peer:
    """llama.cpp with one number of threads."""

    def __init__(self, path: str, context: int, threads: int):
        self.llama = llama_bench.Llama(path, context, threads)
        generator = random.Random(1)
        self.tokens = [generator.randrange(self.llama.vocab) for _ in range(context)]

    def measure(self, test: str, count: int, depth: int) -> float:
        self.llama.clear()
        if depth:
            self.llama.read(self.tokens[:depth])
        step = 2048 if test == "pp" else 1
        best = 0.0
        for _ in range(2):
            self.llama.truncate(depth)
            begin = time.perf_counter()
            self.llama.read(self.tokens[depth : depth + count], step)
            best = max(best, count / (time.perf_counter() - begin))
        return best


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--phsa", default="build/release/bin/phsa")
    parser.add_argument("--threads", default="1,4,16")
    parser.add_argument("--prompts", default="512,4096")
    parser.add_argument("--depths", default="0,4000")
    parser.add_argument("--generate", type=int, default=32)
    parser.add_argument("--attention", default="dense,phsa")
    parser.add_argument("--seconds", type=float, default=180)
    args = parser.parse_args()
    threads = sorted({int(n) for n in args.threads.split(",")}, reverse=True)
    prompts = [int(n) for n in args.prompts.split(",") if n]
    depths = [int(n) for n in args.depths.split(",") if n]
    tests = [("pp", n, 0) for n in prompts] + [("tg", args.generate, d) for d in depths]
    cores = len(os.sched_getaffinity(0))
    print(f"{cores} cores for {', '.join(map(str, threads))} threads", file=sys.stderr)
    path = args.model
    if not os.path.exists(path):
        found = subprocess.run([args.phsa, "models", "path", args.model], capture_output=True, text=True)
        path = found.stdout.strip()
    deadline = time.monotonic() + args.seconds
    speeds = {}

    def note(program: str, attention: str, count: int, test: tuple, speed: float):
        speeds[program, attention, count, test] = speed
        row = {"program": program, "attention": attention, "threads": count, "test": test[0], "tokens": test[1]}
        print(json.dumps(row | {"depth": test[2], "tokens_per_s": speed}), flush=True)

    for count in threads:
        if time.monotonic() < deadline:
            few = [n for n in prompts if n <= LONG or count >= 4]
            rows = phsa(args, count, ",".join(map(str, few)), "0", "0") if few else []
            if depths:
                rows += phsa(args, count, "0", str(args.generate), ",".join(map(str, depths)))
            for row in rows:
                note("phsa", row["attention"], count, (row["test"], row["tokens"], row["depth"]), row["tokens_per_s"])
        if llama_bench is None:
            continue
        peer = Peer(path, max(n + d for _, n, d in tests), count)
        for test in tests:
            if count < 4 and (test[2] > 0 or test[1] > LONG):
                continue
            if time.monotonic() < deadline:
                note("llama.cpp", "dense", count, test, peer.measure(*test))

    names = [f"prefill {n}" for n in prompts] + [f"decode at {d}" for d in depths]
    print(f"\n| threads | | {' | '.join(names)} |\n|---|---|{'---|' * len(tests)}")
    policies = [("phsa", name) for name in args.attention.split(",")] + [("llama.cpp", "dense")]
    for count in sorted(threads):
        for program, attention in policies:
            cells = []
            for test in tests:
                ours, theirs = (
                    speeds.get((*key, count, test)) for key in ((program, attention), ("llama.cpp", "dense"))
                )
                times = f" ({ours / theirs:.2f}×)" if ours and theirs and program == "phsa" else ""
                cells.append(f"{ours:,.1f}{times}" if ours else "")
            if any(cells):
                name = attention if program == "phsa" else program
                print(f"| {count} | {name} | {' | '.join(cells)} |")
    for program, attention in policies:
        cells = []
        for test in tests:
            most, one = (speeds.get((program, attention, n, test)) for n in (threads[0], 1))
            cells.append(f"{most / one:.1f}×" if most and one else "")
        if any(cells):
            name = attention if program == "phsa" else program
            print(f"| {threads[0]} against 1 | {name} | {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
