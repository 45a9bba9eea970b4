"""The backend in SGLang's registry.

SGLang's cache has slots for tokens; with pages of 16 a page is a block. Keys and values are read where the pool has
them, through a table of pages made of its table of slots. Representatives and flags lie in tensors beside the pool,
indexed by the same pages, so that prefixes which texts share (the radix cache) carry theirs along.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from torch import Tensor

from .. import ops, paged
from ..settings import Settings

logger = logging.getLogger("sglang.phsa")


@dataclass
class _Batch:
    """What the layers of a step share."""

    pages: Tensor  # (sequences, pages), on the device
    lens: Tensor  # on the device
    q_lens: Tensor | None = None  # on the host; None: each decodes one token
    kv_lens: Tensor | None = None


def _load_tokenizer(runner: Any) -> Any:
    from transformers import AutoTokenizer

    args = runner.server_args
    return AutoTokenizer.from_pretrained(
        args.tokenizer_path or args.model_path,
        revision=getattr(args, "revision", None),
        trust_remote_code=args.trust_remote_code,
    )


class PhsaAttnBackend(AttentionBackend):
    def __init__(self, runner: Any) -> None:
        super().__init__()
        config = runner.model_config
        self.device = torch.device(runner.device)
        self.context = config.context_len
        self.page_size = runner.page_size
        self.req_to_token = runner.req_to_token_pool.req_to_token
        self.pool = runner.token_to_kv_pool
        self.needs_cpu_seq_lens = True  # of what is prefilled
        if getattr(runner, "is_draft_worker", False):
            paged.refuse("speculation with a draft model; allowed: none")
        window = getattr(runner, "sliding_window_size", None)
        self.inner: Any = None
        if window is not None and window > -1:
            # Layers with windows keep an attention of SGLang's own.
            from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

            self.inner = ATTENTION_BACKENDS["triton"](runner)
        self.settings = paged.model_settings(config.hf_text_config)
        if self.page_size % 16:
            paged.refuse(f"pages have {self.page_size} tokens; allowed: multiples of 16: start with --page-size 16")
        table = paged.flags_of_vocabulary(self.settings, config.hf_text_config, lambda: _load_tokenizer(runner))
        self.table = None
        if table is not None:
            self.table = torch.frombuffer(bytearray(table), dtype=torch.uint8).to(self.device)
        self.flags: Tensor | None = None
        self.caches: dict[int, paged.Cache] = {}
        self.of_layers: dict[int, Settings] = {}
        self.batch: _Batch | None = None
        self.graph_pages: Tensor | None = None
        self.graph_lens: Tensor | None = None
        self.bytes = 0
        # The first and last layers that this process has, with pipeline parallelism.
        first, last = getattr(runner, "start_layer", 0), getattr(runner, "end_layer", config.num_hidden_layers)
        self.total_kv_heads = config.get_total_num_kv_heads()
        sparse = []
        for layer in range(first, last):
            if self._is_windowed(config.hf_text_config, layer):
                continue
            sparse.append(layer)
            self._add(layer, runner, config)
        kept = [layer for layer in range(first, last) if layer not in sparse]
        if not sparse:
            paged.refuse("every layer attends within a window: there is nothing to choose from")
        logger.info(paged.layers_line(self.settings, sparse, kept, self.table is not None))
        logger.info(
            "phsa: %.2f GB of representatives beside the pool: leave room for them by --mem-fraction-static",
            self.bytes / 1e9,
        )

    @staticmethod
    def _is_windowed(config: Any, layer: int) -> bool:
        kinds = getattr(config, "layer_types", None) or ()
        return layer < len(kinds) and kinds[layer] == "sliding_attention"

    def _add(self, layer: int, runner: Any, config: Any) -> None:
        keys, values = self.pool.get_key_buffer(layer), self.pool.get_value_buffer(layer)
        if keys.dtype not in (torch.float16, torch.bfloat16, torch.float32) or keys.dim() != 3:
            paged.refuse(f"the cache is {keys.dtype} of {keys.dim()} dimensions; allowed: --kv-cache-dtype auto")
        if values.shape != keys.shape:
            paged.refuse("values have another head size than keys; allowed: the same")
        pages, heads, head_dim = keys.shape[0] // self.page_size, keys.shape[1], keys.shape[2]
        size = self.total_kv_heads // heads if self.total_kv_heads > heads else 1
        first = (runner.tp_rank % size) * heads if size > 1 else 0
        settings = paged.of_kv_heads(self.settings.for_layer(layer), first, heads, self.total_kv_heads)
        reason = ops.refusal(
            settings,
            device=self.device.type,
            dtype=keys.dtype,
            q_heads=config.num_attention_heads // runner.tp_size,
            kv_heads=heads,
            head_dim=head_dim,
            keys=self.context,
        )
        if reason is not None:
            paged.refuse(f"layer {layer} cannot be served: {reason}")
        tail = paged.Tail.of(settings, self.page_size, heads, head_dim, keys.element_size())
        reps = None
        if tail.rows > 0:
            reps = keys.new_zeros((pages, tail.rows, heads, tail.width))
            self.bytes += reps.numel() * reps.element_size()
        if self.table is not None and self.flags is None:
            self.flags = torch.zeros((pages, self.page_size), dtype=torch.uint8, device=self.device)

        def on_pages(buffer: Tensor) -> Tensor:
            return buffer[: pages * self.page_size].unflatten(0, (pages, self.page_size))

        self.caches[layer] = paged.Cache(on_pages(keys), on_pages(values), reps, self.flags)
        self.of_layers[layer] = settings

    # -----------------------------------------------------------------------------------------------------------------
    # A step

    def _pages(self, rows: Tensor, tokens: int) -> Tensor:
        """The pages of requests, from their slots: the first of each page, over the page's size."""
        first = self.req_to_token[rows, : -(-tokens // self.page_size) * self.page_size : self.page_size]
        return torch.div(first, self.page_size, rounding_mode="floor").to(torch.int32)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        if self.inner is not None:
            self.inner.init_forward_metadata_out_graph(forward_batch, in_capture)
        rows, lens = forward_batch.req_pool_indices, forward_batch.seq_lens
        if forward_batch.forward_mode.is_decode():
            count = rows.shape[0]
            if self.graph_pages is not None and count <= self.graph_pages.shape[0]:
                # In place, where a graph will look for them.
                assert self.graph_lens is not None
                width = self.graph_pages.shape[1]
                pages = self._pages(rows, self.context)
                self.graph_pages[:count, : min(width, pages.shape[1])].copy_(pages[:, :width])
                self.graph_lens[:count].copy_(lens)
                self.batch = _Batch(self.graph_pages[:count], self.graph_lens[:count])
            else:
                self.batch = _Batch(self._pages(rows, self.context), lens.to(torch.int32))
            return
        on_host = forward_batch.seq_lens_cpu
        kv_lens = (on_host if on_host is not None else lens.cpu()).to(torch.int32)
        q_lens = torch.tensor(forward_batch.extend_seq_lens_cpu, dtype=torch.int32)
        longest = int(kv_lens.max()) if kv_lens.numel() else 0
        self.batch = _Batch(self._pages(rows, longest), lens, q_lens, kv_lens)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        if self.inner is not None:
            self.inner.init_forward_metadata_in_graph(forward_batch)
        ids, slots = forward_batch.input_ids, forward_batch.out_cache_loc
        if self.flags is None or slots is None:
            return
        assert self.table is not None
        pages = torch.div(slots, self.page_size, rounding_mode="floor")
        if ids is None:  # embeddings, such as those of pictures
            self.flags[pages, slots % self.page_size] = 0
            return
        self.flags[pages, slots % self.page_size] = self.table[ids.clamp(0, self.table.shape[0] - 1).long()]

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        if self.inner is not None:
            self.inner.init_cuda_graph_state(max_bs, max_num_tokens)
        width = -(-self.context // self.page_size)
        self.graph_pages = torch.zeros((max_bs, width), dtype=torch.int32, device=self.device)
        self.graph_lens = torch.zeros(max_bs, dtype=torch.int32, device=self.device)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1  # padding reads the page that no text has

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **more: Any
    ) -> Tensor:
        return self._run(q, k, v, layer, forward_batch, save_kv_cache, more)

    def forward_decode(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **more: Any
    ) -> Tensor:
        return self._run(q, k, v, layer, forward_batch, save_kv_cache, more)

    def _run(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save: bool, more: dict[str, Any]
    ) -> Tensor:
        cache = self.caches.get(layer.layer_id)
        window = getattr(layer, "sliding_window_size", None)
        if cache is None or (window is not None and window > -1):
            if self.inner is None:
                paged.refuse(
                    f"layer {layer.layer_id} attends within a window, of which the model's configuration says "
                    "nothing (sliding_window_size, layer_types)"
                )
            return self.inner.forward(q, k, v, layer, forward_batch, save_kv_cache=save, **more)
        if getattr(layer, "is_cross_attention", False) or getattr(layer, "logit_cap", 0):
            paged.refuse(f"layer {layer.layer_id} has cross attention or caps its scores, which the kernels do not")
        settings, batch = self.of_layers[layer.layer_id], self.batch
        assert batch is not None
        if save and k is not None:
            self.pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
        heads, head_dim = layer.tp_q_head_num, layer.qk_head_dim
        queries = q.view(-1, heads, head_dim)
        out = torch.empty_like(queries)
        sinks = more.get("sinks")
        options = {
            "page_table": batch.pages,
            "scale": float(layer.scaling),
            "sinks": None if sinks is None else sinks.float(),
        }
        if batch.q_lens is None:
            paged.decode(queries, cache, out, settings, lens=batch.lens, most=self.context, **options)
        else:
            paged.attend(queries, cache, out, settings, q_lens=batch.q_lens, kv_lens=batch.kv_lens, **options)
        return out.view(-1, heads * head_dim)
