"""The attention's settings. Written by `phsa settings --as-python` from src/attention/setting_list.h."""

from __future__ import annotations

from typing import NamedTuple


class Setting(NamedTuple):
    name: str
    kind: str
    python: str = ""  # where it is not the name
    old_name: str = ""  # in JSON of the first version
    choices: tuple[int, ...] | tuple[str, ...] = ()
    high: int = 0
    of_blocks: bool = False  # multiples of the block


SETTINGS = (
    Setting("attention", "policy", python="policy"),
    Setting("block", "int", old_name="block_size", choices=(16, 32, 64)),
    Setting("init", "int", old_name="init_tokens", high=1073741824, of_blocks=True),
    Setting("local", "int", old_name="local_tokens", high=1073741824, of_blocks=True),
    Setting("top_k", "int", high=65536),
    Setting("lambda", "number", python="lam"),
    Setting("group_reduce", "name", choices=("sum", "max", "none")),
    Setting("dense_below", "int", high=1073741824, of_blocks=True),
    Setting("parts", "int", choices=(1, 2, 4, 8)),
    Setting("survivors", "int", high=1073741824),
    Setting("punctuation", "text"),
)
