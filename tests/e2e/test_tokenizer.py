"""`phsa tokenize` gives the ids of the Python package tokenizers."""

import bz2
import gzip
import json
import os

import pytest
from conftest import ROOT
from tokenizer_texts import random_texts

tokenizers = pytest.importorskip("tokenizers")

DATA = ROOT / "tests/data/tokenizer"
KINDS = json.loads((DATA / "kinds.json").read_text(encoding="utf-8"))
# Random texts for each kind of tokenizer; the full check takes 100000.
TEXTS = int(os.environ.get("PHSA_TEST_TEXTS", "3000"))


def lines(values):
    return "".join(json.dumps(value) + "\n" for value in values)


def encode(phsa, path, texts, *flags):
    done = phsa("tokenize", path, "--jsonl", "-f", "-", *flags, input=lines(texts))
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def assert_same(phsa, path, texts, tokenizer, modes=(False, True)):
    for as_text in modes:
        tokenizer.encode_special_tokens = as_text
        ours = encode(phsa, path, texts, *(["--no-special"] if as_text else []))
        assert len(ours) == len(texts)
        for begin in range(0, len(texts), 2000):
            theirs = tokenizer.encode_batch(texts[begin : begin + 2000], add_special_tokens=False)
            for text, our_ids, their in zip(texts[begin:], ours[begin:], theirs, strict=False):
                assert our_ids == their.ids, f"{text!a}, special tokens {'as text' if as_text else 'recognised'}"
    tokenizer.encode_special_tokens = False


@pytest.fixture(scope="module")
def texts():
    return list(random_texts(TEXTS, seed=1))


@pytest.fixture
def kind_path(request, tmp_path):
    """The small tokenizer, changed to a kind that real models have."""
    json_text = json.loads((DATA / "base.json").read_text(encoding="utf-8"))
    for key, value in KINDS[request.param].items():
        if key == "model":
            json_text["model"].update(value)
        else:
            json_text[key] = value
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json_text), encoding="utf-8")
    return path


@pytest.mark.parametrize("kind_path", KINDS, indirect=True)
def test_random_texts_have_the_same_ids(phsa, kind_path, texts):
    assert_same(phsa, kind_path, texts, tokenizers.Tokenizer.from_file(str(kind_path)))


# Planes 4 to 13 and the private ones have no characters.
CODE_POINTS = [chr(c) for c in (*range(0xD800), *range(0xE000, 0x34000), *range(0xE0000, 0xE0200), 0x10FFFF)]


@pytest.mark.parametrize(
    "kind_path",
    ["qwen2", "smollm2", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("gpt4o", "odd-patterns"))],
    indirect=True,
)
def test_every_code_point_has_the_same_ids(phsa, kind_path):
    """Among letters, digits, spaces and marks: a wrong category anywhere shows."""
    texts = []
    for begin in range(0, len(CODE_POINTS), 64):
        texts.append("".join(f"a{c}b {c}1{c}.{c} {c}\n" for c in CODE_POINTS[begin : begin + 64]))
    assert_same(phsa, kind_path, texts, tokenizers.Tokenizer.from_file(str(kind_path)), modes=[False])


@pytest.mark.parametrize("kind_path", ["one-word"], indirect=True)
def test_every_code_point_is_normalised_alike(phsa, kind_path):
    """With marks and Hangul around it: a wrong normal form or combining class anywhere shows."""
    skipped = range(0x3400, 0x9FFF), range(0xAC80, 0xD7A3), range(0x17000, 0x18CD5), range(0x20000, 0x2A6DF)
    code_points = [c for c in CODE_POINTS if not any(ord(c) in some for some in skipped)]
    texts = []
    for begin in range(0, len(code_points), 32):
        part = code_points[begin : begin + 32]
        texts.append("".join(f"a{c}\u0301 e\u0323\u0301{c} {c}\u0308\u0323 \u1100{c} \uac00{c}\u0300" for c in part))
    assert_same(phsa, kind_path, texts, tokenizers.Tokenizer.from_file(str(kind_path)), modes=[False])


@pytest.mark.parametrize("kind_path", ["qwen2", "llama3", "gpt2"], indirect=True)
def test_decoding_is_the_same(phsa, kind_path, texts):
    tokenizer = tokenizers.Tokenizer.from_file(str(kind_path))
    ids = [encoding.ids for encoding in tokenizer.encode_batch(texts[:2000], add_special_tokens=False)]
    # Cut sequences too: they end in half characters.
    ids += [list(reversed(some)) for some in ids[:1000]] + [some[: len(some) // 2] for some in ids[:1000]]
    for skip in (False, True):
        done = phsa(
            "tokenize", kind_path, "--decode", "--jsonl", "-f", "-", *(["--no-special"] * skip), input=lines(ids)
        )
        assert done.returncode == 0, done.stderr
        ours = [json.loads(line) for line in done.stdout.splitlines()]
        assert ours == tokenizer.decode_batch(ids, skip_special_tokens=skip)


def read_texts(folder):
    """Every text under ../shared/data."""
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or path.name == "SHA256SUMS":
            continue
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
        elif path.suffix == ".bz2":
            data = bz2.decompress(data)
        yield path.name, data.decode("utf-8")


@pytest.mark.parametrize("most", [20_000, pytest.param(None, marks=pytest.mark.long)])
def test_qwen3_gives_the_same_ids_for_all_shared_texts(phsa, shared, most):
    path = shared / "tokenizers/qwen3/tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    names, contents = zip(*read_texts(shared / "data"), strict=True)
    assert sum(map(len, contents)) > 10_000_000
    contents = [text[:most] for text in contents]
    for name, text, ours in zip(names, contents, encode(phsa, path, contents), strict=True):
        assert ours == tokenizer.encode(text, add_special_tokens=False).ids, name


def test_qwen3_gives_the_same_ids_for_random_texts(phsa, shared, texts):
    path = shared / "tokenizers/qwen3/tokenizer.json"
    assert_same(phsa, path, texts, tokenizers.Tokenizer.from_file(str(path)))


def smollm2_as_json(gguf_path):
    """SmolLM2's own pre-tokenizer with the vocabulary of the GGUF file."""
    reader = pytest.importorskip("gguf").GGUFReader(gguf_path)
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    types = reader.fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(merge.split(" ")) for merge in reader.fields["tokenizer.ggml.merges"].contents()]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([t for t, kind in zip(tokens, types, strict=True) if kind == 3])
    return tokenizer


@pytest.fixture
def smollm2(phsa):
    done = phsa("models", "path", "smollm2-135m")
    if done.returncode != 0:
        pytest.skip("SmolLM2 is not in the cache: `phsa models fetch smollm2-135m` brings it")
    return done.stdout.strip()


def test_smollm2_from_gguf_gives_the_ids_of_its_tokenizer(phsa, smollm2, texts):
    assert_same(phsa, smollm2, texts, smollm2_as_json(smollm2))


def test_smollm2_from_gguf_gives_the_ids_of_its_tokenizer_for_a_book(phsa, smollm2):
    book = (ROOT / "bench/data/from_sand_hill_to_pine.txt").read_text(encoding="utf-8")
    assert_same(phsa, smollm2, [book], smollm2_as_json(smollm2))


# ----------------------------------------------------------------------------------------------------------------------
# The program


@pytest.mark.parametrize("kind_path", ["qwen2"], indirect=True)
def test_text_comes_from_a_flag_a_file_or_standard_input(phsa, kind_path, tmp_path):
    (tmp_path / "text").write_text("Hello <|im_end|>", encoding="utf-8")
    by_flag = phsa("tokenize", kind_path, "-p", "Hello <|im_end|>", "--ids")
    by_file = phsa("tokenize", kind_path, "-f", tmp_path / "text", "--ids")
    by_stdin = phsa("tokenize", kind_path, "-f", "-", "--ids", input="Hello <|im_end|>")
    by_folder = phsa("tokenize", tmp_path, "-p", "Hello <|im_end|>", "--ids")
    assert by_flag.returncode == 0, by_flag.stderr
    assert by_flag.stdout == by_file.stdout == by_stdin.stdout == by_folder.stdout
    ids = list(map(int, by_flag.stdout.split()))
    assert by_flag.stdout == " ".join(map(str, ids)) + "\n"
    described = json.loads(phsa("tokenize", kind_path, "-p", "Hello <|im_end|>", "--json").stdout)
    assert described["ids"] == ids
    assert "".join(described["tokens"]) == "Hello <|im_end|>"
    assert phsa("tokenize", kind_path, "--decode", "-p", by_flag.stdout).stdout == "Hello <|im_end|>"
    assert phsa("tokenize", kind_path, "--decode", "--no-special", "-p", str(ids)).stdout == "Hello "


@pytest.mark.parametrize("kind_path", ["qwen2"], indirect=True)
@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "no text"),
        (["-p", "x", "-f", "y"], "-p"),
        (["-f", "no/such/file"], "no/such/file"),
        (["--decode", "-p", "12 x"], "x"),
        (["--decode", "-p", "1000000"], "1000000"),
        (["--decode", "-p", "-5"], "-5"),
        (["--jsonl", "-p", "{"], "line 1"),
        (["--jsonl", "-p", "3"], "line 1"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(phsa, kind_path, args, says):
    done = phsa("tokenize", kind_path, *args)
    assert done.returncode == 2
    assert done.stdout == ""
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 2  # ours is one; the parser of flags adds a hint


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": {"type": "Unigram", "vocab": {}}}', "\x00\x01"])
def test_a_broken_tokenizer_is_one_line_and_exit_code_2(phsa, tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    done = phsa("tokenize", tmp_path / "tokenizer.json", "-p", "x")
    assert done.returncode == 2
    assert "tokenizer.json" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
