"""The backend for SGLang on the CPU: with SGLang's own classes for caches and batches where it can be imported, with
stand-ins of their shapes elsewhere."""

import importlib.util
import sys
import types
from types import SimpleNamespace

import pytest
import torch

from phsa import ops, paged

KERNELS = ops.missing_kernels()
pytestmark = pytest.mark.skipif(KERNELS is not None, reason=f"no kernels: {KERNELS}")
REAL = importlib.util.find_spec("sglang") is not None

HEADS, KV_HEADS, HEAD_DIM, PAGE, SLOTS, CONTEXT = 6, 2, 64, 16, 1024, 512
SETTINGS = {
    "attention": "phsa",
    "top_k": 3,
    "init_tokens": 16,
    "local_tokens": 32,
    "lambda": 0.4,
    "punctuation": [1, 2],
}


class Pool:
    """As MHATokenToKVPool: slots of tokens, the first page nobody's."""

    def __init__(self, *args):
        self.k, self.v = ([torch.zeros(SLOTS + PAGE, KV_HEADS, HEAD_DIM) for _ in range(2)] for _ in range(2))

    def get_key_buffer(self, layer):
        return self.k[layer]

    def get_value_buffer(self, layer):
        return self.v[layer]

    def set_kv_buffer(self, layer, slots, k, v):
        self.k[layer.layer_id][slots], self.v[layer.layer_id][slots] = k, v


class Mode:
    def __init__(self, decodes):
        self.is_decode = lambda: decodes
        self.is_idle = lambda: False


class Inner:
    """An attention of SGLang's own."""

    def __init__(self, runner):
        self.calls = []

    def __getattr__(self, name):
        return lambda *args, **more: self.calls.append(name) or "SGLang's own"


@pytest.fixture
def sglang(monkeypatch):
    monkeypatch.delenv(paged.VARIABLE, raising=False)
    registry = {"triton": Inner}
    choices = ["triton"]

    def register(name):
        return lambda factory: registry.setdefault(name, factory)

    modules = {
        "sglang.srt.layers.attention.base_attn_backend": {"AttentionBackend": type("AttentionBackend", (), {})},
        "sglang.srt.layers.attention.attention_registry": {
            "ATTENTION_BACKENDS": registry,
            "register_attention_backend": register,
        },
        "sglang.srt.server_args": {
            "ATTENTION_BACKEND_CHOICES": choices,
            "add_attention_backend_choices": choices.extend,
        },
    }
    if REAL:  # only what chooses among backends is ours
        from sglang.srt.layers.attention import attention_registry

        monkeypatch.setitem(attention_registry.ATTENTION_BACKENDS, "triton", Inner)
    else:
        for name, members in modules.items():
            parts = name.split(".")
            for i in range(1, len(parts) + 1):
                module = types.ModuleType(".".join(parts[:i]))
                module.__path__ = []
                if module.__name__ not in sys.modules:
                    monkeypatch.setitem(sys.modules, module.__name__, module)
            vars(sys.modules[name]).update(members)
    for name in [one for one in sys.modules if one.startswith("phsa.sglang")]:
        monkeypatch.delitem(sys.modules, name)
    yield SimpleNamespace(registry=registry, choices=choices)
    for name in [one for one in sys.modules if one.startswith("phsa.sglang")]:
        del sys.modules[name]


def pools(kind):
    if kind == "stand-in":
        rows = torch.zeros(8, CONTEXT, dtype=torch.int32)
        return Pool(), SimpleNamespace(req_to_token=rows)
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool

    pool = MHATokenToKVPool(
        SLOTS, PAGE, torch.float32, KV_HEADS, HEAD_DIM, 2, "cpu", enable_memory_saver=False, enable_alt_stream=False
    )
    return pool, ReqToTokenPool(8, CONTEXT, "cpu", enable_memory_saver=False)


def runner(kind="stand-in", **changes):
    pool, rows = pools(kind)
    text = SimpleNamespace(
        vocab_size=100, max_position_embeddings=4096, num_hidden_layers=2, phsa=SETTINGS, **changes.pop("text", {})
    )
    config = SimpleNamespace(
        context_len=CONTEXT,
        hf_text_config=text,
        num_attention_heads=HEADS,
        num_hidden_layers=2,
        get_total_num_kv_heads=lambda: KV_HEADS,
    )
    return SimpleNamespace(
        **{
            "model_config": config,
            "device": "cpu",
            "page_size": PAGE,
            "req_to_token_pool": rows,
            "token_to_kv_pool": pool,
            "sliding_window_size": None,
            "tp_rank": 0,
            "tp_size": 1,
            **changes,
        }
    )


LAYERS = [
    SimpleNamespace(
        layer_id=i, tp_q_head_num=HEADS, qk_head_dim=HEAD_DIM, v_head_dim=HEAD_DIM, scaling=HEAD_DIM**-0.5, logit_cap=0
    )
    for i in range(2)
]


class Text:
    def __init__(self, row, length, pages, rows, prefix=None):
        self.row, self.done = row, 0
        self.q = torch.randn(length, HEADS, HEAD_DIM)
        self.k, self.v = torch.randn(2, length, KV_HEADS, HEAD_DIM)
        self.ids = torch.randint(0, 5, (length,))
        pages = list(pages)
        if prefix is not None:
            other, tokens = prefix
            self.k[:tokens], self.v[:tokens], self.ids[:tokens] = other.k[:tokens], other.v[:tokens], other.ids[:tokens]
            pages = other.pages[: tokens // PAGE] + pages
            self.done = tokens
        self.pages = pages
        self.slots = torch.tensor([pages[i // PAGE] * PAGE + i % PAGE for i in range(length)])
        rows[row, :length] = self.slots.to(rows.dtype)

    def wanted(self, end):
        flags = ((self.ids == 1) | (self.ids == 2))[:end].to(torch.uint8)
        return ops.phsa_attention(
            self.q[:end], self.k[:end], self.v[:end], flags, top_k=3, init=16, local=32, lam=0.4, scale=HEAD_DIM**-0.5
        )[0]


def step(backend, batch, decodes=False, layer=LAYERS[1]):
    rows = [slice(text.done, text.done + count) for text, count in batch]
    for text, count in batch:
        text.done += count

    def cat(name):
        return torch.cat([getattr(text, name)[row] for (text, _), row in zip(batch, rows, strict=True)])

    lens = torch.tensor([text.done for text, _ in batch])
    forward = SimpleNamespace(
        forward_mode=Mode(decodes),
        req_pool_indices=torch.tensor([text.row for text, _ in batch]),
        seq_lens=lens,
        seq_lens_cpu=lens,
        extend_seq_lens_cpu=None if decodes else [count for _, count in batch],
        out_cache_loc=cat("slots"),
        input_ids=cat("ids"),
    )
    backend.init_forward_metadata_out_graph(forward)
    backend.init_forward_metadata_in_graph(forward)
    run = backend.forward_decode if decodes else backend.forward_extend
    out = run(cat("q").flatten(1), cat("k"), cat("v"), layer, forward).view(-1, HEADS, HEAD_DIM)
    wanted = torch.cat([text.wanted(text.done)[row] for (text, _), row in zip(batch, rows, strict=True)])
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("kind", ["stand-in", "real"])
def test_prefill_chunks_decodes_and_shared_prefixes_give_what_each_text_gives_alone(sglang, kind, graph):
    if kind == "real" and not REAL:
        pytest.skip("sglang is not installed")
    from phsa.sglang.backend import PhsaAttnBackend

    world = runner(kind)
    backend = PhsaAttnBackend(world)
    if graph:
        backend.init_cuda_graph_state(4, 4)  # the tables that graphs look at
    rows = world.req_to_token_pool.req_to_token
    a, b = Text(1, 300, range(1, 20), rows), Text(3, 200, range(20, 34), rows)
    step(backend, [(a, 170)])
    step(backend, [(a, 60), (b, 90)])
    c = Text(4, 260, range(40, 54), rows, prefix=(a, 208))
    step(backend, [(c, 30)])
    for _ in range(20):
        step(backend, [(a, 1), (b, 1), (c, 1)], decodes=True)


def test_layers_with_windows_keep_sglangs_attention(sglang, caplog):
    from phsa.sglang.backend import PhsaAttnBackend

    world = runner(sliding_window_size=64, text={"layer_types": ["sliding_attention", "full_attention"]})
    with caplog.at_level("INFO"):
        backend = PhsaAttnBackend(world)
    assert any("layers 0 keep their own" in record.message for record in caplog.records)
    assert list(backend.caches) == [1]
    out = backend.forward_decode(None, None, None, SimpleNamespace(layer_id=0, sliding_window_size=64), None)
    assert out == "SGLang's own" and backend.inner.calls == ["forward"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_size": 1}, "--page-size 16"),
        ({"is_draft_worker": True}, "draft model"),
        ({"text": {"layer_types": ["sliding_attention"] * 2}}, "nothing to choose from"),
    ],
)
def test_what_cannot_be_served_is_refused_at_the_start(sglang, changes, message):
    from phsa.sglang.backend import PhsaAttnBackend

    with pytest.raises(paged.Refused, match=message):
        PhsaAttnBackend(runner(**changes))


def test_registering_adds_the_choice_once(sglang):
    import phsa.sglang

    phsa.sglang.register()
    phsa.sglang.register()
    if REAL:
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
        from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES

        assert ATTENTION_BACKEND_CHOICES.count("phsa") == 1 and "phsa" in ATTENTION_BACKENDS
    else:
        assert sglang.choices == ["triton", "phsa"] and "phsa" in sglang.registry
    assert callable(phsa.sglang._create)
