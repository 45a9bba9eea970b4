"""The attention as PyTorch operators.

The kernels of libphsa run where they can, on the CPU and on CUDA devices, and plain PyTorch everywhere else (other
devices, float64, other head sizes). Tensors are packed: queries are (tokens, q_heads, head_dim), keys and values
(tokens, kv_heads, head_dim), the sequences of a batch one after the other. Only the last dimension must be contiguous.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from numbers import Real
from typing import Any, NamedTuple

from . import _build, _library
from .policies import TABLE
from .settings import GROUP_REDUCES, Settings, _plain, default_scale

try:
    import torch
    from torch import Tensor
    from torch.autograd import forward_ad
except ImportError as error:
    raise ImportError("phsa.ops needs PyTorch, which is not installed here: pip install torch") from error

from . import _fallback

__all__ = ["backends", "missing_kernels", "paged_attention", "phsa_attention", "refusal", "representatives", "select"]

BACKENDS = ("auto", "cpu", "cuda", "torch")
_REFUSED = "phsa refuses: "  # as in csrc/status.h
_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


@functools.cache
def _load() -> str | None:
    """Loads the operators' library, and compiles it where the installation has none. Returns None, or why it is not
    there."""
    path = _library.find(_build.NAME)
    try:
        if path is None:
            path = _build.operators()
            _library.load()  # what it needs, of whichever folder
        torch.ops.load_library(str(path))
    except (_build.BuildError, _library.LibraryError) as error:
        return str(error)
    except OSError as error:
        return f"{path} cannot be loaded: {error}"
    return None


def missing_kernels() -> str | None:
    """Why the kernels are not there and plain PyTorch runs instead, many times slower; None where they are."""
    return _load()


@functools.cache
def _warn(reason: str) -> None:
    warnings.warn(f"phsa: no kernels, plain PyTorch is many times slower: {reason}", stacklevel=2)


def _kernel(
    name: str, device: torch.device, args: Sequence[object], outputs: Sequence[object], threads: int | None = None
) -> None:
    """Runs an operator of the library, on the device's current stream or on the CPU by that many threads (torch's).

    torch makes a RuntimeError of every C++ exception; refusals bear a mark.
    """
    operator = getattr(torch.ops.phsa_kernels, name)
    try:
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device).cuda_stream
            if device.index == torch.cuda.current_device():  # entering it again would take longer than the call
                operator(*args, 1, stream, *outputs)
            else:
                with torch.cuda.device(device):
                    operator(*args, 1, stream, *outputs)
        else:
            operator(*args, threads or torch.get_num_threads(), 0, *outputs)
    except RuntimeError as error:
        message = str(error)
        if not message.startswith(_REFUSED):
            raise
        raise ValueError(message.removeprefix(_REFUSED)) from None


def backends() -> tuple[str, ...]:
    """The backends that this installation has; ``cuda`` where libphsa has its kernels and there is a device."""
    if _load() is not None:
        return ("torch",)
    return ("cpu", "cuda", "torch") if _library.has_cuda() and torch.cuda.is_available() else ("cpu", "torch")


@functools.lru_cache(maxsize=256)
def _misfit(
    device: str, dtype: torch.dtype, q_heads: int, kv_heads: int, head_dim: int, keys: int, settings: Settings
) -> str | None:
    """What the kernels of a device, cpu or cuda, cannot do with such inputs, in the library's words, or None."""
    if dtype not in _DTYPES:
        return f"{dtype}; allowed: {'' if device == 'cuda' else 'float32, '}float16, bfloat16"
    lens = _int_tensor([keys], torch.int32)
    lam = (settings.lam,) if isinstance(settings.lam, Real) else settings.lam
    sizes = (_DTYPES[dtype], q_heads, kv_heads, head_dim)
    try:
        torch.ops.phsa_kernels.check(lens, *sizes, *_native_settings(settings, lam), int(device == "cuda"))
    except RuntimeError as error:
        message = str(error)
        if not message.startswith(_REFUSED):
            raise
        return message.removeprefix(_REFUSED).removeprefix("plan: ")
    return None


def _use_kernels(backend: str, q: Tensor, k: Tensor, settings: Settings) -> bool:
    if backend == "torch":
        return False
    reason = _load()
    misfit = None
    device = q.device.type
    if (device == "cuda" and backend in ("auto", "cuda")) or (device == "cpu" and backend != "cuda"):
        if reason is None and device == "cuda" and not _library.has_cuda():
            reason = "libphsa was built without CUDA"
        if reason is None:
            # Lengths are rounded up to a power of two: a text that grows asks anew a few times only.
            keys = 1 << max(0, k.shape[0] - 1).bit_length()
            misfit = _misfit(device, q.dtype, q.shape[-2], k.shape[-2], q.shape[-1], keys, settings)
    else:
        misfit = f"{q.dtype} on {q.device}; allowed: tensors on {'a CUDA device' if backend == 'cuda' else 'the CPU'}"
    if backend != "auto":
        if misfit is not None:
            raise ValueError(f"phsa_attention: the {backend} backend has {misfit}")
        if reason is not None:
            raise RuntimeError(f"phsa_attention: the {backend} backend is not there: {reason}")
    elif misfit is None and reason is not None:
        _warn(reason)
    return misfit is None and reason is None


# ---------------------------------------------------------------------------------------------------------------------
# The operators below carry settings as plain values, because that is what torch.library can pass. `lam` is always a
# list: of one number, or of one per KV head.


def _settings(
    policy: str,
    block: int,
    init: int,
    local: int,
    top_k: int,
    lam: Sequence[float],
    group_reduce: str,
    dense_below: int,
    parts: int,
    survivors: int,
) -> Settings:
    lams: float | tuple[float, ...] = lam[0] if len(lam) == 1 else tuple(lam)
    return Settings(
        policy=policy,
        block=block,
        init=init,
        local=local,
        top_k=top_k,
        lam=lams,
        group_reduce=group_reduce,
        dense_below=dense_below,
        parts=parts,
        survivors=survivors,
    )


def _native_settings(
    settings: Settings, lam: Sequence[float]
) -> tuple[int, int, int, int, int, float, Tensor | None, int, int, int, int]:
    lams = torch.tensor(list(lam), dtype=torch.float32) if len(lam) > 1 else None
    block = settings.block
    assert block is not None
    return (
        TABLE[settings.policy].number,
        block,
        settings.init,
        settings.local,
        settings.top_k,
        float(lam[0]),
        lams,
        GROUP_REDUCES.index(settings.group_reduce),  # in the order of phsa_group_reduce
        settings.dense_below,
        settings.parts,
        settings.survivors,
    )


def _selection_shape(q: Tensor, k: Tensor, policy: str, top_k: int, group_reduce: str) -> tuple[int, int, int]:
    heads = q.shape[1] if group_reduce == "none" else k.shape[1]
    return q.shape[0], heads, top_k if TABLE[policy].chooses else 0


def _sequences(
    q_rows: int,
    kv_rows: int,
    q_lens: Tensor | None,
    kv_lens: Tensor | None,
    kv_starts: Tensor | None = None,
    rep_starts: Tensor | None = None,
    settings: Settings | None = None,
) -> list[_fallback.Sequence]:
    """Where the sequences lie, after checking that they lie within the tensors: the kernels trust this."""
    queries = [q_rows] if q_lens is None else q_lens.tolist()
    keys = [kv_rows] if kv_lens is None else kv_lens.tolist()
    if len(queries) != len(keys):
        raise ValueError(f"phsa_attention: q_lens has {len(queries)} sequences and kv_lens {len(keys)}")
    if sum(queries) != q_rows:
        raise ValueError(f"phsa_attention: q has {q_rows} tokens, but the query lengths sum to {sum(queries)}")
    if kv_starts is None and sum(keys) != kv_rows:
        raise ValueError(f"phsa_attention: k has {kv_rows} tokens, but the key lengths sum to {sum(keys)}")
    starts = None if kv_starts is None else kv_starts.tolist()
    rep_rows = None if rep_starts is None else rep_starts.tolist()
    blocks = None if settings is None else _fallback.Blocks.of(settings)
    out = []
    q_start = kv_start = rep_start = 0
    for index, (q_len, kv_len) in enumerate(zip(queries, keys, strict=True)):
        if not 0 <= q_len <= kv_len:
            raise ValueError(
                f"phsa_attention: sequence {index} has {q_len} queries and {kv_len} keys; allowed: "
                "0 <= queries <= keys (the queries are the last positions)"
            )
        if starts is not None:
            kv_start = starts[index]
        if rep_rows is not None:
            rep_start = rep_rows[index]
        if kv_start < 0 or kv_start + kv_len > kv_rows:
            raise ValueError(f"phsa_attention: sequence {index} reaches beyond the {kv_rows} rows of k")
        out.append(_fallback.Sequence(q_start, q_len, kv_start, kv_len, rep_start))
        q_start += q_len
        kv_start += kv_len
        if blocks is not None:
            rep_start += blocks.rep_rows(kv_len)
    # A compiled graph has places for as many sequences as there might be, and most of them empty.
    return [seq for seq in out if seq.kv_len > 0] or out[:1]


def _int_tensor(values: list[int], dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def _layout(seqs: list[_fallback.Sequence]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        _int_tensor([seq.q_len for seq in seqs], torch.int32),
        _int_tensor([seq.kv_len for seq in seqs], torch.int32),
        _int_tensor([seq.kv_start for seq in seqs], torch.int64),
        _int_tensor([seq.rep_start for seq in seqs], torch.int64),
    )


def _rows_contiguous(x: Tensor) -> Tensor:
    """The last dimension contiguous; on a CUDA device, rows at multiples of 16 bytes: its kernels load that much."""
    fits = x.stride(-1) == 1
    if x.device.type == "cuda":
        fits = fits and x.data_ptr() % 16 == 0 and all(stride * x.itemsize % 16 == 0 for stride in x.stride()[:-1])
    return x if fits else x.contiguous()


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _empty_outputs(q: Tensor, k: Tensor, policy: str, top_k: int, group_reduce: str) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.empty(q.shape, dtype=q.dtype, device=q.device),
        torch.empty(q.shape[:2], dtype=_lse_dtype(q), device=q.device),
        torch.empty(_selection_shape(q, k, policy, top_k, group_reduce), dtype=torch.int32, device=q.device),
    )


def _run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    flags: Tensor | None,
    reps: Tensor | None,
    seqs: list[_fallback.Sequence],
    settings: Settings,
    lam: Sequence[float],
    scale: float,
    backend: str,
    scores: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Attention, or, without v, the selection alone. With reps, the batch's new representatives are written first."""
    kernels = _use_kernels(backend, q, k, settings)
    outputs = _empty_outputs(q, k, settings.policy, settings.top_k, settings.group_reduce)
    out, lse, selection = (None, None, outputs[2]) if v is None else outputs
    if q.shape[0] == 0:
        return out, lse, selection
    if kernels:
        inputs = (_rows_contiguous(q), _rows_contiguous(k), None if v is None else _rows_contiguous(v), flags, reps)
        args = (*inputs, *_layout(seqs), *_native_settings(settings, lam), scale)
        _kernel("forward", q.device, args, (out, lse, selection, scores))
    else:
        if reps is not None and v is not None:
            _fallback.write_reps(k, flags, reps, seqs, settings)
        _fallback.forward(q, k, v, flags, reps, seqs, settings, scale, out, lse, selection, scores)
    return out, lse, selection


@torch.library.custom_op("phsa::attention", mutates_args=())
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    flags: Tensor | None,
    q_lens: Tensor | None,
    kv_lens: Tensor | None,
    policy: str,
    block: int,
    init: int,
    local: int,
    top_k: int,
    lam: Sequence[float],
    group_reduce: str,
    dense_below: int,
    parts: int,
    survivors: int,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    settings = _settings(policy, block, init, local, top_k, lam, group_reduce, dense_below, parts, survivors)
    seqs = _sequences(q.shape[0], k.shape[0], q_lens, kv_lens)
    out, lse, selection = _run_forward(q, k, v, flags, None, seqs, settings, lam, scale, backend)
    assert out is not None and lse is not None
    return out, lse, selection


@_attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    flags: Tensor | None,
    q_lens: Tensor | None,
    kv_lens: Tensor | None,
    policy: str,
    block: int,
    init: int,
    local: int,
    top_k: int,
    lam: Sequence[float],
    group_reduce: str,
    *rest: object,
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_outputs(q, k, policy, top_k, group_reduce)


@torch.library.custom_op("phsa::attention_backward", mutates_args=())
def _attention_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    selection: Tensor,
    q_lens: Tensor | None,
    kv_lens: Tensor | None,
    policy: str,
    block: int,
    init: int,
    local: int,
    top_k: int,
    lam: Sequence[float],
    group_reduce: str,
    dense_below: int,
    parts: int,
    survivors: int,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    settings = _settings(policy, block, init, local, top_k, lam, group_reduce, dense_below, parts, survivors)
    seqs = _sequences(q.shape[0], k.shape[0], q_lens, kv_lens)
    # The kernels differentiate whole sequences; a chunk's gradient (q_len < kv_len) is computed in PyTorch.
    whole = q.shape[0] > 0 and all(seq.q_len == seq.kv_len for seq in seqs)
    if not whole or not _use_kernels(backend, q, k, settings):
        return _fallback.backward(q, k, v, out, lse, selection, d_out, seqs, settings, scale)
    d_q, d_k, d_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    inputs = (*(_rows_contiguous(x) for x in (d_out, q, k, v, out)), lse, selection)
    args = (*inputs, *_layout(seqs)[:3], *_native_settings(settings, lam), scale)
    _kernel("backward", q.device, args, (d_q, d_k, d_v))
    return d_q, d_k, d_v


@_attention_backward.register_fake
def _(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor]:
    d_q, d_k, d_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    return d_q, d_k, d_v


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, _, q_lens, kv_lens, *rest = inputs
    out, lse, selection = output
    ctx.mark_non_differentiable(lse, selection)
    ctx.save_for_backward(q, k, v, out, lse, selection, q_lens, kv_lens)
    ctx.rest = rest


def _backward(ctx: Any, d_out: Tensor, d_lse: Tensor | None, d_selection: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, selection, q_lens, kv_lens = ctx.saved_tensors
    grads = _attention_backward(d_out, q, k, v, out, lse, selection, q_lens, kv_lens, *ctx.rest)
    return (*grads, *([None] * (3 + len(ctx.rest))))


_attention.register_autograd(_backward, setup_context=_setup_context)


def _refuse_derivative(what: str) -> None:
    raise NotImplementedError(
        f"phsa_attention has no {what}; allowed: first derivatives in reverse mode (backward, torch.func.grad, vjp, "
        "jacrev)"
    )


class _Differentiable(torch.autograd.Function):
    """The operator for eager PyTorch. What torch.library derives from an operator does not take part in torch.func's
    transforms; a Function with a context of its own does."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        return _attention(*args)

    setup_context = staticmethod(_setup_context)

    @staticmethod
    def backward(ctx: Any, *d_outputs: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, selection, q_lens, kv_lens = ctx.saved_tensors
        grads = _Gradient.apply(d_outputs[0], q, k, v, out, lse, selection, q_lens, kv_lens, *ctx.rest)
        return (*grads, *([None] * (3 + len(ctx.rest))))

    @staticmethod
    def jvp(*args: Any) -> None:
        _refuse_derivative("derivative in forward mode (jvp, jacfwd, hessian)")


class _Gradient(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        return _attention_backward(*args)

    @staticmethod
    def setup_context(*args: Any) -> None:
        pass

    @staticmethod
    def backward(*args: Any) -> None:
        _refuse_derivative("second derivative")

    @staticmethod
    def jvp(*args: Any) -> None:
        _refuse_derivative("derivative in forward mode (jvp, jacfwd, hessian)")


class _Prepared(NamedTuple):
    """What eager calls with the same shapes, lengths and settings have in common: all checks passed, plain values."""

    settings: Settings
    lam: list[float]
    scale: float
    backend: str
    seqs: list[_fallback.Sequence]
    kernels: bool  # for the forward
    backward_kernels: bool
    layout: tuple[Tensor, Tensor, Tensor, Tensor]
    native: tuple  # settings and scale
    selection: tuple[int, int, int]  # its shape
    rest: tuple  # of _attention_backward's arguments


_PREPARED: dict[tuple, _Prepared] = {}
_MOST_PREPARED = 1024


def _eager_forward(
    call: _Prepared, q: Tensor, k: Tensor, v: Tensor, flags: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=_lse_dtype(q), device=q.device)
    selection = torch.empty(call.selection, dtype=torch.int32, device=q.device)
    if q.shape[0] == 0:
        return out, lse, selection
    if call.kernels:
        rows = (_rows_contiguous(q), _rows_contiguous(k), _rows_contiguous(v), flags, None)
        _kernel("forward", q.device, (*rows, *call.layout, *call.native), (out, lse, selection, None))
    else:
        _fallback.forward(q, k, v, flags, None, call.seqs, call.settings, call.scale, out, lse, selection, None)
    return out, lse, selection


def _eager_backward(
    call: _Prepared, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, selection: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    if not call.backward_kernels:
        return _fallback.backward(q, k, v, out, lse, selection, d_out, call.seqs, call.settings, call.scale)
    d_q, d_k, d_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    rows = (*(_rows_contiguous(x) for x in (d_out, q, k, v, out)), lse, selection)
    _kernel("backward", q.device, (*rows, *call.layout[:3], *call.native), (d_q, d_k, d_v))
    return d_q, d_k, d_v


class _Eager(torch.autograd.Function):
    """_Differentiable where no transform of torch.func or of a compiler looks on: a quarter of its time."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, flags: Tensor | None, call: _Prepared
    ) -> tuple[Tensor, Tensor, Tensor]:
        out, lse, selection = _eager_forward(call, q, k, v, flags)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(lse, selection)
        ctx.save_for_backward(q, k, v, out, lse, selection)
        ctx.call = call
        return out, lse, selection

    @staticmethod
    def backward(ctx: Any, *d_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        if d_outputs[0] is None:
            return (None,) * 5
        q, k, v, out, lse, selection = ctx.saved_tensors
        if torch.is_grad_enabled():  # who wants a derivative of this is told that there is none
            lens = ctx.call.layout[:2]
            grads = _Gradient.apply(d_outputs[0], q, k, v, out, lse, selection, *lens, *ctx.call.rest)
        else:
            grads = _eager_backward(ctx.call, d_outputs[0], q, k, v, out, lse, selection)
        return (*grads, None, None)


def _is_eager(*tensors: Tensor | None) -> bool:
    """Whether nothing looks on that must see torch.library's operator: a compiler, torch.func, forward mode, a mode."""
    return (
        not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and torch._C._len_torch_dispatch_stack() == 0
        and forward_ad._current_level < 0
        and all(x is None or type(x) in (Tensor, torch.nn.Parameter) for x in tensors)
    )


def _lengths_key(lengths: Tensor | Sequence[int] | None) -> tuple | None:
    if lengths is None:
        return None
    if not isinstance(lengths, Tensor):
        return tuple(lengths)
    return (lengths.dtype, lengths.shape, *(lengths.tolist() if lengths.dim() == 1 else ()))


def _fold(size: int, in_dims: Sequence[int | None], tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """For vmap: the dimension that is mapped over becomes the first part of the rows."""
    folded = []
    for dim, tensor in zip(in_dims, tensors, strict=False):
        if tensor is not None:
            tensor = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            tensor = tensor.flatten(0, 1)
        folded.append(tensor)
    return folded


def _fold_lengths(size: int, dim: int | None, lengths: Tensor | None, rows: int) -> Tensor:
    if dim is not None:
        raise NotImplementedError(
            "phsa_attention: vmap over lengths (cu_seqlens, q_lens, kv_lens); allowed: over q, k, v and flags"
        )
    one = torch.tensor([rows], dtype=torch.int32) if lengths is None else lengths
    return one.repeat(size)


def _rows_of(tensor: Tensor, dim: int | None) -> int:
    return tensor.shape[0] if dim is None else tensor.movedim(dim, 0).shape[1]


def _map_over(operator: Any, tensors: int, lengths: int, q: int, k: int) -> None:
    """Registers how vmap goes over an operator: what it maps over becomes more sequences of one call.

    tensors: how many arguments, the first ones, have a row per token; lengths: how many follow that have one per
    sequence; q, k: the places of the queries and of the keys."""

    @operator.register_vmap
    def _(info: Any, in_dims: Sequence[int | None], *args: Any) -> tuple[Any, Any]:
        size = info.batch_size
        folded = _fold(size, in_dims, args[:tensors])
        for place, like in zip(range(tensors, tensors + lengths), (q, k), strict=False):
            rows = _rows_of(args[like], in_dims[like])
            folded.append(_fold_lengths(size, in_dims[place], args[place], rows))
        out = operator(*folded, *args[tensors + lengths :])
        if isinstance(out, Tensor):
            return out.unflatten(0, (size, out.shape[0] // size)), 0
        return tuple(one.unflatten(0, (size, one.shape[0] // size)) for one in out), (0,) * len(out)


_map_over(_attention, tensors=4, lengths=2, q=0, k=1)
_map_over(_attention_backward, tensors=7, lengths=2, q=1, k=2)


@torch.library.custom_op("phsa::attention_cached", mutates_args=("reps",))
def _attention_cached(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    flags: Tensor | None,
    reps: Tensor,
    q_lens: Tensor,
    kv_lens: Tensor,
    kv_starts: Tensor,
    rep_starts: Tensor,
    policy: str,
    block: int,
    init: int,
    local: int,
    top_k: int,
    lam: Sequence[float],
    group_reduce: str,
    dense_below: int,
    parts: int,
    survivors: int,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention over cached keys whose earlier representatives are in reps; the new ones are written there.

    k, v: rows in which sequence s starts at kv_starts[s]; flags (rows,) alike; reps: (rows, kv_heads, width), sequence
    s from rep_starts[s]. No gradients.
    """
    settings = _settings(policy, block, init, local, top_k, lam, group_reduce, dense_below, parts, survivors)
    seqs = _sequences(q.shape[0], k.shape[0], q_lens, kv_lens, kv_starts, rep_starts)
    blocks = _fallback.Blocks.of(settings)
    for index, seq in enumerate(seqs):
        if seq.rep_start < 0 or seq.rep_start + blocks.rep_rows(seq.kv_len) > reps.shape[0]:
            raise ValueError(f"phsa_attention: sequence {index} reaches beyond the {reps.shape[0]} rows of reps")
    out, lse, selection = _run_forward(q, k, v, flags, reps, seqs, settings, lam, scale, backend)
    assert out is not None and lse is not None
    return out, lse, selection


@_attention_cached.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    flags: Tensor | None,
    reps: Tensor,
    q_lens: Tensor,
    kv_lens: Tensor,
    kv_starts: Tensor,
    rep_starts: Tensor,
    policy: str,
    block: int,
    init: int,
    local: int,
    top_k: int,
    lam: Sequence[float],
    group_reduce: str,
    *rest: object,
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_outputs(q, k, policy, top_k, group_reduce)


@torch.library.custom_op("phsa::represent", mutates_args=())
def _represent(
    k: Tensor,
    flags: Tensor | None,
    kv_lens: Tensor | None,
    policy: str,
    block: int,
    lam: Sequence[float],
    backend: str,
) -> Tensor:
    settings = _settings(policy, block, 0, 0, 1, lam, "sum", 0, 1, 0)
    seqs = _sequences(k.shape[0], k.shape[0], kv_lens, kv_lens, settings=settings)
    blocks = _fallback.Blocks.of(settings)
    rows = sum(blocks.rep_rows(seq.kv_len) for seq in seqs)
    reps = k.new_empty((rows, k.shape[1], blocks.rep_width(k.shape[2])))
    if _use_kernels(backend, k, k, settings):
        args = (_rows_contiguous(k), flags, *_layout(seqs), *_native_settings(settings, lam))
        _kernel("represent", k.device, args, (reps,))
    else:
        _fallback.write_reps(k, flags, reps, seqs, settings)
    return reps


@_represent.register_fake
def _(
    k: Tensor,
    flags: Tensor | None,
    kv_lens: Tensor | None,
    policy: str,
    block: int,
    lam: Sequence[float],
    backend: str,
) -> Tensor:
    blocks = _fallback.Blocks.of(_settings(policy, block, 0, 0, 1, lam, "sum", 0, 1, 0))
    if kv_lens is None:
        rows = torch.sym_max(0, (k.shape[0] - blocks.rep_span) // blocks.rep_stride + 1)
    else:
        rows = torch.library.get_ctx().new_dynamic_size()
    return k.new_empty((rows, k.shape[1], blocks.rep_width(k.shape[2])))


@torch.library.custom_op("phsa::select", mutates_args=())
def _select(
    q: Tensor,
    k: Tensor,
    flags: Tensor | None,
    q_lens: Tensor | None,
    kv_lens: Tensor | None,
    policy: str,
    block: int,
    init: int,
    local: int,
    top_k: int,
    lam: Sequence[float],
    group_reduce: str,
    dense_below: int,
    parts: int,
    survivors: int,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    settings = _settings(policy, block, init, local, top_k, lam, group_reduce, dense_below, parts, survivors)
    seqs = _sequences(q.shape[0], k.shape[0], q_lens, kv_lens)
    shape = _selection_shape(q, k, policy, top_k, group_reduce)
    scores = torch.empty(shape, dtype=torch.float32, device=q.device)
    _, _, selection = _run_forward(q, k, None, flags, None, seqs, settings, lam, scale, backend, scores)
    return selection, scores


@_select.register_fake
def _(
    q: Tensor,
    k: Tensor,
    flags: Tensor | None,
    q_lens: Tensor | None,
    kv_lens: Tensor | None,
    policy: str,
    block: int,
    init: int,
    local: int,
    top_k: int,
    lam: Sequence[float],
    group_reduce: str,
    *rest: object,
) -> tuple[Tensor, Tensor]:
    shape = _selection_shape(q, k, policy, top_k, group_reduce)
    return (
        torch.empty(shape, dtype=torch.int32, device=q.device),
        torch.empty(shape, dtype=torch.float32, device=q.device),
    )


_map_over(_represent, tensors=2, lengths=1, q=0, k=0)
_map_over(_select, tensors=3, lengths=2, q=0, k=1)


# ---------------------------------------------------------------------------------------------------------------------
# What users call.


def _lams(lam: float | Sequence[float], head_lambda: Sequence[float] | None, kv_heads: int) -> list[float]:
    lams = lam if head_lambda is None else head_lambda
    if isinstance(lams, Real):
        return [float(lams)]
    if len(lams) not in (1, kv_heads):
        raise ValueError(
            f"phsa_attention: lambda lists {len(lams)} values; allowed: one, or one per KV head ({kv_heads})"
        )
    return [float(value) for value in lams]


def _autocast(x: Tensor) -> Tensor:
    """Under torch.autocast, the type that scaled_dot_product_attention would take x in."""
    kind = x.device.type
    if x.dtype == torch.float64 or not x.dtype.is_floating_point:
        return x
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind))


def _check_tensors(q: Tensor, k: Tensor, v: Tensor | None, flags: Tensor | None) -> None:
    for name, x in (("k", k), ("v", v)):
        if x is None:
            continue
        if x.dim() != q.dim():
            raise ValueError(f"phsa_attention: {name} has {x.dim()} dimensions, q has {q.dim()}")
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(f"phsa_attention: {name} is {x.dtype} on {x.device}, q is {q.dtype} on {q.device}")
    if not q.dtype.is_floating_point or q.dtype.itemsize < 2:
        raise ValueError(f"phsa_attention: q is {q.dtype}; allowed: float32, float16, bfloat16, float64")
    if v is not None and v.shape != k.shape:
        raise ValueError(f"phsa_attention: v has the shape {tuple(v.shape)}, k {tuple(k.shape)}")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"phsa_attention: q has head_dim {q.shape[-1]}, k has {k.shape[-1]}")
    if k.shape[-2] < 1 or q.shape[-2] % k.shape[-2] or q.shape[-2] < 1:
        raise ValueError(
            f"phsa_attention: {q.shape[-2]} query heads; allowed: a multiple of the {k.shape[-2]} KV heads"
        )
    if flags is not None:
        if flags.dtype not in (torch.uint8, torch.bool):
            raise ValueError(f"phsa_attention: flags are {flags.dtype}; allowed: uint8, bool")
        if flags.shape != k.shape[:-2] or flags.device != k.device:
            raise ValueError(
                f"phsa_attention: flags have the shape {tuple(flags.shape)} on {flags.device}; "
                f"one per token is {tuple(k.shape[:-2])} on {k.device}"
            )


def _as_lengths(lengths: Tensor | Sequence[int] | None, name: str) -> Tensor | None:
    if lengths is None or isinstance(lengths, Tensor):
        if lengths is not None and (lengths.dim() != 1 or lengths.dtype not in (torch.int32, torch.int64)):
            raise ValueError(
                f"phsa_attention: {name} is {lengths.dim()}-D {lengths.dtype}; allowed: 1-D int32 or int64"
            )
        return lengths
    return torch.tensor(list(lengths), dtype=torch.int32)


def _take_lengths(
    cu_seqlens: Tensor | Sequence[int] | None,
    q_lens: Tensor | Sequence[int] | None,
    kv_lens: Tensor | Sequence[int] | None,
    tokens: int,
) -> tuple[Tensor | None, Tensor | None]:
    if cu_seqlens is not None:
        if q_lens is not None or kv_lens is not None:
            raise ValueError("phsa_attention: give cu_seqlens, or q_lens and kv_lens, not both")
        starts = _as_lengths(cu_seqlens, "cu_seqlens")
        assert starts is not None
        if starts.shape[0] < 2:
            raise ValueError("phsa_attention: cu_seqlens has fewer than 2 entries; allowed: sequences + 1")
        lengths = starts.diff()
        if not torch.compiler.is_compiling():
            first, last = starts[[0, -1]].tolist()
            if first != 0 or last != tokens:
                raise ValueError(
                    f"phsa_attention: cu_seqlens goes from {first} to {last}; allowed: from 0 to the number of tokens, "
                    f"{tokens}"
                )
            return lengths, lengths
        # A compiled graph cannot look at numbers: one that does not begin at 0 has other lengths for the queries than
        # for the keys, which the operator refuses.
        return torch.cat((starts[1:2], lengths[1:])), lengths
    if (q_lens is None) != (kv_lens is None):
        raise ValueError("phsa_attention: q_lens and kv_lens go together")
    return _as_lengths(q_lens, "q_lens"), _as_lengths(kv_lens, "kv_lens")


def _batch_lengths(x: Tensor) -> Tensor:
    return torch.full((x.shape[0],), x.shape[1], dtype=torch.int32)


def _flag_bytes(flags: Tensor | None) -> Tensor | None:
    return None if flags is None else flags.to(torch.uint8).contiguous()


class _Call:
    """The arguments that all operators share, checked and in the operators' form."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        flags: Tensor | None,
        settings: Settings,
        lam: float | Sequence[float],
        head_lambda: Sequence[float] | None,
        scale: float | None,
        cu_seqlens: Tensor | Sequence[int] | None,
        q_lens: Tensor | Sequence[int] | None,
        kv_lens: Tensor | Sequence[int] | None,
        backend: str,
    ) -> None:
        if q.dim() not in (3, 4):
            raise ValueError(
                f"phsa_attention: q has {q.dim()} dimensions; allowed: 3 (tokens, heads, head_dim) or "
                "4 (batch, tokens, heads, head_dim)"
            )
        q, k, v = _autocast(q), _autocast(k), None if v is None else _autocast(v)
        _check_tensors(q, k, v, flags)
        if backend not in BACKENDS:
            raise ValueError(f"phsa_attention: backend is {backend!r}; allowed: {', '.join(BACKENDS)}")
        if scale is not None and not 0 < scale < float("inf"):
            raise ValueError(f"phsa_attention: scale is {scale}; allowed: a positive number")
        self.batch = q.shape[:-2] if q.dim() == 4 else None
        if self.batch is not None and not (cu_seqlens is None and q_lens is None and kv_lens is None):
            raise ValueError("phsa_attention: cu_seqlens, q_lens and kv_lens need 3-D tensors")
        self.q_lens, self.kv_lens = _take_lengths(cu_seqlens, q_lens, kv_lens, q.shape[0])
        self.q, self.k, self.v, self.flags = q, k, v, _flag_bytes(flags)
        if self.batch is not None:
            if q.shape[0] != k.shape[0]:
                raise ValueError(f"phsa_attention: q has a batch of {q.shape[0]}, k of {k.shape[0]}")
            self.q_lens, self.kv_lens = _batch_lengths(q), _batch_lengths(k)
            self.q, self.k = q.flatten(0, 1), k.flatten(0, 1)
            self.v = None if v is None else v.flatten(0, 1)
            self.flags = None if self.flags is None else self.flags.flatten()
        elif self.q_lens is None and q.shape[0] > k.shape[0]:
            raise ValueError(f"phsa_attention: {q.shape[0]} queries but {k.shape[0]} keys")
        block = settings.block
        assert block is not None
        # More slots than blocks would only be padding, and "a top_k that covers everything" may be huge.
        top_k = min(settings.top_k, self.k.shape[0] // block)
        self.settings = (
            settings.policy,
            block,
            settings.init,
            settings.local,
            top_k,
            _lams(lam, head_lambda, k.shape[-2]),
            settings.group_reduce,
            settings.dense_below,
            settings.parts,
            settings.survivors,
            default_scale(q.shape[-1]) if scale is None else float(scale),
            backend,
        )

    def batched(self, x: Tensor) -> Tensor:
        return x if self.batch is None else x.unflatten(0, self.batch)

    def take_one_sequence(self) -> None:
        """Without lengths, the queries are the last positions of one sequence."""
        if self.q_lens is None and self.q.shape[0] != self.k.shape[0]:
            self.q_lens, self.kv_lens = _as_lengths([self.q.shape[0]], ""), _as_lengths([self.k.shape[0]], "")

    def prepare(self) -> _Prepared:
        *numbers, scale, backend = self.settings
        settings, lam = _settings(*numbers), numbers[5]
        seqs = _sequences(self.q.shape[0], self.k.shape[0], self.q_lens, self.kv_lens)
        kernels = _use_kernels(backend, self.q, self.k, settings)
        # The kernels differentiate whole sequences; a chunk's gradient (q_len < kv_len) is computed in PyTorch.
        whole = self.q.shape[0] > 0 and all(seq.q_len == seq.kv_len for seq in seqs)
        return _Prepared(
            settings,
            lam,
            scale,
            backend,
            seqs,
            kernels,
            kernels and whole,
            _layout(seqs),
            (*_native_settings(settings, lam), scale),
            _selection_shape(self.q, self.k, settings.policy, settings.top_k, settings.group_reduce),
            self.settings,
        )


def _make_settings(
    policy: str,
    top_k: int,
    lam: float | Sequence[float],
    init: int,
    local: int,
    block: int | None,
    group_reduce: str,
    dense_below: int,
    head_lambda: Sequence[float] | None,
    parts: int = 1,
    survivors: int = 0,
) -> Settings:
    lams = lam if head_lambda is None else head_lambda
    return Settings(
        policy=policy,
        top_k=top_k,
        lam=lams if isinstance(lams, Real) else tuple(lams),
        init=init,
        local=local,
        block=block,
        group_reduce=group_reduce,
        dense_below=dense_below,
        parts=parts,
        survivors=survivors,
    )


def phsa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    flags: Tensor | None = None,
    *,
    top_k: int = 16,
    lam: float | Sequence[float] = 0.9,
    init: int = 128,
    local: int = 512,
    block: int | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    q_lens: Tensor | Sequence[int] | None = None,
    kv_lens: Tensor | Sequence[int] | None = None,
    policy: str = "phsa",
    group_reduce: str = "sum",
    head_lambda: Sequence[float] | None = None,
    scale: float | None = None,
    dense_below: int = 0,
    parts: int = 1,
    survivors: int = 0,
    return_selection: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, ...]:
    """Sparse causal attention.

    Args:
        q: (tokens, q_heads, head_dim), or (batch, tokens, q_heads, head_dim) for sequences of equal length.
        k, v: the same with kv_heads, which divides q_heads. Keys are those of the cache: after norm and RoPE.
        flags: one per token of k, uint8 or bool: whether it is punctuation. None: no token is.
        top_k: chosen blocks per query and KV head.
        lam: weight of the plain mean in a block's representative, 0 to 1; or one per KV head, as head_lambda.
        init, local: tokens always read at the start and before the query's own block, multiples of block.
        block: tokens per block, 16, 32 or 64. None: the policy's own (64 for infllm2-64, else 16).
        cu_seqlens: (sequences + 1,) where the packed sequences start, and the end. None: one sequence.
        q_lens, kv_lens: in place of cu_seqlens where the queries of a sequence are the last q_len of its kv_len
            positions: a chunk of a prompt, or decoding. Without any of the three, the queries are the last positions
            of the one sequence.
        policy: phsa, dense, infllm2, infllm2-64, streaming or quest.
        group_reduce: how the query heads of a KV head agree: sum, max, or none (each chooses for itself).
        scale: of the dot products. None: 1/sqrt(head_dim).
        dense_below: query positions below this read everything.
        parts: representatives of a block where blocks are chosen, 1, 2, 4 or 8: one for each run of its tokens. More
            than one finds what crosses from one block into the next; for phsa and infllm2.
        survivors: how many blocks one representative each leaves for the parts, at least top_k; 0: all.
        return_selection: whether to return the chosen blocks too.
        backend: auto, cpu or cuda (the kernels) or torch (plain PyTorch).

    Returns:
        The output, shaped as q, and the natural logarithm of the sum of the exponentials (tokens, q_heads) in f32
        (f64 for f64), which carries no gradient. Under torch.autocast the inputs are cast as those of
        scaled_dot_product_attention are, and nothing inside is. With return_selection also the chosen blocks, int32
        (tokens, choosing heads, slots), ascending, -1 beyond the last; there are min(top_k, blocks) slots.

        Gradients flow to q, k and v through the attention over the selected tokens, none through the selection.
    """
    numbers = (policy, top_k, _plain(lam), init, local, block, group_reduce, dense_below, _plain(head_lambda))
    numbers += (parts, survivors)
    lengths = (cu_seqlens, q_lens, kv_lens)
    if _is_eager(q, k, v, flags):
        out, lse, selection = _eager(q, k, v, flags, numbers, scale, lengths, backend)
    else:
        call = _Call(q, k, v, flags, _make_settings(*numbers), lam, head_lambda, scale, *lengths, backend)
        call.take_one_sequence()
        attention = _attention if torch.compiler.is_compiling() else _Differentiable.apply
        results = attention(call.q, call.k, call.v, call.flags, call.q_lens, call.kv_lens, *call.settings)
        out, lse, selection = (call.batched(x) for x in results)
    return (out, lse, selection) if return_selection else (out, lse)


def _eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    flags: Tensor | None,
    numbers: tuple,
    scale: float | None,
    lengths: tuple[Tensor | Sequence[int] | None, ...],
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """phsa_attention where `_is_eager`: what depends on shapes, lengths and settings alone is checked once."""
    if torch.is_autocast_enabled(q.device.type):
        q, k, v = _autocast(q), _autocast(k), _autocast(v)
    key = (
        *((x.shape, x.dtype, x.device) for x in (q, k, v)),
        None if flags is None else (flags.shape, flags.dtype, flags.device),
        numbers,
        scale,
        *map(_lengths_key, lengths),
        backend,
    )
    prepared = _PREPARED.get(key)
    if prepared is None:
        settings = _make_settings(*numbers)
        call = _Call(q, k, v, flags, settings, numbers[2], numbers[8], scale, *lengths, backend)
        call.take_one_sequence()
        prepared = call.prepare()
        if len(_PREPARED) >= _MOST_PREPARED:
            _PREPARED.clear()
        _PREPARED[key] = prepared
    flags = _flag_bytes(flags)
    batch = q.shape[:-2] if q.dim() == 4 else None
    if batch is not None:
        q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
        flags = None if flags is None else flags.flatten()
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        results = _Eager.apply(q, k, v, flags, prepared)
    else:
        results = _eager_forward(prepared, q, k, v, flags)
    return results if batch is None else tuple(x.unflatten(0, batch) for x in results)


def refusal(
    settings: Settings, *, device: str, dtype: torch.dtype, q_heads: int, kv_heads: int, head_dim: int, keys: int
) -> str | None:
    """Why the kernels of a device (cpu or cuda) cannot run such calls, in the library's words; None where they can.

    keys: the tokens of the longest sequence."""
    reason = missing_kernels()
    if reason is None and device == "cuda" and not _library.has_cuda():
        reason = "libphsa was built without CUDA; build it with PHSA_CUDA=ON (docs/vllm.md)"
    return reason or _misfit(device, dtype, q_heads, kv_heads, head_dim, keys, settings)


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    settings: Settings,
    q_lens: Tensor,
    kv_lens: Tensor,
    page_table: Tensor,
    out: Tensor,
    reps: Tensor | None = None,
    flags: Tensor | None = None,
    sinks: Tensor | None = None,
    device_lens: Tensor | None = None,
    selection: Tensor | None = None,
    scale: float | None = None,
    threads: int | None = None,
) -> None:
    """Attention over keys on the pages of somebody else's cache, where they are; by the kernels, without gradients.

    The queries of a sequence are the last of its positions, whose keys lie in the cache already. Representatives that
    they complete are written into reps; those before them are taken from there.

    Args:
        q, out: (tokens, q_heads, head_dim), the sequences one after the other. out is written.
        k, v: (pages, page_size, kv_heads, head_dim), of any strides but the last; page_size: a multiple of the block.
        q_lens, kv_lens: int32 (sequences,), on the CPU.
        page_table: int32 (sequences, pages of the longest), where q is.
        reps: (pages, rows, kv_heads, width) with rows = page_size / tokens a row; None: nothing is chosen, or the
            representatives of the whole batch are made in each call (CPU only).
        flags: uint8 (pages, page_size): 1 where a token is punctuation.
        sinks: f32 (q_heads,), a score beside the keys' whose value is zero.
        device_lens: int32 (sequences,) where q is, on a CUDA device and with one query a sequence: the lengths, read
            when the kernels run. kv_lens are then upper limits, so that a CUDA graph can be replayed as texts grow.
        selection: int32 (tokens, choosing heads, top_k), written.
        threads: on the CPU; None: torch's.
    """
    reason = _load()
    if reason is not None:
        raise RuntimeError(f"paged_attention: there are no kernels: {reason}")
    lam = (settings.lam,) if isinstance(settings.lam, Real) else settings.lam
    scale = default_scale(q.shape[-1]) if scale is None else float(scale)
    native = _native_settings(settings, lam)
    args = (q, k, v, flags, reps, sinks, q_lens, kv_lens, page_table, device_lens, *native, scale)
    _kernel("forward_paged", q.device, args, (out, selection), threads)


def representatives(
    k: Tensor,
    flags: Tensor | None = None,
    *,
    lam: float | Sequence[float] = 0.9,
    block: int | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    policy: str = "phsa",
    head_lambda: Sequence[float] | None = None,
    backend: str = "auto",
) -> Tensor:
    """One representative per complete block and KV head: (rows, kv_heads, width), in the type of k, no gradient.

    The rows of packed sequences follow each other; an incomplete block has none. For quest a row holds the maxima,
    then the minima, of the channels; for infllm2-64 there is a row every 16 tokens, the mean of 32.
    """
    if policy in TABLE and not TABLE[policy].chooses:
        allowed = ", ".join(one.name for one in TABLE.values() if one.chooses)
        raise ValueError(f"representatives: policy is {policy!r}, which has none; allowed: {allowed}")
    if k.dim() != 3:
        raise ValueError(f"representatives: k has {k.dim()} dimensions; allowed: 3 (tokens, kv_heads, head_dim)")
    settings = _make_settings(policy, 1, lam, 0, 0, block, "sum", 0, head_lambda)
    call = _Call(k, k, None, flags, settings, lam, head_lambda, None, cu_seqlens, None, None, backend)
    assert settings.block is not None
    with torch.no_grad():
        return _represent(
            call.k, call.flags, call.kv_lens, policy, settings.block, _lams(lam, head_lambda, k.shape[1]), backend
        )


def select(
    q: Tensor,
    k: Tensor,
    flags: Tensor | None = None,
    *,
    top_k: int = 16,
    lam: float | Sequence[float] = 0.9,
    init: int = 128,
    local: int = 512,
    block: int | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    q_lens: Tensor | Sequence[int] | None = None,
    kv_lens: Tensor | Sequence[int] | None = None,
    policy: str = "phsa",
    group_reduce: str = "sum",
    head_lambda: Sequence[float] | None = None,
    scale: float | None = None,
    dense_below: int = 0,
    parts: int = 1,
    survivors: int = 0,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The selection alone: the chosen blocks and their scores, arguments as in phsa_attention, no gradient.

    Both are (tokens, choosing heads, slots); the scores are f32, 0 beyond the last block.
    """
    settings = _make_settings(
        policy, top_k, lam, init, local, block, group_reduce, dense_below, head_lambda, parts, survivors
    )
    call = _Call(q, k, None, flags, settings, lam, head_lambda, scale, cu_seqlens, q_lens, kv_lens, backend)
    if call.q_lens is None and q.shape[0] != k.shape[0]:
        call.q_lens, call.kv_lens = _as_lengths([q.shape[0]], ""), _as_lengths([k.shape[0]], "")
    with torch.no_grad():
        selection, scores = _select(call.q, call.k, call.flags, call.q_lens, call.kv_lens, *call.settings)
    return call.batched(selection), call.batched(scores)
