"""SentencePiece's vocabularies: the ids and texts of the Python package tokenizers, from both kinds of files."""

import json
import random

import numpy as np
import pytest
from conftest import ROOT
from test_tokenizer import assert_same, lines
from tokenizer_texts import random_texts

tokenizers = pytest.importorskip("tokenizers")

MARK = "\u2581"
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": MARK}
METASPACE = {"type": "Metaspace", "replacement": MARK}
UNDO = [{"type": "Replace", "pattern": {"String": MARK}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
KINDS = {
    "gemma": {
        "normalizer": REPLACE,
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        },
        "decoder": {"type": "Sequence", "decoders": UNDO},
    },
    "llama-2": {
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": MARK}, REPLACE]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [*UNDO, STRIP]},
    },
    "first": {
        "normalizer": None,
        "pre_tokenizer": {**METASPACE, "prepend_scheme": "first", "split": False},
        "decoder": {"type": "Sequence", "decoders": [*UNDO, STRIP]},
    },
    "always": {
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {**METASPACE, "prepend_scheme": "always", "split": True},
        "decoder": {"type": "Sequence", "decoders": UNDO},
    },
}


@pytest.fixture(scope="module")
def trained():
    """Merges over words and over the ends of words, so that cutting texts into words is not right everywhere."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = tokenizers.normalizers.Replace(" ", MARK)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=1500, special_tokens=[*SPECIAL, *BYTES], initial_alphabet=[MARK, "\n"], max_token_length=9
    )
    prose = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))]
    tokenizer.train_from_iterator([line for text in prose for line in text.splitlines()], trainer)
    made = json.loads(tokenizer.to_str())
    made["added_tokens"] = [token for token in made["added_tokens"] if token["content"] in SPECIAL]
    assert any(MARK in token.lstrip(MARK) for token in made["model"]["vocab"]), "some token must go over a word's end"
    return made


def tokenizer_json(trained, kind, folder):
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**trained, **KINDS[kind], "post_processor": None}), encoding="utf-8")
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_random_texts_have_the_same_ids(phsa, trained, kind, tmp_path):
    path = tokenizer_json(trained, kind, tmp_path)
    texts = [*random_texts(1500, seed=21), "", " ", "   a", "a   b ", f"{MARK}a", "<bos> x<eos> y", "x\n\n y"]
    assert_same(phsa, path, texts, tokenizers.Tokenizer.from_file(str(path)))


@pytest.mark.parametrize("kind", KINDS)
def test_random_ids_have_the_same_text(phsa, trained, kind, tmp_path):
    path = tokenizer_json(trained, kind, tmp_path)
    theirs = tokenizers.Tokenizer.from_file(str(path))
    draw = random.Random(22)
    pools = [range(theirs.get_vocab_size()), range(len(SPECIAL), len(SPECIAL) + 256)]  # of all, and of bytes
    ids = [[draw.choice(draw.choice(pools)) for _ in range(draw.randrange(1, 12))] for _ in range(1500)]
    ids += [theirs.encode(text).ids for text in random_texts(300, seed=23) if text]
    done = phsa("tokenize", path, "--jsonl", "--decode", "-f", "-", input=lines(ids))
    assert done.returncode == 0, done.stderr
    ours = [json.loads(line) for line in done.stdout.splitlines()]
    for one, text in zip(ids, ours, strict=True):
        assert text == theirs.decode(one, skip_special_tokens=False), one


def test_scores_of_a_gguf_file_are_merges(phsa, trained, tmp_path):
    gguf = pytest.importorskip("gguf")
    tokens = sorted(trained["model"]["vocab"], key=trained["model"]["vocab"].get)
    first = len(SPECIAL) + len(BYTES)
    scores = [0.0] * first + [-float(i) for i in range(len(tokens) - first)]
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(1)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types([3] * len(SPECIAL) + [6] * 256 + [1] * (len(tokens) - first))
    writer.add_bos_token_id(2)
    writer.add_add_space_prefix(False)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 32), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    # Any two tokens that make a token are a merge; the better the score, the earlier.
    vocab, merges = trained["model"]["vocab"], []
    for token in tokens[first:]:
        halves = [(token[:i], token[i:]) for i in range(len(token) - 1, 0, -1)]
        merges += [list(pair) for pair in halves if all(vocab.get(half, -1) >= first for half in pair)]
    model = {**trained["model"], "merges": merges}
    reference = {**trained, **KINDS["gemma"], "model": model, "post_processor": None}
    texts = [*random_texts(1500, seed=24), "  two  spaces ", "<bos>x"]
    assert_same(phsa, tmp_path / "model.gguf", texts, tokenizers.Tokenizer.from_str(json.dumps(reference)))


def test_what_is_not_supported_is_refused_by_name(phsa, trained, tmp_path):
    path = tokenizer_json(trained, "gemma", tmp_path)
    json_text = json.loads(path.read_text(encoding="utf-8"))
    lacking = {token: id for token, id in json_text["model"]["vocab"].items() if token != "<0x41>"}
    for change, says in [
        ({"normalizer": None}, "normalizer"),
        ({"normalizer": {"type": "Lowercase"}}, "Lowercase"),
        ({"model": {**json_text["model"], "vocab": lacking}}, "single bytes"),
        ({"model": {**json_text["model"], "ignore_merges": True}}, "ignore_merges"),
    ]:
        path.write_text(json.dumps({**json_text, **change}), encoding="utf-8")
        done = phsa("tokenize", path, "-p", "x")
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        assert says in done.stderr, done.stderr
