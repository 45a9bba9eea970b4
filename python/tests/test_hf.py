from __future__ import annotations

import copy
import itertools
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    StaticCache,
)

import phsa.hf  # noqa: E402
from phsa.hf.cache import PhsaLayer  # noqa: E402

VOCABULARY = 300
MARKS = list(range(20, 60))
TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    # Larger than the default, so that attention is far from uniform and choosing other blocks shows.
    "initializer_range": 0.2,
}
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
SMALL = {"top_k": 3, "lam": 0.5, "init": 16, "local": 64, "punctuation": MARKS}


# float64 runs in PyTorch and leaves no room for rounding to turn a near tie between blocks; float32 runs the kernels.
DTYPES = [torch.float64, torch.float32]


def difference(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


def assert_same(got: Tensor, want: Tensor) -> None:
    # A few turned choices in float32 change the whole by less than this; other flags or blocks by far more.
    assert difference(got, want) < (1e-8 if got.dtype == torch.float64 else 1e-2)


def assert_other(got: Tensor, want: Tensor) -> None:
    assert difference(got, want) > 3e-2


def make_model(
    family: str = "qwen3", enabled: bool = True, dtype: torch.dtype = torch.float64, **changes: Any
) -> PreTrainedModel:
    config, model = FAMILIES[family]
    values = {**TINY, **changes}
    if family == "qwen2":
        values.pop("head_dim")
        values["hidden_size"] = 256
    torch.manual_seed(0)
    out = model(config(**values)).eval().to(dtype)
    return phsa.hf.enable(out, **SMALL) if enabled else out


def tokens(rows: int, count: int, seed: int = 0) -> Tensor:
    return torch.randint(1, VOCABULARY, (rows, count), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: PreTrainedModel, ids: Tensor, **kwargs: Any) -> Tensor:
    return model(input_ids=ids, use_cache=False, **kwargs).logits


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_reading_everything_equals_sdpa(family: str, dtype: torch.dtype) -> None:
    model = make_model(family, enabled=False, dtype=dtype)
    ids = tokens(1, 600)
    want = logits(model, ids)
    phsa.hf.enable(model, **{**SMALL, "top_k": 4096})
    assert_same(logits(model, ids), want)
    phsa.hf.enable(model, policy="dense")
    assert_same(logits(model, ids), want)
    phsa.hf.enable(model, policy="phsa", top_k=3)
    assert_other(logits(model, ids), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_flags_come_from_the_token_ids(dtype: torch.dtype) -> None:
    model = make_model(dtype=dtype)
    ids = tokens(1, 700)
    flagged = logits(model, ids)
    phsa.hf.enable(model, punctuation="none")
    plain = logits(model, ids)
    assert_other(flagged, plain)
    phsa.hf.enable(model, lam=1.0, punctuation=MARKS)
    assert_same(logits(model, ids), plain)
    # Given flags take the place of the table, and are what embeddings need.
    phsa.hf.enable(model, lam=0.5, punctuation="none")
    flags = torch.isin(ids, torch.tensor(MARKS))
    assert_same(logits(model, ids, flags=flags), flagged)
    embeds = model.get_input_embeddings()(ids)
    with torch.no_grad():
        got = model(inputs_embeds=embeds, flags=flags, use_cache=False).logits
    assert_same(got, flagged)
    with pytest.raises(ValueError, match="inputs_embeds without input_ids"):
        model(inputs_embeds=embeds)
    with pytest.raises(ValueError, match="flags have the shape"):
        model(ids, flags=flags[:, 1:])


@pytest.mark.parametrize("family", FAMILIES)
def test_generating_with_a_cache_equals_recomputing(family: str) -> None:
    model = make_model(family)
    ids = tokens(2, 381)
    kwargs = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    cached = model.generate(ids, **kwargs)
    again = model.generate(ids, **kwargs, use_cache=False)
    assert torch.equal(cached.sequences, again.sequences)
    for a, b in zip(cached.logits, again.logits, strict=True):
        assert_same(a, b)
    for layer in cached.past_key_values.layers:
        assert isinstance(layer, PhsaLayer) and layer.rep_tokens == layer.flags.shape[1] == 381 + 5


@torch.no_grad()
def run_in_pieces(model: PreTrainedModel, ids: Tensor, cuts: list[int], mask: Tensor | None = None) -> Tensor:
    cache = DynamicCache(config=model.config)
    out = []
    for begin, end in itertools.pairwise(cuts):
        part = {} if mask is None else {"attention_mask": mask[:, :end]}
        if mask is not None:
            part["position_ids"] = (mask[:, :end].cumsum(1) - 1).clamp(min=0)[:, begin:end]
        out.append(model(input_ids=ids[:, begin:end], past_key_values=cache, use_cache=True, **part).logits)
    return torch.cat(out, dim=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("policy", ["phsa", "infllm2-64", "quest", "streaming", "dense"])
def test_chunked_prefill_equals_one_pass(policy: str, dtype: torch.dtype) -> None:
    model = make_model(dtype=dtype)
    phsa.hf.enable(model, policy=policy)
    ids = tokens(2, 600)
    want = logits(model, ids)
    for cuts in ([0, 250, 251, 509, 600], [0, 100, 200, 300, 400, 500, 600]):
        assert_same(run_in_pieces(model, ids, cuts), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_choose_the_same_in_chunks_decoding_and_after_loading(tmp_path: Path, dtype: torch.dtype) -> None:
    model = make_model(dtype=dtype)
    phsa.hf.enable(model, parts=4, survivors=6)
    ids = tokens(2, 600)
    want = logits(model, ids)
    assert_same(run_in_pieces(model, ids, [0, 250, 251, 509, *range(590, 601)]), want)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="phsa", dtype=dtype)
    assert phsa.hf.settings_of(loaded).base.parts == 4 and phsa.hf.settings_of(loaded).base.survivors == 6
    assert torch.equal(logits(loaded, ids), want)
    phsa.hf.enable(loaded, parts=1)
    assert_other(logits(loaded, ids), want)
    phsa.hf.enable(loaded, preset="paper-32k", local=64)
    base = phsa.hf.settings_of(loaded).base
    assert (base.init, base.local, base.parts, base.top_k) == (128, 64, 1, 3)


def padded(ids: list[Tensor], side: str) -> tuple[Tensor, Tensor]:
    length = max(len(row) for row in ids)
    out, mask = torch.zeros(len(ids), length, dtype=torch.long), torch.zeros(len(ids), length, dtype=torch.long)
    for index, row in enumerate(ids):
        where = slice(length - len(row), length) if side == "left" else slice(0, len(row))
        out[index, where], mask[index, where] = row, 1
    return out, mask


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("use_cache", [False, True])
def test_padding_changes_nothing(side: str, use_cache: bool, dtype: torch.dtype) -> None:
    model = make_model(dtype=dtype)
    alone = [tokens(1, count, seed)[0] for seed, count in enumerate((700, 393, 1, 650))]
    ids, mask = padded(alone, side)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        got = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=use_cache).logits
    for index, row in enumerate(alone):
        assert_same(got[index][mask[index].bool()], logits(model, row[None])[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_left_padding_in_chunks_equals_one_pass(dtype: torch.dtype) -> None:
    model = make_model(dtype=dtype)
    alone = [tokens(1, count, seed)[0] for seed, count in enumerate((600, 301))]
    ids, mask = padded(alone, "left")
    got = run_in_pieces(model, ids, [0, 200, 301, 450, 451, 600], mask)
    for index, row in enumerate(alone):
        assert_same(got[index][mask[index].bool()], logits(model, row[None])[0])


def test_generating_from_a_padded_batch_equals_each_alone() -> None:
    model = make_model()
    alone = [tokens(1, count, seed)[0] for seed, count in enumerate((500, 333))]
    kwargs = {"max_new_tokens": 20, "do_sample": False}
    ids, mask = padded(alone, "left")
    got = model.generate(ids, attention_mask=mask, **kwargs)
    for index, row in enumerate(alone):
        assert torch.equal(got[index, ids.shape[1] :], model.generate(row[None], **kwargs)[0, len(row) :])


@pytest.mark.parametrize("dtype", DTYPES)
def test_decoding_after_right_padding_skips_the_hole(dtype: torch.dtype) -> None:
    model = make_model(dtype=dtype)
    alone = [tokens(1, count, seed)[0] for seed, count in enumerate((420, 300))]
    ids, mask = padded(alone, "right")
    cache = DynamicCache(config=model.config)
    new = tokens(2, 3, seed=9)
    with torch.no_grad():
        model(input_ids=ids, attention_mask=mask, past_key_values=cache)
        full = torch.cat((mask, torch.ones_like(new)), dim=1)
        positions = (full.cumsum(1) - 1)[:, -3:]
        got = model(input_ids=new, attention_mask=full, position_ids=positions, past_key_values=cache).logits
    for index, row in enumerate(alone):
        assert_same(got[index], logits(model, torch.cat((row, new[index]))[None])[0, -3:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", ["position_ids", "cu_seq_lens"])
@pytest.mark.parametrize("use_cache", [False, True])
def test_packed_sequences_are_each_alone(how: str, use_cache: bool, dtype: torch.dtype) -> None:
    model = make_model(dtype=dtype)
    alone = [tokens(1, count, seed)[0] for seed, count in enumerate((400, 17, 290))]
    positions = torch.cat([torch.arange(len(row)) for row in alone])[None]
    kwargs: dict[str, Any] = {"position_ids": positions}
    if how == "cu_seq_lens":
        ends = torch.tensor([0, 400, 417, 707], dtype=torch.int32)
        kwargs |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 400, "max_length_k": 400}
    with torch.no_grad():
        got = model(input_ids=torch.cat(alone)[None], use_cache=use_cache, **kwargs)
    for part, row in zip(got.logits[0].split([len(row) for row in alone]), alone, strict=True):
        assert_same(part, logits(model, row[None])[0])
    if use_cache:
        with pytest.raises(ValueError, match="packed sequences, which cannot be continued"):
            model(tokens(1, 1), past_key_values=got.past_key_values)


def test_several_packed_rows() -> None:
    model = make_model()
    ids = tokens(2, 300)
    positions = torch.stack([torch.cat((torch.arange(cut), torch.arange(300 - cut))) for cut in (100, 170)])
    got = logits(model, ids, position_ids=positions)
    for row, cut in ((0, 100), (1, 170)):
        assert_same(got[row, :cut], logits(model, ids[row : row + 1, :cut])[0])
        assert_same(got[row, cut:], logits(model, ids[row : row + 1, cut:])[0])


def gradients(model: PreTrainedModel, ids: Tensor, **kwargs: Any) -> dict[str, Tensor]:
    model.zero_grad()
    model(input_ids=ids, labels=ids, **kwargs).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(reentrant: bool) -> None:
    model = make_model(dtype=torch.float32).train()
    alone = [tokens(1, count, seed)[0] for seed, count in enumerate((500, 350))]
    ids, mask = padded(alone, "left")
    want = gradients(model, ids, attention_mask=mask)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    got = gradients(model, ids, attention_mask=mask)
    assert all(torch.equal(got[name], grad) for name, grad in want.items())


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_reading_everything_equal_those_of_sdpa(dtype: torch.dtype) -> None:
    model = make_model(enabled=False, dtype=dtype).train()
    ids = tokens(1, 400)
    want = gradients(model, ids, use_cache=False)
    phsa.hf.enable(model, **{**SMALL, "top_k": 4096})
    for use_cache in (False, True):
        for name, grad in gradients(model, ids, use_cache=use_cache).items():
            torch.testing.assert_close(grad, want[name], atol=1e-5, rtol=1e-3)


def test_training_in_lower_precision_runs_under_autocast() -> None:
    model = make_model(dtype=torch.float32).train()
    ids = tokens(1, 400)
    want = gradients(model, ids)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = gradients(model, ids)
    for name, grad in want.items():
        assert torch.isfinite(got[name]).all()
        if "embed" in name:
            cosine = torch.nn.functional.cosine_similarity(got[name].flatten(), grad.flatten(), dim=0)
            assert cosine > 0.9


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cache_filled_with_gradients_can_be_continued_without(dtype: torch.dtype) -> None:
    model = make_model(dtype=dtype)
    ids = tokens(1, 520)
    cache = DynamicCache(config=model.config)
    model(ids[:, :500], past_key_values=cache)
    assert cache.layers[0].rep_tokens == 0
    with torch.no_grad():
        got = model(ids[:, 500:], past_key_values=cache).logits
    assert_same(got, logits(model, ids)[:, 500:])


@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_cache_operations_move_flags_and_representatives(dtype: torch.dtype) -> None:
    model = make_model(dtype=dtype)
    ids = tokens(3, 400)
    more = tokens(3, 40, seed=1)

    def filled() -> DynamicCache:
        cache = DynamicCache()
        model(ids, past_key_values=cache)
        return cache

    def check(cache: DynamicCache, prompt: Tensor, new: Tensor) -> None:
        got = model(new, past_key_values=cache).logits
        want = logits(model, torch.cat((prompt, new), dim=1))[:, -new.shape[1] :]
        assert_same(got, want)

    cache = filled()
    order = torch.tensor([2, 0, 0])
    cache.reorder_cache(order)
    check(cache, ids[order], more)

    cache = filled()
    cache.crop(-133)
    check(cache, ids[:, :-133], more)

    cache = filled()
    cache.batch_select_indices(torch.tensor([2, 1]))
    check(cache, ids[[2, 1]], more[:2])

    cache = filled()
    cache.batch_repeat_interleave(2)
    check(cache, ids.repeat_interleave(2, 0), more.repeat_interleave(2, 0))

    cache = filled()
    cache.reset()
    check(cache, ids[:, :0], more)

    # Representatives of another lambda are computed anew.
    cache, emptied = filled(), filled()
    for layer in emptied.layers:
        layer.reps, layer.rep_tokens, layer.rep_settings = None, 0, None
    kept = copy.deepcopy(cache)
    before = model(more, past_key_values=kept).logits
    phsa.hf.enable(model, lam=0.0)
    after = model(more, past_key_values=cache).logits
    assert_same(after, model(more, past_key_values=emptied).logits)
    assert_other(before, after)


def test_beam_search_with_a_cache_equals_recomputing() -> None:
    model = make_model()
    alone = [tokens(1, count, seed)[0] for seed, count in enumerate((220, 189))]
    ids, mask = padded(alone, "left")
    kwargs = {"max_new_tokens": 8, "num_beams": 3, "do_sample": False, "attention_mask": mask}
    assert torch.equal(model.generate(ids, **kwargs), model.generate(ids, use_cache=False, **kwargs))


def test_assisted_generation_crops_the_cache_rightly() -> None:
    model, assistant = make_model(), make_model(num_hidden_layers=1)
    ids = tokens(1, 300)
    kwargs = {"max_new_tokens": 20, "do_sample": False}
    assert torch.equal(model.generate(ids, assistant_model=assistant, **kwargs), model.generate(ids, **kwargs))


def test_settings_are_saved_and_loaded(tmp_path: Path) -> None:
    model = make_model()
    phsa.hf.enable(model, layers={1: {"top_k": 2, "lam": [0.25, 0.75]}})
    ids = tokens(1, 600)
    want = logits(model, ids)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="phsa")
    assert phsa.hf.settings_of(loaded) == phsa.hf.settings_of(model)
    assert phsa.hf.settings_of(loaded).for_layer(1).lam == (0.25, 0.75)
    assert torch.equal(logits(loaded, ids), want)
    # Without asking for it, the model is dense; asked later, it is as saved.
    dense = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_other(logits(dense, ids), want)
    dense.set_attn_implementation("phsa")
    assert torch.equal(logits(dense, ids), want)
    assert torch.equal(logits(copy.deepcopy(dense), ids), want)


def test_layers_may_differ() -> None:
    model = make_model()
    ids = tokens(1, 600)
    phsa.hf.enable(model, layers={"0-1": {"policy": "dense"}})
    dense = logits(model, ids)
    phsa.hf.enable(model, layers={0: {"policy": "dense"}})
    mixed = logits(model, ids)
    phsa.hf.enable(model, layers={})
    sparse = logits(model, ids)
    assert_other(dense, mixed)
    assert_other(mixed, sparse)
    with pytest.raises(ValueError, match="this model has 0 to 1"):
        phsa.hf.enable(model, layers={2: {"policy": "dense"}})
    with pytest.raises(ValueError, match="one per KV head"):
        phsa.hf.enable(model, lam=[0.1, 0.2, 0.3])


def test_disable_restores() -> None:
    model = make_model(enabled=False)
    ids = tokens(1, 500)
    want, config = logits(model, ids), model.config.to_dict()
    phsa.hf.enable(model, **SMALL)
    assert model.config._attn_implementation == "phsa"
    phsa.hf.disable(model)
    assert model.config._attn_implementation == "sdpa" and model.config.to_dict() == config
    assert torch.equal(logits(model, ids), want)


def test_two_models_do_not_mix() -> None:
    one, two = make_model(), make_model()
    phsa.hf.enable(two, punctuation=range(200, 280), top_k=1)
    ids = tokens(1, 500)
    first = logits(one, ids)
    assert_other(first, logits(two, ids))
    assert torch.equal(logits(one, ids), first)


def test_a_tokenizer_is_asked_for_where_it_is_needed() -> None:
    model = make_model(enabled=False)
    with pytest.raises(ValueError, match="no tokenizer was found"):
        phsa.hf.enable(model, punctuation="en")
    assert model.config._attn_implementation == "sdpa"
    built = LlamaForCausalLM(LlamaConfig(**TINY, attn_implementation="phsa"))
    with pytest.raises(ValueError, match="no tokenizer was found"):
        built(tokens(1, 20))
    phsa.hf.enable(built, punctuation="none")
    built(tokens(1, 20))
    with pytest.raises(ValueError, match="allowed: 0 to 299"):
        phsa.hf.enable(model, punctuation=[300])


def test_a_tokenizer_gives_the_flags(tmp_path: Path) -> None:
    from test_punctuation import byte_level_tokenizer

    model = make_model(enabled=False)
    phsa.hf.enable(model, tokenizer=byte_level_tokenizer(tmp_path), punctuation="en+zh")
    assert model.config.phsa["punctuation"] == "en+zh"
    assert model.config.phsa_punctuation_ids == [0, 1, 5, 13]


def refused(message: str, config: Any, model: type) -> None:
    with pytest.raises(ValueError, match=message):
        phsa.hf.enable(model(config), punctuation="none")


WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 48}


@pytest.mark.parametrize("family", ["gemma3", "ministral"])
def test_layers_with_a_window_keep_it_and_the_others_go_sparse(family: str) -> None:
    values = {**TINY, **WINDOW}
    if family == "ministral":
        config, kind = transformers.MinistralConfig(**values), transformers.MinistralForCausalLM
    else:
        config = transformers.Gemma3TextConfig(**values, query_pre_attn_scalar=64)
        kind = transformers.Gemma3ForCausalLM
    torch.manual_seed(0)
    model = kind(config).eval().to(torch.float64)
    ids = tokens(1, 400)
    dense = logits(model, ids)
    phsa.hf.enable(model, **{**SMALL, "top_k": 4096})
    assert_same(logits(model, ids), dense)
    phsa.hf.enable(model, top_k=1, local=16)
    sparse = logits(model, ids)
    assert difference(sparse, dense) > 1e-3
    # Padded, packed and with a cache as alone.
    padded = torch.cat((torch.zeros(1, 30, dtype=torch.long), ids), dim=1)
    mask = (torch.arange(430) >= 30).long()[None]
    positions = (torch.arange(430) - 30).clamp(min=0)[None]
    assert_same(logits(model, padded, attention_mask=mask, position_ids=positions)[:, 30:], sparse)
    both = torch.cat((ids, ids), dim=1)
    restart = torch.arange(400).repeat(2)[None]
    assert_same(logits(model, both, position_ids=restart)[:, 400:], sparse)
    with pytest.raises(ValueError, match="use_cache=False"):
        model(both, position_ids=restart, use_cache=True)
    kwargs = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.generate(ids, **kwargs), model.generate(ids, **kwargs, use_cache=False))
    with pytest.raises(ValueError, match="layer 0, which attends within a window"):
        phsa.hf.enable(model, layers={0: {"top_k": 2}})


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_static_cache_gives_what_the_default_one_gives(side: str) -> None:
    model = make_model()
    ids = tokens(2, 300)
    if side == "left":
        ids[1, :40] = 0
    else:
        ids[1, 260:] = 0
        phsa.hf.enable(model, parts=4)
    mask = (ids != 0).long()
    kwargs = {"max_new_tokens": 20, "do_sample": False, "attention_mask": mask}
    want = model.generate(ids, **kwargs)
    assert torch.equal(model.generate(ids, **kwargs, cache_implementation="static"), want)
    kwargs |= {"num_beams": 3, "max_new_tokens": 8}
    want = model.generate(ids, **kwargs)
    assert torch.equal(model.generate(ids, **kwargs, cache_implementation="static"), want)


def test_a_static_cache_stays_where_it_is() -> None:
    model = make_model()
    ids = tokens(2, 300)
    cache = StaticCache(config=model.config, max_cache_len=400)
    with torch.no_grad():
        model(ids[:1, :200], past_key_values=cache)
        room = cache.layers[0].keys.data_ptr()
        got = model(ids[:1, 200:], past_key_values=cache).logits
    assert_same(got, logits(model, ids[:1])[:, 200:])
    assert cache.layers[0].keys.data_ptr() == room
    # Other settings: representatives are computed anew. Emptied, it begins anew.
    phsa.hf.enable(model, lam=0.1)
    with torch.no_grad():
        emptied = copy.deepcopy(cache)
        emptied.layers[0].reps = emptied.layers[1].reps = None
        assert_same(
            model(ids[:1, :5], past_key_values=cache).logits, model(ids[:1, :5], past_key_values=emptied).logits
        )
        cache.reset()
        assert_same(model(ids[:1, 50:], past_key_values=cache).logits, logits(model, ids[:1, 50:]))
        cache.reset()
        positions = torch.arange(100).repeat(2)[None]
        with pytest.raises(ValueError, match="packed sequences in a static cache"):
            model(ids[:1, :200], position_ids=positions, past_key_values=cache)
        with pytest.raises(ValueError, match="need \\(1, 20\\)"):
            model(ids[:1, :20], attention_mask=torch.ones(1, 10), past_key_values=StaticCache(model.config, 64))
    full = StaticCache(config=model.config, max_cache_len=400)
    make_model(enabled=False)(ids[:1], past_key_values=full)
    with pytest.raises(ValueError, match="static cache was filled while phsa was off"):
        model(ids[:1, :1], past_key_values=full)


def test_models_that_would_be_wrong_are_refused() -> None:
    values = {**TINY, "num_hidden_layers": 1}
    sliding = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}
    refused(
        r"window of 64 tokens in all of its layers.*; models with windows in some layers",
        Qwen3Config(**values, **sliding),
        Qwen3ForCausalLM,
    )
    mistral = transformers.MistralConfig(**values, sliding_window=64)
    refused("sliding", mistral, transformers.MistralForCausalLM)
    gemma = transformers.Gemma2Config(**{**values, "num_hidden_layers": 2})
    refused(r"attn_logit_softcapping = 50.*; models without a cap work", gemma, transformers.Gemma2ForCausalLM)
    gemma = transformers.Gemma2Config(**values, layer_types=["full_attention"])
    refused("caps its attention", gemma, transformers.Gemma2ForCausalLM)
    bert = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=1, num_attention_heads=1, intermediate_size=64
    )
    refused("phsa", bert, transformers.BertModel)
    t5 = transformers.T5Config(vocab_size=VOCABULARY, d_model=64, d_kv=64, d_ff=64, num_layers=1, num_heads=1)
    refused("phsa", t5, transformers.T5ForConditionalGeneration)
    vit = transformers.ViTConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=1, intermediate_size=64)
    refused("ViTModel reads no tokens", vit, transformers.ViTModel)
    clip = transformers.CLIPTextConfig(
        vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=1, num_attention_heads=1, intermediate_size=64
    )
    refused("causal decoders only", clip, transformers.CLIPTextModel)
    with pytest.raises(ValueError, match="is not causal"):
        phsa.hf.enable(make_model(enabled=False, is_causal=False), punctuation="none")
    with pytest.raises(TypeError, match="not a model of transformers"):
        phsa.hf.enable(torch.nn.Linear(2, 2))


def test_attention_sinks_weaken_what_is_read() -> None:
    config = transformers.GptOssConfig(
        **TINY,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=20,
        num_local_experts=2,
        num_experts_per_tok=1,
    )
    torch.manual_seed(3)
    model = transformers.GptOssForCausalLM(config).eval()
    ids = tokens(2, 200)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.copy_(torch.randn_like(layer.self_attn.sinks) + 1)
        dense = model(ids).logits
        phsa.hf.enable(model, **{**SMALL, "top_k": 100})
        torch.testing.assert_close(model(ids).logits, dense, rtol=1e-4, atol=1e-4)
        phsa.hf.enable(model, **SMALL)
        whole = model(ids).logits
        assert (whole - dense).abs().max() > 1e-3
        cache = DynamicCache(config=model.config)
        parts = [model(part, past_key_values=cache).logits for part in ids.split([150, 1, 49], dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-4)
        with pytest.raises(ValueError, match=r"attention sinks .* static caches"):
            model.generate(ids, max_new_tokens=2, cache_implementation="static")
    with pytest.raises(ValueError, match=r"attention sinks .* gradients"):
        model(ids)


def test_a_model_that_computes_something_else_is_found_out() -> None:
    model = make_model(enabled=False)
    attention = model.model.layers[0].self_attn
    forward = attention.forward

    def halved(*args: Any, **kwargs: Any) -> Any:
        out, weights = forward(*args, **kwargs)
        return (out if model.config._attn_implementation == "phsa" else 0.5 * out), weights

    attention.forward = halved
    with pytest.raises(ValueError, match="computes something else"):
        phsa.hf.enable(model, **SMALL)
    assert model.config._attn_implementation == "sdpa" and not hasattr(model.config, "phsa")
    phsa.hf.enable(model, **SMALL, check=False)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"attention_mask": torch.zeros(1, 1, 40, 40)}, "not 2-D"),
        ({"attention_mask": torch.ones(1, 30)}, "need \\(1, 40\\)"),
        ({"softcap": 30.0}, "caps its attention scores"),
        ({"is_causal": False}, "not causal"),
        ({"past_key_values": "quantized"}, "QuantizedCache; allowed: DynamicCache"),
        ({"past_key_values": "foreign"}, "filled while phsa was off"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_calls_that_would_be_wrong_are_refused(kwargs: dict, message: str) -> None:
    model = make_model()
    if kwargs.get("past_key_values") == "quantized":
        kwargs = {"past_key_values": type("QuantizedCache", (DynamicCache,), {})()}
    elif kwargs.get("past_key_values") == "foreign":
        cache = DynamicCache(config=model.config)
        model.set_attn_implementation("sdpa")
        model(tokens(1, 8), past_key_values=cache)
        model.set_attn_implementation("phsa")
        kwargs = {"past_key_values": cache}
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        model(input_ids=tokens(1, 40), **kwargs)


def test_attention_dropout_is_refused_in_training() -> None:
    model = make_model(attention_dropout=0.1)
    logits(model, tokens(1, 40))
    with pytest.raises(ValueError, match=r"attention dropout of 0\.1"):
        model.train()(tokens(1, 40))


def test_a_model_without_its_hook_says_so() -> None:
    model = make_model()
    phsa.hf.disable(model)
    model.config._attn_implementation_internal = "phsa"
    with pytest.raises(RuntimeError, match=r"phsa\.hf\.enable"):
        model(tokens(1, 40))


def test_a_model_that_carries_settings_warns_where_they_are_not_used(tmp_path: Path) -> None:
    make_model(dtype=torch.float32).save_pretrained(tmp_path / "model")
    ids = tokens(1, 20)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with pytest.warns(UserWarning, match="carries phsa's attention settings .* runs with sdpa"):
        plain(ids)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain(ids)
        phsa.hf.enable(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), check=False)(ids)
        AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="phsa")(ids)
        phsa.hf.disable(AutoModelForCausalLM.from_pretrained(tmp_path / "model"))(ids)


@pytest.mark.parametrize("name", ["default", "other"])
def test_an_adapter_saved_by_peft_keeps_the_settings(tmp_path: Path, name: str) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(make_model(), lora, adapter_name=name)
    ids = tokens(1, 600)
    want = logits(model, ids)
    model.save_pretrained(tmp_path)
    folder = tmp_path if name == "default" else tmp_path / name
    settings = json.loads((folder / "phsa.json").read_text())
    assert (settings["attention"], settings["top_k"], settings["lambda"]) == ("phsa", 3, 0.5)
    again = peft.PeftModel.from_pretrained(make_model(enabled=False), folder)
    assert phsa.hf.settings_of(again).to_json() == settings
    with pytest.warns(UserWarning, match="carries phsa's attention settings"):
        assert_other(logits(again, ids), want)
    assert_same(logits(phsa.hf.enable(again), ids), want)
    # A model with settings of its own keeps them; one without any is saved without.
    other = phsa.hf.enable(make_model(enabled=False), **{**SMALL, "top_k": 5})
    assert phsa.hf.settings_of(peft.PeftModel.from_pretrained(other, folder)).base.top_k == 5
    peft.get_peft_model(make_model(enabled=False), lora).save_pretrained(tmp_path / "plain")
    assert not (tmp_path / "plain/phsa.json").exists()


def test_a_model_compiles_into_one_graph() -> None:
    model = make_model(dtype=torch.float32, num_hidden_layers=1).train()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    ids = tokens(2, 200)
    packed = {"position_ids": torch.cat((torch.arange(150), torch.arange(50)))[None], "use_cache": False}
    packed |= {"cu_seq_lens_q": torch.tensor([0, 150, 200], dtype=torch.int32)}
    for batch in ({"input_ids": ids, "use_cache": False}, {"input_ids": ids[:1], **packed}):
        grads = []
        for one in (compiled, model):
            model.zero_grad()
            one(**batch).logits.square().mean().backward()
            grads.append([parameter.grad.clone() for parameter in model.parameters()])
        for got, want in zip(*grads, strict=True):
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-3)
    # A hole in a mask, padding on both sides, positions that restart: as eagerly.
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    mask = torch.ones_like(ids)
    mask[0, 100:120], mask[1, :30], mask[1, 190:] = 0, 0, 0
    whole, positions = torch.ones_like(ids), torch.cat((torch.arange(150), torch.arange(50)))[None].expand(2, -1)
    with torch.no_grad():
        for batch in (
            {"attention_mask": mask},
            {"attention_mask": whole},
            {"position_ids": positions},
            {"attention_mask": whole, "position_ids": positions},
            {"attention_mask": mask, "position_ids": positions},
        ):
            got = compiled(input_ids=ids, use_cache=False, **batch).logits
            want = model(input_ids=ids, use_cache=False, **batch).logits
            real = batch.get("attention_mask", whole).bool()
            assert_same(got[real], want[real])


def test_training_with_padding_compiles_into_one_graph() -> None:
    model = make_model(dtype=torch.float32, num_hidden_layers=1).train()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for side in ("left", "right"):
        ids, mask = padded([tokens(1, count, seed)[0] for seed, count in enumerate((200, 131))], side)
        batch = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
        labels = ids.masked_fill(mask == 0, -100)
        grads = []
        for one in (compiled, model):
            model.zero_grad()
            one(**batch, labels=labels).loss.backward()
            grads.append([parameter.grad.clone() for parameter in model.parameters()])
        for got, want in zip(*grads, strict=True):
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-3)


def test_generating_with_a_static_cache_compiles_into_one_graph() -> None:
    model = make_model(dtype=torch.float32, num_hidden_layers=1)
    ids, mask = padded([tokens(1, count, seed)[0] for seed, count in enumerate((200, 131))], "left")
    kwargs = {"max_new_tokens": 20, "do_sample": False, "attention_mask": mask, "cache_implementation": "static"}
    want = model.generate(ids, **kwargs)
    eager = model.forward
    torch.compiler.reset()
    model.forward = torch.compile(eager, fullgraph=True, backend="aot_eager")
    assert torch.equal(model.generate(ids, **kwargs), want)
    del kwargs["attention_mask"]
    model.forward = eager
    want = model.generate(ids[:1], **kwargs)
    model.forward = torch.compile(eager, fullgraph=True, backend="aot_eager")
    assert torch.equal(model.generate(ids[:1], **kwargs), want)


def test_continuous_batching_is_refused_and_not_silently_dense() -> None:
    model = make_model(dtype=torch.float32)
    with pytest.raises(ValueError, match=r"generate_batch .* allowed: generate\(\) .* phsa\.LLM\.generate"):
        model.generate_batch([[1, 2, 3]])
    with pytest.raises(ValueError, match="generate_batch"), model.continuous_batching_context_manager():
        pass
