"""What the documents show in Python runs, on a small random model in place of the real one."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_model import write_adapter, write_model
from token_shards import write_documents

import phsa
from phsa import _library

ROOT = Path(__file__).resolve().parents[2]
try:
    _library.load_engine()
except phsa.LibraryError as error:
    pytest.skip(f"the engine's module is not built: {error}", allow_module_level=True)


def snippets(document: str) -> list[tuple[int, str]]:
    """The Python blocks of a document, each with the number of its first line."""
    text = (ROOT / document).read_text(encoding="utf-8")
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, match.start(1)) + 1, match.group(1)) for match in found]


def run(document: str, changes: dict[str, str]) -> dict[str, Any]:
    """As a reader would: one after the other, in one session."""
    blocks = snippets(document)
    assert blocks, document
    names: dict[str, Any] = {"__name__": "__main__"}
    for line, code in blocks:
        for old, new in changes.items():
            code = code.replace(old, new)
        # So that a traceback names the document's line.
        exec(compile("\n" * (line - 1) + code, str(ROOT / document), "exec"), names)
    return names


@pytest.fixture(scope="module")
def changes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the examples load, and what there is here in its place."""
    folder = tmp_path_factory.mktemp("docs")
    write_model(folder / "model", layers=6, kv_heads=2, context=8192)
    settings = '{"attention": "phsa", "top_k": 2}'
    adapter = write_adapter(folder / "adapter", layers=6, settings=settings)
    return {
        '"smollm2-135m"': repr(str(folder / "model")),
        '"HuggingFaceTB/SmolLM2-135M-Instruct"': repr(str(folder / "model")),
        '"models/smollm2-135m-phsa"': repr(str(adapter)),
        "limit=100": "limit=2",
    }


@pytest.fixture(autouse=True)
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the checkout's texts, which may be written into."""
    os.symlink(ROOT / "bench", tmp_path / "bench")
    monkeypatch.chdir(tmp_path)


def test_what_python_md_shows_runs(changes: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # The small model's tokens are short: the text has as many tokens with fewer letters.
    names = run("docs/python.md", {**changes, "[:12000]": "[:6000]"})
    assert "<html" in (tmp_path / "page.html").read_text()
    out = capsys.readouterr().out
    assert "max_tokens" in out and "phsa" in out
    share = float(re.findall(r"^(?:.*[^0-9.])?(0\.\d+)$", out, re.MULTILINE)[0])
    assert share < 0.8, "the text of the sparse example is longer than what its queries may read"
    assert names["out"].shape == names["q"].shape and names["model"].config._attn_implementation == "phsa"


def test_what_the_readme_shows_runs(changes: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    names = run("README.md", changes)
    assert names["model"].config._attn_implementation == "phsa" and capsys.readouterr().out


def test_what_lm_eval_md_shows_runs(changes: dict[str, str]) -> None:
    pytest.importorskip("lm_eval", reason="lm_eval is not installed: its example is not run")
    from phsa.lm_eval import data

    try:
        data.folder()
    except FileNotFoundError as error:
        pytest.skip(f"the example's task has no data here: {error}")
    # The harness's thousands of tasks take ten seconds to list, and the example names none of them.
    names = run("docs/lm_eval.md", {**changes, "include_path=phsa": "include_defaults=False, include_path=phsa"})
    assert names["results"]["results"]["phsa_local_hellaswag"]["alias"]


def test_what_prepare_md_shows_runs(tmp_path: Path) -> None:
    documents = [np.arange(length) % 90 for length in (3000, 50, 9000)]
    write_documents(tmp_path / "tokens", [documents], vocab_size=100)
    names = run("docs/prepare.md", {})
    assert sum(map(len, names["sequences"][0])) == 4096


def test_python_is_shown_nowhere_else() -> None:
    """A document with Python in it belongs to the tests above; server.md's needs a server, as tests/e2e has."""
    shown = {str(path.relative_to(ROOT)) for path in (*(ROOT / "docs").glob("*.md"), ROOT / "README.md")}
    tested = {"README.md", "docs/lm_eval.md", "docs/prepare.md", "docs/python.md"}
    assert {name for name in shown if snippets(name)} == {*tested, "docs/server.md"}
