"""Sparse attention in SGLang: `sglang serve --model-path MODEL --attention-backend phsa --page-size 16`, with phsa
installed beside SGLang.

SGLang finds `register` by its entry point (sglang.srt.plugins) and calls it in each of its processes. docs/vllm.md has
a section on it.
"""

from __future__ import annotations

from typing import Any

__all__ = ["NAME", "register"]

NAME = "phsa"


def register() -> None:
    """Makes the backend known to SGLang. May be called again."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices

    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])
    if NAME not in ATTENTION_BACKENDS:
        register_attention_backend(NAME)(_create)


def _create(runner: Any) -> Any:
    from .backend import PhsaAttnBackend

    return PhsaAttnBackend(runner)
