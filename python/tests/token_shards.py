"""Token shards as `phsa prepare` writes them, without it, and the file of a run that trains on them."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np


def write_documents(
    folder: Path, shards: Sequence[Sequence[np.ndarray]], vocab_size: int, end: int | None = None, dtype: str = "uint16"
) -> Path:
    """One shard for each list of documents; a document has its end in it already."""
    folder.mkdir(parents=True)
    entries = []
    for number, documents in enumerate(shards):
        tokens = np.concatenate(documents).astype(dtype)
        name = f"shard-{number:05}"
        (folder / f"{name}.tokens").write_bytes(tokens.tobytes())
        offsets = np.cumsum([0, *(len(document) for document in documents)])
        (folder / f"{name}.offsets").write_bytes(offsets.astype("<u8").tobytes())
        digest = hashlib.sha256(tokens.tobytes()).hexdigest()
        entries.append({"file": name, "documents": len(documents), "tokens": len(tokens), "sha256": digest})
    index = {
        "format": "phsa tokens 1",
        "dtype": dtype,
        "vocab_size": vocab_size,
        "end": end,
        "punctuation": {"en": [3, 5], "en+zh": [3, 5, 6]},
        "documents": sum(entry["documents"] for entry in entries),
        "tokens": sum(entry["tokens"] for entry in entries),
        "shards": entries,
    }
    (folder / "index.json").write_text(json.dumps(index))
    return folder


def write_config(folder: Path, out: Path, length: int, sections: str, start: str = "") -> Path:
    """A run on the model and the tokens of the folder, with sparse attention that leaves much out.
    `start`: lines before any table."""
    path = out.with_suffix(".toml")
    path.write_text(
        f"""
out = {json.dumps(str(out))}
{start}
device = "cpu"
[model]
path = {json.dumps(str(folder / "model"))}
dtype = "float32"
[attention]
top_k = 2
init = 16
local = 32
[data]
train = {json.dumps(str(folder / "tokens"))}
held_out = {json.dumps(str(folder / "held-out"))}
length = {length}
[evaluate]
sequences = 2
{sections}
""",
        encoding="utf-8",
    )
    return path
