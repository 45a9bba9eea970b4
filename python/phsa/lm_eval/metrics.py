"""pass@1 of HumanEval without the Hub: the harness's own task downloads its metric before it runs anything."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

_SECONDS = 3.0  # as in OpenAI's evaluation and in the harness
_PASSED = 93  # an exit status that a program which ends itself, before its tests, does not have
_RUNNER = f"""
import resource, runpy
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
runpy.run_path("program.py")
raise SystemExit({_PASSED})
"""


def build_predictions(resps: list[list[str]], docs: list[dict[str, str]]) -> list[list[str]]:
    """The programs: the prompt and each answer to it."""
    return [[doc["prompt"] + answer for answer in answers] for answers, doc in zip(resps, docs, strict=True)]


def _passes(program: str) -> bool:
    """Runs a program in a process and an empty folder of its own. That keeps accidents away, not malice: the harness
    asks for ``--confirm_run_unsafe_code`` because this is code that nobody has read."""
    with tempfile.TemporaryDirectory(prefix="phsa-humaneval-") as scratch:
        (Path(scratch) / "program.py").write_text(program, encoding="utf-8")
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _RUNNER],
            cwd=scratch,
            env={"PATH": os.defpath, "HOME": scratch, "TMPDIR": scratch, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return process.wait(timeout=_SECONDS) == _PASSED
        except subprocess.TimeoutExpired:
            return False
        finally:
            # Its children too, which may outlive it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def pass_at_1(references: list[str], predictions: list[list[str]]) -> dict[str, float]:
    """The share of answers that pass the tests of ``references``."""
    passed = [
        _passes(f"{program}\n{test}")
        for test, programs in zip(references, predictions, strict=True)
        for program in programs
    ]
    return {"pass@1": sum(passed) / len(passed)}
