"""`phsa tune`: settings within a budget that every command takes, and that a model can carry."""

import json
import signal
import subprocess
import time

import pytest
from conftest import BIN, run_phsa
from test_cli import refused, write_gguf
from test_compare import check_page

gguf = pytest.importorskip("gguf")
FEW = ("--budget", 0.2, "--length", "1k", "--samples", 2, "--task", "single_1", "--seed", 7002)
FLAGS = (*FEW, "--parts", "1,4", "--lambda", "0.9", "--weights", "f32", "-t", 1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", context=2048)


def records_of(path):
    header, *lines = map(json.loads, path.read_text().splitlines())
    return header, lines


def keys_of(lines):
    return [json.dumps([line.get(key) for key in ("task", "sample", "prose", "attention")]) for line in lines]


def carried_by(model):
    return json.loads(json.loads(run_phsa("info", model, "--json").stdout)["phsa_settings"])


def test_every_command_takes_the_settings_that_were_found(tiny, tmp_path):
    out, page = tmp_path / "settings.json", tmp_path / "report.html"
    done = run_phsa("tune", "-m", tiny, *FLAGS, "--out", out, "--report", page, "--json")
    assert done.returncode == 0, done.stderr
    found, settings = json.loads(done.stdout), json.loads(out.read_text())
    assert found["best"]["read"] <= 0.2 and found["dense"]["read"] == 1
    assert settings.pop("tested_tokens") == 1024
    assert settings == found["best"]["settings"] and settings["attention"] == "phsa"
    read = settings["init"] + settings["local"] + 16 * (settings["top_k"] + 1)
    assert read / 1024 == pytest.approx(found["best"]["read"])
    assert {trial["stage"] for trial in found["trials"]} >= {"parts", "band", "final", "fewer"}
    assert {trial["settings"]["parts"] for trial in found["trials"]} == {1, 4}
    check_page(page)
    text = tmp_path / "text.txt"
    text.write_text("abc " * 400)
    row = json.loads(run_phsa("perplexity", "-m", tiny, "-f", text, "-c", 1024, "--json", "--phsa-config", out).stdout)
    assert (row["attention"], row["top_k"]) == ("phsa", settings["top_k"])
    # The needles are those of `phsa niah`, which can make its tables of them.
    merged = run_phsa("niah", "--merge", tmp_path / "settings.records.jsonl")
    assert merged.returncode == 0 and "single_1" in merged.stdout


def test_an_interrupted_search_goes_on_where_it_was(tiny, tmp_path):
    whole = run_phsa("tune", "-m", tiny, *FLAGS, "--out", tmp_path / "whole.json", "--json")
    out, records = tmp_path / "parts.json", tmp_path / "parts.records.jsonl"
    command = [BIN / "phsa", "tune", "-m", tiny, *map(str, FLAGS), "--out", out, "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and (not records.exists() or records.read_text().count("\n") < 10):
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and f"what is done is in {records}" in errors
    assert not out.exists()
    begun = keys_of(records_of(records)[1])
    assert len(begun) >= 9
    again = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stderr
    finished = keys_of(records_of(records)[1])
    assert finished[: len(begun)] == begun and len(finished) > len(begun)
    assert len(set(finished)) == len(finished), "nothing was measured twice"
    assert json.loads(out.read_text()) == json.loads((tmp_path / "whole.json").read_text())
    one, other = json.loads(whole.stdout), json.loads(again.stdout)
    assert one["trials"] == other["trials"]
    text = tmp_path / "prose.txt"
    text.write_text("Another text. " * 100)
    # A third run has nothing left to read; other samples are another file's.
    assert run_phsa("tune", "-m", tiny, *FLAGS, "--out", out, "--json").returncode == 0
    assert keys_of(records_of(records)[1]) == finished
    refused(run_phsa("tune", "-m", tiny, *FLAGS, "--prose", text, "--out", out, "-q"), "prose", "another --out")


def test_a_model_carries_what_was_found(tiny, tmp_path):
    folder, adapter = tmp_path / "folder", tmp_path / "settings.json"
    assert run_phsa("export", "-m", tiny, "--out", folder).returncode == 0
    before = json.loads((folder / "config.json").read_text())
    done = run_phsa("tune", "-m", folder, *FLAGS, "--out", adapter, "--install", "--json")
    assert done.returncode == 0, done.stderr
    settings = json.loads(adapter.read_text())
    assert carried_by(folder) == settings
    after = json.loads((folder / "config.json").read_text())
    assert {key: value for key, value in after.items() if not key.startswith("phsa")} == before
    assert after["phsa_punctuation_ids"]
    text = tmp_path / "text.txt"
    text.write_text("abc " * 400)
    row = json.loads(run_phsa("perplexity", "-m", folder, "-f", text, "-c", 1024, "--json").stdout)
    assert (row["attention"], row["top_k"]) == ("phsa", settings["top_k"])
    # A file of weights, whose weights stay.
    file = tmp_path / "copy.gguf"
    file.write_bytes(tiny.read_bytes())
    for lam in (0.5, 1):  # the second in place of the first
        own = tmp_path / f"own-{lam}.json"
        flags = (*FEW, "--parts", 1, "--lambda", lam, "--out", own, "--install", "--json")
        done = run_phsa("tune", "-m", file, *flags)
        assert done.returncode == 0, done.stderr
        assert carried_by(file) == json.loads(own.read_text()) and carried_by(file)["lambda"] == lam
    ask = ("perplexity", "-f", text, "-c", 512, "--json", "--attention", "dense")
    losses = [json.loads(run_phsa(*ask, "-m", model).stdout)["loss"] for model in (tiny, file)]
    assert losses[0] == losses[1]
    reader = gguf.GGUFReader(file)
    assert len(reader.fields) == len(gguf.GGUFReader(tiny).fields) + 1
    # And by way of export.
    carrying = tmp_path / "carrying.gguf"
    done = run_phsa("export", "-m", tiny, "--phsa-config", adapter, "--out", carrying)
    assert done.returncode == 0, done.stderr
    assert carried_by(carrying) == settings
    refused(run_phsa("export", "-m", tiny, "--phsa-config", text, "--out", tmp_path / "no.gguf"), "not valid JSON")
    assert not (tmp_path / "no.gguf").exists()


def test_an_adapter_carries_what_was_found_with_it(tiny, tmp_path):
    transformers, test_adapter = pytest.importorskip("transformers"), pytest.importorskip("test_adapter")
    folder, adapter, out = tmp_path / "folder", tmp_path / "adapter", tmp_path / "settings.json"
    assert run_phsa("export", "-m", tiny, "--out", folder).returncode == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    test_adapter.make_adapter(model, adapter, r=4, target_modules=["q_proj", "v_proj"])
    before = (folder / "config.json").read_text()
    flags = ("--adapter", adapter, "--out", out, "--install", "--json")
    done = run_phsa("tune", "-m", folder, *FLAGS, *flags)
    assert done.returncode == 0, done.stderr
    assert json.loads((adapter / "phsa.json").read_text()) == json.loads(out.read_text())
    assert (folder / "config.json").read_text() == before
    refused(run_phsa("tune", "-m", folder, *FLAGS, "--out", out, "-q"), "adapter", "another --out")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--budget", 0.01), ("--budget 0.01 of 1024 tokens", "give --budget 0.063 or more")),
        (("--budget", 2), ("between 0 and 1",)),
        (("--length", "8k"), ("--length is 8192", "context is 2048")),
        (("--length", "abc"), ("--length", "abc")),
        (("--haystack", "/nowhere/text.txt"), ("/nowhere/text.txt",)),
        (("--task", "single_9"), ("single_9", "single_1")),
        (("--parts", 3), ("parts is 3", "1, 2, 4, 8")),
        (("--lambda", 2), ("lambda is 2",)),
        (("--language", "zh"), ("--haystack FILE",)),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_before_any_work(tiny, tmp_path, flags, words):
    given = dict(zip(FEW[::2], FEW[1::2], strict=True))
    given["--out"] = tmp_path / "settings.json"
    if len(flags) == 2:
        given[flags[0]] = flags[1]
    done = run_phsa("tune", "-m", tiny, *(part for pair in given.items() for part in pair), *flags[2:], "-q",
                    *(flags if len(flags) == 1 else ()))  # fmt: skip
    refused(done, *words)
    assert not (tmp_path / "settings.json").exists()


def test_a_place_that_cannot_be_written_to_is_told_before_any_work(tiny, tmp_path):
    refused(run_phsa("tune", "-m", tiny, *FEW, "--out", "/nowhere/a.json", "-q"), "/nowhere/a.json", code=1)
    flags = ("--out", tmp_path / "settings.json", "--report", "/nowhere/page.html")
    refused(run_phsa("tune", "-m", tiny, *FEW, *flags, "-q"), "/nowhere/page.html", code=1)
    assert not any(tmp_path.iterdir())


def test_the_papers_settings_have_names(tiny, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("abc " * 400)
    config = tmp_path / "settings.json"
    config.write_text(json.dumps({"attention": "phsa", "init": 32, "local": 64, "top_k": 3, "parts": 4}))
    ask = ("perplexity", "-m", tiny, "-f", text, "-c", 512, "--json", "--phsa-config", config)

    def budget(*flags):
        row = json.loads(run_phsa(*ask, *flags).stdout)
        return round((1 - row["sparsity"]) * 512) - 16 * row["top_k"], row.get("parts", 1)

    assert budget() == (32 + 64, 4)
    assert budget("--preset", "paper-4k") == (16 + 128, 1)
    assert budget("--preset", "paper-32k", "--local", 64, "--parts", 2) == (128 + 64, 2)
    refused(run_phsa(*ask, "--preset", "paper-8k"), "paper-4k")
    refused(run_phsa("run", "-m", tiny, "-p", "x", "--preset", "paper-4k"), "--preset has no effect")
