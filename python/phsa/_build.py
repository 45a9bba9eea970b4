"""Compiles the operators' library at first use, where the installation has none: PyTorch often comes after phsa.

Two small files against torch's stable ABI: what is built serves every PyTorch from 2.10 on, so it is kept under the
digest of its sources and built once per machine and user. A C++ compiler is all it takes; torch's own loader would
want ninja as well.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from . import _library

NAME = "libphsa_torch.so"
_TARGET = "0x020a000000000000"  # the oldest PyTorch, as in csrc/CMakeLists.txt
_SOURCES = ("ops.cc", "threads.cc")
_TIMEOUT_S = 600


class BuildError(RuntimeError):
    """Why there are no kernels, and what to do."""


def _places() -> tuple[Path, Path]:
    """The folders of the sources and of phsa's headers: in the installed package, or in a checkout."""
    package = Path(__file__).resolve().parent
    for sources, headers in (
        (package / "csrc", package / "csrc" / "include"),
        (package.parent / "csrc", package.parent.parent / "include"),
    ):
        if (sources / "ops.cc").is_file() and (headers / "phsa" / "c.h").is_file():
            return sources, headers
    raise BuildError("the sources of the operators are not in this installation: install phsa again")


def _cache() -> Path:
    """As the program's: PHSA_CACHE, XDG_CACHE_HOME/phsa or ~/.cache/phsa."""
    if folder := os.environ.get("PHSA_CACHE"):
        return Path(folder) / "torch"
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "phsa" / "torch"


def _digest(sources: Path, headers: Path) -> str:
    digest = hashlib.sha256(_TARGET.encode())
    for path in (*sorted(sources.glob("*.cc")), *sorted(sources.glob("*.h")), headers / "phsa" / "c.h"):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _command(sources: Path, headers: Path, library: Path, out: Path) -> list[str]:
    import torch

    torch_folder = Path(torch.__file__).parent
    if not (torch_folder / "include/torch/csrc/stable/library.h").is_file():
        raise BuildError(f"PyTorch {torch.__version__} has no stable ABI: 2.10 or newer is needed")
    compilers = (os.environ.get("CXX", ""), "c++", "g++", "clang++")
    compiler = next((shlex.split(one) for one in compilers if one and shutil.which(shlex.split(one)[0])), None)
    if compiler is None:
        raise BuildError(
            "they are compiled at first use, for which there is no C++ compiler: install one (apt-get install g++)"
        )
    return [
        *compiler,
        *("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread", "-w"),
        f"-DTORCH_TARGET_VERSION={_TARGET}",
        *(f"-I{folder}" for folder in (sources, headers, torch_folder / "include")),
        *(str(sources / name) for name in _SOURCES),
        # By its own name and without a path: libphsa is in the process before this is.
        str(library),
        f"-L{torch_folder / 'lib'}",
        "-ltorch_cpu",
        *("-o", str(out)),
    ]


def operators() -> Path:
    """The operators' library, compiled now if it was not before. Raises BuildError."""
    if os.environ.get("PHSA_TORCH", "").upper() in ("OFF", "NO", "FALSE", "0"):
        raise BuildError("PHSA_TORCH is OFF, so they are not compiled")
    library = _library.find("libphsa.so")
    if library is None:
        raise BuildError(f"libphsa.so was not found (looked in {_library.searched()})")
    sources, headers = _places()
    folder = _cache() / _digest(sources, headers)
    path = folder / NAME
    if path.is_file():
        return path
    command = _command(sources, headers, library, path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be at it; the lock goes with its process
            if not path.is_file():
                _compile(command, path)
    except OSError as error:
        raise BuildError(f"they cannot be compiled into {folder}: {error}; PHSA_CACHE names another folder") from error
    return path


def _compile(command: list[str], path: Path) -> None:
    print("phsa: compiling the PyTorch operators, once (some seconds)", file=sys.stderr, flush=True)
    handle, new = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(handle)
    try:
        done = subprocess.run(
            [*command[:-1], new], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT_S
        )
        if done.returncode != 0:
            (path.parent / "log").write_text(f"{shlex.join(command)}\n{done.stdout}{done.stderr}", encoding="utf-8")
            first = next((line for line in done.stderr.splitlines() if "error" in line), "no message")
            raise BuildError(f"they cannot be compiled ({first.strip()}); all of it is in {path.parent / 'log'}")
        os.chmod(new, 0o755)
        os.replace(new, path)
    except subprocess.TimeoutExpired:
        raise BuildError(f"compiling them took more than {_TIMEOUT_S} seconds") from None
    finally:
        Path(new).unlink(missing_ok=True)
