"""Files that appear whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def sync(path: Path) -> None:
    """Waits until a file or the names in a folder are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            sync(path)
    sync(folder)


def write_text(path: Path, text: str) -> None:
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8")
    sync(new)
    new.replace(path)


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")
