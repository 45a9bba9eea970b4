"""Models as transformers loads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from .._library import LibraryError, load_engine


def _where(model: str) -> tuple[str, dict[str, Any]]:
    path = Path(model)
    if "/" not in model and not path.exists():
        path = Path(_packaged(model) or model)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"{model}: there is no such file")
        return str(path.parent), {"gguf_file": path.name}
    return model, {}


def _packaged(name: str) -> str | None:
    """The file of a model that `phsa models` lists, where the engine is installed that knows them."""
    try:
        return load_engine().packaged_model(name)
    except LibraryError:
        return None


def load_model(model: str, dtype: torch.dtype) -> PreTrainedModel:
    """A folder or name of Hugging Face, a name of `phsa models`, or a .gguf file, which transformers then turns back
    into plain weights."""
    name, options = _where(model)
    if options and hasattr(transformers, "GgufConfig"):
        # Newer versions leave the weights packed where they have kernels for that; those cannot be trained beside.
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **options)


def load_tokenizer(model: str) -> Any:
    name, options = _where(model)
    return AutoTokenizer.from_pretrained(name, **options)
