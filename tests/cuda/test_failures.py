"""The engine when the GPU fails it: a device that is lost, memory that another program has taken.

    PHSA_BIN_DIR=build/cuda-release/bin python3 tests/cuda/test_failures.py [part of a test's name …]

break_device.cu, preloaded into the program, takes the device or its memory away when it is told; scripts/test-cuda.sh
builds it, PHSA_BREAK_DEVICE names the library. Nothing may hang: every wait has an end.
"""

import contextlib
import http.client
import json
import os
import pathlib
import subprocess
import sys
import time

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from alone import run_tests, skip
from test_engine import FOLDER, GPU, PHSA, ROOT, TEXT, free_port, model, prompts, run

LIBRARY = pathlib.Path(os.environ.get("PHSA_BREAK_DEVICE", ROOT / "build/cuda/libbreak_device.so")).resolve()
if not LIBRARY.exists():
    skip(f"skipped: there is no {LIBRARY}", code=0)
SWITCH = pathlib.Path(FOLDER.name) / "break"
PREPARED = {**os.environ, "LD_PRELOAD": str(LIBRARY), "PHSA_TEST_BREAK": str(SWITCH)}
SPARSE = {"attention": "phsa", "top_k": 4, "init": 16, "local": 64}
LIMIT = 60  # seconds that anything here may take


def start(*args, **more):
    command = [str(part) for part in (PHSA, *args)]
    return subprocess.Popen(command, env=PREPARED, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)


def wait_for(condition, process):
    end = time.monotonic() + LIMIT
    while not condition():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < end, "nothing happens"
        time.sleep(0.01)


def make_it(word, process):
    """Has break_device do what the word says, and waits until it has."""
    whole = SWITCH.with_suffix(".new")
    whole.write_text(word)
    whole.rename(SWITCH)
    wait_for(lambda: not SWITCH.exists(), process)


def ask(port, method, path, body=None):
    """(status, JSON)"""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT)) as connection:
        connection.request(method, path, json.dumps(body) if body else None, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, json.loads(response.read())


@contextlib.contextmanager
def server():
    port = free_port()
    process = start("serve", "-m", model("qwen3"), *GPU, "-c", 4096, "--port", port, "--log-file", "none")

    def answers():
        with contextlib.suppress(OSError):
            return ask(port, "GET", "/health")[0] == 200

    try:
        wait_for(answers, process)
        yield process, port
    finally:
        SWITCH.unlink(missing_ok=True)
        process.kill()
        process.communicate()


def complete(port, length, count=8):
    request = {"prompt": prompts((length,))[0], "max_tokens": count, "temperature": 0, "return_token_ids": True}
    return ask(port, "POST", "/v1/completions", {**request, "phsa": SPARSE})


def message(answer):
    status, body = answer
    assert "error" in body, answer
    return status, body["error"]["message"]


def test_a_server_whose_device_is_lost_says_so_and_ends_when_told():
    with server() as (process, port):
        assert complete(port, 500)[0] == 200
        make_it("lose", process)
        begin = time.monotonic()
        for _ in range(3):
            status, words = message(complete(port, 500))
            assert status == 500 and "the GPU failed" in words, (status, words)
        status, health = ask(port, "GET", "/health")
        assert status == 503 and health["status"] == "failed" and "the GPU failed" in health["message"], health
        process.terminate()
        _, errors = process.communicate(timeout=LIMIT)
        print(f"{words}\n{time.monotonic() - begin:.1f} s from the failure to the end, status {process.returncode}")
        assert process.returncode == 0, errors


def test_a_server_without_memory_refuses_and_goes_on_when_there_is_some():
    with server() as (process, port):
        status, before = complete(port, 500)
        assert status == 200
        make_it("fill", process)
        # What has its memory goes on; what needs more is refused.
        assert complete(port, 500)[0] == 200
        look = {"prompt": prompts((3000,))[0], "max_tokens": 0, "last": 4, "phsa": SPARSE}
        status, words = message(ask(port, "POST", "/inspect", look))
        print(status, words)
        assert status == 503 and "GPU" in words and "memory" in words
        assert ask(port, "GET", "/health")[0] == 200
        make_it("free", process)
        assert ask(port, "POST", "/inspect", look)[0] == 200
        status, after = complete(port, 500)
        assert status == 200 and after["choices"][0]["token_ids"] == before["choices"][0]["token_ids"]


def one_line(errors):
    """The last line on standard error, which must say what failed."""
    lines = [line for line in errors.splitlines() if not line.startswith("break_device")]
    assert lines and "the GPU failed" in lines[-1], errors
    return lines[-1]


def test_a_device_that_is_lost_ends_a_command():
    flags = ("-m", model("qwen3"), *GPU, "--raw", "-p", "To be, or not", "-n", 4000, "--temp", 0, "-c", 4096)
    with start("run", *flags) as process:
        assert process.stdout.read(8)  # it writes
        make_it("lose", process)
        _, errors = process.communicate(timeout=LIMIT)
        print(process.returncode, one_line(errors))
        assert process.returncode == 1


def test_what_was_recorded_before_a_device_was_lost_is_kept():
    out = pathlib.Path(FOLDER.name) / "needles.jsonl"
    flags = ["niah", "-m", model("qwen3"), *GPU, "--forced", "--lengths", "1k", "--samples", 400, "--attention"]
    flags += ["dense,phsa", "-K", 4, "--haystack", TEXT, "--batch", 2, "--out", out]
    with start(*flags) as process:
        wait_for(lambda: out.exists() and len(out.read_text().splitlines()) > 3, process)
        make_it("lose", process)
        _, errors = process.communicate(timeout=LIMIT)
        assert process.returncode == 1, errors
        print(one_line(errors))
    kept = [json.loads(line) for line in out.read_text().splitlines()]  # every line is whole
    assert len(kept) > 3
    flags[flags.index(400)] = 8
    run(*flags)
    assert [json.loads(line) for line in out.read_text().splitlines()][: len(kept)] == kept


def test_a_cache_that_does_not_fit_beside_other_programs_is_refused_with_both_numbers():
    free, _ = torch.cuda.mem_get_info()
    taken = torch.empty(free - (2 << 30), dtype=torch.uint8, device="cuda")
    try:
        flags = ("-m", model("qwen3"), *GPU, "--port", free_port(), "--cache-tokens", 2_000_000)  # 6 GB
        words = run("serve", *flags, status=2).stderr.strip().splitlines()[-1]
        print(words)
        assert words.count("GB") >= 2 and ("NVIDIA" in words or "GPU" in words), words
    finally:
        del taken
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(run_tests(globals(), sys.argv[1:]))
