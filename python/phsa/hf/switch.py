"""Another attention for a model from one call to the next: for comparisons, and between training and evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel

from ..settings import is_dense
from . import disable, enable, packed
from .hook import find_decoder


def set_attention(
    model: PreTrainedModel,
    attention: Mapping[str, Any],
    punctuation: Mapping[str, Sequence[int]],
    backend: str = "auto",
) -> None:
    """Makes a model attend by settings in JSON's form; dense is SDPA, which packed sequences do not slow down.
    `punctuation` has the ids of each named set."""
    if is_dense(attention["attention"]) and not attention.get("layers"):
        disable(model)
        model.set_attn_implementation(packed.NAME)
        return
    config = find_decoder(model).config
    config.phsa = dict(attention)
    name = attention["punctuation"]
    enable(model, punctuation=punctuation[name] if isinstance(name, str) else name, backend=backend, check=False)
    # enable() calls ids that it is given "custom"; these are the named set's.
    if isinstance(name, str):
        config.phsa = {**config.phsa, "punctuation": name}
