"""Which tokens of a vocabulary count as punctuation: one flag byte per token id.

The sets are those of libphsa (``en``, ``zh``, ``en+zh``, ``sentence``, ``pure``, ``none``, or a file of ids or
strings); this module only finds the raw bytes of each token. A tokenizer is a transformers fast tokenizer, a
``tokenizers.Tokenizer``, or the path of a ``tokenizer.json`` or of the folder that holds it.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import _library

__all__ = ["flag_table", "ids", "token_bytes"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """Byte-level BPE writes each byte as a printable character: those that have none get the next free ones."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return table


def _description(tokenizer: Any) -> dict[str, Any]:
    """The content of tokenizer.json."""
    if isinstance(tokenizer, (str, Path)):
        path = Path(tokenizer)
        if path.is_dir():
            path = path / "tokenizer.json"
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ValueError(f"punctuation: there is no {path}") from None
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"punctuation: {path} is not valid JSON: {error}") from error
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not hasattr(backend, "to_str"):
        raise ValueError(
            f"punctuation: {type(tokenizer).__name__} has no tokenizer.json behind it; allowed: a fast tokenizer of "
            "transformers, a tokenizers.Tokenizer, or the path of a tokenizer.json"
        )
    return json.loads(backend.to_str())


def _steps(part: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """A pre-tokenizer or decoder, or the parts of a sequence of them."""
    if part is None:
        return
    if part.get("type") == "Sequence":
        for step in [*part.get("decoders", ()), *part.get("pretokenizers", ())]:
            yield from _steps(step)
    else:
        yield part


def _from_byte_level(token: str) -> bytes | None:
    table = _byte_of_character()
    return bytes(table[c] for c in token) if all(c in table for c in token) else None


def _from_sentencepiece(token: str) -> bytes | None:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.replace("\u2581", " ").encode()


def token_bytes(tokenizer: Any) -> tuple[list[bytes], list[bool]]:
    """The raw bytes of every token, by id, and which ids are special. Ids without a token are special and empty."""
    description = _description(tokenizer)
    model = description.get("model") or {}
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, list):  # Unigram: a list of pairs
        vocabulary = {entry[0]: index for index, entry in enumerate(vocabulary)}
    if not isinstance(vocabulary, dict):
        raise ValueError("punctuation: the tokenizer has no vocabulary")
    types = [step.get("type") for part in ("pre_tokenizer", "decoder") for step in _steps(description.get(part))]
    if "ByteLevel" in types:
        decode = _from_byte_level
    elif "Metaspace" in types or "ByteFallback" in types:
        decode = _from_sentencepiece
    else:
        raise ValueError(
            "punctuation: cannot tell the bytes of this tokenizer's tokens; allowed: byte-level BPE and SentencePiece"
        )
    added = description.get("added_tokens") or []
    size = 1 + max([*vocabulary.values(), *(token["id"] for token in added)], default=-1)
    tokens = [b""] * size
    special = [True] * size
    for token, index in vocabulary.items():
        raw = decode(token)
        # A byte-level token with other characters in it is not text that the model can produce from bytes.
        if raw is not None:
            tokens[index], special[index] = raw, False
    for token in added:
        tokens[token["id"]], special[token["id"]] = token["content"].encode(), bool(token.get("special"))
    for index in getattr(tokenizer, "all_special_ids", ()):
        special[index] = True
    return tokens, special


def flag_table(tokenizer: Any, punctuation: str = "en+zh", size: int | None = None) -> bytes:
    """One byte per token id, 1 where it is punctuation. ``size``: of the model's vocabulary, where it is larger."""
    tokens, special = token_bytes(tokenizer)
    table = _library.punctuation_table(punctuation, tokens, special)
    return table if size is None else table.ljust(size, b"\0")


def ids(tokenizer: Any, punctuation: str = "en+zh") -> list[int]:
    """The token ids that are punctuation, ascending."""
    return [index for index, flag in enumerate(flag_table(tokenizer, punctuation)) if flag]
