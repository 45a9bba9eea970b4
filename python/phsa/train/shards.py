"""The folders of tokens that ``phsa prepare`` writes, and the training sequences that are packed from them.

``Sequences`` has no state: sequence number ``i`` follows from the folder, the length, the seed and ``i`` alone. A run
that is resumed, or that runs on another number of processes, asks for other numbers and for nothing else.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import operator
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Sequences", "Shards"]

FORMAT = "phsa tokens 1"
_DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
# Lengths share a 64-bit sort key with random bits.
_MAX_LENGTH = 2**24 - 1


class Shards:
    """A folder of tokens, memory-mapped: documents one after the other, each with the token ``end`` behind it.

    With ``verify`` the whole of it is read once, and compared with the digests in the index. Other processes of a run
    that has done so may leave it out; sizes are always checked.
    """

    documents: int
    tokens: int
    vocab_size: int
    end: int | None
    punctuation: dict[str, list[int]]
    offsets: np.ndarray  # (documents + 1): where each document begins, in tokens from the first of the folder

    def __init__(self, folder: str | Path, *, verify: bool = True) -> None:
        self.folder = Path(folder)
        index = self._read_index()
        dtype = _DTYPES.get(self._field(index, "dtype", str))
        if dtype is None:
            raise ValueError(f"{self.folder / 'index.json'}: dtype is not one of {', '.join(_DTYPES)}")
        self.vocab_size = self._count(index, "vocab_size")
        self.documents = self._count(index, "documents")
        self.tokens = self._count(index, "tokens")
        self.end = None if index.get("end") is None else self._count(index, "end")
        self.punctuation = self._read_punctuation(index)
        self.digests: list[str] = []  # of the shards' tokens
        self._shards: list[np.ndarray] = []
        offsets = [np.zeros(1, dtype=np.int64)]
        self._bases = [0]  # the first token of each shard
        for entry in self._field(index, "shards", list):
            shard, shard_offsets = self._open_shard(entry, dtype, verify)
            self._shards.append(shard)
            self.digests.append(self._field(entry, "sha256", str))
            offsets.append(self._bases[-1] + shard_offsets[1:])
            self._bases.append(self._bases[-1] + len(shard))
        self.offsets = np.concatenate(offsets)
        if (len(self.offsets) - 1, self._bases[-1]) != (self.documents, self.tokens):
            raise ValueError(f"{self.folder / 'index.json'}: the shards do not add up to its documents and tokens")
        if self.tokens == 0:
            raise ValueError(f"{self.folder}: there are no tokens in it")

    def document(self, number: int) -> np.ndarray:
        """The tokens of one document, with the one that ends it."""
        if not 0 <= number < self.documents:
            raise IndexError(f"{self.folder}: there is no document {number}; allowed: 0 to {self.documents - 1}")
        begin, end = self.offsets[number : number + 2].tolist()
        return self.piece(begin, end - begin)

    def piece(self, begin: int, length: int) -> np.ndarray:
        """Tokens of one document, by their place in the folder."""
        shard = bisect.bisect_right(self._bases, begin) - 1
        begin -= self._bases[shard]
        return self._shards[shard][begin : begin + length]

    def _read_index(self) -> dict[str, Any]:
        path = self.folder / "index.json"
        try:
            index = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ValueError(
                f"{self.folder}: there is no index.json, so this is no finished output of phsa prepare"
            ) from None
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"{path}: cannot be read: {error}") from error
        if not isinstance(index, dict) or index.get("format") != FORMAT:
            raise ValueError(f'{path}: its format is not "{FORMAT}", which is all that this version of phsa reads')
        return index

    def _field(self, part: dict[str, Any], key: str, kind: type) -> Any:
        value = part.get(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"{self.folder / 'index.json'}: {key} is missing or of another type")
        return value

    def _count(self, part: dict[str, Any], key: str) -> int:
        value = self._field(part, key, int)
        if not 0 <= value < 2**62:
            raise ValueError(f"{self.folder / 'index.json'}: {key} is out of range")
        return value

    def _read_punctuation(self, index: dict[str, Any]) -> dict[str, list[int]]:
        sets = self._field(index, "punctuation", dict)
        for ids in sets.values():
            if not isinstance(ids, list) or any(type(id) is not int or not 0 <= id < self.vocab_size for id in ids):
                raise ValueError(f"{self.folder / 'index.json'}: punctuation is not lists of token ids")
        return sets

    def _open_shard(self, entry: Any, dtype: np.dtype, verify: bool) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of a shard, and where its documents begin."""
        if not isinstance(entry, dict):
            raise ValueError(f"{self.folder / 'index.json'}: a shard is not an object")
        name = self._field(entry, "file", str)
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            raise ValueError(f"{self.folder / 'index.json'}: {name!r} is not the name of a shard")
        path = self.folder / f"{name}.tokens"
        tokens = self._map(path, dtype, self._count(entry, "tokens"))
        offsets_path = self.folder / f"{name}.offsets"
        offsets = np.array(self._map(offsets_path, np.dtype("<u8"), self._count(entry, "documents") + 1)).view("<i8")
        if offsets[0] != 0 or offsets[-1] != len(tokens) or (np.diff(offsets) <= 0).any():
            raise ValueError(f"{offsets_path}: changed since it was written; run phsa prepare again")
        if verify:
            if hashlib.sha256(tokens).hexdigest() != self._field(entry, "sha256", str):
                raise ValueError(f"{path}: changed since it was written (another sha256); run phsa prepare again")
            # `end` is nowhere else, so this leaves no other offsets than the right ones.
            if self.end is not None and (tokens[offsets[1:] - 1] != self.end).any():
                raise ValueError(f"{offsets_path}: changed since it was written; run phsa prepare again")
        return tokens, offsets

    @staticmethod
    def _map(path: Path, dtype: np.dtype, count: int) -> np.ndarray:
        try:
            size = path.stat().st_size
            if size != count * dtype.itemsize:
                raise ValueError(
                    f"{path}: {size:,} bytes instead of {count * dtype.itemsize:,}, so it was cut or changed; "
                    "run phsa prepare again"
                )
            if count == 0:
                return np.zeros(0, dtype)
            # A plain array over the mapping: slices of np.memmap cost several times as much.
            return np.asarray(np.memmap(path, dtype=dtype, mode="r", shape=(count,)))
        except FileNotFoundError:
            raise ValueError(f"{path}: missing, though index.json names it; run phsa prepare again") from None
        except OSError as error:
            raise ValueError(f"{path}: cannot be read: {error.strerror}") from error


class _Pieces(NamedTuple):
    """Parts of documents. All are arrays of the same length."""

    sequence: np.ndarray  # the sequence that a piece is in
    begin: np.ndarray  # its first token, counted from the first of the folder
    length: np.ndarray


class _Epoch(NamedTuple):
    """The sequences of one epoch: the pieces of number k are those from first[k] to first[k + 1]."""

    first: np.ndarray
    begin: np.ndarray
    length: np.ndarray


class Sequences:
    """An endless list of training sequences: ``sequences[i]`` is the list of the pieces of sequence ``i``.

    Together they have ``length`` tokens; only the last sequence of an epoch may be shorter. A document longer than
    ``length`` is cut into pieces of that length; what remains of it, and shorter documents, are packed together whole,
    the best fit first. Only what then would leave sequences unfilled is cut again. Each token comes once in an epoch;
    an epoch is ``per_epoch`` sequences, in an order of its own, packed anew.
    """

    def __init__(self, shards: Shards, length: int, seed: int) -> None:
        if not 2 <= length <= _MAX_LENGTH:
            raise ValueError(f"sequences: the length is {length}; allowed: 2 to {_MAX_LENGTH:,}")
        if not 0 <= seed < 2**64:
            raise ValueError(f"sequences: the seed is {seed}; allowed: 0 to 2^64 - 1")
        self.shards = shards
        self.length = length
        self.seed = seed
        self.per_epoch = -(-shards.tokens // length)
        self._epoch: tuple[int, _Epoch] | None = None  # the one that was asked for last

    def __getitem__(self, number: int) -> list[np.ndarray]:
        number = operator.index(number)
        if number < 0:
            raise IndexError(f"sequences: there is no number {number}; they begin at 0")
        epoch, place = divmod(number, self.per_epoch)
        current = self._epoch
        if current is None or current[0] != epoch:
            current = self._epoch = (epoch, self._pack(epoch))
        first, begin, length = current[1]
        pieces = slice(first[place], first[place + 1])
        return [
            self.shards.piece(*piece) for piece in zip(begin[pieces].tolist(), length[pieces].tolist(), strict=True)
        ]

    def _pack(self, epoch: int) -> _Epoch:
        # Raw bits and sorts: numpy promises that the stream of a bit generator stays as it is, but not what its own
        # shuffles make of it.
        generator = np.random.PCG64(np.random.SeedSequence((self.seed, epoch)))

        def random(count: int, bits: int) -> np.ndarray:
            return (generator.random_raw(count) >> np.uint64(64 - bits)).astype(np.int64)

        length = self.length
        begins, sizes = self.shards.offsets[:-1], np.diff(self.shards.offsets)
        wholes, rests = np.divmod(sizes, length)

        # Pieces as long as a sequence are sequences.
        whole = int(wholes.sum())
        within = np.arange(whole) - np.repeat(np.cumsum(wholes) - wholes, wholes)
        full = _Pieces(np.arange(whole), np.repeat(begins, wholes) + within * length, np.full(whole, length))

        # The others by length, the longest first; those of one length in a random order.
        some = np.flatnonzero(rests)
        some = some[np.argsort((length - rests[some]) << 39 | random(len(some), 39), kind="stable")]
        begins, rests = (begins + wholes * length)[some], rests[some]
        packed = _fill(_Pieces(_best_fit(rests, length), begins, rests), self.per_epoch - whole, length)
        packed = packed._replace(sequence=whole + packed.sequence)

        # The last sequence stays the last: it is the one that may be short.
        place = np.arange(self.per_epoch)
        place[np.argsort(random(self.per_epoch - 1, 63), kind="stable")] = np.arange(self.per_epoch - 1)
        pieces = _Pieces(*map(np.concatenate, zip(full, packed, strict=True)))
        places = place[pieces.sequence]
        order = np.argsort(places << 24 | random(len(places), 24), kind="stable")
        first = np.append(0, np.cumsum(np.bincount(places, minlength=self.per_epoch)))
        return _Epoch(first, pieces.begin[order], pieces.length[order])


def _best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Best-fit-decreasing packing: a bin for each of these lengths, which descend from at most ``capacity``.

    All items of a length go at once into all bins with the same space, so the work grows with the number of different
    lengths and not with the number of items.
    """
    bin_of = np.empty(len(lengths), dtype=np.int64)
    bins = 0
    spaces: list[int] = []  # that some bin has left, ascending
    with_space: dict[int, list[np.ndarray]] = {}

    def put_back(members: np.ndarray, space: int) -> None:
        if len(members) == 0 or space == 0:
            return
        if space not in with_space:
            with_space[space] = []
            bisect.insort(spaces, space)
        with_space[space].append(members)

    changes = np.flatnonzero(np.diff(lengths)) + 1
    ends = [*changes.tolist(), len(lengths)] if len(lengths) else []
    at = 0
    for end in ends:
        size = int(lengths[at])
        while at < end:
            tightest = bisect.bisect_left(spaces, size)
            if tightest < len(spaces):
                space = spaces[tightest]
                members = with_space[space].pop()
                if not with_space[space]:
                    del with_space[space], spaces[tightest]
            else:
                space = capacity
                members = np.arange(bins, bins - (at - end) // (capacity // size))
                bins += len(members)
            each = space // size
            count = min(len(members) * each, end - at)
            filled, more = divmod(count, each)
            bin_of[at : at + count] = members[np.arange(count) // each]
            at += count
            put_back(members[:filled], space - each * size)
            put_back(members[filled : filled + (more > 0)], space - more * size)
            put_back(members[filled + (more > 0) :], space)
    return bin_of


def _fill(items: _Pieces, sequences: int, length: int) -> _Pieces:
    """Makes this many sequences of bins that may be more: the emptiest are cut to fill the others, and what is left of
    them is the last sequence."""
    if sequences == 0:
        return items
    used = np.bincount(items.sequence, weights=items.length).astype(np.int64)
    by_gap = np.argsort(length - used, kind="stable")
    rank = np.empty(len(used), dtype=np.int64)
    rank[by_gap] = np.arange(len(used))
    sequence = rank[items.sequence]
    keep = sequence < sequences - 1
    kept = _Pieces(sequence[keep], items.begin[keep], items.length[keep])
    # What is to be spread, and the gaps, are two divisions of one line: it is cut at the points of both.
    begins, lengths = items.begin[~keep], items.length[~keep]
    item_ends = np.cumsum(lengths)
    gap_ends = np.cumsum(np.append((length - used)[by_gap[: sequences - 1]], length))
    ends = np.unique(np.concatenate([item_ends, gap_ends[(gap_ends > 0) & (gap_ends < item_ends[-1])]]))
    starts = np.append(0, ends[:-1])
    item = np.searchsorted(item_ends, starts, side="right")
    gap = np.searchsorted(gap_ends, starts, side="right")
    spread = _Pieces(gap, begins[item] + starts - (item_ends - lengths)[item], ends - starts)
    return _Pieces(*map(np.concatenate, zip(kept, spread, strict=True)))
