from __future__ import annotations

import json
import string
from pathlib import Path

import pytest

from phsa import punctuation

QWEN3 = Path(__file__).resolve().parents[3] / "shared" / "tokenizers" / "qwen3"
needs_qwen3 = pytest.mark.skipif(not QWEN3.is_dir(), reason="no Qwen3 tokenizer in ../shared/tokenizers/qwen3")


def byte_level_tokenizer(path: Path) -> Path:
    """A byte-level vocabulary of a few tokens, as tokenizer.json writes them."""
    tokens = [",", ".", "Ġ,", ".Ċ", "a", "ï¼Į", "Ċ", "ï¼", ")))", "Ġ", "12"]
    description = {
        "version": "1.0",
        "added_tokens": [
            {"id": len(tokens), "content": "!", "special": True},
            {"id": len(tokens) + 2, "content": "?", "special": False},
        ],
        "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "vocab": {token: index for index, token in enumerate(tokens)}, "merges": []},
    }
    file = path / "tokenizer.json"
    file.write_text(json.dumps(description), encoding="utf-8")
    return file


def test_bytes_of_byte_level_tokens(tmp_path: Path) -> None:
    tokens, special = punctuation.token_bytes(byte_level_tokenizer(tmp_path))
    assert tokens[2] == b" ," and tokens[3] == b".\n" and tokens[5] == "，".encode() and tokens[7] == b"\xef\xbc"
    assert [index for index, mark in enumerate(special) if mark] == [11, 12]


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("en", [0, 1, 13]),
        ("zh", [5]),
        ("en+zh", [0, 1, 5, 13]),
        ("sentence", [0, 1, 2, 5, 13]),
        ("pure", [0, 1, 2, 3, 5, 8, 13]),
        ("none", []),
    ],
)
def test_named_sets(tmp_path: Path, name: str, want: list[int]) -> None:
    assert punctuation.ids(byte_level_tokenizer(tmp_path), name) == want


def test_a_file_of_ids_and_strings(tmp_path: Path) -> None:
    folder = byte_level_tokenizer(tmp_path).parent
    marks = tmp_path / "marks.txt"
    marks.write_text("4\n)))\n", encoding="utf-8")
    assert punctuation.ids(folder, str(marks)) == [4, 8]
    marks.write_text("11\n", encoding="utf-8")
    with pytest.raises(ValueError, match="special token"):
        punctuation.ids(folder, str(marks))


def test_tables_may_be_longer_than_the_tokenizer(tmp_path: Path) -> None:
    table = punctuation.flag_table(byte_level_tokenizer(tmp_path), "en", size=20)
    assert len(table) == 20 and sum(table) == 3


def test_bytes_of_sentencepiece_tokens(tmp_path: Path) -> None:
    description = {
        "decoder": {
            "type": "Sequence",
            "decoders": [{"type": "Replace", "pattern": {"String": "_"}, "content": " "}, {"type": "ByteFallback"}],
        },
        "model": {"type": "BPE", "vocab": {"\u2581,": 0, "<0x2C>": 1, "ab": 2, ".": 3}},
    }
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(description), encoding="utf-8")
    assert punctuation.token_bytes(file)[0] == [b" ,", b",", b"ab", b"."]
    assert punctuation.ids(file, "en") == [1, 3]


def test_what_is_not_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no"):
        punctuation.ids(tmp_path)
    with pytest.raises(ValueError, match="neither a set nor a file"):
        punctuation.ids(byte_level_tokenizer(tmp_path), "english")
    with pytest.raises(ValueError, match=r"has no tokenizer\.json behind it"):
        punctuation.ids(object())
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}', encoding="utf-8")
    with pytest.raises(ValueError, match="cannot tell the bytes"):
        punctuation.ids(tmp_path)


@needs_qwen3
def test_sets_of_qwen3() -> None:
    marks = punctuation.ids(QWEN3, "en")
    assert len(marks) == 32 and {11, 13} <= set(marks)
    tokens, special = punctuation.token_bytes(QWEN3)
    assert tokens[11] == b"," and tokens[13] == b"."
    pure = punctuation.ids(QWEN3, "pure")
    ascii_only = [index for index in pure if all(byte < 0x80 for byte in tokens[index])]
    assert len(ascii_only) == 5402
    assert all(set(tokens[index].decode().strip()) <= set(string.punctuation) for index in ascii_only)
    assert not any(special[index] for index in pure)


@needs_qwen3
def test_a_tokenizer_of_transformers_gives_the_same() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(QWEN3)
    for name in ("en", "zh", "sentence"):
        assert punctuation.ids(tokenizer, name) == punctuation.ids(QWEN3, name)
    flags = punctuation.flag_table(tokenizer, "en")
    text = 'Hello, world. "So (what)?"'
    assert sum(flags[index] for index in tokenizer(text)["input_ids"]) >= 2
