"""The attention in plain PyTorch, for any device and dtype: the same choice and output as the kernels, in query tiles.

Memory is bounded by the tile, never by queries × tokens. A tile reads the init tokens and the local window as two
contiguous slices that all of its queries share, and gathers the chosen blocks per query.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from .settings import Settings

_Result = TypeVar("_Result")

# infllm2-64: entry j covers tokens [16j, 16j + 32); block B takes the best of entries 4B-1 … 4B+3.
_POOL_STRIDE = 16
_POOL_SPAN = 32
# Elements of the largest temporary of a tile. 2^23 floats are 32 MB: large enough that launching costs little.
_TILE_ELEMENTS = 1 << 23
# Tokens that are averaged at a time.
_REPRESENT_TOKENS = 4096


@dataclass(frozen=True)
class Blocks:
    """The block arithmetic of one setting."""

    policy: str
    block: int
    init_blocks: int
    local_blocks: int
    top_k: int
    dense_below: int
    rep_stride: int
    rep_span: int
    parts: int
    survivors: int

    @staticmethod
    def of(settings: Settings) -> Blocks:
        block = settings.block
        assert block is not None
        pooled = settings.policy == "infllm2-64"
        parts = settings.parts if settings.policy in ("phsa", "infllm2") else 1
        row = block if settings.survivors else block // parts
        return Blocks(
            policy=settings.policy,
            block=block,
            init_blocks=-(-settings.init // block),
            local_blocks=-(-settings.local // block),
            top_k=0 if settings.policy in ("dense", "streaming") else settings.top_k,
            dense_below=settings.dense_below,
            rep_stride=_POOL_STRIDE if pooled else row,
            rep_span=_POOL_SPAN if pooled else row,
            parts=parts,
            survivors=max(settings.survivors, settings.top_k) if settings.survivors else 0,
        )

    @property
    def parts_in_reps(self) -> bool:
        """Whether the representatives that are kept are the parts. Else parts are made from what survives."""
        return self.parts > 1 and self.rep_span < self.block

    def of_parts(self) -> Blocks:
        """The same for what represents parts: blocks that are a part long."""
        size = self.block // self.parts
        return dataclasses.replace(self, block=size, rep_stride=size, rep_span=size, parts=1)

    def rep_rows(self, tokens: int) -> int:
        """Representatives that exist once that many tokens are there."""
        if self.policy in ("dense", "streaming") or tokens < self.rep_span:
            return 0
        return (tokens - self.rep_span) // self.rep_stride + 1

    def rep_width(self, head_dim: int) -> int:
        return 2 * head_dim if self.policy == "quest" else head_dim

    def candidate_end(self, block: int) -> int:
        return max(self.init_blocks, block - self.local_blocks)

    def below_dense(self, block: int) -> bool:
        return self.policy == "dense" or block * self.block < self.dense_below

    def reads_all(self, block: int) -> bool:
        """Whether the queries of a block read everything: by position, never by call."""
        return self.below_dense(block) or self.candidate_end(block) - self.init_blocks <= self.top_k


def _without_autocast(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """For a function of tensors on one device, that of the first: scores in bf16 would choose other blocks."""

    @functools.wraps(function)
    def wrapper(x: Tensor, *args: object) -> _Result:
        kind = x.device.type
        if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
            return function(x, *args)
        with torch.autocast(kind, enabled=False):
            return function(x, *args)

    return wrapper


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def represent(
    k: Tensor, flags: Tensor | None, blocks: Blocks, lam: float | tuple[float, ...], first: int, end: int
) -> Tensor:
    """Representatives [first, end) of one sequence: (end - first, kv_heads, width), in the type of k.

    k: (tokens, kv_heads, head_dim); flags: (tokens,) or None.
    """
    _, heads, head_dim = k.shape
    out = k.new_empty((end - first, heads, blocks.rep_width(head_dim)))
    stride, span = blocks.rep_stride, blocks.rep_span
    step = max(1, _REPRESENT_TOKENS // stride)
    for start in range(first, end, step):
        stop = min(end, start + step)
        rows = k[start * stride : (stop - 1) * stride + span].to(_compute_dtype(k.dtype))
        if blocks.policy == "infllm2-64":
            halves = rows.view(-1, stride, heads, head_dim).sum(1)
            value = (halves[:-1] + halves[1:]) / span
        else:
            rows = rows.view(stop - start, span, heads, head_dim)
            if blocks.policy == "quest":
                value = torch.cat((rows.amax(1), rows.amin(1)), dim=-1)
            else:
                weights = _weights(flags, blocks, lam, start, stop, rows)
                value = (rows * weights).sum(1)
        out[start - first : stop - first] = value.to(k.dtype)
    return out


def _weights(
    flags: Tensor | None, blocks: Blocks, lam: float | tuple[float, ...], start: int, stop: int, like: Tensor
) -> Tensor:
    """lambda / m + (1 - lambda) · flag / count, or 1 / m where a block has no flag: (blocks, m, heads or 1, 1)."""
    m = blocks.rep_span
    if blocks.policy == "infllm2" or flags is None:
        return like.new_full((1, m, 1, 1), 1.0 / m)
    flag = flags[start * m : stop * m].ne(0).view(stop - start, m, 1, 1).to(like.dtype)
    count = flag.sum(1, keepdim=True)
    lams = like.new_tensor(lam if isinstance(lam, tuple) else (lam,)).view(1, 1, -1, 1)
    mixed = lams / m + (1 - lams) * flag / count.clamp(min=1)
    return torch.where(count > 0, mixed, 1.0 / m)


def _scores(q: Tensor, reps: Tensor, visible: Tensor, blocks: Blocks, scale: float, group_reduce: str) -> Tensor:
    """Logarithms of the blocks' scores: (queries, choosing heads, blocks); -inf for what is not visible.

    Softmax values may lie further apart than float32 reaches; their logarithms rank them all the same.
    """
    queries, q_heads, _ = q.shape
    rows, kv_heads, _ = reps.shape
    if blocks.policy == "quest":
        # max(q·hi, q·lo) per channel is q·hi where q is positive and q·lo where it is negative.
        q = torch.cat((q.clamp(min=0), q.clamp(max=0)), dim=-1)
    width = q.shape[-1]
    grouped = q.view(queries, kv_heads, -1, width).permute(1, 0, 2, 3).reshape(kv_heads, -1, width)
    score = torch.bmm(grouped, reps.to(q.dtype).permute(1, 2, 0)) * scale
    score = score.view(kv_heads, queries, -1, rows).transpose(0, 1)
    hidden = torch.arange(rows, device=q.device) >= visible[:, None]
    share = score.masked_fill(hidden[:, None, None], -torch.inf).log_softmax(-1)
    if group_reduce == "sum":
        share = share.logsumexp(2)
    elif group_reduce == "max":
        share = share.amax(2)
    else:
        share = share.reshape(queries, q_heads, rows)
    share = share.masked_fill(hidden[:, None], -torch.inf)
    if blocks.policy == "infllm2-64":
        count = -(-(rows + 1) // 4)
        padded = torch.nn.functional.pad(share, (1, 4 * count + 1 - (rows + 1)), value=-torch.inf)
        share = padded.unfold(-1, 5, 4).amax(-1)
    return share


class Parts:
    """The representatives of the blocks' parts, of one sequence: those that are kept, or made when first asked for."""

    def __init__(
        self, k: Tensor, flags: Tensor | None, blocks: Blocks, lam: float | tuple[float, ...], rows: int
    ) -> None:
        self._k, self._flags, self._blocks, self._lam = k, flags, blocks, lam
        self._made = torch.zeros(rows, dtype=torch.bool, device=k.device)
        self._reps = k.new_empty((rows, blocks.parts, *k.shape[1:]))

    @staticmethod
    def kept(reps: Tensor, k: Tensor, blocks: Blocks) -> Parts:
        rows = reps.shape[0] // blocks.parts
        parts = Parts(k, None, blocks, 1.0, 0)
        parts._made = torch.ones(rows, dtype=torch.bool, device=k.device)
        parts._reps = reps[: rows * blocks.parts].unflatten(0, (rows, blocks.parts))
        return parts

    def of(self, index: Tensor) -> Tensor:
        """Of these blocks: (blocks, parts, kv_heads, head_dim), in the type of k."""
        missing = index[~self._made[index]]
        if missing.numel() > 0:
            m = self._blocks.block
            tokens = (missing[:, None] * m + torch.arange(m, device=missing.device)).flatten()
            flags = None if self._flags is None else self._flags[tokens]
            parts = self._blocks.of_parts()
            made = represent(self._k[tokens], flags, parts, self._lam, 0, missing.numel() * self._blocks.parts)
            self._reps[missing] = made.unflatten(0, (-1, self._blocks.parts))
            self._made[missing] = True
        return self._reps[index]


def _part_scores(
    q: Tensor, parts: Parts, fine: Tensor, score: Tensor, blocks: Blocks, scale: float, group_reduce: str
) -> Tensor:
    """Logarithms of the blocks' scores by their parts, -inf outside of fine. fine: (queries, choosing heads, blocks),
    the blocks over whose parts a head's softmax runs; score: as the one mean of each block has it."""
    queries, _, head_dim = q.shape
    index = fine.flatten(0, 1).any(0).nonzero().flatten()
    reps = parts.of(index).to(q.dtype)
    count, n, kv_heads, _ = reps.shape
    grouped = q.view(queries, kv_heads, -1, head_dim).permute(1, 0, 2, 3).reshape(kv_heads, -1, head_dim)
    value = torch.bmm(grouped, reps.flatten(0, 1).permute(1, 2, 0)) * scale
    value = value.view(kv_heads, queries, -1, count, n).transpose(0, 1)
    # (queries, kv_heads, group, blocks): a choosing head is a KV head, or one of its group.
    hidden = ~fine[..., index].unflatten(1, (kv_heads, -1))
    share = value.masked_fill(hidden[..., None], -torch.inf).flatten(3).log_softmax(-1)
    share = share.unflatten(3, (count, n)).logsumexp(-1)
    if group_reduce == "sum":
        share = share.logsumexp(2)
    elif group_reduce == "max":
        share = share.amax(2)
    else:
        share = share.flatten(1, 2)
    out = torch.full_like(score, -torch.inf)
    out[..., index] = share.masked_fill(~fine[..., index], -torch.inf)
    return out


def _nan_lowest(score: Tensor) -> Tensor:
    """NaN, which a sort takes for the highest, below every number."""
    return score.masked_fill(score.isnan(), torch.finfo(score.dtype).min)


@dataclass(frozen=True)
class Tile:
    """Consecutive queries of one sequence that are computed together."""

    row: int  # of q, within the sequence
    queries: int
    position: int  # of the first query
    everything: bool  # whether they read all tokens up to their own

    def positions(self, device: torch.device) -> Tensor:
        return torch.arange(self.position, self.position + self.queries, device=device)


def select_tile(
    tile: Tile,
    q: Tensor,
    reps: Tensor,
    parts: Parts | None,
    blocks: Blocks,
    scale: float,
    group_reduce: str,
    selection: Tensor,
    scores: Tensor | None,
) -> None:
    """Writes the lists of one tile of queries: selection (queries, choosing heads, slots), and their scores."""
    slots = selection.shape[-1]
    selection.fill_(-1)
    if scores is not None:
        scores.zero_()
    own = tile.positions(q.device) // blocks.block
    last = (tile.position + tile.queries - 1) // blocks.block
    if slots == 0 or blocks.candidate_end(last) <= blocks.init_blocks:
        return
    q = q.to(_compute_dtype(q.dtype))
    if blocks.parts_in_reps:
        visible = own
        score = q.new_zeros((tile.queries, selection.shape[1], last))  # all survive, whatever one mean says
    else:
        visible = (own * blocks.block - blocks.rep_span).div(blocks.rep_stride, rounding_mode="floor") + 1
        visible = visible.clamp(min=0)
        score = _scores(q, reps[: blocks.rep_rows(last * blocks.block)], visible, blocks, scale, group_reduce)
    index = torch.arange(score.shape[-1], device=q.device)
    end = torch.where(own * blocks.block < blocks.dense_below, 0, own - blocks.local_blocks)
    barred = (index < blocks.init_blocks) | (index >= end[:, None])
    candidate = score.masked_fill(barred[:, None], -torch.inf)
    if parts is not None:
        shown = (index < visible[:, None])[:, None].expand(score.shape)
        fine = shown
        if 0 < blocks.survivors < score.shape[-1]:
            value, order = _nan_lowest(candidate).sort(dim=-1, descending=True, stable=True)
            value, order = value[..., : blocks.survivors], order[..., : blocks.survivors]
            survive = torch.zeros_like(shown).scatter(-1, order, value > -torch.inf)
            fine = (shown & barred[:, None]) | survive
        score = _part_scores(q, parts, fine, score, blocks, scale, group_reduce)
        candidate = _nan_lowest(score.masked_fill(barred[:, None], -torch.inf))
    score = candidate
    # A stable sort keeps the lower block first among equals; topk promises no order.
    value, order = score.sort(dim=-1, descending=True, stable=True)
    value, order = value[..., :slots], order[..., :slots]
    # The logarithm of a candidate's score is never -inf, so -inf marks what is not a candidate.
    order = order.masked_fill(value == -torch.inf, score.shape[-1])
    order, rank = order.sort(dim=-1)
    count = order.shape[-1]
    chosen = order < score.shape[-1]
    selection[..., :count] = torch.where(chosen, order, -1).to(selection.dtype)
    if scores is not None:
        scores[..., :count] = torch.where(chosen, value.gather(-1, rank).exp(), 0).to(scores.dtype)


def tiles(
    q_len: int, kv_len: int, blocks: Blocks, q_heads: int, choosing_heads: int, head_dim: int, slots: int
) -> Iterator[Tile]:
    """Cuts the queries of a sequence into tiles of bounded memory."""
    first = kv_len - q_len
    row = 0
    while row < q_len:
        position = first + row
        own = position // blocks.block
        everything = blocks.reads_all(own)
        if everything:
            per_query = q_heads * kv_len
        else:
            gathered = choosing_heads * slots * blocks.block * head_dim
            window = (blocks.init_blocks + 2 * blocks.local_blocks + slots) * blocks.block
            scored = q_heads * (kv_len // min(blocks.block, blocks.rep_stride * blocks.parts) + 1) * blocks.parts
            per_query = max(gathered, q_heads * window, scored)
        queries = max(1, _TILE_ELEMENTS // max(1, per_query))
        if not everything:
            # The shared window grows with the tile; past its own length that is wasted work.
            queries = min(queries, max(64, blocks.local_blocks * blocks.block))
        stop = min(q_len, row + queries)
        # A tile has queries of one kind only.
        while blocks.reads_all((first + stop - 1) // blocks.block) != everything:
            stop = (first + stop - 1) // blocks.block * blocks.block - first
        yield Tile(row, stop - row, position, everything)
        row = stop


def _shared_tokens(tile: Tile, blocks: Blocks, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token indices that the tile's queries share, and the mask (queries, tokens) of who reads them."""
    positions = tile.positions(device)[:, None]
    end = tile.position + tile.queries
    if tile.everything:
        tokens = torch.arange(end, device=device)
        return tokens, tokens <= positions
    m = blocks.block
    own = positions // m
    init = torch.arange(min(blocks.init_blocks * m, end), device=device)
    start = max(0, tile.position // m - blocks.local_blocks) * m
    window = torch.arange(start, end, device=device)
    local_block = own - blocks.local_blocks
    # Init tokens that are local as well are read once, as local ones.
    init_mask = (init // m < local_block) & (init <= positions)
    window_mask = (window // m >= local_block) & (window <= positions)
    return torch.cat((init, window)), torch.cat((init_mask, window_mask), dim=1)


def _chosen_tokens(selection: Tensor, kv_heads: int, blocks: Blocks) -> tuple[Tensor, Tensor, Tensor]:
    """Of the chosen blocks: tokens and mask (queries, choosing heads, slots · m), KV heads (choosing heads, 1)."""
    queries, heads, slots = selection.shape
    m = blocks.block
    chosen = selection.long()
    token = chosen.clamp(min=0)[..., None] * m + torch.arange(m, device=selection.device)
    head = torch.arange(heads, device=selection.device) // (heads // kv_heads)
    mask = (chosen >= 0)[..., None].expand(-1, -1, -1, m).reshape(queries, heads, slots * m)
    return token.view(queries, heads, slots * m), mask, head[:, None]


class _TileMath:
    """Scores and weights of one tile, for the forward and the backward pass alike."""

    def __init__(
        self, tile: Tile, q: Tensor, k: Tensor, v: Tensor, selection: Tensor, blocks: Blocks, scale: float
    ) -> None:
        dtype = _compute_dtype(q.dtype)
        self.queries, self.q_heads, self.head_dim = q.shape
        self.kv_heads = k.shape[1]
        self.group = self.q_heads // self.kv_heads
        self.scale = scale
        self.q = q.to(dtype)
        self.tokens, shared_mask = _shared_tokens(tile, blocks, q.device)
        # (kv_heads, tokens, head_dim)
        self.k_shared = k[self.tokens].to(dtype).transpose(0, 1)
        self.v_shared = v[self.tokens].to(dtype).transpose(0, 1)
        shared = torch.matmul(self._by_kv_head(self.q), self.k_shared.transpose(1, 2))
        self.shared_len = shared.shape[-1]
        score = self._by_query(shared).masked_fill(~shared_mask[:, None], -torch.inf)
        self.rows: Tensor | None = None
        if not tile.everything and selection.shape[-1] > 0:
            self.choosing = selection.shape[1]
            token, mask, head = _chosen_tokens(selection, self.kv_heads, blocks)
            self.rows = token * self.kv_heads + head  # of the keys' gradient, as (tokens · kv_heads, head_dim)
            # (queries, choosing heads, tokens, head_dim)
            self.k_chosen = k[token, head].to(dtype)
            self.v_chosen = v[token, head].to(dtype)
            chosen = torch.matmul(self._by_choice(self.q), self.k_chosen.transpose(2, 3))
            chosen = chosen.masked_fill(~mask[:, :, None], -torch.inf)
            score = torch.cat((score, chosen.reshape(self.queries, self.q_heads, -1)), dim=-1)
        self.score = score * scale

    def _by_kv_head(self, x: Tensor) -> Tensor:
        """(queries, q_heads, n) to (kv_heads, queries · group, n)."""
        n = x.shape[-1]
        return x.view(self.queries, self.kv_heads, self.group, n).transpose(0, 1).reshape(self.kv_heads, -1, n)

    def _by_query(self, x: Tensor) -> Tensor:
        """The way back."""
        n = x.shape[-1]
        x = x.view(self.kv_heads, self.queries, self.group, n).transpose(0, 1)
        return x.reshape(self.queries, self.q_heads, n)

    def _by_choice(self, x: Tensor) -> Tensor:
        """(queries, q_heads, n) to (queries, choosing heads, heads that share a choice, n)."""
        return x.view(self.queries, self.choosing, -1, x.shape[-1])

    def forward(self) -> tuple[Tensor, Tensor]:
        lse = self.score.logsumexp(-1)
        weight = (self.score - lse[..., None]).exp()
        out = self._by_query(torch.matmul(self._by_kv_head(weight[..., : self.shared_len].contiguous()), self.v_shared))
        if self.rows is not None:
            chosen = self._by_choice(weight[..., self.shared_len :].contiguous())
            out = out + torch.matmul(chosen, self.v_chosen).reshape(out.shape)
        return out, lse

    def backward(self, out: Tensor, lse: Tensor, d_out: Tensor, d_k: Tensor, d_v: Tensor) -> Tensor:
        """Adds to d_k and d_v, (tokens, kv_heads, head_dim), and returns d_q."""
        dtype = self.q.dtype
        d_out = d_out.to(dtype)
        delta = (out.to(dtype) * d_out).sum(-1, keepdim=True)
        weight = (self.score - lse[..., None].to(dtype)).exp()
        heads = self._by_kv_head(d_out)
        d_weight = self._by_query(torch.matmul(heads, self.v_shared.transpose(1, 2)))
        if self.rows is not None:
            chosen = torch.matmul(self._by_choice(d_out), self.v_chosen.transpose(2, 3))
            d_weight = torch.cat((d_weight, chosen.reshape(self.queries, self.q_heads, -1)), dim=-1)
        d_score = weight * (d_weight - delta) * self.scale

        shared = self._by_kv_head(d_score[..., : self.shared_len].contiguous())
        d_q = self._by_query(torch.matmul(shared, self.k_shared))
        d_k.index_add_(0, self.tokens, torch.matmul(shared.transpose(1, 2), self._by_kv_head(self.q)).transpose(0, 1))
        weight_shared = self._by_kv_head(weight[..., : self.shared_len].contiguous())
        d_v.index_add_(0, self.tokens, torch.matmul(weight_shared.transpose(1, 2), heads).transpose(0, 1))
        if self.rows is not None:
            chosen = self._by_choice(d_score[..., self.shared_len :].contiguous())
            d_q = d_q + torch.matmul(chosen, self.k_chosen).reshape(d_q.shape)
            rows = self.rows.reshape(-1)
            d_k_chosen = torch.matmul(chosen.transpose(2, 3), self._by_choice(self.q))
            d_k.view(-1, self.head_dim).index_add_(0, rows, d_k_chosen.reshape(-1, self.head_dim))
            chosen = self._by_choice(weight[..., self.shared_len :].contiguous())
            d_v_chosen = torch.matmul(chosen.transpose(2, 3), self._by_choice(d_out))
            d_v.view(-1, self.head_dim).index_add_(0, rows, d_v_chosen.reshape(-1, self.head_dim))
        return d_q


@dataclass(frozen=True)
class Sequence:
    """Where one sequence of a batch lies."""

    q_start: int
    q_len: int
    kv_start: int
    kv_len: int
    rep_start: int

    @property
    def q_rows(self) -> slice:
        return slice(self.q_start, self.q_start + self.q_len)

    @property
    def kv_rows(self) -> slice:
        return slice(self.kv_start, self.kv_start + self.kv_len)


@_without_autocast
def write_reps(k: Tensor, flags: Tensor | None, reps: Tensor, seqs: list[Sequence], settings: Settings) -> None:
    """Writes the representatives of the blocks that the batch's queries complete."""
    blocks = Blocks.of(settings)
    for seq in seqs:
        first, end = blocks.rep_rows(seq.kv_len - seq.q_len), blocks.rep_rows(seq.kv_len)
        if end > first:
            flag = None if flags is None else flags[seq.kv_rows]
            rows = represent(k[seq.kv_rows], flag, blocks, settings.lam, first, end)
            reps[seq.rep_start + first : seq.rep_start + end] = rows


@_without_autocast
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    flags: Tensor | None,
    reps: Tensor | None,
    seqs: list[Sequence],
    settings: Settings,
    scale: float,
    out: Tensor | None,
    lse: Tensor | None,
    selection: Tensor,
    scores: Tensor | None,
) -> None:
    """Everything, or, without v, the selection alone. Writes out, lse, selection and scores."""
    blocks = Blocks.of(settings)
    slots = selection.shape[-1]
    for seq in seqs:
        k_seq = k[seq.kv_rows]
        if reps is not None:
            seq_reps = reps[seq.rep_start : seq.rep_start + blocks.rep_rows(seq.kv_len)]
        else:
            # The last block that any query scores lies before its own.
            rows = blocks.rep_rows(seq.kv_len)
            seq_reps = represent(
                k_seq, None if flags is None else flags[seq.kv_rows], blocks, settings.lam, 0, rows if slots else 0
            )
        parts = None
        if blocks.parts_in_reps:
            parts = Parts.kept(seq_reps, k_seq, blocks)
        elif blocks.parts > 1:
            seq_flags = None if flags is None else flags[seq.kv_rows]
            parts = Parts(k_seq, seq_flags, blocks, settings.lam, blocks.rep_rows(seq.kv_len))
        for tile in tiles(seq.q_len, seq.kv_len, blocks, q.shape[1], selection.shape[1], q.shape[2], slots):
            rows = slice(seq.q_start + tile.row, seq.q_start + tile.row + tile.queries)
            select_tile(
                tile,
                q[rows],
                seq_reps,
                parts,
                blocks,
                scale,
                settings.group_reduce,
                selection[rows],
                None if scores is None else scores[rows],
            )
            if v is not None:
                assert out is not None and lse is not None
                math = _TileMath(tile, q[rows], k_seq, v[seq.kv_rows], selection[rows], blocks, scale)
                tile_out, tile_lse = math.forward()
                out[rows] = tile_out.to(out.dtype)
                lse[rows] = tile_lse.to(lse.dtype)


@_without_autocast
def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    selection: Tensor,
    d_out: Tensor,
    seqs: list[Sequence],
    settings: Settings,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    blocks = Blocks.of(settings)
    d_q = torch.zeros_like(q, memory_format=torch.contiguous_format)
    d_k = torch.zeros(k.shape, dtype=_compute_dtype(k.dtype), device=k.device)
    d_v = torch.zeros(v.shape, dtype=_compute_dtype(v.dtype), device=v.device)
    for seq in seqs:
        kv = seq.kv_rows
        for tile in tiles(
            seq.q_len, seq.kv_len, blocks, q.shape[1], selection.shape[1], q.shape[2], selection.shape[-1]
        ):
            rows = slice(seq.q_start + tile.row, seq.q_start + tile.row + tile.queries)
            math = _TileMath(tile, q[rows], k[kv], v[kv], selection[rows], blocks, scale)
            d_q[rows] = math.backward(out[rows], lse[rows], d_out[rows], d_k[kv], d_v[kv]).to(q.dtype)
    return d_q, d_k.to(k.dtype), d_v.to(v.dtype)
