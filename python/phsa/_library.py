"""Where the libraries are, the engine's module, and through ctypes those functions of libphsa that need no tensors."""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

ABI_VERSION = 1
_INVALID_ARGUMENT = 2
_UNSUPPORTED = 3


class LibraryError(RuntimeError):
    """libphsa is missing, does not fit this package, or failed."""


def _folders() -> Iterator[Path]:
    """The folders that may hold the libraries, best first."""
    variable = os.environ.get("PHSA_LIBRARY_PATH")
    if variable:
        # Whoever sets it wants this build and no other.
        for folder in variable.split(os.pathsep):
            if folder:
                yield Path(folder)
        return
    package = Path(__file__).resolve().parent
    yield package / "lib"
    # In a source checkout the package lies in python/phsa and is used without being installed.
    root = package.parent.parent
    if (root / "include" / "phsa" / "c.h").is_file():
        yield root / "build" / "release" / "lib"


def find(name: str) -> Path | None:
    """The path of a library, or None. ``name`` is the file's name without its version: ``libphsa.so``."""
    for folder in _folders():
        for candidate in (folder / name, folder / f"{name}.{ABI_VERSION}"):
            if candidate.is_file():
                return candidate
    return None


def searched() -> str:
    return ", ".join(str(folder) for folder in _folders())


@functools.cache
def load() -> ctypes.CDLL:
    """libphsa itself."""
    path = find("libphsa.so")
    if path is None:
        raise LibraryError(
            f"libphsa.so was not found (looked in {searched()}). Build it with `cmake --preset release && "
            "cmake --build --preset release`, or set PHSA_LIBRARY_PATH to its folder"
        )
    library = ctypes.CDLL(str(path))
    library.phsa_abi_version.restype = ctypes.c_int32
    if library.phsa_abi_version() != ABI_VERSION:
        raise LibraryError(
            f"{path} has ABI version {library.phsa_abi_version()}; this package needs {ABI_VERSION}: rebuild it"
        )
    for name in ("phsa_last_error", "phsa_version", "phsa_targets", "phsa_target"):
        getattr(library, name).restype = ctypes.c_char_p
    library.phsa_set_target.argtypes = [ctypes.c_char_p]
    library.phsa_punctuation_table.argtypes = [
        ctypes.c_char_p,
        ctypes.POINTER(ctypes.c_char_p),
        ctypes.POINTER(ctypes.c_size_t),
        ctypes.POINTER(ctypes.c_uint8),
        ctypes.c_int64,
        ctypes.POINTER(ctypes.c_uint8),
    ]
    return library


@functools.cache
def load_engine() -> ModuleType:
    """phsa._engine: it lies beside libphsa, not in the package, so that a checkout's build is found."""
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = find(f"_engine{suffix}")
        if path is not None:
            break
    else:
        raise LibraryError(
            f"there is no engine for this Python (looked for _engine{importlib.machinery.EXTENSION_SUFFIXES[0]} in "
            f"{searched()}). `pip install .` builds it unless PHSA_ENGINE=OFF is set; in a checkout, with nanobind "
            "installed, `cmake --preset release -DPHSA_PYTHON=$(which python) && cmake --build --preset release` does"
        )
    name = f"{__package__}._engine"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise LibraryError(f"{path} cannot be loaded: {error}") from error
    sys.modules[name] = module
    return module


def _check(library: ctypes.CDLL, status: int) -> None:
    if status == 0:
        return
    message = library.phsa_last_error().decode()
    if status in (_INVALID_ARGUMENT, _UNSUPPORTED):
        raise ValueError(message)
    raise LibraryError(message)


def punctuation_table(name: str, tokens: Sequence[bytes], special: Sequence[bool]) -> bytes:
    """One byte per token: 1 where it belongs to the set or file ``name``."""
    library = load()
    count = len(tokens)
    table = (ctypes.c_uint8 * count)()
    status = library.phsa_punctuation_table(
        name.encode(),
        (ctypes.c_char_p * count)(*tokens),
        (ctypes.c_size_t * count)(*map(len, tokens)),
        (ctypes.c_uint8 * count)(*special),
        count,
        table,
    )
    _check(library, status)
    return bytes(table)


def targets() -> list[str]:
    """The backends and SIMD targets that this machine can run, best first."""
    return load().phsa_targets().decode().split()


def has_cuda() -> bool:
    """Whether libphsa was built with its CUDA kernels."""
    return bool(load().phsa_has_device(1))


def target() -> str:
    """The one in use."""
    return load().phsa_target().decode()


def set_target(name: str) -> None:
    """Chooses another one, for tests and bug reports. Not to be called while attention runs."""
    library = load()
    _check(library, library.phsa_set_target(name.encode()))
