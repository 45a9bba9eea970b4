"""Low-rank adapters (LoRA) in PEFT's format, without PEFT: two small matrices beside each chosen linear layer."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..settings import ModelSettings
from .config import ConfigError, Lora
from .files import write_json


class LoraLinear(nn.Module):
    """A frozen linear layer and its adapter: base(x) + (alpha / rank) B A x. The adapter is trained in float32."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base = base
        self.scale = alpha / rank
        self.enabled = True
        device = base.weight.device
        self.lora_A = nn.Parameter(torch.empty(rank, base.in_features, dtype=torch.float32, device=device))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank, dtype=torch.float32, device=device))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        out = self.base(x)
        if not self.enabled:
            return out
        narrow = F.linear(x, self.lora_A.to(x.dtype)).flatten(0, -2)
        # One product that also scales and adds.
        wide = torch.addmm(out.flatten(0, -2), narrow, self.lora_B.to(x.dtype).t(), alpha=self.scale)
        return wide.view_as(out)


def add_adapter(model: PreTrainedModel, lora: Lora, seed: int) -> None:
    """Freezes the model and puts an adapter beside each linear layer whose name is a target."""
    model.requires_grad_(False)
    chosen = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.rsplit(".", 1)[-1] in lora.targets
    ]
    missing = set(lora.targets) - {name.rsplit(".", 1)[-1] for name, _ in chosen}
    if missing:
        have = sorted({name.rsplit(".", 1)[-1] for name, one in model.named_modules() if isinstance(one, nn.Linear)})
        raise ConfigError(f"lora.targets has {sorted(missing)[0]!r}; this model has {', '.join(have)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name, module in chosen:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, LoraLinear(module, lora.rank, lora.alpha))


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """The model as it was before training."""
    layers = [module for module in model.modules() if isinstance(module, LoraLinear)]
    for layer in layers:
        layer.enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.enabled = True


def peft_name(name: str) -> str:
    """`model.layers.0.self_attn.q_proj.lora_A`, as PEFT calls it."""
    return f"base_model.model.{name}.weight"


def save_adapter(
    folder: Path, tensors: Mapping[str, Tensor], lora: Lora, base_model: str, settings: ModelSettings
) -> None:
    """PEFT's two files, and the attention that it was trained with for `phsa --adapter`."""
    dtype = getattr(torch, lora.save_dtype)
    named = {peft_name(name): tensor.to("cpu", dtype).contiguous() for name, tensor in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    alpha = int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha
    configuration = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": lora.rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": list(lora.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "inference_mode": True,
    }
    write_json(folder / "adapter_config.json", configuration)
    write_json(folder / "phsa.json", settings.to_json())


def load_adapter(folder: Path, model: PreTrainedModel) -> None:
    """Puts the adapter of a folder into a model that has none yet."""
    configuration = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    plain = {"peft_type": "LORA", "use_rslora": False, "use_dora": False, "bias": "none", "fan_in_fan_out": False}
    plain |= {"rank_pattern": {}, "alpha_pattern": {}, "modules_to_save": None}
    for name, value in plain.items():
        if configuration.get(name, value) != value:
            raise ValueError(f"{folder}: {name} is {configuration[name]!r}; allowed here: {value!r}. PEFT loads it")
    lora = Lora(
        rank=configuration["r"],
        alpha=float(configuration["lora_alpha"]),
        targets=tuple(configuration["target_modules"]),
    )
    add_adapter(model, lora, seed=0)
    fill_adapter(folder, model)


def fill_adapter(folder: Path, model: PreTrainedModel) -> None:
    """The weights of a folder into the adapter that a model has."""
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, parameter in model.named_parameters():
        if name.endswith((".lora_A", ".lora_B")):
            with torch.no_grad():
                if peft_name(name) not in tensors:
                    raise ValueError(f"{folder}: the adapter lacks {peft_name(name)}, which the model needs")
                parameter.copy_(tensors.pop(peft_name(name)))
    if tensors:
        raise ValueError(f"{folder}: the adapter has {next(iter(tensors))}, which the model does not have")
