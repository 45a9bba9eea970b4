"""The series of trainings from a corpus to its table, with a tiny model: every stage, stopped and continued."""

import argparse
import json
import lzma
import pathlib
import random
import signal
import subprocess
import sys
import tarfile
import time

import pytest
import torch
from conftest import BIN, ROOT

sys.path.insert(0, str(ROOT / "bench"))
sys.path.insert(0, str(ROOT / "python"))
sys.path.insert(0, str(ROOT / "python/tests"))
import training_arms as arms
import training_questions as questions
from tiny_model import write_model

from phsa.hf.load import load_tokenizer
from phsa.train import loop
from phsa.train.config import read
from phsa.train.texts import open_texts

WORDS = [one for one in (ROOT / "docs/phsa.md").read_text().split() if one.isalpha()]
SCRIPT = [sys.executable, str(ROOT / "bench/training_arms.py")]


def prose(generator, words):
    return " ".join(generator.choice(WORDS) for _ in range(words)) + "."


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, a corpus of all kinds, and a haystack of which one book is in the corpus."""
    folder = tmp_path_factory.mktemp("arms")
    write_model(folder / "model", layers=1, context=4096)
    generator = random.Random(1)
    (folder / "haystack.txt").write_text(". ".join(prose(generator, 12) for _ in range(120)))
    book = (folder / "haystack.txt").read_text()
    asks = "\nWhat does a part of the text ask for?\nIt asks for the words that were in the part before it.\nMore."
    head = "PEP: 7 Title: Of Blocks Author: A. Nother <a@b.c> Status: Active Type: Process Created: 2001 "
    texts = {
        "eltec_eng": [prose(generator, 900) for _ in range(8)],
        "pg19_test": [prose(generator, 500), prose(generator, 60) + book[: len(book) // 2], prose(generator, 400)],
        "openstax_ccby": [prose(generator, 80) + asks for _ in range(20)],
        "elife": ["A title of thirty letters or so\n" + " ".join(prose(generator, 9).capitalize() for _ in range(9))]
        * 3,
        "mdn_en": [f"Words.\n## A heading number {n}\n" + prose(generator, 50) for n in range(20)],
        "peps": [head + prose(generator, 50) for n in range(5)],
        "zh_gutenberg": ["天地玄黃，宇宙洪荒。" * 300] * 4,
    }
    for name, documents in texts.items():
        lines = [json.dumps({"id": f"{name}/{n}/index.md", "text": text}) for n, text in enumerate(documents)]
        (folder / "corpus").mkdir(exist_ok=True)
        with lzma.open(folder / "corpus" / f"{name}.jsonl.xz", "wt") as file:
            file.write("\n".join(lines) + "\n")
    (folder / "code").mkdir()
    (folder / "code/one.py").write_text("def of_the_first(x):\n    return x\n" * 3)
    (folder / "zh.txt").write_text("天地玄黃，宇宙洪荒。日月盈昃，辰宿列張。" * 200)
    return folder


def prepare(folder, out, *more):
    sizes = "--length 1024 --long 2048 --batch-tokens 2048 --micro-tokens 2048 --tokens 6144 --long-tokens 4096"
    sizes += " --distill-tokens 16384 --samples 1 --held-out 1 --device cpu --dtype float32 --adapter-rank 2"
    corpus = ("--corpus", folder / "corpus", "--code", folder / "code", "--held-out-share", "0.2")
    text = ("--haystack", folder / "haystack.txt", "--haystack-zh", folder / "zh.txt")
    command = ["prepare", out, "--model", folder / "model", "--program", BIN / "phsa", *corpus, *text, *sizes.split()]
    return subprocess.run([*SCRIPT, *map(str, [*command, *more])], capture_output=True, text=True)


def test_every_arm_is_trained_on_the_same_tokens_and_the_series_can_be_stopped(folder, tmp_path, monkeypatch, phsa):
    out = tmp_path / "series"
    done = prepare(folder, out, "--without", folder / "haystack.txt")
    assert done.returncode == 0, done.stderr
    assert "none holds text of" in done.stdout and "chats with" in done.stdout
    assert prepare(folder, out, "--tokens", "4096").stderr.strip() == f"{out} holds another plan; give another folder"
    plan = arms.read_plan(out)
    every = arms.arms_of(plan)
    assert len(every) == 9 + 4 + 2 + 2 and len({arm.key for arm in every}) == len(every)

    # One arm as users run it: the time is over after some steps, and the same command goes on.
    path = out / "runs/4k/dense"
    command = [*SCRIPT, "run", str(out), "--only", "4k/dense"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not (path / "log.csv").exists() or (path / "log.csv").read_text().count("\n") < 2:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    if process.returncode != 0:  # else it was done before the signal
        assert process.returncode == 143 and "the same command goes on" in said
        assert not (path / "final").exists() and list((path / "checkpoints").iterdir())

    # The others in this process, which has loaded PyTorch already.
    def train(folder, plan, arm, deadline, processes):
        path = folder / "arms" / f"{arm.stage}-{arm.name}.toml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(arms.toml(arms.configuration(folder, plan, arm)))
        loop.Run(read(path), device=torch.device("cpu"), quiet=True).run()
        return 0

    monkeypatch.setattr(arms, "train", train)
    options = argparse.Namespace(minutes=1e6, only=None, processes=1)
    assert arms.run(out, plan, argparse.Namespace(minutes=0.0, only=None, processes=1)) == arms.OVER
    assert arms.run(out, plan, options) == 0
    assert all(arms.finished(out, arm) and not (out / "runs" / arm.key / "checkpoints").exists() for arm in every)
    assert arms.run(out, plan, options) == 0  # nothing is left

    text = "\n".join(arms.table(out, plan))
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ") and "trained" not in line]
    # The dense arms are read with both methods, the others with their own.
    assert len(rows) == len(every) + 2
    steps, batch = arms.steps_of(plan, "4k")
    for row in rows:
        # Needles of one sample: found or not, each with its interval; Chinese and English alike.
        cells = row[2:8]
        known = [cell for cell in cells if cell]
        assert all(cell.startswith(("0.0 (", "100.0 (")) for cell in known) and len(known) == 6, row
        assert float(row[8]) > 0 and float(row[9]) > 0
    same = {row[10] for row in rows[:10]}
    assert len(same) == 1 and int(same.pop().replace(",", "")) > steps * batch * plan.length * 0.9
    config = json.loads((out / "runs/32k/phsa-parts4-k4/config.json").read_text())
    assert config["attention"]["parts"] == 4 and config["attention"]["top_k"] == 4
    assert config["init_from"].endswith("runs/4k/phsa-parts4-k2/final")
    assert json.loads((out / "runs/zh/en+zh/config.json").read_text())["attention"]["punctuation"] == "en+zh"
    adapter = json.loads((out / "runs/distill/phsa-k2/final/phsa.json").read_text())
    assert (adapter["top_k"], adapter["tested_tokens"]) == (2, 2048)

    arms.pack(out, tmp_path / "results.tar.gz")
    with tarfile.open(tmp_path / "results.tar.gz") as archive:
        names = archive.getnames()
    assert "runs/4k/phsa-k16/log.csv" in names and "plan.json" in names
    assert "runs/distill/phsa-k2/final/adapter_model.safetensors" in names
    assert not [name for name in names if "tokens/" in name or name.endswith("/model.safetensors")]

    # An arm of other tokens is not compared with the rest.
    path = out / "runs/4k/phsa-k1/config.json"
    path.write_text(path.read_text().replace('"seed": 1', '"seed": 2'))
    with pytest.raises(SystemExit, match="4k: the arms read other tokens"):
        list(arms.table(out, plan))


def test_text_of_the_haystack_is_found_where_nothing_left_it_out(folder, tmp_path, phsa):
    for name, source in (("all", folder / "corpus/pg19_test.jsonl.xz"), ("haystack", folder / "haystack.txt")):
        assert phsa("prepare", "-m", folder / "model", "--out", tmp_path / name, source).returncode == 0
    assert arms.seen_in(arms.Shards(tmp_path / "all"), arms.Shards(tmp_path / "haystack")) == [1]


def test_questions_fit_and_none_asks_about_the_haystack(folder, tmp_path):
    files = {path.name.split(".")[0]: path for path in sorted((folder / "corpus").iterdir())}
    out = tmp_path / "questions.jsonl"
    said = questions.write_questions(out, files, [folder / "code"], [folder / "haystack.txt"], 2048, 60_000)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    chats = [one["messages"] for one in records if "messages" in one]
    assert said.startswith(f"{len(chats)} chats with {sum(len(one) for one in chats) // 2} questions")
    texts = [one["text"] for one in records if "text" in one] + [one[0]["content"] for one in chats]
    assert len(chats) < len(records) and all(len(text) < 2048 * questions.CHARACTERS_PER_TOKEN + 300 for text in texts)
    passage = (folder / "haystack.txt").read_text()[:200]
    assert not any(passage in text for text in texts)
    asked = {message["content"].rpartition("\n")[2] for one in chats for message in one if message["role"] == "user"}
    for begin in ("What does a part", "Who wrote PEP 7", "What does the article", "On which page", "Where is `of_the"):
        assert any(one.startswith(begin) for one in asked), begin
    # What the textbooks ask themselves is taken out, and its answer with it.
    assert not any("It asks for the words" in one[0]["content"] for one in chats)
    # The trainer takes it, and learns answers and texts.
    documents = open_texts(str(out), lambda: load_tokenizer(str(folder / "model")), True)
    assert documents.documents == len(records)
    assert pathlib.Path(out.with_suffix(".new")).exists() is False


def test_what_a_piece_takes_is_estimated_from_what_was_measured(tmp_path):
    plan = arms.Plan()
    found = {arm.key: arms.estimate(plan, arm) for arm in arms.arms_of(plan)}
    tokens, speed, minutes, memory = found["4k/phsa-k2"]
    assert tokens == pytest.approx(20e6, rel=0.01) and minutes == pytest.approx(tokens / speed / 60)
    # Qwen3-0.6B did 63,280 tokens/s densely and 60,180 with K = 16; this model is smaller.
    assert 60_000 < found["4k/dense"][1] < 120_000 and 60_000 < found["4k/phsa-k16"][1] < 120_000
    assert found["32k/phsa-k16"][1] > found["32k/dense"][1] and 50 < memory < 70
