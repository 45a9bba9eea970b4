"""SentencePiece's vocabularies: the ids and texts of the Python package tokenizers, from both kinds of files."""

import base64
import json
import random
import struct

import numpy as np
import pytest
from conftest import ROOT
from gguf_files import write_out
from test_tokenizer import CODE_POINTS, assert_same, encode, lines, read_texts
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


def write_gguf(path, model, tokens, scores, add_space_prefix, more=lambda writer: None):
    """SPECIAL, then BYTES, then the tokens of the text."""
    gguf = pytest.importorskip("gguf")
    first = len(SPECIAL) + len(BYTES)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types([3] * len(SPECIAL) + [6] * 256 + [1] * (len(tokens) - first))
    writer.add_bos_token_id(SPECIAL.index("<bos>"))
    writer.add_unk_token_id(SPECIAL.index("<unk>"))
    writer.add_add_space_prefix(add_space_prefix)
    more(writer)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 32), np.float16))
    writer.add_tensor("output_norm.weight", np.ones(32, np.float32))
    for name, rows, columns in [
        ("attn_norm", 0, 32),
        ("attn_q", 32, 32),
        ("attn_k", 32, 32),
        ("attn_v", 32, 32),
        ("attn_output", 32, 32),
        ("ffn_norm", 0, 32),
        ("ffn_gate", 64, 32),
        ("ffn_up", 64, 32),
        ("ffn_down", 32, 64),
    ]:
        shape, kind = ((rows, columns), np.float16) if rows else ((columns,), np.float32)
        writer.add_tensor(f"blk.0.{name}.weight", np.zeros(shape, kind))
    write_out(writer)


def test_scores_of_a_gguf_file_are_merges(phsa, trained, tmp_path):
    tokens = sorted(trained["model"]["vocab"], key=trained["model"]["vocab"].get)
    first = len(SPECIAL) + len(BYTES)
    scores = [0.0] * first + [-float(i) for i in range(len(tokens) - first)]
    write_gguf(tmp_path / "model.gguf", "llama", tokens, scores, False)

    # Any two tokens that make a token are a merge; the better the score, the earlier.
    vocab, merges = trained["model"]["vocab"], []
    for token in tokens[first:]:
        halves = [(token[:i], token[i:]) for i in range(len(token) - 1, 0, -1)]
        merges += [list(pair) for pair in halves if all(vocab.get(half, -1) >= first for half in pair)]
    model = {**trained["model"], "merges": merges}
    reference = {**trained, **KINDS["gemma"], "model": model, "post_processor": None}
    texts = [*random_texts(1500, seed=24), "  two  spaces ", "<bos>x"]
    theirs = tokenizers.Tokenizer.from_str(json.dumps(reference))
    assert_same(phsa, tmp_path / "model.gguf", texts, theirs)
    done = phsa("export", "-m", tmp_path / "model.gguf", "--out", tmp_path / "again.gguf")
    assert done.returncode == 0, done.stderr
    assert_same(phsa, tmp_path / "again.gguf", texts[:300], theirs)


# What nmt_nfkc, the table that SentencePiece's trainer takes, does to some characters; of these some begin alike, so
# that the shortest counts.
CHARSMAP = {
    "e\u0301": "é", "\u2460": "1", "\uff21": "A", "\u00a0": " ", "\u3000": " ", "\t": " ", "\ufb01": "fi",
    "\u0001": "", "\u200b": " ", "\u212b": "Å", "A": "B", "A\u0301": "C", "\u1100": "\u1100\u1161", "©": "(c)",
    "\u0958": "\u0915\u093c", "\u0301": "´", "\r\n": "\n", "\u0600": "x", "\U0001d400": "A",
}  # fmt: skip


def charsmap(rules):
    """A precompiled_charsmap: a trie as a double array, and the texts."""
    tree, texts = {}, b""
    for text, becomes in rules.items():
        node = tree
        for byte in text.encode():
            node = node.setdefault(byte, {})
        node[None] = len(texts)
        texts += becomes.encode() + b"\0"
    units = [0] * (1 << 16)
    free = iter(range(1, 256))  # of blocks of 256 units: one for the children of each node

    def place(node, at, label, has_leaf):
        block = next(free) * 256
        units[at] = (block ^ at) << 10 | has_leaf << 8 | label
        if None in node:
            units[block] = 1 << 31 | node[None]
        for byte, child in node.items():
            if byte is not None:
                place(child, block ^ byte, byte, None in child)

    place(tree, 0, 0, False)
    return struct.pack("<I", 4 * len(units)) + struct.pack(f"<{len(units)}I", *units) + texts


PRECOMPILED = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap(CHARSMAP)).decode()}
SPACES = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
UNIGRAM_KINDS = {
    # As transformers converts a file of SentencePiece: words that begin with a mark.
    "converted": {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [PRECOMPILED, {"type": "Strip", "strip_left": False, "strip_right": True}, SPACES],
        },
        "pre_tokenizer": {**METASPACE, "prepend_scheme": "always", "split": True},
        "decoder": {**METASPACE, "prepend_scheme": "always", "split": True},
    },
    "old": {
        "normalizer": PRECOMPILED,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "WhitespaceSplit"}, {**METASPACE, "add_prefix_space": True}],
        },
        "decoder": {**METASPACE, "add_prefix_space": True},
    },
    # As the package tokenizers trains one.
    "trained": {
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Nmt"}, {"type": "NFKC"}, SPACES]},
        "pre_tokenizer": {**METASPACE, "prepend_scheme": "first", "split": True},
        "decoder": {**METASPACE, "prepend_scheme": "first", "split": True},
    },
    # The whole text is one word.
    "whole": {
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": MARK}, REPLACE]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [*UNDO, STRIP]},
    },
    "forms": {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "NFKD"}, {"type": "Strip", "strip_left": True, "strip_right": False}, REPLACE],
        },
        "pre_tokenizer": {"type": "Digits", "individual_digits": True},
        "decoder": {"type": "Sequence", "decoders": UNDO},
    },
    "decomposed": {
        "normalizer": {"type": "NFD"},
        "pre_tokenizer": {**METASPACE, "prepend_scheme": "never", "split": False},
        "decoder": {"type": "Sequence", "decoders": UNDO},
    },
}


@pytest.fixture(scope="module")
def unigram():
    """A vocabulary whose tokens go over the ends of words, and some of whose scores are equal."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram())
    tokenizer.normalizer = tokenizers.normalizers.Replace(" ", MARK)
    trainer = tokenizers.trainers.UnigramTrainer(
        vocab_size=1200, special_tokens=SPECIAL, unk_token="<unk>", max_piece_length=9, show_progress=False
    )
    prose = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))]
    tokenizer.train_from_iterator([line for text in prose for line in text.splitlines()], trainer)
    made = json.loads(tokenizer.to_str())
    learned = made["model"]["vocab"][len(SPECIAL) :]
    assert any(MARK in token.lstrip(MARK) for token, _ in learned), "some token must go over a word's end"
    learned = [(token, round(score, 1)) for token, score in learned]
    learned += [["中文", -9.0], ["é", -11.5], ["\n", -8.0], ["\n\n", -8.5], ["xx", -40.0]]
    vocab = [[token, 0.0] for token in (*SPECIAL, *BYTES)] + learned
    made["model"] = {"type": "Unigram", "unk_id": SPECIAL.index("<unk>"), "vocab": vocab, "byte_fallback": True}
    return made


def unigram_json(unigram, kind, folder, byte_fallback=True):
    model = {**unigram["model"], "byte_fallback": byte_fallback}
    # Without bytes for it the unknown token stands for a character, in a user's text too.
    added = [{**token, "special": byte_fallback or token["content"] != "<unk>"} for token in unigram["added_tokens"]]
    path = folder / "tokenizer.json"
    json_text = {**unigram, **UNIGRAM_KINDS[kind], "model": model, "added_tokens": added, "post_processor": None}
    path.write_text(json.dumps(json_text), encoding="utf-8")
    return path


def plain_texts(count, seed):
    """Random ones that write no control token and no byte out: as text these have ids of their own here."""
    names = [*SPECIAL, *BYTES]
    return [text for text in random_texts(count, seed) if not any(name in text for name in names)]


UNIGRAM_TEXTS = [
    "",
    " ",
    "   a",
    "a   b ",
    f"{MARK}a",
    "x\n\n y",
    "xx",
    "\U0001f60a\U0001f60a.",
    "A\u0301 A \u2460\u0301",
]


@pytest.mark.parametrize("byte_fallback", [True, False])
@pytest.mark.parametrize("kind", UNIGRAM_KINDS)
def test_unigram_models_give_the_same_ids(phsa, unigram, kind, byte_fallback, tmp_path):
    path = unigram_json(unigram, kind, tmp_path, byte_fallback)
    theirs = tokenizers.Tokenizer.from_file(str(path))
    texts = [*plain_texts(1500, seed=31), *UNIGRAM_TEXTS]
    assert_same(phsa, path, texts, theirs)
    assert_same(phsa, path, ["<bos> x<eos> y", "<unk>", "a <pad>  b"], theirs, modes=[False])


@pytest.mark.parametrize("kind", ["converted", "old", "whole"])
def test_random_ids_of_unigram_models_have_the_same_text(phsa, unigram, kind, tmp_path):
    path = unigram_json(unigram, kind, tmp_path)
    theirs = tokenizers.Tokenizer.from_file(str(path))
    draw = random.Random(32)
    # Decoders without ByteFallback write a byte's name out; ours give the byte.
    first = len(SPECIAL) + (0 if kind == "whole" else len(BYTES))
    ids = [[draw.randrange(first, theirs.get_vocab_size()) for _ in range(draw.randrange(1, 12))] for _ in range(800)]
    done = phsa("tokenize", path, "--jsonl", "--decode", "-f", "-", input=lines(ids))
    assert done.returncode == 0, done.stderr
    for one, text in zip(ids, map(json.loads, done.stdout.splitlines()), strict=True):
        assert text == theirs.decode(one, skip_special_tokens=False), one


@pytest.mark.parametrize("most", [20_000, pytest.param(None, marks=pytest.mark.long)])
def test_unigram_models_give_the_same_ids_for_all_shared_texts(phsa, shared, unigram, most, tmp_path):
    path = unigram_json(unigram, "converted", tmp_path)
    theirs = tokenizers.Tokenizer.from_file(str(path))
    names, contents = zip(*read_texts(shared / "data"), strict=True)
    contents = [text[:most] for text in contents]
    for name, text, ours in zip(names, contents, encode(phsa, path, contents), strict=True):
        assert ours == theirs.encode(text, add_special_tokens=False).ids, name


@pytest.mark.parametrize("form", ["NFD", "NFKC", "NFKD"])
def test_every_code_point_has_the_same_normal_form(phsa, unigram, form, tmp_path):
    """With marks and Hangul around it, written out as bytes."""
    vocab = [[token, 0.0] for token in (*SPECIAL, *BYTES)]
    json_text = {
        **unigram,
        "normalizer": {"type": form},
        "pre_tokenizer": {**METASPACE, "prepend_scheme": "never", "split": True},
        "model": {**unigram["model"], "vocab": vocab},
        "post_processor": None,
    }
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json_text), encoding="utf-8")
    texts = []
    for begin in range(0, len(CODE_POINTS), 32):
        part = CODE_POINTS[begin : begin + 32]
        texts.append("".join(f"a{c}\u0301 e\u0323\u0301{c} \u1100{c} \uac00{c}\u0300" for c in part))
    assert_same(phsa, path, texts, tokenizers.Tokenizer.from_file(str(path)), modes=[False])


@pytest.mark.parametrize("one_space", [False, True])
def test_a_gguf_file_has_a_unigram_model(phsa, unigram, one_space, tmp_path):
    table = charsmap(CHARSMAP)

    def more(writer):
        writer.add_precompiled_charsmap(table)
        writer.add_remove_extra_whitespaces(one_space)

    tokens, scores = zip(*unigram["model"]["vocab"], strict=True)
    write_gguf(tmp_path / "model.gguf", "t5", tokens, scores, True, more)
    steps = [{**PRECOMPILED}, *([SPACES, {"type": "Strip", "strip_left": True, "strip_right": True}] * one_space)]
    steps += [{"type": "Prepend", "prepend": MARK}, REPLACE]
    # A file's numbers have 32 bits.
    vocab = [[token, float(np.float32(score))] for token, score in unigram["model"]["vocab"]]
    reference = {
        **unigram,
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "model": {**unigram["model"], "vocab": vocab},
        "post_processor": None,
    }
    theirs = tokenizers.Tokenizer.from_str(json.dumps(reference))
    texts = [*plain_texts(1000, seed=33), *UNIGRAM_TEXTS]
    assert_same(phsa, tmp_path / "model.gguf", texts, theirs)
    done = phsa("export", "-m", tmp_path / "model.gguf", "--out", tmp_path / "again.gguf")
    assert done.returncode == 0, done.stderr
    assert_same(phsa, tmp_path / "again.gguf", texts[:300], theirs)


def test_no_control_token_comes_from_a_text_that_spells_it(phsa, unigram, tmp_path):
    path = unigram_json(unigram, "converted", tmp_path)
    (ids,) = encode(phsa, path, ["a <bos>b <unk>"], "--no-special")
    assert not any(id < len(SPECIAL) for id in ids)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"vocab": {"a": 0}}, "vocab"),
        ({"vocab": [["a", "b"]]}, "entry 0"),
        ({"vocab": [["a" * 2000, 0.0]]}, "2000 bytes"),
        ({"unk_id": 10**6}, "unk_id"),
        ({"type": "WordPiece"}, "WordPiece"),
    ],
)
def test_unigram_models_that_cannot_be_are_refused(phsa, unigram, change, says, tmp_path):
    path = unigram_json(unigram, "converted", tmp_path)
    json_text = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**json_text, "model": {**json_text["model"], **change}}), encoding="utf-8")
    done = phsa("tokenize", path, "-p", "x")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert says in done.stderr, done.stderr


def test_tables_of_characters_that_lead_nowhere_do_no_harm(phsa, unigram, tmp_path):
    path = unigram_json(unigram, "old", tmp_path)
    json_text = json.loads(path.read_text(encoding="utf-8"))
    table = charsmap(CHARSMAP)
    draw = random.Random(34)
    for i in range(40):
        bad = bytearray(table)
        for _ in range(200):
            bad[draw.randrange(4 if i else 0, 4 + (1 << 16))] = draw.randrange(256)
        json_text["normalizer"]["precompiled_charsmap"] = base64.b64encode(bad).decode()
        path.write_text(json.dumps(json_text), encoding="utf-8")
        done = phsa("tokenize", path, "-p", "A e\u0301 \u2460x\u3000")
        assert done.returncode in (0, 2) and done.stderr.count("\n") <= 1


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
