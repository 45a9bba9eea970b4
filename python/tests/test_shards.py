from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from token_shards import write_documents

from phsa.train.shards import Sequences, Shards

END = 7


def write(folder: Path, sizes: list[list[int]], dtype: str = "uint16") -> Path:
    """Shards of documents of these sizes (with their end). Tokens count up from 8, so that each place can be told."""
    shards = []
    value = END + 1
    for lengths in sizes:
        documents = []
        for length in lengths:
            documents.append(np.append(np.arange(value, value + length - 1), END))
            value += length - 1
        shards.append(documents)
    return write_documents(folder, shards, vocab_size=value, end=END, dtype=dtype)


def random_sizes(count: int, largest: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, largest + 1, count).tolist()


def as_lists(pieces: list[np.ndarray]) -> list[list[int]]:
    return [piece.tolist() for piece in pieces]


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_documents_come_back_as_they_were_written(tmp_path: Path, dtype: str) -> None:
    shards = Shards(write(tmp_path / "tokens", [[3, 1], [2]], dtype))
    assert (shards.documents, shards.tokens, shards.vocab_size, shards.end) == (3, 6, 11, END)
    assert shards.punctuation == {"en": [3, 5], "en+zh": [3, 5, 6]}
    assert [shards.document(i).tolist() for i in range(3)] == [[8, 9, END], [END], [10, END]]
    with pytest.raises(IndexError, match="document 3"):
        shards.document(3)
    with pytest.raises(ValueError, match="read-only"):
        shards.document(0)[0] = 0


@pytest.mark.parametrize("length", [2, 5, 16, 100, 10_000])
@pytest.mark.parametrize("largest", [3, 20, 90])
def test_every_token_comes_once_in_each_epoch(tmp_path: Path, length: int, largest: int) -> None:
    sizes = [random_sizes(60, largest, 1), random_sizes(1, largest, 2), random_sizes(40, largest, 3)]
    shards = Shards(write(tmp_path / "tokens", sizes))
    want = Counter(token for number in range(shards.documents) for token in shards.document(number).tolist())
    sequences = Sequences(shards, length, seed=3)
    assert sequences.per_epoch == -(-shards.tokens // length)
    for epoch in range(2):
        numbers = range(epoch * sequences.per_epoch, (epoch + 1) * sequences.per_epoch)
        totals = [sum(map(len, sequences[number])) for number in numbers]
        assert totals[:-1] == [length] * (sequences.per_epoch - 1)
        got = Counter(t for number in numbers for piece in sequences[number] for t in piece.tolist())
        assert got == want


def test_short_documents_stay_whole_where_they_fit_together(tmp_path: Path) -> None:
    shards = Shards(write(tmp_path / "tokens", [[60] * 8 + [25] * 8 + [15] * 8]))
    sequences = Sequences(shards, 100, seed=0)
    assert sequences.per_epoch == 8
    for number in range(8):
        assert sum(map(len, sequences[number])) == 100
        assert all(piece[-1] == END for piece in sequences[number])


def test_a_long_document_is_cut_into_sequences_and_its_rest_is_packed(tmp_path: Path) -> None:
    shards = Shards(write(tmp_path / "tokens", [[230, 70]]))
    sequences = Sequences(shards, 100, seed=0)
    long, short = shards.document(0).tolist(), shards.document(1).tolist()
    got = sorted(sorted(as_lists(sequences[number])) for number in range(3))
    assert got == sorted([[long[:100]], [long[100:200]], sorted([long[200:], short])])


def test_what_cannot_be_packed_whole_fills_the_gaps_of_others(tmp_path: Path) -> None:
    # No two documents of 60 fit into 100: five of them make three full sequences, and only two documents are cut.
    shards = Shards(write(tmp_path / "tokens", [[60] * 5]))
    sequences = Sequences(shards, 100, seed=0)
    pieces = [piece for number in range(3) for piece in sequences[number]]
    assert [sum(map(len, sequences[number])) for number in range(3)] == [100] * 3
    assert sorted(map(len, pieces)).count(60) == 3


def test_the_packing_leaves_few_documents_cut(tmp_path: Path) -> None:
    sizes = random_sizes(3000, 900, 5)
    shards = Shards(write(tmp_path / "tokens", [sizes], "uint32"))
    sequences = Sequences(shards, 1000, seed=0)
    whole = {(int(document[0]), len(document)) for document in map(shards.document, range(shards.documents))}
    pieces = [(int(p[0]), len(p)) for number in range(sequences.per_epoch) for p in sequences[number]]
    assert sum(piece in whole for piece in pieces) > 0.97 * shards.documents


def test_a_sequence_follows_from_seed_and_number_alone(tmp_path: Path) -> None:
    folder = write(tmp_path / "tokens", [random_sizes(200, 50, 1), random_sizes(100, 50, 2)])
    straight = Sequences(Shards(folder), 64, seed=5)
    want = [as_lists(straight[number]) for number in range(3 * straight.per_epoch)]
    # Another process that begins in the middle, goes back, and jumps between the epochs.
    other = Sequences(Shards(folder, verify=False), 64, seed=5)
    for number in [len(want) - 1, 0, len(want) // 2, *range(1, len(want), 7)]:
        assert as_lists(other[number]) == want[number]


def test_processes_that_share_the_numbers_read_what_one_reads(tmp_path: Path) -> None:
    folder = write(tmp_path / "tokens", [random_sizes(300, 50, 1)])
    one = Sequences(Shards(folder), 64, seed=5)
    for world in (2, 3):
        ranks = [Sequences(Shards(folder), 64, seed=5) for _ in range(world)]
        for number in range(2 * one.per_epoch):
            assert as_lists(ranks[number % world][number]) == as_lists(one[number])


def test_epochs_and_seeds_have_orders_of_their_own(tmp_path: Path) -> None:
    shards = Shards(write(tmp_path / "tokens", [random_sizes(300, 50, 1)]))
    sequences = Sequences(shards, 64, seed=5)
    orders = [
        [as_lists(sequences[epoch * sequences.per_epoch + number]) for number in range(sequences.per_epoch)]
        for epoch in range(2)
    ]
    other = Sequences(shards, 64, seed=6)
    orders.append([as_lists(other[number]) for number in range(other.per_epoch)])
    assert orders[0] != orders[1] and orders[0] != orders[2] and orders[1] != orders[2]


def test_the_order_stays_that_of_earlier_versions(tmp_path: Path) -> None:
    """A run that was begun with an older phsa or numpy goes on with the same sequences."""
    shards = Shards(write(tmp_path / "tokens", [[1 + 37 * number % 90 for number in range(50)]]))
    sequences = Sequences(shards, 64, seed=5)
    digest = hashlib.sha256()
    for number in range(2 * sequences.per_epoch):
        for piece in sequences[number]:
            digest.update(piece.astype("<u2").tobytes() + b"|")
    assert digest.hexdigest() == "b5d9cf7e2fed6c54b88f43f1623fd4d7a88a0d5190c0f51b495c0139fa55e10b"


def test_what_is_no_length_or_number_is_refused(tmp_path: Path) -> None:
    shards = Shards(write(tmp_path / "tokens", [[3]]))
    for length in (0, 1, 2**24):
        with pytest.raises(ValueError, match="length"):
            Sequences(shards, length, seed=0)
    with pytest.raises(ValueError, match="seed"):
        Sequences(shards, 16, seed=-1)
    with pytest.raises(IndexError, match="begin at 0"):
        Sequences(shards, 16, seed=0)[-1]


@pytest.mark.parametrize("file", ["shard-00001.tokens", "shard-00001.offsets"])
def test_a_missing_cut_or_changed_shard_is_refused_by_name(tmp_path: Path, file: str) -> None:
    folder = write(tmp_path / "tokens", [[3, 4], [5, 6, 7]])
    path = folder / file
    content = path.read_bytes()
    Shards(folder)
    for wrong in (content[:-1], content[:-8], content + b"\0", content[:8] + b"\x09" + content[9:], b""):
        path.write_bytes(wrong)
        with pytest.raises(ValueError, match=file):
            Shards(folder)
    path.unlink()
    with pytest.raises(ValueError, match=f"{file}: missing"):
        Shards(folder)
    path.write_bytes(content)
    Shards(folder)


def test_offsets_between_other_documents_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "tokens", [[3, 4, 5]])
    path = folder / "shard-00000.offsets"
    path.write_bytes(np.array([0, 2, 7, 12], dtype="<u8").tobytes())
    with pytest.raises(ValueError, match=r"shard-00000\.offsets: changed"):
        Shards(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("format", "phsa tokens 2"),
        ("dtype", "float32"),
        ("dtype", None),
        ("vocab_size", "many"),
        ("documents", 4),
        ("tokens", -1),
        ("tokens", True),
        ("punctuation", {"en": ["a"]}),
        ("punctuation", []),
        ("shards", {}),
        ("shards", [3]),
        ("shards", [{"file": "../shard-00000", "documents": 1, "tokens": 3}]),
        ("shards", []),
    ],
)
def test_a_wrong_index_is_refused(tmp_path: Path, key: str, value: object) -> None:
    folder = write(tmp_path / "tokens", [[3]])
    path = folder / "index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(ValueError, match=r"index\.json: "):
        Shards(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, '{"format": "\xff"}'])
def test_an_index_that_is_no_json_object_is_refused(tmp_path: Path, text: str) -> None:
    folder = write(tmp_path / "tokens", [[3]])
    (folder / "index.json").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"index\.json: "):
        Shards(folder)


def test_a_folder_that_was_not_finished_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "tokens", [[3]])
    (folder / "index.json").unlink()
    with pytest.raises(ValueError, match="no finished output of phsa prepare"):
        Shards(folder)
    with pytest.raises(ValueError, match="no finished output of phsa prepare"):
        Shards(tmp_path / "nothing")
