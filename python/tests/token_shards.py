"""Token shards as `phsa prepare` writes them, without it."""

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
