"""The plugin for vLLM against stand-ins of its classes, on the CPU: pages, batches, settings, refusals."""

import inspect
import json
from types import SimpleNamespace

import fake_vllm
import pytest
import torch

from phsa import ops, paged
from phsa.settings import Settings

KERNELS = ops.missing_kernels()
pytestmark = pytest.mark.skipif(KERNELS is not None, reason=f"no kernels: {KERNELS}")

HEADS, KV_HEADS, HEAD_DIM, PAGE, PAGES = 6, 2, 64, 32, 48
SETTINGS = {"top_k": 3, "init_tokens": 16, "local_tokens": 32, "lambda": 0.4, "punctuation": [1, 2, 3]}


@pytest.fixture
def vllm(monkeypatch):
    monkeypatch.delenv(paged.VARIABLE, raising=False)
    with fake_vllm.installed() as world:
        world.config = fake_vllm.config(additional_config={"phsa": SETTINGS})
        yield world


def make_layer(impl_class, name="model.layers.1.self_attn.attn", **changes):
    arguments = {"num_heads": HEADS, "head_size": HEAD_DIM, "scale": HEAD_DIM**-0.5, "num_kv_heads": KV_HEADS}
    impl = impl_class(**{**arguments, **changes})
    return SimpleNamespace(impl=impl, attn_backend=None, layer_name=name, _k_scale=None, _v_scale=None)


def start(world, module, builder_name, impl_name, dtype=torch.float32):
    """A layer, its builder and its cache, as vLLM makes them."""
    layer = make_layer(getattr(module, impl_name))
    world.config.compilation_config.static_forward_context[layer.layer_name] = layer
    state = __import__("phsa.vllm.state", fromlist=["x"])
    state.models_write_flags = True
    backend = next(value for key, value in vars(module).items() if key.startswith("Phsa") and key.endswith("Backend"))
    spec = backend.customize_spec(fake_vllm.FullAttentionSpec(PAGE, KV_HEADS, HEAD_DIM, dtype))
    builder = getattr(module, builder_name)(spec, [layer.layer_name], world.config, torch.device("cpu"))
    page = spec.page_size_bytes // dtype.itemsize
    raw = torch.full((PAGES * page,), float("nan"), dtype=dtype)
    # Heads inside tokens, as on a GPU: the logical order stays.
    shape, order = (PAGES, KV_HEADS, PAGE, 2 * HEAD_DIM), (page, 2 * HEAD_DIM, KV_HEADS * 2 * HEAD_DIM, 1)
    return layer, builder, raw.as_strided(shape, order), state


class Text:
    """A request: its tokens' queries, keys, values and flags, and the pages that it was given."""

    def __init__(self, length, pages, prefix=None):
        self.q = torch.randn(length, HEADS, HEAD_DIM)
        self.k, self.v = torch.randn(2, length, KV_HEADS, HEAD_DIM)
        self.ids = torch.randint(0, 6, (length,))
        self.pages = list(pages)
        self.done = 0
        if prefix is not None:
            other, tokens = prefix
            for mine, its in ((self.k, other.k), (self.v, other.v), (self.ids, other.ids)):
                mine[:tokens] = its[:tokens]
            self.pages[: tokens // PAGE] = other.pages[: tokens // PAGE]
            self.done = tokens

    def wanted(self, until):
        flags = ((self.ids >= 1) & (self.ids <= 3))[:until].to(torch.uint8)
        out, _ = ops.phsa_attention(
            self.q[:until],
            self.k[:until],
            self.v[:until],
            flags,
            top_k=3,
            init=16,
            local=32,
            lam=0.4,
            scale=HEAD_DIM**-0.5,
        )
        return out


def step(layer, builder, kv_cache, state, batch, padding=0):
    """batch: texts and how many tokens each goes on by. Checks what comes out against the text alone."""
    starts, lens, slots, rows = [0], [], [], []
    for text, count in batch:
        positions = range(text.done, text.done + count)
        slots += [text.pages[p // PAGE] * PAGE + p % PAGE for p in positions]
        rows.append(slice(text.done, text.done + count))
        starts.append(starts[-1] + count)
        text.done += count
        lens.append(text.done)
    for _ in range(padding):  # a graph's, of length 0
        starts.append(starts[-1])
        lens.append(0)
    table = torch.zeros(len(lens), PAGES, dtype=torch.int32)
    for i, (text, _) in enumerate(batch):
        table[i, : len(text.pages)] = torch.tensor(text.pages, dtype=torch.int32)

    def cat(name):
        return torch.cat([getattr(text, name)[row] for (text, _), row in zip(batch, rows, strict=True)])

    lengths = torch.tensor(lens, dtype=torch.int32)
    common = SimpleNamespace(
        num_reqs=len(lens),
        query_start_loc_cpu=torch.tensor(starts, dtype=torch.int32),
        seq_lens=lengths,
        seq_lens_cpu_upper_bound=lengths,
        block_table_tensor=table,
        max_seq_len=max(lens),
        max_query_len=max(count for _, count in batch),
    )
    metadata = builder.build(0, common)
    q, k, v = cat("q"), cat("k"), cat("v")
    pad = torch.zeros(padding + 3, HEADS, HEAD_DIM)
    q = torch.cat((q, pad))
    state.write_flags(cat("ids"))
    layer.impl.do_kv_cache_update(layer, k, v, kv_cache, torch.tensor(slots))
    output = torch.empty_like(q)
    layer.impl.forward(layer, q, k, v, kv_cache, metadata, output)
    for i, (text, _) in enumerate(batch):
        wanted = text.wanted(text.done)[rows[i]]
        torch.testing.assert_close(output[starts[i] : starts[i + 1]], wanted, rtol=1e-5, atol=1e-5)
    return metadata


@pytest.mark.parametrize(
    ("module", "builder", "impl"),
    [("backend", "PhsaBuilder", "PhsaImpl"), ("cpu", "PhsaCpuBuilder", "PhsaCpuImpl")],
)
def test_chunks_decodes_mixtures_and_shared_prefixes_give_what_each_text_gives_alone(vllm, module, builder, impl):
    module = __import__(f"phsa.vllm.{module}", fromlist=["x"])
    layer, builder, kv_cache, state = start(vllm, module, builder, impl)
    a, b = Text(400, range(1, 16)), Text(200, range(20, 30))
    step(layer, builder, kv_cache, state, [(a, 150)])
    step(layer, builder, kv_cache, state, [(a, 77), (b, 90)])
    step(layer, builder, kv_cache, state, [(b, 1), (a, 90)])  # decodes come first
    step(layer, builder, kv_cache, state, [(b, 1), (a, 1)])
    # The pages of `a` again, with their representatives and flags: nothing of the prefix is computed anew.
    c = Text(380, [*range(1, 10), *range(30, 36)], prefix=(a, 288))
    step(layer, builder, kv_cache, state, [(a, 1), (b, 1), (c, 40)])
    for _ in range(20):  # over the end of a block
        step(layer, builder, kv_cache, state, [(a, 1), (b, 1), (c, 1)])


def test_padding_of_graphs_is_passed_over_and_their_lengths_are_the_models(vllm):
    from phsa.vllm import backend

    layer, builder, kv_cache, state = start(vllm, backend, "PhsaBuilder", "PhsaImpl")
    a, b = Text(100, range(1, 6)), Text(90, range(8, 14))
    step(layer, builder, kv_cache, state, [(a, 99), (b, 80)])
    metadata = step(layer, builder, kv_cache, state, [(a, 1), (b, 1)], padding=2)
    assert (metadata.num_decodes, metadata.q_lens.numel()) == (4, 0)
    common = SimpleNamespace(
        num_reqs=4,
        query_start_loc_cpu=torch.arange(5, dtype=torch.int32),
        seq_lens=torch.ones(4, dtype=torch.int32),
        block_table_tensor=torch.zeros(4, PAGES, dtype=torch.int32),
        max_seq_len=1,
    )
    assert builder.build_for_cudagraph_capture(common).most == 1024  # of all that may be replayed
    assert builder._cudagraph_support.value == 1


def test_a_profiling_run_without_metadata_touches_no_cache(vllm):
    from phsa.vllm import backend

    layer = make_layer(backend.PhsaImpl)
    out = torch.full((3, HEADS, HEAD_DIM), float("nan"))
    assert (layer.impl.forward(layer, out, out, out, None, None, out) == 0).all()


def test_pages_grow_by_what_phsa_keeps_and_windows_pages_do_not(vllm):
    from phsa.vllm import backend

    spec = fake_vllm.FullAttentionSpec(PAGE, KV_HEADS, HEAD_DIM, torch.bfloat16)
    assert backend.PhsaBackend.customize_spec(spec) == spec  # no model asks yet
    make_layer(backend.PhsaImpl)
    content, tail = 2 * PAGE * KV_HEADS * HEAD_DIM * 2, PAGE // 16 * KV_HEADS * HEAD_DIM * 2 + PAGE
    padded = backend.PhsaBackend.customize_spec(spec)
    assert padded.page_size_bytes == content + tail
    assert backend.PhsaBackend.customize_spec(padded) == padded
    window = fake_vllm.FullAttentionSpec(PAGE, KV_HEADS, HEAD_DIM, torch.bfloat16, sliding_window=64)
    assert backend.PhsaBackend.customize_spec(window) == window


def test_versions_that_do_not_ask_backends_have_their_specifications_padded_all_the_same(vllm, monkeypatch):
    from phsa.vllm import versions

    monkeypatch.setattr(versions, "CUSTOMIZES_SPEC", False)

    class Old:
        attn_backend = "ours"

        def get_kv_cache_spec(self, vllm_config):
            return "a specification"

    for _ in range(2):  # a second time changes nothing
        versions.pad_pages(Old, lambda backend, spec: f"{backend}: {spec}, padded")
    assert Old().get_kv_cache_spec(None) == "ours: a specification, padded"


REFUSALS = [
    ({"alibi_slopes": [1.0]}, {}, "ALiBi"),
    ({"logits_soft_cap": 30.0}, {}, "caps its attention scores"),
    ({"kv_cache_dtype": "fp8"}, {}, "--kv-cache-dtype auto"),
    ({"kv_sharing_target_layer_name": "model.layers.0.attn"}, {}, "another layer's cache"),
    ({"sliding_window": 128}, {}, "backend_per_kind"),
    ({}, {"speculative_config": SimpleNamespace(method="eagle")}, "ngram"),
    ({}, {"additional_config": {"phsa": {"attention": "infllm2-64"}}}, "infllm2-64"),
    ({}, {"additional_config": {"phsa": {"top_k": -1}}}, "top_k"),
    ({}, {"additional_config": {"phsa": {"layers": {"9": {"top_k": 1}}}}}, "0 to 3"),
    ({}, {"additional_config": {"phsa": "/nowhere.json"}}, "no file"),
]


@pytest.mark.parametrize(("layer", "config", "message"), REFUSALS)
def test_what_cannot_be_served_is_refused_when_the_layer_is_made(vllm, layer, config, message):
    from phsa.vllm import backend

    vllm.config = fake_vllm.config(**config)
    with pytest.raises(paged.Refused, match=message):
        make_layer(backend.PhsaImpl, **layer)


def test_what_the_kernels_refuse_is_refused_before_the_first_request(vllm):
    from phsa.vllm import backend

    layer = make_layer(backend.PhsaImpl, head_size=48)
    vllm.config.compilation_config.static_forward_context[layer.layer_name] = layer
    spec = fake_vllm.FullAttentionSpec(PAGE, KV_HEADS, 48, torch.float32)
    with pytest.raises(paged.Refused, match="layer 1 cannot be served: head_dim is 48"):
        backend.PhsaBuilder(
            backend.PhsaBackend.customize_spec(spec), [layer.layer_name], vllm.config, torch.device("cpu")
        )


def test_pages_without_room_for_representatives_are_refused(vllm):
    from phsa.vllm import backend

    layer = make_layer(backend.PhsaImpl)
    vllm.config.compilation_config.static_forward_context[layer.layer_name] = layer
    spec = fake_vllm.FullAttentionSpec(PAGE, KV_HEADS, HEAD_DIM, torch.float32)
    with pytest.raises(paged.Refused, match="representatives"):
        backend.PhsaBuilder(spec, [layer.layer_name], vllm.config, torch.device("cpu"))


def test_on_the_cpu_it_is_vllms_own_where_custom_is_not_asked_for_and_in_layers_with_windows(vllm):
    from phsa.vllm import cpu

    assert make_layer(cpu.PhsaCpuImpl).impl.sparse is not None
    assert make_layer(cpu.PhsaCpuImpl, sliding_window=64).impl.sparse is None
    vllm.config.attention_config.backend = None
    layer = make_layer(cpu.PhsaCpuImpl)
    assert layer.impl.sparse is None
    assert layer.impl.forward(layer, *[None] * 6) == "vLLM's own"
    layer.impl.do_kv_cache_update(layer, *[None] * 4)
    assert layer.impl.updated
    vllm.config.attention_config.backend_per_kind = {"full_attention": fake_vllm.BackendEnum.CUSTOM}
    assert make_layer(cpu.PhsaCpuImpl).impl.sparse is not None


class _Model:
    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
        return input_ids, positions


def test_registering_overrides_backends_and_wraps_models_that_read_tokens_once(vllm):
    import phsa.vllm

    vllm.models.update(LlamaForCausalLM=fake_vllm.Entry(_Model), BertModel=fake_vllm.Entry(_Model))
    phsa.vllm.register()
    phsa.vllm.register()
    assert vllm.overrides == {
        fake_vllm.BackendEnum.CUSTOM: "phsa.vllm.backend.PhsaBackend",
        fake_vllm.BackendEnum.CPU_ATTN: "phsa.vllm.cpu.PhsaCpuBackend",
    }
    assert isinstance(vllm.models["BertModel"], fake_vllm.Entry)
    entry = vllm.models["LlamaForCausalLM"]
    assert entry.inspect_model_cls() == "inspected"
    model = entry.load_model_cls()
    assert issubclass(model, _Model) and model.__name__ == "_Model"
    assert inspect.signature(model.forward) == inspect.signature(_Model.forward)
    assert model().forward(torch.tensor([1]), 2) == (torch.tensor([1]), 2)


def test_a_gpu_platform_keeps_its_other_backends(vllm):
    import phsa.vllm

    vllm.is_cpu = False
    phsa.vllm.register()
    assert list(vllm.overrides) == [fake_vllm.BackendEnum.CUSTOM]


def test_without_flags_lambda_is_one_and_the_log_says_so(vllm, caplog):
    from phsa.vllm import backend

    layer = make_layer(backend.PhsaImpl)
    window = SimpleNamespace(impl=SimpleNamespace(), attn_backend=None)
    vllm.config.compilation_config.static_forward_context.update(
        {layer.layer_name: layer, "model.layers.2.self_attn.attn": window}
    )
    spec = backend.PhsaBackend.customize_spec(fake_vllm.FullAttentionSpec(PAGE, KV_HEADS, HEAD_DIM, torch.float32))
    with caplog.at_level("INFO"):
        for _ in range(2):  # several groups of layers have a builder each
            backend.PhsaBuilder(spec, [layer.layer_name], vllm.config, torch.device("cpu"))
    assert layer.impl.sparse.settings.lam == 1.0
    lines = [record.message for record in caplog.records if "layers" in record.message]
    assert len(lines) == 1
    assert "layers 1: phsa, init 16, local 32, K 3" in lines[0]
    assert "layers 2 keep their own attention" in lines[0] and "lambda = 1 everywhere" in lines[0]


def test_lambdas_of_kv_heads_are_shared_out_with_the_heads(vllm):
    from phsa.vllm import state

    vllm.config = fake_vllm.config(kv_heads=4, additional_config={"phsa": {"lambda": [0.1, 0.2, 0.3, 0.4]}})
    model = state.model_of(vllm.config)
    model.flags = object()
    vllm.rank, vllm.size = 1, 2
    assert model.of_layer(0, 2).lam == (0.3, 0.4)
    vllm.rank, vllm.size = 5, 8  # more processes than KV heads: each head is in two of them
    assert model.of_layer(0, 1).lam == (0.3,)


def test_settings_come_from_the_environment_a_file_the_configuration_or_the_model(tmp_path, monkeypatch):
    monkeypatch.delenv(paged.VARIABLE, raising=False)
    config = SimpleNamespace(
        max_position_embeddings=32768, num_hidden_layers=2, phsa={"attention": "dense", "top_k": 7, "parts": 4}
    )
    # A model that is dense until somebody asks: who chose the backend did.
    carried = paged.model_settings(config).base
    assert (carried.policy, carried.top_k, carried.parts, carried.init) == ("phsa", 7, 4, 128)
    assert paged.model_settings(config, {"attention": "dense"}).base.policy == "dense"
    assert paged.model_settings(config, {"top_k": 9}).base.top_k == 9
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({"top_k": 11}))
    assert paged.model_settings(config, str(file)).base.top_k == 11
    monkeypatch.setenv(paged.VARIABLE, '{"top_k": 13}')
    assert paged.model_settings(config, {"top_k": 9}).base.top_k == 13
    monkeypatch.setenv(paged.VARIABLE, str(file))
    assert paged.model_settings(config).base.top_k == 11
    for wrong, message in (("{", "not JSON"), ("nowhere", "no file"), ('{"topk": 1}', "topk")):
        monkeypatch.setenv(paged.VARIABLE, wrong)
        with pytest.raises(paged.Refused, match=message):
            paged.model_settings(config)


def test_a_page_must_hold_whole_blocks():
    with pytest.raises(paged.Refused, match="--block-size 64"):
        paged.Tail.of(Settings(block=64, init=64, local=64), 16, 2, 64, 2)


def test_the_paged_operator_names_what_is_wrong():
    q, k = torch.randn(1, 2, 64), torch.randn(4, 16, 1, 64)
    one, table = torch.tensor([1], dtype=torch.int32), torch.zeros((1, 2), dtype=torch.int32)
    good = {"settings": Settings(), "q_lens": one, "kv_lens": one, "page_table": table, "out": torch.empty_like(q)}
    ops.paged_attention(q, k, k, **good)
    for change, message in (
        ({"kv_lens": one * 40}, "too few pages"),
        ({"page_table": table + 4}, "names a page that does not exist"),
        ({"q_lens": one * 2, "kv_lens": one * 2}, "another number of tokens than q_lens"),
        ({"flags": torch.zeros(4, 8, dtype=torch.uint8)}, "flags must be"),
        ({"reps": torch.zeros(4, 2, 1, 64)}, "reps must be"),
        ({"device_lens": one}, "kv_lens is given"),
        ({"page_table": table.long()}, "page_table must be int32"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.paged_attention(q, k, k, **{**good, **change})
