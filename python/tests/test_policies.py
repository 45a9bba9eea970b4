"""The package's table of policies is the library's."""

from __future__ import annotations

import ctypes
import dataclasses

import pytest

from phsa import Settings, _library
from phsa.policies import OWN, TABLE, Policy

_FACTS = [field.name for field in dataclasses.fields(Policy) if field.name not in ("name", "number")]


class _Info(ctypes.Structure):
    """phsa_policy_info."""

    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        *((name, ctypes.c_int32) for name in ("plans", "cuda", *_FACTS)),
        ("name", ctypes.c_char_p),
        ("label", ctypes.c_char_p),
    ]


def _of_the_library() -> list[Policy]:
    """Those that plans take, in the order of their numbers."""
    library = _library.load()
    out: list[Policy] = []
    info = _Info(struct_size=ctypes.sizeof(_Info))
    number = 0
    while library.phsa_policy_describe(number, ctypes.byref(info)) == 0:
        if info.plans:
            out.append(Policy(info.name.decode(), number, **{fact: getattr(info, fact) for fact in _FACTS}))
        number += 1
    return out


def test_the_table_is_that_of_the_library() -> None:
    assert _of_the_library() == list(TABLE.values())


def test_the_names_are_the_keys() -> None:
    assert [policy.name for policy in TABLE.values()] == list(TABLE)
    assert OWN in TABLE


@pytest.mark.parametrize("policy", TABLE)
def test_settings_are_made_of_each(policy: str) -> None:
    assert Settings(policy=policy).block == TABLE[policy].block()
    assert Settings().replace(policy=policy).policy == policy
