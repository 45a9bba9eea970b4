"""Sparse attention in vLLM: `vllm serve MODEL --attention-backend CUSTOM`, with phsa installed beside vLLM.

vLLM finds `register` by its entry point (vllm.general_plugins) and calls it in each of its processes. Nothing changes
for who does not ask for CUSTOM. docs/vllm.md says what can be served, with which settings and versions.
"""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Makes phsa's backends and the flags of models known to vLLM. May be called again."""
    from . import plugin

    plugin.register()
