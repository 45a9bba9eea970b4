"""The list of settings is one: documents, Python, flags and requests have what it has."""

import json
import re

import pytest
from conftest import ROOT, run_phsa
from test_cli import write_gguf


def table():
    done = run_phsa("settings")
    assert done.returncode == 0, done.stderr
    return done.stdout


def names():
    return re.findall(r"^\| `(\w+)`", table(), re.MULTILINE)


def test_the_document_has_the_programs_table():
    assert {"attention", "top_k", "punctuation"} <= {*names()}
    assert table() in (ROOT / "docs/settings.md").read_text()


def test_python_has_the_programs_table():
    done = run_phsa("settings", "--as-python")
    assert done.stdout == (ROOT / "python/phsa/_setting_table.py").read_text()


def test_python_takes_every_setting():
    settings = pytest.importorskip("phsa.settings")
    written = settings.Settings().to_json()
    assert [*written] == names()
    taken = {settings.SETTING_OF[one].name for one in settings.AttentionOptions.__annotations__ if one != "preset"}
    assert taken == {*names()} - {"attention"}


def test_every_setting_is_a_flag_with_help():
    text = run_phsa("help", "run").stdout
    for name, flag, meaning in re.findall(
        r"^\| `(\w+)` \| `([\w-]+)` \|(?:[^|]*\|){2} ([^|]*) \|", table(), re.MULTILINE
    ):
        assert re.search(rf"^ +{flag}[ ,]", text, re.MULTILINE), name
        words = " ".join(text.split())
        assert name in ("attention", "lambda") or meaning.split(";")[0] in words, name


def test_a_file_is_read_by_the_names_of_the_first_version(tmp_path):
    model = write_gguf(tmp_path / "tiny.gguf", context=512)
    first, today = tmp_path / "first.json", tmp_path / "today.json"
    first.write_text(json.dumps({"attention": "phsa", "block_size": 32, "init_tokens": 64, "local_tokens": 96}))
    today.write_text(json.dumps({"attention": "phsa", "block": 32, "init": 64, "local": 96}))
    texts = []
    for file in (first, today):
        done = run_phsa("inspect", "-m", model, "-p", "some text", "--raw", "--json", "--phsa-config", file)
        assert done.returncode == 0, done.stderr
        texts.append(json.loads(done.stdout)["attention"])
    assert texts[0] == texts[1] and texts[0]["block"] == 32 and "block_size" not in texts[0]
    first.write_text(json.dumps({"block": 32, "block_size": 32}))
    done = run_phsa("run", "-m", model, "-p", "x", "--phsa-config", first)
    assert done.returncode == 2 and "given twice" in done.stderr


def test_a_wrong_value_is_told_by_the_name_under_which_it_was_given(tmp_path):
    model = write_gguf(tmp_path / "tiny.gguf", context=512)

    def said(*given):
        done = run_phsa("run", "-m", model, "-p", "x", "--attention", "phsa", *given)
        assert done.returncode == 2
        return done.stderr.strip()

    assert said("--init", 24) == "phsa: settings: --init is 24; allowed: multiples of 16 from 0 to 1073741824"
    assert said("-K", 1 << 20) == "phsa: settings: -K is 1048576; allowed: 0 to 65536"
    assert said("--group-reduce", "mean") == 'phsa: settings: --group-reduce is "mean"; allowed: sum, max, none'
    file = tmp_path / "settings.json"
    file.write_text('{"init": 24}')
    assert said("--phsa-config", file) == "phsa: settings: init is 24; allowed: multiples of 16 from 0 to 1073741824"
    phsa = pytest.importorskip("phsa")
    with pytest.raises(ValueError, match=r"^settings: init is 24; allowed: multiples of 16"):
        phsa.LLM(model, device="cpu", attention="phsa", init=24)
    with pytest.raises(ValueError, match=r"^settings: lam is 2(\.0)?; allowed: a number from 0 to 1$"):
        phsa.LLM(model, device="cpu", attention="phsa", lam=2.0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'block_size'"):
        phsa.LLM(model, device="cpu", block_size=32)
