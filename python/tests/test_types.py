"""A user's script passes the type checkers: mypy, and pyright as basedpyright, whose wheels bring all that it needs.

torch and transformers take them half a minute to read, so that they see stubs of the few names that the script uses.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

HERE = Path(__file__).resolve().parent
STUBS = {
    "torch/__init__.pyi": (
        "from typing import Any\nfrom . import nn as nn\n"
        "class Tensor:\n    def __array__(self, dtype=None): ...\n"
        "def tensor(data: Any) -> Tensor: ...\n"
    ),
    "torch/nn/__init__.pyi": "class Module: ...\n",
    "transformers/__init__.pyi": (
        "from torch import nn\nclass PreTrainedModel(nn.Module): ...\nclass LlamaForCausalLM(PreTrainedModel): ...\n"
    ),
}
COMMANDS = {
    "mypy": ["--python-executable", sys.executable, "--no-incremental", "--hide-error-context", "."],
    "basedpyright": ["--pythonpath", sys.executable, "--level", "error", "."],
}


@pytest.mark.parametrize("checker", COMMANDS)
def test_a_users_script_has_the_right_types_and_a_wrong_one_has_not(tmp_path: Path, checker: str) -> None:
    if importlib.util.find_spec(checker) is None:
        pytest.skip(f"{checker} is not installed: types are not checked with it")
    for name, text in STUBS.items():
        (tmp_path / "stubs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "stubs" / name).write_text(text)
    scripts = tmp_path / "scripts"
    shutil.copytree(HERE / "typed", scripts)
    (scripts / "mypy.ini").write_text(
        f"[mypy]\nmypy_path = {tmp_path / 'stubs'}:{HERE.parent}\nfollow_imports = silent\n"
        "[mypy-torch.*,transformers.*]\nfollow_imports = skip\n"  # the real ones; stubs are followed all the same
    )
    config = {"stubPath": "../stubs", "extraPaths": [str(HERE.parent)]}
    (scripts / "pyrightconfig.json").write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, "-m", checker, *COMMANDS[checker]], cwd=scripts, capture_output=True, text=True, timeout=300
    )
    found = re.findall(r"(\w+)\.py:(\d+)(?::\d+)?(?: -|:) error", done.stdout)
    assert {(name, int(line)) for name, line in found} == {("wrong", line) for line in (6, 7, 8, 9)}, done.stdout
    # What the stubs say is so.
    assert list(inspect.signature(torch.Tensor.__array__).parameters) == ["self", "dtype"]
    assert issubclass(LlamaForCausalLM, torch.nn.Module)
