"""PEFT saves adapters without the configuration of their model. The attention that they were trained with goes along in
`phsa.json`, the file that `phsa --adapter` reads, and comes back when they are loaded."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from .hook import find_decoder, warn_where_unused

_SETTINGS = "phsa.json"
_IDS = "phsa_punctuation_ids.json"  # of a set that has no name


def _decoder(peft_model: Any) -> Any:
    model = peft_model.get_base_model()
    return find_decoder(model) if isinstance(model, PreTrainedModel) else None


def _save(peft_model: Any, folder: str | os.PathLike, selected: list[str] | None) -> None:
    decoder = _decoder(peft_model)
    settings = getattr(getattr(decoder, "config", None), "phsa", None)
    if not settings:
        return
    for name in selected or list(peft_model.peft_config):
        path = Path(folder) if name == "default" else Path(folder) / name
        (path / _SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        if settings.get("punctuation") == "custom":
            (path / _IDS).write_text(json.dumps(decoder.config.phsa_punctuation_ids) + "\n", encoding="utf-8")


def _load(peft_model: Any, folder: str | os.PathLike) -> None:
    """The model then has what the adapter carries, unless it has settings already; enable() makes it use them."""
    path, decoder = Path(folder), _decoder(peft_model)
    if decoder is None or getattr(decoder.config, "phsa", None) or not (path / _SETTINGS).is_file():
        return
    decoder.config.phsa = json.loads((path / _SETTINGS).read_text(encoding="utf-8"))
    if (path / _IDS).is_file():
        decoder.config.phsa_punctuation_ids = json.loads((path / _IDS).read_text(encoding="utf-8"))
    warn_where_unused(decoder)


def register() -> None:
    """PEFT has no place to say so, which is why two of its methods are wrapped."""
    try:
        from peft import PeftModel
    except ImportError:
        return
    if hasattr(PeftModel.save_pretrained, "_phsa"):
        return
    save, load = PeftModel.save_pretrained, PeftModel.load_adapter

    @functools.wraps(save)
    def save_pretrained(self: Any, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> Any:
        out = save(self, save_directory, *args, **kwargs)
        if kwargs.get("is_main_process", True):
            _save(self, save_directory, kwargs.get("selected_adapters"))
        return out

    @functools.wraps(load)
    def load_adapter(self: Any, model_id: str | os.PathLike, *args: Any, **kwargs: Any) -> Any:
        out = load(self, model_id, *args, **kwargs)
        _load(self, Path(model_id) / (kwargs.get("subfolder") or ""))
        return out

    save_pretrained._phsa = True  # type: ignore[attr-defined]
    PeftModel.save_pretrained, PeftModel.load_adapter = save_pretrained, load_adapter
