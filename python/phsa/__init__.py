"""phsa: sparse attention for large language models.

``phsa.LLM`` runs a language model. ``phsa.ops`` holds the PyTorch operators, ``phsa.punctuation`` the flag tables,
``phsa.hf`` the Hugging Face integration and ``phsa.settings`` the settings they share. Importing ``phsa`` alone needs
neither PyTorch nor transformers, and loads nothing large.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._library import LibraryError, set_target, target, targets
from .settings import ModelSettings, Settings

if TYPE_CHECKING:
    from .llm import LLM, Generation, Inspection, LogLikelihood

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "Generation",
    "Inspection",
    "LibraryError",
    "LogLikelihood",
    "ModelSettings",
    "Settings",
    "__version__",
    "set_target",
    "target",
    "targets",
]
_OF_LLM = ("LLM", "Generation", "Inspection", "LogLikelihood")


def __getattr__(name: str) -> object:
    # NumPy takes a moment to import, and the operators do without it.
    if name in _OF_LLM:
        from . import llm

        return getattr(llm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_OF_LLM})
