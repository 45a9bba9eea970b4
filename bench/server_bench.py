"""Load on `phsa serve`, and on llama_cpp.server or vLLM's server with the same model, prompts and clients.

    python bench/server_bench.py --model MODEL.gguf [--phsa build/release/bin/phsa] [--seconds 120] [--clients 64]
        [--short 32,200] [--long 800,2400] [--long-share 0.25] [--answer 32] [--serve-args='--attention phsa'] [--check]
        [--llama] [--vllm PYTHON] [--vllm-args='--dtype bfloat16'] [--threads 0] [--requests 0] [--drain 60]
        [--context 8192] [--seed 1]

Each client sends one request after the other on a connection of its own. A prompt is a piece of a text behind a
number that is new each time, so that no cache can help; every fourth one is long. --long 8000,8000 --long-share 1 is
the load of long documents. Every answer must be complete: status 200, a finish_reason, as many tokens as usage says.

--check takes prompts from a fixed set instead, asks for each once with nobody else there, and compares every answer
under load with that one. Greedy answers are equal with `--serve-args='--weights f32'`.

--llama runs llama_cpp.server (the extra `server` of llama-cpp-python) afterwards, for as long, and prints the ratio.
--vllm does so with `vllm serve` of the environment whose interpreter is named; --model is a folder then. With
--vllm-args='--attention-backend CUSTOM' it is vLLM with phsa's plugin (docs/vllm.md).
Needs nothing but the standard library besides. Loopback only. Prints one JSON line for each server, then a table.
"""

import argparse
import contextlib
import http.client
import json
import os
import pathlib
import random
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

TEXT = pathlib.Path(__file__).parent / "data/from_sand_hill_to_pine.txt"
CHARACTERS_PER_TOKEN = 4.3  # of this text, with SmolLM2's tokenizer: about
CHECKED_PROMPTS = 24
START_SECONDS = 300


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Peer:
    """A server in a process of its own."""

    def __init__(self, name, command, port):
        self.name = name
        self.port = port
        self.log = tempfile.NamedTemporaryFile("w", prefix=f"{name}-", suffix=".log")  # noqa: SIM115
        self.process = subprocess.Popen([str(part) for part in command], stdout=self.log, stderr=self.log)
        end = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(OSError):
                if self.get("/v1/models"):
                    return
            if self.process.poll() is not None or time.monotonic() > end:
                words = pathlib.Path(self.log.name).read_text()[-2000:]
                self.stop()
                sys.exit(f"{name} did not start:\n{words}")
            time.sleep(0.2)

    def connect(self):
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)

    def get(self, path):
        with contextlib.closing(self.connect()) as connection:
            connection.request("GET", path)
            return connection.getresponse().status == 200

    def post(self, path, body):
        """The answer's JSON; ends the program where there is none."""
        with contextlib.closing(self.connect()) as connection:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            data = response.read()
        if response.status != 200:
            sys.exit(f"{self.name}: status {response.status} from {path}: {data[:500]!r}")
        return json.loads(data)

    def complete(self, connection, prompt, tokens):
        """(text, prompt tokens, answer tokens), or a sentence that says what is wrong."""
        body = json.dumps({"model": "x", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "seed": 1})
        try:
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            data = response.read()
            if response.status != 200:
                return f"status {response.status}: {data[:200]!r}"
            answer = json.loads(data)
        except (OSError, http.client.HTTPException, ValueError) as error:
            connection.close()
            return repr(error)
        choice, usage = answer["choices"][0], answer["usage"]
        if choice["finish_reason"] not in ("stop", "length") or usage["completion_tokens"] > tokens:
            return f"not complete: {choice['finish_reason']}, {usage}"
        return choice["text"], usage["prompt_tokens"], usage["completion_tokens"]

    def memory(self):
        """Bytes that the process has in memory."""
        for line in pathlib.Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        return 0

    def stop(self):
        if self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.log.close()


class Prompts:
    """The same ones for every server."""

    def __init__(self, args):
        self.random = random.Random(args.seed)
        self.args = args
        self.text = TEXT.read_text(encoding="utf-8")
        self.lock = threading.Lock()
        self.count = 0
        self.fixed = [self.make() for _ in range(CHECKED_PROMPTS)] if args.check else []

    def make(self):
        self.count += 1
        # Of every few one is long: chosen by count, so that a short run has both.
        share = self.args.long_share
        is_long = int(self.count * share) > int((self.count - 1) * share)
        low, high = self.args.long if is_long else self.args.short
        length = int(self.random.randint(low, high) * CHARACTERS_PER_TOKEN)
        begin = self.random.randrange(max(1, len(self.text) - length))
        return f"{self.count}. {self.text[begin : begin + length]}"

    def next(self):
        """(number of a fixed prompt or None, prompt)"""
        with self.lock:
            if not self.fixed:
                return None, self.make()
            which = self.random.randrange(len(self.fixed))
            return which, self.fixed[which]


def load(peer, args):
    prompts = Prompts(args)
    expected = []
    if args.check:
        with contextlib.closing(peer.connect()) as connection:
            for prompt in prompts.fixed:
                answer = peer.complete(connection, prompt, args.answer)
                if isinstance(answer, str):
                    sys.exit(f"{peer.name}: a lone client: {answer}")
                expected.append(answer[0])
    lock = threading.Lock()
    totals = {"answers": 0, "prompt_tokens": 0, "answer_tokens": 0, "different": 0, "late": 0}
    errors, seconds = [], []
    stopped = threading.Event()
    begin = time.monotonic()
    end = begin + args.seconds

    def client():
        with contextlib.closing(peer.connect()) as connection:
            while time.monotonic() < end and not (args.requests and totals["answers"] >= args.requests):
                which, prompt = prompts.next()
                asked = time.monotonic()
                answer = peer.complete(connection, prompt, args.answer)
                with lock:
                    if time.monotonic() > end and not args.requests:
                        # It counts for nobody's speed, but must be right.
                        totals["late"] += 1
                        if stopped.is_set():
                            return
                        if isinstance(answer, str):
                            errors.append(answer)
                        elif which is not None:
                            totals["different"] += answer[0] != expected[which]
                        return
                    if isinstance(answer, str):
                        errors.append(answer)
                        continue
                    text, read, written = answer
                    seconds.append(time.monotonic() - asked)
                    totals["answers"] += 1
                    totals["prompt_tokens"] += read
                    totals["answer_tokens"] += written
                    totals["different"] += which is not None and text != expected[which]

    memory = peer.memory()
    threads = [threading.Thread(target=client) for _ in range(args.clients)]
    for thread in threads:
        thread.start()
    # Memory once everything has been of use, and at the end: what grows between them grows for ever.
    warm = memory_end = 0
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.2)
        if not stopped.is_set():
            memory_end = peer.memory()
        if not warm and time.monotonic() > begin + args.seconds / 3:
            warm = memory_end
        if time.monotonic() > end + args.drain and not stopped.is_set():
            stopped.set()  # what it still owes is not waited for
            peer.stop()
    elapsed = min(time.monotonic(), end) - begin
    seconds.sort()
    return {
        "server": peer.name,
        "clients": args.clients,
        "seconds": round(elapsed, 1),
        **totals,
        "errors": len(errors),
        "first_error": errors[0] if errors else None,
        "answers_per_s": round(totals["answers"] / elapsed, 2),
        "tokens_per_s": round((totals["prompt_tokens"] + totals["answer_tokens"]) / elapsed, 1),
        "answer_tokens_per_s": round(totals["answer_tokens"] / elapsed, 1),
        "median_s": round(seconds[len(seconds) // 2], 2) if seconds else None,
        "slowest_s": round(seconds[-1], 2) if seconds else None,
        "memory_start": memory,
        "memory_third": warm,
        "memory_end": memory_end,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])

    def pair(text):
        low, high = map(int, text.split(","))
        return low, high

    parser.add_argument("--model", required=True)
    parser.add_argument("--phsa", default="build/release/bin/phsa")
    parser.add_argument("--serve-args", default="", help="more flags for phsa serve")
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--drain", type=float, default=60, help="seconds that the last answers may take after the end")
    parser.add_argument(
        "--requests", type=int, default=0, help="stop after this many answers; 0: when the time is over"
    )
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--short", type=pair, default=(32, 200), help="tokens of short prompts, about")
    parser.add_argument("--long", type=pair, default=(800, 2400), help="tokens of long prompts, about")
    parser.add_argument("--long-share", type=float, default=0.25)
    parser.add_argument("--answer", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=0, help="0: one per core")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--check", action="store_true", help="compare with what a lone client gets")
    parser.add_argument("--llama", action="store_true", help="llama_cpp.server too")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has llama_cpp.server")
    parser.add_argument("--vllm", metavar="PYTHON", help="vLLM's server too, by this interpreter")
    parser.add_argument("--vllm-args", default="", help="more flags for vllm serve")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no server is left behind
    threads = args.threads or os.cpu_count()

    ours, theirs = free_port(), free_port()
    serve = [args.phsa, "serve", "-m", args.model, "--port", ours, "-t", threads, "-c", args.context]
    servers = [("phsa", [*serve, "--queue", args.clients, "--log-file", "none", *shlex.split(args.serve_args)], ours)]
    if args.llama:
        peer = [args.python, "-m", "llama_cpp.server", "--model", args.model, "--port", theirs, "--n_ctx", args.context]
        peer += ["--n_threads", threads, "--n_threads_batch", threads, "--flash_attn", "true"]
        servers.append(("llama_cpp.server", [*peer, "--interrupt_requests", "false", "--verbose", "false"], theirs))
    if args.vllm:
        port = free_port()
        peer = [args.vllm, "-m", "vllm.entrypoints.openai.api_server", "--model", args.model, "--port", port]
        peer += ["--host", "127.0.0.1", "--served-model-name", "x", "--max-model-len", args.context]
        servers.append(("vLLM", [*peer, *shlex.split(args.vllm_args)], port))
    rows = []
    for name, command, port in servers:
        peer = Peer(name, command, port)
        try:
            rows.append(load(peer, args))
        finally:
            peer.stop()
        print(json.dumps(rows[-1]), flush=True)
    print(
        "\n| server | answers/s | tokens/s, prompts and answers | median answer, s | errors | different | memory, MB |"
    )
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        memory = " → ".join(f"{row[key] / 1e6:.0f}" for key in ("memory_start", "memory_third", "memory_end"))
        ratio = (
            f" ({row['tokens_per_s'] / rows[-1]['tokens_per_s']:.2f}×)"
            if len(rows) > 1 and rows[-1]["tokens_per_s"]
            else ""
        )
        print(
            f"| {row['server']} | {row['answers_per_s']} | {row['tokens_per_s']}{ratio} | {row['median_s']} "
            f"| {row['errors']} | {row['different'] if args.check else '-'} | {memory} |"
        )
    if any(row["errors"] or row["different"] for row in rows if row["server"] == "phsa"):
        sys.exit(1)


if __name__ == "__main__":
    main()
