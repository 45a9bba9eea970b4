"""End-to-end tests: the program as users run it, against the Python packages that they would use instead."""

import os
import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"
# Where the build put its programs.
BIN = pathlib.Path(os.environ.get("PHSA_BIN_DIR", ROOT / "build/release/bin"))


def run_phsa(*args, input=None, env=None, timeout=600):
    """`phsa ARGS`; the finished process, with text in stdout and stderr."""
    return subprocess.run(
        [BIN / "phsa", *map(str, args)],
        input=input,
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **(env or {})},
    )


@pytest.fixture
def phsa():
    if not (BIN / "phsa").exists():
        pytest.fail(f"{BIN / 'phsa'} is not built; run `make build` first")
    return run_phsa


@pytest.fixture(scope="session")
def shared():
    """The folder of large test data beside the project; a plain clone has none."""
    if not SHARED.is_dir():
        pytest.skip("there is no ../shared beside the project: its texts are not tested")
    return SHARED


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2-135M, fetched on first use (93 MB)."""
    done = run_phsa("models", "fetch", "smollm2-135m")
    if done.returncode != 0:
        pytest.skip(f"SmolLM2 cannot be had here: {done.stderr.strip().splitlines()[-1]}")
    return pathlib.Path(run_phsa("models", "path", "smollm2-135m").stdout.strip())
