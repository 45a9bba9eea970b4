"""The model in training: its weights, its attention, its shards over the processes, and its loss."""

from __future__ import annotations

import copy
import types
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from transformers import PreTrainedModel

from .. import punctuation as punctuation_sets
from ..hf import packed
from ..hf.hook import find_decoder
from ..hf.load import load_model, load_tokenizer
from ..hf.switch import set_attention
from ..settings import ModelSettings, is_dense
from . import checkpoints, context, identity
from .batches import Batch
from .config import Config, ConfigError
from .identity import Start
from .lora import add_adapter, fill_adapter, without_adapter
from .loss import sliced_loss


def fuse_norms(model: nn.Module) -> int:
    """Lets PyTorch's one kernel compute the RMS norms that transformers writes as seven; returns how many. On an H200
    they are a fifth of a step of Qwen3-0.6B at 32k otherwise. A norm that is written differently is left alone."""

    def fused(self: nn.Module, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)

    count = 0
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if not hasattr(module, "variance_epsilon") or not isinstance(weight, Tensor) or weight.dim() != 1:
            continue
        probe = torch.linspace(-3, 2, weight.shape[0], device=weight.device, dtype=weight.dtype)
        with torch.no_grad():
            theirs, ours = module(probe).float(), fused(module, probe).float()
        if float((ours - theirs).norm()) <= 0.02 * float(theirs.norm()):
            module.forward = types.MethodType(fused, module)
            count += 1
    return count


def _hidden(self: PreTrainedModel, batch: Batch) -> Tensor:
    """The last layer's output: (tokens, width)."""
    # With context parallelism the bounds are those of a row of which the tokens at hand are a part.
    rows = {"cu_seq_lens_q": batch.bounds} if batch.context is None else {"phsa_context": batch.context}
    out = find_decoder(self)(input_ids=batch.tokens, position_ids=batch.positions, use_cache=False, **rows)
    return out.last_hidden_state[0]


def _training_loss(
    self: PreTrainedModel, batch: Batch, teacher: Tensor | None, teacher_weight: Tensor | None, **weights: float
) -> tuple[Tensor, Tensor, Tensor]:
    weight = self.get_output_embeddings().weight
    if teacher is not None and teacher_weight is None:
        teacher_weight = weight
    hidden = _hidden(self, batch)
    return sliced_loss(hidden, weight, batch.labels, teacher=teacher, teacher_weight=teacher_weight, **weights)


class Trainee:
    """One model on all processes. Calls are collective: every process makes the same ones."""

    def __init__(
        self,
        config: Config,
        punctuation: Mapping[str, Any],
        device: torch.device,
        world: int,
        start: Start | None = None,
    ) -> None:
        self.config = config
        self.device = device
        dtype = getattr(torch, config.model.dtype)
        full = config.lora is None
        # Trained weights are kept in float32; FSDP casts them for the products, on one process too.
        self._sharded = world > 1 or (full and dtype != torch.float32)
        model = load_model(config.model.path, torch.float32 if full else dtype)
        self.settings = config.attention.settings(config.data.length, getattr(model.config, "phsa", None))
        self.dense = ModelSettings(self.settings.base.replace(policy="dense"))
        marks = self.settings.base.punctuation
        sparse = self.settings.layers or not is_dense(self.settings.base.policy)
        if sparse and marks not in punctuation:
            # Token folders bring the ids of the usual sets; of others the tokenizer tells.
            own = punctuation_sets.ids(load_tokenizer(config.model.path), marks) if isinstance(marks, str) else marks
            punctuation = {**punctuation, marks: own}
        self._punctuation = punctuation
        longest = model.config.max_position_embeddings
        if config.data.length > longest:
            raise ConfigError(f"data.length is {config.data.length}; the model's context is {longest} tokens")
        self.context: context.Context | None = None
        if config.context_parallel > 1:
            context.check_config(model.config, config.context_parallel)
            heads = context.kv_heads(model.config)
            self.context = context.Context(config.context_parallel, heads, device.type, world)
            self._flags = self._flag_table(model.config.vocab_size)
        self.digest = identity.of_weights(model)
        self.teacher: PreTrainedModel | None = None
        if config.distill.weight and full:
            self.teacher = copy.deepcopy(model).to(device, dtype).requires_grad_(False).eval()
            self.teacher.set_attn_implementation(packed.NAME if self.context is None else context.NAME)
        if not full:
            assert config.lora is not None
            add_adapter(model, config.lora, config.seed)
            if start is not None and start.kind == "adapter":
                fill_adapter(start.folder, model)
        elif start is not None and start.kind == "model":
            # After the teacher: that stays model.path, as the base of an adapter does.
            self._take_weights(model, start)
        model.to(device)
        model.train()
        model.config.use_cache = False
        if device.type == "cuda":
            fuse_norms(model)
        if config.model.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        # Methods of the model, because FSDP gathers the weights only for calls that it knows.
        model.training_loss = types.MethodType(_training_loss, model)
        model.hidden = types.MethodType(_hidden, model)
        self.model = model
        layers = find_decoder(model).layers
        if config.model.compile:
            for layer in layers:
                layer.compile()
        if self._sharded:
            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32) if full else None
            mesh = init_device_mesh(device.type, (world,))
            options: dict[str, Any] = {"mesh": mesh} | ({"mp_policy": policy} if policy else {})
            # One process shards nothing and only casts: all weights at once, for a fifth less of the host's time.
            for layer in layers if world > 1 else ():
                fully_shard(layer, **options)
            fully_shard(model, **options)
            for name in ("training_loss", "hidden"):
                register_fsdp_forward_method(model, name)
        if start is not None and start.kind == "checkpoint":
            checkpoints.load(start.folder, model, None)
        self.attend(self.settings)

    @staticmethod
    def _take_weights(model: PreTrainedModel, start: Start) -> None:
        try:
            model.load_state_dict(load_model(str(start.folder), torch.float32).state_dict())
        except RuntimeError as error:
            raise ConfigError(f"init_from is {str(start.folder)!r}, a model of another shape: {error}") from None

    def attend(self, settings: ModelSettings) -> None:
        set_attention(self.model, settings.to_json(), self._punctuation, self.config.attention.backend)
        if self.context is not None:
            self.model.set_attn_implementation(context.NAME)

    def _flag_table(self, words: int) -> Tensor | None:
        """Which tokens are punctuation: (words,), or None where nothing asks."""
        if not self.settings.needs_flags:
            return None
        marks = self.settings.base.punctuation
        table = torch.zeros(words, dtype=torch.uint8)
        table[torch.tensor(list(self._punctuation[marks]), dtype=torch.long)] = 1
        return table.to(self.device)

    def _placed(self, batch: Batch, settings: ModelSettings) -> Batch:
        """With context parallelism the layers need to know the whole row."""
        if self.context is None:
            return batch
        assert batch.row is not None
        flags = self._flags[batch.row] if self._flags is not None and settings.needs_flags else None
        backend = self.config.attention.backend
        return replace(batch, context=context.ContextAttention.of(self.context, settings, backend, batch.bounds, flags))

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def _teacher(self, batch: Batch) -> tuple[Tensor | None, Tensor | None]:
        """What the untrained model with dense attention makes of a batch, and its output weights if they are others."""
        if not self.config.distill.weight:
            return None, None
        batch = self._placed(batch, self.dense)
        if self.teacher is not None:
            with torch.no_grad():
                return _hidden(self.teacher, batch), self.teacher.get_output_embeddings().weight
        self.attend(self.dense)
        try:
            with torch.no_grad(), without_adapter(self.model):
                return self.model.hidden(batch), None
        finally:
            self.attend(self.settings)

    def loss(self, batch: Batch, factor: float) -> tuple[Tensor, Tensor, Tensor]:
        """The loss to differentiate (times factor), the sum of the next-token losses, that of the divergences."""
        teacher, teacher_weight = self._teacher(batch)
        weights = {"next_token": self.config.distill.next_token, "distill": self.config.distill.weight}
        batch = self._placed(batch, self.settings)
        return self.model.training_loss(batch, teacher, teacher_weight, factor=factor, **weights)

    @torch.no_grad()
    def held_out_loss(self, batches: list[Batch], settings: ModelSettings) -> float:
        """Mean next-token loss with other settings, per token."""
        self.attend(settings)
        self.model.eval()
        try:
            total = torch.zeros(2, dtype=torch.float64, device=self.device)
            for batch in batches:
                batch = self._placed(batch.to(self.device), settings)
                _, nll, _ = self.model.training_loss(batch, None, None)
                total += torch.stack((nll, nll.new_tensor(batch.predicted)))
            if self.context is not None:
                total = self.context.sum(total)
        finally:
            self.model.train()
            self.attend(self.settings)
        return float(total[0] / total[1].clamp(min=1))

    def gather_gradients(self, now: bool) -> None:
        """Gradients of all micro-batches but a step's last need not meet those of the other processes."""
        if self._sharded:
            self.model.set_requires_gradient_sync(now)
