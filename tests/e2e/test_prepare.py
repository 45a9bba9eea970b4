"""`phsa prepare`: texts to token shards, as the training reads them."""

import gzip
import json
import lzma
import os
import resource
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import BIN, ROOT
from test_cli import refused

sys.path.insert(0, str(ROOT / "python"))
from phsa.train.shards import Sequences, Shards

tokenizers = pytest.importorskip("tokenizers")

DATA = ROOT / "tests/data/tokenizer"
WORDS = [
    "the",
    "quick",
    "brown",
    "fox,",
    "jumps",
    "a",
    "lazy",
    "dog.",
    "Häuser",
    "你好",
    "don't",
    "12345",
    "\n\t",
    "x=y;",
]


def texts(count, seed=0, longest=200):
    random = np.random.default_rng(seed)
    return [" ".join(random.choice(WORDS, random.integers(1, longest))) for _ in range(count)]


def as_lines(documents, field="text"):
    return "".join(json.dumps({"id": i, field: text, "n": [1, {field: 2}]}) + "\n" for i, text in enumerate(documents))


def zstd_frame(data):
    """Uncompressed blocks in a zstd frame: Python has no module that writes one."""
    frame = b"\x28\xb5\x2f\xfd\xa0" + len(data).to_bytes(4, "little")
    for begin in range(0, len(data), 1 << 16):
        block = data[begin : begin + (1 << 16)]
        last = begin + (1 << 16) >= len(data)
        frame += (len(block) << 3 | last).to_bytes(3, "little") + block
    return frame


def prepare(run, out, *files, **kwargs):
    done = run("--out", out, "--json", *files, **kwargs)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def documents(folder):
    shards = Shards(folder)
    return [shards.document(i).tolist() for i in range(shards.documents)]


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory):
    """The small vocabulary with a token that ends texts."""
    description = json.loads((DATA / "base.json").read_text(encoding="utf-8"))
    description |= json.loads((DATA / "kinds.json").read_text(encoding="utf-8"))["smollm2"]
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(json.dumps(description), encoding="utf-8")
    return path


@pytest.fixture
def run(phsa, tokenizer_path):
    return lambda *args, **kwargs: phsa("prepare", "-m", tokenizer_path, *args, **kwargs)


@pytest.fixture(scope="module")
def encode(tokenizer_path):
    tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_path))
    tokenizer.encode_special_tokens = True
    end = tokenizer.token_to_id("<|endoftext|>")
    return lambda text: [*tokenizer.encode(text, add_special_tokens=False).ids, end]


def test_the_tokens_are_those_of_tokenizers(run, phsa, tmp_path, encode, tokenizer_path):
    inputs = [*texts(200), "<|endoftext|> in a text is text"]
    (tmp_path / "a.jsonl").write_text(as_lines(inputs), encoding="utf-8")
    summary = prepare(run, tmp_path / "tokens", tmp_path / "a.jsonl", "--shard-tokens", "2k")
    assert documents(tmp_path / "tokens") == [encode(text) for text in inputs]
    index = json.loads((tmp_path / "tokens/index.json").read_text())
    assert summary["documents"] == index["documents"] == 201
    assert summary["tokens"] == index["tokens"] and summary["shards"] == len(index["shards"]) > 3
    assert all(shard["tokens"] <= 2000 for shard in index["shards"])
    assert index["sources"] == [{"file": "a.jsonl", "documents": 201, "tokens": index["tokens"]}]
    marks = phsa("punctuation", tokenizer_path, "--set", "en", "--ids").stdout.split()
    assert index["punctuation"]["en"] == list(map(int, marks))
    sequences = Sequences(Shards(tmp_path / "tokens"), 128, seed=0)
    assert sum(map(len, sequences[0])) == 128


def test_the_result_is_the_same_for_every_number_of_threads(run, tmp_path):
    # Several batches of a megabyte, and a document longer than one.
    lines = as_lines([*texts(2000, seed=1, longest=800), "a longer one, " * 200_000, *texts(2000, seed=2)])
    (tmp_path / "a.jsonl.xz").write_bytes(lzma.compress(lines.encode(), preset=0))
    results = []
    for threads in (1, 2, 7):
        out, held_out = tmp_path / f"tokens{threads}", tmp_path / f"held-out{threads}"
        flags = ("-t", threads, "--held-out", held_out, "--held-out-share", 0.1)
        prepare(run, out, tmp_path / "a.jsonl.xz", *flags)
        results.append((contents(out), contents(held_out)))
    assert results[0] == results[1] == results[2]


def test_compression_is_known_by_the_content(run, tmp_path):
    text = as_lines(texts(50)).encode()
    packed = {
        "plain": text,
        "xz": lzma.compress(text),
        "gz": gzip.compress(text),
        "zst": zstd_frame(text),
        # What appending files makes.
        "gz2": gzip.compress(text[:1000]) + gzip.compress(text[1000:]),
        "xz2": lzma.compress(text[:1000]) + lzma.compress(text[1000:]),
        "zst2": zstd_frame(text[:1000]) + b"\x50\x2a\x4d\x18\x02\0\0\0ab" + zstd_frame(text[1000:]),
    }
    for name, data in packed.items():
        (tmp_path / name).write_bytes(data)  # no name says what it is
        prepare(run, tmp_path / f"tokens-{name}", tmp_path / name)
        assert documents(tmp_path / f"tokens-{name}") == documents(tmp_path / "tokens-plain"), name


def test_a_text_file_is_a_document_and_a_folder_is_its_files(run, tmp_path, encode):
    folder = tmp_path / "texts"
    (folder / "b").mkdir(parents=True)
    (folder / "b" / "2.txt").write_text("second\nfile\n", encoding="utf-8")
    (folder / "1.md.gz").write_bytes(gzip.compress(b'{"text": "not json lines: the name says so"}'))
    (folder / "c").write_text("\ufeffno mark of byte order", encoding="utf-8")
    (folder / "d.txt").write_text("")
    summary = prepare(run, tmp_path / "tokens", folder)
    assert summary["empty_documents"] == 1
    want = ['{"text": "not json lines: the name says so"}', "second\nfile\n", "no mark of byte order"]
    assert documents(tmp_path / "tokens") == [encode(text) for text in want]


def test_standard_input_and_another_field(run, tmp_path, encode):
    lines = (
        '{"text": 5, "body": "one"}\n\n  \r\n{"body": "x", "body": "two"}\r\n{"body": ""}\n{"body": "\\ud83d\\ude00"}'
    )
    summary = prepare(run, tmp_path / "tokens", "-", "--field", "body", input=lines)
    assert summary["empty_documents"] == 1
    assert documents(tmp_path / "tokens") == [encode(text) for text in ("one", "two", "😀")]


def test_held_out_documents_are_chosen_by_their_text(run, tmp_path):
    inputs = texts(1000, seed=3)
    (tmp_path / "a.jsonl").write_text(as_lines(inputs))
    (tmp_path / "b.jsonl").write_text(as_lines(reversed(inputs)))
    sides = []
    for name in ("a", "b"):
        out, held_out = tmp_path / f"{name}-tokens", tmp_path / f"{name}-held-out"
        flags = ("--held-out", held_out, "--held-out-share", 0.1)
        prepare(run, out, tmp_path / f"{name}.jsonl", *flags)
        sides.append((sorted(documents(out)), sorted(documents(held_out))))
    assert sides[0] == sides[1]
    assert 60 < len(sides[0][1]) < 140 and sum(map(len, sides[0])) == 1000


def test_documents_that_hold_other_text_are_left_out(run, tmp_path, encode):
    novel = " ".join(f"word{i}" for i in range(400))
    (tmp_path / "test.txt").write_text(novel)
    edition = novel.upper().replace(" ", " — ")
    phrase = " ".join(novel.split()[100:116])  # a quotation in a long text is none
    others = ["short", " ".join(f"other{i}" for i in range(2000)) + " " + phrase]
    (tmp_path / "a.jsonl").write_text(as_lines([others[0], novel, edition, "x " * 20 + novel[:500], others[1]]))
    summary = prepare(run, tmp_path / "tokens", tmp_path / "a.jsonl", "--without", tmp_path / "test.txt")
    assert summary["overlapping_documents"] == 3
    assert documents(tmp_path / "tokens") == [encode(text) for text in others]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"text": "a"}\n{"text": \n', ["line 2", "not valid JSON"]),
        (b'{"text": "a"}\n{"text": "\\ud800"}\n', ["line 2", "not valid JSON"]),
        (b'{"text": "a"}\n{"tekst": "a"}\n', ["line 2", 'no field "text"', "--field"]),
        (b'{"x": {"text": "a"}}\n', ["line 1", 'no field "text"']),
        (b'{"text": null}\n', ["line 1", "null", "must be a string"]),
        (b'{"text": ["a"]}\n', ["line 1", "a list", "must be a string"]),
        (b'["a"]\n', ["line 1", "not a JSON object"]),
        (b'{"text": "a"} {"text": "b"}\n', ["line 1", "not valid JSON"]),
        (b'\n\n{"text": "a\xff"}\n', ["line 3", "not UTF-8", "byte 12", "0xff"]),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_left_behind(run, tmp_path, content, words):
    (tmp_path / "a.jsonl").write_bytes(content)
    for threads in (1, 3):
        done = run("--out", tmp_path / "tokens", tmp_path / "a.jsonl", "-t", threads)
        refused(done, "a.jsonl", *words)
    assert not (tmp_path / "tokens").exists()


def test_a_file_that_is_cut_or_corrupt_is_named(run, tmp_path):
    text = as_lines(texts(3000)).encode()
    for name, data in {"xz": lzma.compress(text), "gz": gzip.compress(text), "zst": zstd_frame(text)}.items():
        path = tmp_path / f"a.jsonl.{name}"
        for size in (7, len(data) // 2, len(data) - 1):
            path.write_bytes(data[:size])
            done = run("--out", tmp_path / "tokens", path)
            refused(done, path.name, "is cut", f"byte {size}")
        if name != "zst":  # its raw blocks have no checksum here
            path.write_bytes(data[: len(data) // 2] + b"\xff\0\xff\0" + data[len(data) // 2 + 4 :])
            refused(run("--out", tmp_path / "tokens", path), path.name, "corrupt near byte")
        path.write_bytes(data + b"and more")
        refused(run("--out", tmp_path / "tokens", path), path.name, "byte")
    assert not (tmp_path / "tokens").exists()


def test_what_cannot_be_read_or_has_no_text_is_refused(run, tmp_path):
    out = ("--out", tmp_path / "tokens")
    refused(run(*out, tmp_path / "missing.jsonl"), "missing.jsonl", "No such file")
    (tmp_path / "empty").mkdir()
    refused(run(*out, tmp_path / "empty"), "empty", "no files")
    (tmp_path / "latin.txt").write_bytes("one\nHäuser".encode("latin-1"))
    refused(run(*out, tmp_path / "latin.txt"), "latin.txt", "line 2", "not UTF-8")
    (tmp_path / "nothing.jsonl").write_text("\n\n")
    refused(run(*out, tmp_path / "nothing.jsonl"), "no document")
    (tmp_path / "one.txt").write_text("one")
    refused(run(*out, "--held-out", tmp_path / "x/../tokens", tmp_path / "one.txt"), "same folder")
    refused(run(*out, "--held-out", tmp_path / "h", "--held-out-share", 0, tmp_path / "one.txt"), "none is held out")
    refused(run(*out, "--held-out", tmp_path / "h", "--held-out-share", 1, tmp_path / "one.txt"), "no document left")
    assert not (tmp_path / "tokens").exists() and not (tmp_path / "h").exists()


def test_a_finished_folder_is_replaced_only_on_demand_and_whole(run, tmp_path):
    tokens = tmp_path / "tokens"
    (tmp_path / "a.jsonl").write_text(as_lines(texts(100)))
    (tmp_path / "b.jsonl").write_text(as_lines(texts(20, seed=1)))
    prepare(run, tokens, tmp_path / "a.jsonl", "--shard-tokens", 1000)
    (tokens / "notes.txt").write_text("not ours")
    before = contents(tokens)
    refused(run("--out", tokens, tmp_path / "b.jsonl"), "finished", "--force")
    bad = tmp_path / "bad.jsonl"
    bad.write_text(as_lines(texts(20)) + "{")
    refused(run("--out", tokens, "--force", bad), "line 21")
    assert contents(tokens) == before
    prepare(run, tokens, tmp_path / "b.jsonl", "--force")
    assert sorted(contents(tokens)) == ["index.json", "notes.txt", "shard-00000.offsets", "shard-00000.tokens"]
    assert Shards(tokens).documents == 20


def test_a_full_disk_loses_nothing(tmp_path, tokenizer_path):
    """A limit on the size of files stands in for the disk."""
    tokens = tmp_path / "tokens"
    (tmp_path / "a.jsonl").write_text(as_lines(texts(20)))
    (tmp_path / "b.jsonl").write_text(as_lines(texts(20000)))

    def run_limited(file):
        def limit():
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))

        command = [BIN / "phsa", "prepare", "-m", tokenizer_path, "--out", tokens, "--force", tmp_path / file]
        return subprocess.run(command, capture_output=True, text=True, preexec_fn=limit)

    assert run_limited("a.jsonl").returncode == 0
    before = contents(tokens)
    refused(run_limited("b.jsonl"), "cannot be written", "File too large", code=1)
    assert contents(tokens) == before


def test_a_killed_run_leaves_what_was_there_and_the_next_one_cleans_up(run, tmp_path, tokenizer_path):
    tokens = tmp_path / "tokens"
    (tmp_path / "a.jsonl").write_text(as_lines(texts(20)))
    prepare(run, tokens, tmp_path / "a.jsonl")
    before = contents(tokens)
    command = [BIN / "phsa", "prepare", "-m", tokenizer_path, "--out", tokens, "--force", "--format", "jsonl", "-"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdin.write(as_lines(texts(20000)).encode())
        process.stdin.flush()
        while not any((tokens / ".part").glob("*")):
            assert process.poll() is None
            time.sleep(0.01)
        # While it writes there, nobody else does.
        refused(run("--out", tokens, "--force", tmp_path / "a.jsonl"), "another phsa prepare")
        os.kill(process.pid, signal.SIGKILL)
    assert {name: (tokens / name).read_bytes() for name in before} == before
    prepare(run, tokens, tmp_path / "a.jsonl", "--force")
    assert contents(tokens) == before


def test_memory_does_not_grow_with_the_input(tmp_path, tokenizer_path):
    """Two hundred megabytes of text, packed very small, and one tokenizing thread that is slower than the reader."""
    line = as_lines(["the quick brown fox " * 5000]).encode()
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(line * 2000))
    done = subprocess.run(
        [BIN / "phsa", "prepare", "-m", tokenizer_path, "-t1", "--out", tmp_path / "tokens", tmp_path / "bomb.gz"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (100 << 20, 100 << 20)),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
