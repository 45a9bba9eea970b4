"""`phsa niah`: needles in a haystack, on SmolLM2-135M (fetched on first use; skipped where it cannot be had)."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree

import pytest
from conftest import BIN, ROOT, run_phsa

PACKAGE = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
SMALL = ("--lengths", 512, "--samples", 2, "--strict")


@pytest.fixture(scope="session")
def niah(smollm2):
    return lambda *args, **more: run_phsa("niah", "-m", smollm2, *args, **more)


def rows(done):
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def results(path):
    """What must not depend on how a run came about: all but the time it took."""
    return sorted(json.dumps({k: v for k, v in r.items() if k != "seconds"}) for r in lines(path)[1:])


def test_json_lines_have_what_scripts_read(niah):
    flags = ("--attention", "dense,infllm2,phsa", "-K", "1,2", "--lambda", "0.75,0.9", "--preset", "paper-4k")
    found = rows(niah(*SMALL, *flags, "--json"))
    assert [(r["attention"], r["top_k"], r["lambda"]) for r in found] == [
        ("dense", None, None),
        ("infllm2", 1, 1),
        ("infllm2", 2, 1),
        ("phsa", 1, 0.75),
        ("phsa", 2, 0.75),
        ("phsa", 1, 0.9),
        ("phsa", 2, 0.9),
    ]
    for row in found:
        assert (row["task"], row["length"], row["samples"]) == ("single_2", 512, 2)
        low, high = row["ci95"]
        assert 0 <= low <= row["score"] <= high <= 1
    dense, sparse = found[0], found[2]
    assert dense["read_share"] == 1 and dense["sparsity"] == 0
    assert 0.5 < sparse["read_share"] < 0.9
    assert sparse["sparsity"] == pytest.approx(1 - (16 + 128 + 2 * 16) / 512)
    assert [a["attention"] for a in found[6]["against"]] == ["dense", "infllm2"]


def test_a_needle_that_all_blocks_hold_is_found(niah):
    # A K that chooses everything is dense attention, and the small model does this task at this length.
    found = rows(niah("--lengths", 512, "--samples", 4, "--attention", "dense,phsa", "-K", 64, "--json"))
    assert found[0]["score"] == found[1]["score"] >= 0.75


@pytest.mark.parametrize("task", ["single_1", "multikey_3", "multivalue", "multiquery"])
def test_tasks_run_and_score_what_the_answer_says(niah, tmp_path, task):
    out = tmp_path / "out.jsonl"
    row = rows(niah("--task", task, "--lengths", 800, "--samples", 1, "--attention", "dense", "--out", out, "--json"))
    sample = lines(out)[1]
    found = [reference.lower() in sample["answer"].lower() for reference in sample["references"]]
    assert sample["found"] == found
    assert row[0]["score"] == sample["score"] == sum(found) / len(found)
    assert sample["tokens"] + 128 <= 800


def test_tables_and_heat_map(niah, tmp_path):
    picture = tmp_path / "map.svg"
    done = niah(*SMALL, "--attention", "infllm2,phsa", "-K", "1,2", "--depths", "0,100", "--heatmap", picture)
    assert done.returncode == 0, done.stderr
    assert "| method | K=1 | K=2 |" in done.stdout
    assert re.search(r"\| phsa λ=0.9 \| \d+\.\d \(\d+\.\d–\d+\.\d\) \|", done.stdout)
    assert "phsa λ=0.9 − infllm2" in done.stdout and "McNemar" in done.stdout
    texts = [e.text for e in xml.etree.ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")]
    assert "0 %" in texts and "100 %" in texts and "phsa λ=0.9, K=2" in texts


def test_attentions_that_are_the_same_run_once_and_it_is_said(niah, tmp_path):
    picture = tmp_path / "map.html"
    flags = ("--attention", "dense,phsa,auto", "-K", 2, "--depths", "0,50,100", "--heatmap", picture)
    done = niah(*SMALL, *flags, "--json")
    assert [row["method"] for row in rows(done)] == ["dense", "phsa λ=0.9"]
    assert "auto is the same as dense here and is run once" in done.stderr
    # Two samples for three depths: the third is empty, not gone.
    assert "no sample lies at depth 100 %" in done.stderr
    assert picture.read_text().count("<title>no sample</title>") == 2


def test_attentions_that_differ_in_one_setting_are_told_apart(niah, tmp_path):
    settings = {"attention": "phsa", "init": 16, "local": 128, "top_k": 2}
    files = []
    for name, more in (("a", {}), ("b", {"dense_below": 256})):
        config, out = tmp_path / f"{name}.json", tmp_path / f"{name}.jsonl"
        config.write_text(json.dumps(settings | more))
        assert niah(*SMALL, "--phsa-config", config, "--out", out).returncode == 0
        files.append(str(out))
    found = rows(run_phsa("niah", "--merge", ",".join(files), "--json"))
    assert [(row["method"], row["settings"]["dense_below"]) for row in found] == [
        ("phsa λ=0.9 (dense below 0)", 0),
        ("phsa λ=0.9 (dense below 256)", 256),
    ]


def test_a_killed_run_goes_on_and_is_as_one_run(niah, smollm2, tmp_path):
    command = ("--lengths", 512, "--samples", 6, "--strict", "--attention", "dense,phsa", "-K", 2)
    whole, killed = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    assert niah(*command, "--out", whole).returncode == 0
    process = subprocess.Popen(
        [BIN / "phsa", "niah", "-m", smollm2, *map(str, command), "--out", killed], stdout=subprocess.DEVNULL
    )
    while process.poll() is None and (not killed.exists() or len(killed.read_text().splitlines()) < 4):
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before = len(lines(killed))
    assert 4 <= before < 13
    with killed.open("a") as file:
        file.write('{"task":"single_2","len')  # as if the kill had come while a line was written
    first = niah(*command, "--out", killed, "--json")
    assert first.returncode == 0
    assert results(killed) == results(whole)
    again = niah(*command, "--out", killed, "--json")  # nothing is left to do
    assert again.stdout == first.stdout
    assert len(lines(killed)) == 13


@pytest.mark.parametrize("scoring", ["--forced", None])
def test_samples_read_together_are_as_one_by_one(niah, tmp_path, scoring):
    command = ("--lengths", 512, "--samples", 5, *filter(None, [scoring]), "--attention", "dense,phsa", "-K", 2)
    alone, together = tmp_path / "alone.jsonl", tmp_path / "together.jsonl"
    assert niah(*command, "--out", alone).returncode == 0
    assert niah(*command, "--batch", 3, "--chunk", 1024, "--out", together).returncode == 0
    assert results(alone) == results(together) and len(lines(together)) == 11


def test_an_interrupted_run_says_how_to_go_on(smollm2, tmp_path):
    out = tmp_path / "out.jsonl"
    command = ["niah", "-m", smollm2, "--lengths", "1k", "--samples", "500", "--strict", "--out", out]
    process = subprocess.Popen([BIN / "phsa", *command], stderr=subprocess.PIPE, text=True)
    while process.poll() is None and (not out.exists() or len(out.read_text().splitlines()) < 2):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the same command goes on" in err


def test_shards_merge_to_the_whole(niah, tmp_path):
    command = ("--lengths", 512, "--samples", 3, "--strict", "--attention", "infllm2,phsa", "-K", 2)
    parts = [tmp_path / "1.jsonl", tmp_path / "2.jsonl"]
    for i, part in enumerate(parts, 1):
        assert niah(*command, "--shard", f"{i}/2", "--out", part).returncode == 0
    merged = run_phsa("niah", "--merge", ",".join(map(str, parts)), "--json")
    assert rows(merged) == rows(niah(*command, "--json"))


def test_merging_different_runs_is_refused(niah, tmp_path):
    files = [tmp_path / "1.jsonl", tmp_path / "2.jsonl"]
    for seed, file in enumerate(files):
        assert niah(*SMALL, "--seed", seed, "--out", file).returncode == 0
    done = run_phsa("niah", "--merge", f"{files[0]},{files[1]}")
    assert done.returncode == 2 and "seed" in done.stderr


def test_chinese_samples(niah, tmp_path):
    text = tmp_path / "zh.txt"
    text.write_text("今天天气很好。他们去了河边，看见一只白色的鸟。“真美！”她说。\n" * 40)
    done = niah(
        *("--language", "zh", "--haystack", text, "--lengths", 1024, "--samples", 1, "--strict"),
        *("--attention", "phsa", "-K", 2, "--punctuation", "en+zh", "--json"),
    )
    assert rows(done)[0]["punctuation"] == "en+zh"
    prompt = niah("--language", "zh", "--haystack", text, "--lengths", 1024, "--show-sample", 0).stdout
    assert re.search(r"的特殊魔法数字之一是：\d{7}。", prompt)


@pytest.mark.parametrize(
    "flags, words",
    [
        (("--task", "single_4"), ["single_4", "multiquery"]),
        (("--lengths", "64k"), ["65536", "8192"]),
        (("--lengths", "4x"), ["4x", "4k"]),
        (("--lengths", 100), ["100"]),
        (("--haystack", "{short}"), ["short.txt", "4096", "--repeat-haystack"]),
        (("--haystack", "/no/such/file"), ["/no/such/file"]),
        (("--out", "/no/such/folder/out.jsonl"), ["/no/such/folder/out.jsonl"]),
        (("--out", "{short}"), ["short.txt"]),
        (("--heatmap", "/no/such/folder/map.svg"), ["/no/such/folder/map.svg"]),
        (("--heatmap", "map.png"), [".svg"]),
        (("--shard", "3/2"), ["3/2"]),
        (("--shard", "1/200"), ["1/200", "100"]),
        (("--attention", "dense", "-K", "1,2"), ["-K"]),
        (("--attention", "infllm2", "--lambda", "0.5"), ["--lambda"]),
        (("--strict", "--task", "multivalue"), ["--strict"]),
        (("--forced", "--task", "multiquery"), ["--forced"]),
        (("--export", "samples.jsonl"), ["--export", "--forced"]),
        (("--language", "zh"), ["--haystack"]),
        (("--merge", "{short}"), ["short.txt"]),
    ],
)
def test_bad_input_is_refused_before_any_work(niah, tmp_path, flags, words):
    short = tmp_path / "short.txt"
    short.write_text("Too short for that. Far too short.\n")
    start = time.monotonic()
    done = niah(*[str(flag).format(short=short) for flag in flags])
    assert time.monotonic() - start < 5
    assert done.returncode == 2 and done.stdout == ""
    last = done.stderr.strip().splitlines()[-1]
    for word in words:
        assert word in last
    assert short.read_text() == "Too short for that. Far too short.\n"


@pytest.mark.parametrize(
    "length, samples, policies",
    [("512", 1, "dense,phsa"), pytest.param("1k", 2, "dense,infllm2,phsa", marks=pytest.mark.long)],
)
def test_transformers_gives_the_same_answers_to_exported_samples(niah, smollm2, tmp_path, length, samples, policies):
    command = ("--lengths", length, "--samples", samples, "--forced", "--attention", policies, "-K", 2)
    ours, exported, theirs = (tmp_path / name for name in ("ours.jsonl", "samples.jsonl", "theirs.jsonl"))
    assert niah(*command, "--weights", "f32", "--kv-type", "f32", "--out", ours).returncode == 0
    assert niah(*command, "--export", exported).returncode == 0
    python = [sys.executable, "-m", "phsa.hf.niah", exported, "--model", smollm2, "--out", theirs, "--dtype", "float32"]
    for more in [["--samples", "1"], []][2 - samples :]:  # the second goes on where the first ended
        done = subprocess.run([*python, *more], capture_output=True, text=True, env=PACKAGE)
        assert done.returncode == 0, done.stderr

    def comparable(path):
        left_out = ("seconds", "answer", "nll")  # here tokens, there their text; and it says no loss
        return sorted(
            json.dumps({k: v for k, v in r.items() if k not in left_out}, sort_keys=True) for r in lines(path)[1:]
        )

    assert comparable(ours) == comparable(theirs) and len(lines(ours)) == 1 + samples * len(policies.split(","))
    merged = rows(run_phsa("niah", "--merge", theirs, "--json"))
    assert [row["score"] for row in merged] == [
        row["score"] for row in rows(run_phsa("niah", "--merge", ours, "--json"))
    ]
    # Another run's file is not continued, and not touched.
    before = theirs.read_text()
    assert niah(*command, "--seed", 2, "--export", exported).returncode == 0
    done = subprocess.run(python, capture_output=True, text=True, env=PACKAGE)
    assert done.returncode == 1 and "--out" in done.stderr and theirs.read_text() == before


def test_a_model_is_needed_unless_files_are_merged():
    done = run_phsa("niah", "--task", "single_1")
    assert done.returncode == 2 and "--model" in done.stderr
