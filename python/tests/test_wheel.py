"""The package as pip builds and installs it, in an environment that has nothing else.

Built beside the build that the other tests use, with its options, so that ccache need not compile anything again.
Without ccache the first time takes minutes.
"""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy
import pytest
from tiny_model import write_model

import phsa
from phsa import _library

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import importlib.util, sys
assert importlib.util.find_spec("torch") is None
import phsa
llm = phsa.LLM(sys.argv[1], threads=1, weights="f32")
print(phsa.__file__)
print(llm.generate("Bees, wasps;", max_tokens=8, temperature=0, ignore_eos=True).tokens.tolist())
print(phsa.target())
"""

for module in ("nanobind", "scikit_build_core"):
    pytest.importorskip(module, reason=f"{module} is not installed: the wheel is not tested")
if shutil.which("cmake") is None:
    pytest.skip("there is no cmake: the wheel is not tested", allow_module_level=True)


def run(*args: object, env: dict[str, str] | None = None, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    # As a user's shell has it, not as this test's: an installed package needs no variable of ours.
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PHSA_", "PYTHON", "SKBUILD_"))}
    return subprocess.run(
        [str(arg) for arg in args], capture_output=True, text=True, timeout=3000, cwd=cwd, env={**clean, **(env or {})}
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    library = _library.find("libphsa.so")
    assert library is not None
    build = library.parent.parent
    variables = {
        "CC": "cc",
        "CXX": "c++",
        "PHSA_TORCH": "OFF",
        "SKBUILD_BUILD_DIR": str(build.parent / "wheel"),
        "SKBUILD_CMAKE_DEFINE": ";".join(
            ("PHSA_WERROR=ON", "PHSA_COMPILE_TOGETHER=ON", f"PHSA_INCLUDE_ROOTS={build.parent / 'include-roots'}")
        ),
        "CMAKE_BUILD_PARALLEL_LEVEL": os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count())),
    }
    pip = (sys.executable, "-m", "pip", "wheel", "--disable-pip-version-check")
    done = run(*pip, ROOT, "--no-build-isolation", "--no-deps", "--wheel-dir", folder, env=variables)
    assert done.returncode == 0, done.stdout + done.stderr
    [path] = folder.glob("phsa-*.whl")
    return path


def test_the_wheel_holds_the_package_and_asks_for_numpy_alone(wheel: Path) -> None:
    version = f"cp{sys.version_info.major}{sys.version_info.minor}"
    tag = "cp312-abi3" if sys.version_info >= (3, 12) else f"{version}-{version}"
    assert f"-{tag}-" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        [metadata] = [name for name in names if name.endswith(".dist-info/METADATA")]
        wanted = email.message_from_bytes(archive.read(metadata)).get_all("Requires-Dist") or []
    assert [line.split(">")[0] for line in wanted if "extra" not in line] == ["numpy"]
    for name in ("phsa/llm.py", "phsa/_engine.pyi", "phsa/py.typed", f"phsa/lib/libphsa.so.{_library.ABI_VERSION}"):
        assert name in names
    assert any(name.startswith("phsa/lib/_engine.") for name in names)
    assert any(name.endswith(".data/scripts/phsa") for name in names)
    # The operators' sources are compiled where PyTorch comes later.
    sources = {f"phsa/csrc/{name}" for name in ("ops.cc", "status.h", "threads.cc", "threads.h", "include/phsa/c.h")}
    assert {name for name in names if name.endswith((".cc", ".h"))} == sources
    assert not any("tests" in name for name in names)


def test_the_wheel_works_in_an_environment_without_torch(wheel: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_model(model)
    assert run(sys.executable, "-m", "venv", tmp_path / "venv").returncode == 0
    python = tmp_path / "venv/bin/python"
    pip = (python, "-m", "pip", "install", "--disable-pip-version-check")
    installed = run(*pip, "--no-deps", wheel)
    assert installed.returncode == 0, installed.stderr
    if run(*pip, f"numpy=={numpy.__version__}").returncode != 0:
        pytest.skip("NumPy cannot be had here: the wheel was installed, but not run")
    done = run(python, "-c", PROGRAM, model, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    file, tokens, target = done.stdout.splitlines()
    assert Path(file).is_relative_to(tmp_path / "venv")
    here = phsa.LLM(model, threads=1, weights="f32")
    assert tokens == str(here.generate("Bees, wasps;", max_tokens=8, temperature=0, ignore_eos=True).tokens.tolist())
    assert target == phsa.target()
    program = run(tmp_path / "venv/bin/phsa", "run", "-m", model, "-p", "x", "-n", 2, "--temp", 0, cwd=tmp_path)
    assert program.returncode == 0, program.stderr


def test_all_missing_libraries_are_named_at_once(tmp_path: Path) -> None:
    configure = ("cmake", "-S", ROOT / "python", "-B", tmp_path / "build", f"-DPython_EXECUTABLE={sys.executable}")
    done = run(*configure, "-DPHSA_TORCH=OFF", env={"PKG_CONFIG_LIBDIR": str(tmp_path)})
    assert done.returncode == 1
    [line] = [line for line in done.stderr.splitlines() if "apt-get install" in line]
    assert {"libhwy-dev", "libzip-dev", "libpcre2-dev", "libutf8proc-dev"} <= set(line.split())
    assert "PHSA_ENGINE=OFF" in done.stderr
