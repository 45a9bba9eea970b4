"""The key-value cache with what the attention adds to it: flags and representatives, layer by layer.

generate() makes a DynamicCache and hands it to the model; `adopt` exchanges its layers for ours, so that everything
that moves keys about (beam search, cropping, batch selection) moves flags and representatives with them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, StaticCache, StaticLayer

from .. import ops
from .._fallback import Blocks
from ..settings import Settings


def _represent(settings: Settings, keys: Tensor, flags: Tensor | None, out: Tensor, start: int, end: int) -> None:
    """Computes all representatives of one sequence anew: of keys (kv_heads, tokens, head_dim) from start to end."""
    if end <= start:
        return
    reps = ops.representatives(
        keys.transpose(0, 1)[start:end],
        None if flags is None else flags[start:end],
        lam=settings.lam,
        block=settings.block,
        policy=settings.policy,
    )
    out[: reps.shape[0]] = reps


class PhsaLayer(DynamicLayer):
    """A DynamicLayer with one flag per token and one representative per complete block.

    keys, values: (batch, kv_heads, tokens, head_dim); flags: (batch, tokens) or None where they are not known;
    reps: (batch, rows, kv_heads, width), of which those of the first `rep_tokens` columns are valid.
    """

    def __init__(self, **kwargs: object) -> None:
        super().__init__(**kwargs)
        self._forget()

    def _forget(self) -> None:
        self._room: tuple[Tensor, Tensor] | None = None  # keys and values with space at the end
        self.flags: Tensor | None = None
        self.reps: Tensor | None = None
        self.rep_tokens = 0
        self.rep_settings: tuple | None = None
        self.starts: list[int] = []  # the column of each row's first real token, for which reps were computed
        self.packed = False

    @staticmethod
    def take(layer: DynamicLayer) -> PhsaLayer:
        """Takes over the content of a plain layer. The flags of the tokens in it are not known."""
        out = PhsaLayer()
        out.__dict__.update(layer.__dict__)
        return out

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Adds tokens. Into room that is there already, because copying the whole cache for every token would cost
        more than sparse attention over it."""
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            self._room = None
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        past = self.get_seq_length()
        tokens = past + key_states.shape[-2]
        if past == 0 or not self._has_room(tokens):
            self._room = tuple(
                new.new_empty((*new.shape[:2], tokens + max(64, tokens // 8), new.shape[-1]))
                for new in (key_states, value_states)
            )
            if past > 0:
                self._room[0][:, :, :past] = self.keys
                self._room[1][:, :, :past] = self.values
        for room, new in zip(self._room, (key_states, value_states), strict=True):
            room[:, :, past:tokens] = new
        self.keys, self.values = (room[:, :, :tokens] for room in self._room)
        return self.keys, self.values

    def _has_room(self, tokens: int) -> bool:
        # Reordering and selecting replace keys and values; cropping leaves them where they are.
        return self._room is not None and all(
            room.data_ptr() == kept.data_ptr() and room.shape[0] == kept.shape[0] and room.shape[2] >= tokens
            for room, kept in zip(self._room, (self.keys, self.values), strict=True)
        )

    def add_flags(self, flags: Tensor | None) -> None:
        """The flags of the tokens that were just added: (batch, new tokens)."""
        if flags is None:
            return
        past = self.get_seq_length() - flags.shape[1]
        if past == 0:
            self.flags = flags.to(self.keys.device)
        elif self.flags is not None and self.flags.shape[1] == past:
            self.flags = torch.cat((self.flags, flags.to(self.flags.device)), dim=1)
        else:
            raise ValueError(
                f"phsa: the cache holds {past} tokens of which {0 if self.flags is None else self.flags.shape[1]} have "
                "flags. It was filled while phsa was off; start with an empty cache"
            )

    def ready_reps(self, settings: Settings, starts: list[int], past: int) -> tuple[Tensor, int]:
        """Representatives with room for all complete blocks, those of the first `past` columns valid: (batch · rows,
        kv_heads, width), and the rows per sequence."""
        blocks = Blocks.of(settings)
        batch, kv_heads, tokens, head_dim = self.keys.shape
        key = (settings.policy, settings.block, settings.lam)
        if self.rep_settings != key or self.starts != starts:
            self.rep_settings, self.starts, self.rep_tokens = key, list(starts), 0
            self.reps = None
        needed = max(1, blocks.rep_rows(tokens))
        if self.reps is None or self.reps.shape[1] < needed or self.reps.dtype != self.keys.dtype:
            rows = needed if self.reps is None else max(needed, 2 * self.reps.shape[1])
            grown = self.keys.new_zeros((batch, rows, kv_heads, blocks.rep_width(head_dim)))
            if self.reps is not None:
                grown[:, : self.reps.shape[1]] = self.reps
            self.reps = grown
        if self.rep_tokens < past and blocks.rep_rows(past) > 0:
            for row, start in enumerate(starts):
                self._represent(settings, row, start, past)
        self.rep_tokens = tokens
        return self.reps.flatten(0, 1), self.reps.shape[1]

    def _represent(self, settings: Settings, row: int, start: int, past: int) -> None:
        """Computes all representatives of one sequence anew."""
        assert self.reps is not None
        flags = None if self.flags is None else self.flags[row]
        _represent(settings, self.keys[row], flags, self.reps[row], start, past)

    # What moves keys moves the rest.

    def reset(self) -> None:
        super().reset()
        self._forget()

    def crop(self, *args: int, **kwargs: int) -> None:
        super().crop(*args, **kwargs)
        # Representatives beyond the end are written again when their blocks are complete again.
        tokens = self.get_seq_length()
        if self.flags is not None:
            self.flags = self.flags[:, :tokens]
        self.rep_tokens = min(self.rep_tokens, tokens)

    def _select(self, indices: Tensor) -> None:
        for name in ("flags", "reps"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, tensor.index_select(0, indices.to(tensor.device)))
        if self.starts:
            self.starts = [self.starts[index] for index in indices.tolist()]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        batch = self.keys.shape[0] if self.get_seq_length() > 0 else 0
        super().batch_repeat_interleave(repeats)
        if batch:
            self._select(torch.arange(batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        batch = self.keys.shape[0] if self.get_seq_length() > 0 else 0
        super().batch_select_indices(indices)
        if batch:
            self._select(torch.arange(batch)[torch.as_tensor(indices).cpu()])


class PhsaStaticLayer(StaticLayer):
    """A StaticLayer with flags and representatives of fixed sizes, so that a compiled graph can fill them.

    keys, values: (batch, kv_heads, room, head_dim); flags: (batch, room); reps: (batch, rows, kv_heads, width). state,
    int64 on the CPU, has for each row the first real column and up to which column representatives are valid, and in a
    last row the tokens that are known here: a cache that grew while phsa was off has more.
    """

    def __init__(self, max_cache_len: int, **kwargs: object) -> None:
        super().__init__(max_cache_len=max_cache_len, **kwargs)
        self.flags: Tensor | None = None
        self.reps: Tensor | None = None
        self.state: Tensor | None = None
        self.rep_settings: tuple | None = None

    @staticmethod
    def take(layer: StaticLayer) -> PhsaStaticLayer:
        """Takes the place of an empty layer; of one that is not, phsa::attention_static says so."""
        out = PhsaStaticLayer(layer.max_cache_len)
        if layer.is_initialized:
            out.__dict__.update(layer.__dict__)
        return out

    def ready_reps(self, settings: Settings, keys: Tensor) -> tuple[Tensor, Tensor]:
        """The representatives' room and the state. Of other settings, all are to be computed anew."""
        batch, kv_heads, tokens, head_dim = keys.shape
        blocks = Blocks.of(settings)
        key = (settings.policy, settings.block, settings.lam)
        if self.state is None:
            self.state = torch.zeros((batch + 1, 2), dtype=torch.long)
        if self.reps is None or self.rep_settings != key or self.reps.dtype != keys.dtype:
            shape = (batch, max(1, blocks.rep_rows(tokens)), kv_heads, blocks.rep_width(head_dim))
            self.reps = torch.zeros(shape, dtype=keys.dtype, device=keys.device)
            self.rep_settings = key
            self.state[:-1] = 0
        return self.reps, self.state

    def add_flags(self, flags: Tensor, past: Tensor) -> Tensor:
        """The flags of the tokens from `past` on. Returns all."""
        if self.flags is None:
            self.flags = torch.zeros((flags.shape[0], self.max_cache_len), dtype=torch.uint8, device=flags.device)
        self.flags.index_copy_(1, torch.arange(flags.shape[1], device=flags.device) + past, flags)
        return self.flags

    def reset(self) -> None:
        super().reset()
        if self.state is not None:
            self.state.zero_()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        for name in ("flags", "reps"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, tensor.index_select(0, beam_idx.to(tensor.device)))
        if self.state is not None:
            last = torch.tensor([self.state.shape[0] - 1])
            self.state = self.state.index_select(0, torch.cat((beam_idx.cpu(), last)))


class StaticView:
    """What a static layer holds so far, as the attention sees a PhsaLayer."""

    def __init__(self, keys: Tensor, flags: Tensor | None, reps: Tensor, state: Tensor) -> None:
        self.keys, self.flags, self._reps, self._state = keys, flags, reps, state

    def ready_reps(self, settings: Settings, starts: list[int], past: int) -> tuple[Tensor, int]:
        """As PhsaLayer.ready_reps."""
        for row, (start, (known, valid)) in enumerate(zip(starts, self._state.tolist(), strict=False)):
            if known != start or valid < past:
                flags = None if self.flags is None else self.flags[row]
                _represent(settings, self.keys[row], flags, self._reps[row], start, past)
        ends = [[start, self.keys.shape[2]] for start in starts]
        self._state[:-1] = torch.tensor(ends, dtype=torch.long)
        return self._reps.flatten(0, 1), self._reps.shape[1]


def adopt(cache: Cache) -> Cache:
    """Makes a cache carry flags and representatives, in place. Layers that attend within a window stay as they are."""
    if type(cache) not in (DynamicCache, StaticCache):
        raise ValueError(
            f"phsa: the cache is a {type(cache).__name__}; allowed: DynamicCache (the default of generate) and "
            "StaticCache, because flags and representatives must move with the keys"
        )
    if cache.offloading:
        raise ValueError("phsa: the cache is offloaded to the CPU; allowed: a DynamicCache that stays on its device")
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, PhsaLayer | PhsaStaticLayer) or layer.is_sliding:
            continue
        if type(layer) is StaticLayer:
            cache.layers[index] = PhsaStaticLayer.take(layer)
        elif type(layer) is DynamicLayer:
            cache.layers[index] = PhsaLayer.take(layer)
        else:
            raise ValueError(f"phsa: layer {index} of the cache is a {type(layer).__name__}; allowed: DynamicLayer")
    if cache.layer_class_to_replicate is not None:
        cache.layer_class_to_replicate = PhsaLayer
    return cache
