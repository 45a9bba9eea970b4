"""Small random models of every architecture: our logits are transformers' logits."""

import json
import subprocess

import numpy as np
import pytest
from conftest import BIN, ROOT

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

VOCAB = 512
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}

FULL, SLIDING = "full_attention", "sliding_attention"
GEMMA3 = {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "sliding_window": 50,
    "tie_word_embeddings": True,
    "layer_types": [SLIDING, FULL, SLIDING],
}

MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 96, "norm_topk_prob": True}
PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1 + i / 8 for i in range(16)],
    "long_factor": [2 + i / 3 for i in range(16)],
    "original_max_position_embeddings": 64,
}
LONGROPE_PHI = {
    "pad_token_id": None,
    "eos_token_id": 2,
    "hidden_size": 256,
    "rope_parameters": LONGROPE,
    "original_max_position_embeddings": 64,
}
GPT_OSS = {
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "sliding_window": 50,
    "rope_parameters": {**YARN, "truncate": False},
    "pad_token_id": None,
}
GRANITE = {
    "attention_multiplier": 0.1,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 5.0,
}

# name: architecture, changes of the configuration, largest shard
CASES = {
    "llama": ("Llama", {}, None),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}, None),
    "llama-sharded": ("Llama", {}, "200KB"),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True}, None),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3}, None),
    "llama-linear": ("Llama", {"rope_parameters": LINEAR}, None),
    "llama-heads": ("Llama", {"hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 1}, None),
    "qwen2": ("Qwen2", {}, None),
    "qwen2-tied-sharded": ("Qwen2", {"tie_word_embeddings": True}, "200KB"),
    "qwen2-yarn": ("Qwen2", {"rope_parameters": YARN}, None),
    "qwen2-yarn-factor": ("Qwen2", {"rope_parameters": {**YARN, "attention_factor": 1.3}}, None),
    "qwen3": ("Qwen3", {"head_dim": 128}, None),
    "qwen3-tied": ("Qwen3", {"tie_word_embeddings": True, "head_dim": 64}, None),
    "qwen3-yarn-sharded": ("Qwen3", {"rope_parameters": YARN, "head_dim": 64}, "200KB"),
    "qwen2-windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1}, None),
    "mistral": ("Mistral", {"sliding_window": None}, None),
    "mistral-window": ("Mistral", {"sliding_window": 100}, None),
    "ministral": ("Ministral", {"sliding_window": 33, "layer_types": [FULL, SLIDING, SLIDING]}, None),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5, "pad_token_id": None, "eos_token_id": 2}, None),
    "smollm3-list": ("SmolLM3", {"no_rope_layers": [0, 1, 1], "pad_token_id": None, "eos_token_id": 2}, None),
    "gemma3": ("Gemma3", GEMMA3, None),
    "gemma3-pattern": ("Gemma3", {**GEMMA3, "num_hidden_layers": 7, "layer_types": None}, None),
    "gemma3-scaled": (
        "Gemma3",
        {
            **GEMMA3,
            "query_pre_attn_scalar": 100,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        "400KB",
    ),
    "qwen3moe": ("Qwen3Moe", MOE, None),
    "qwen3moe-plain-layers": (
        "Qwen3Moe",
        {**MOE, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": False},
        "200KB",
    ),
    "phi3": ("Phi3", {"pad_token_id": None, "eos_token_id": 2, "sliding_window": 70}, None),
    "phi3-part-of-heads": ("Phi3", {**PARTIAL, "pad_token_id": None, "eos_token_id": 2}, None),
    "phi3-longrope": ("Phi3", LONGROPE_PHI, None),
    "glm4": ("Glm4", {**PARTIAL, "pad_token_id": None, "eos_token_id": 2, "attention_bias": True}, "200KB"),
    "granite": ("Granite", GRANITE, None),
    "gpt-oss": ("GptOss", GPT_OSS, None),
    "gpt-oss-sharded": (
        "GptOss",
        {**GPT_OSS, "swiglu_limit": 3.0, "swiglu_alpha": 1.3, "layer_types": [FULL, SLIDING, SLIDING, FULL]},
        "400KB",
    ),
    "qwen3-odd": ("Qwen3", {"hidden_size": 120, "intermediate_size": 200, "head_dim": 64, "vocab_size": 509}, None),
}


def make_model(name, folder, dtype=torch.float32):
    architecture, changes, shard = CASES[name]
    config = getattr(transformers, {"Gemma3": "Gemma3Text"}.get(architecture, architecture) + "Config")(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 128,
            "intermediate_size": 352,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "max_position_embeddings": 512,
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-6,
            **changes,
        }
    )
    torch.manual_seed(sum(map(ord, name)))
    model = getattr(transformers, architecture + "ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # Wide enough that attention is far from uniform and every norm and bias counts.
            small = ("norm", "bias")
            scale = 0.3 if any(part in parameter_name for part in small) else 0.12
            if "sinks" in parameter_name:
                scale = 2.0  # beside scores of one's own, neither nothing nor all
            offset = 1.0 if "norm" in parameter_name and architecture != "Gemma3" else 0.0  # Gemma adds the 1
            parameter.copy_(torch.randn_like(parameter) * scale + offset)
    model = model.to(dtype)
    model.save_pretrained(folder, **({"max_shard_size": shard} if shard else {}))
    return model


def our_logits(
    folder, ids, weights="f32", kv_type="f32", chunk=64, threads=2, adapter="-", settings=None, context=None
):
    more = [json.dumps(settings) if settings else "-"] + ([str(context)] if context else [])
    done = subprocess.run(
        [BIN / "logits_of", folder, weights, kv_type, str(chunk), str(threads), adapter, *more],
        input=" ".join(map(str, ids)).encode(),
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr.decode()
    return np.frombuffer(done.stdout, np.float32).reshape(len(ids), -1)


def relative_error(ours, theirs):
    return np.abs(ours - theirs).max() / np.abs(theirs).max()


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_transformers(name, tmp_path):
    model = make_model(name, tmp_path)
    if CASES[name][2]:
        assert len(list(tmp_path.glob("*.safetensors"))) > 1, "the case must be sharded"
    ids = torch.randint(0, model.config.vocab_size, (1, 300), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        theirs = model(ids).logits[0].numpy()
    ours = our_logits(tmp_path, ids[0].tolist())
    assert relative_error(ours, theirs) <= 1e-4


# What GGUF calls the family, whether its converters turn q and k for RoPE over neighbours, and keys of its own.
GGUF = {
    "Llama": ("llama", True, {}),
    "Mistral": ("llama", True, {}),
    "Qwen2": ("qwen2", False, {}),
    "Qwen3": ("qwen3", False, {}),
    "SmolLM3": ("smollm3", True, {}),
    "Gemma3": ("gemma3", False, {"attention.sliding_window": "sliding_window"}),
    "Qwen3Moe": (
        "qwen3moe",
        False,
        {
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
    ),
    "GptOss": (
        "gpt-oss",
        False,
        {
            "attention.sliding_window": "sliding_window",
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "intermediate_size",
        },
    ),
    "Phi3": ("phi3", False, {"attention.sliding_window": "sliding_window"}),
    "Glm4": ("glm4", False, {}),
    "Granite": (
        "granite",
        True,
        {
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
    ),
}


def add_expert(writer, name, values, family, kind):
    """Experts as GGUF has them, [expert][row][column]; kind: how their matrices are quantised."""
    gguf = pytest.importorskip("gguf")
    if name.endswith("bias") or family != "GptOss":
        writer.add_tensor(name, np.ascontiguousarray(values))
        return
    values = np.ascontiguousarray(values.swapaxes(1, 2))
    if kind is None:
        writer.add_tensor(name, values)
    else:
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)


def make_gguf(name, model, path, experts=None):
    """The model as converters write it, in f32, by the package gguf."""
    gguf = pytest.importorskip("gguf")
    family = CASES[name][0]
    architecture, turned, own = GGUF[family]
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    for key, value in own.items():
        value = getattr(config, value)
        if value is None:
            continue
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"{architecture}.{key}", value)
    number = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope.get("rope_type") == "longrope":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        for length in ("long", "short"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], np.float32))
    share = rope.get("partial_rotary_factor", 1)
    writer.add_rope_dimension_count(int(head_dim * share))
    for tensor, values in model.state_dict().items():
        if tensor == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = values.numpy()
        if family == "Gemma3" and "norm" in tensor:
            values = values + 1
        if turned and ("q_proj" in tensor or "k_proj" in tensor):
            heads = values.shape[0] // config.head_dim
            halves = values.reshape(heads, 2, config.head_dim // 2, -1)
            values = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
        if "experts.gate_up_proj" in tensor:
            # gpt-oss has gates and up by turns, and matrices the other way round.
            kind = "bias" if tensor.endswith("_bias") else "weight"
            by_turns = family == "GptOss"
            halves = [values[..., 0::2], values[..., 1::2]] if by_turns else np.split(values, 2, axis=1)
            for half, part in zip(("gate", "up"), halves, strict=True):
                add_expert(writer, f"blk.{tensor.split('.')[2]}.ffn_{half}_exps.{kind}", part, family, experts)
            continue
        if "experts.down_proj" in tensor:
            kind = "bias" if tensor.endswith("_bias") else "weight"
            add_expert(writer, f"blk.{tensor.split('.')[2]}.ffn_down_exps.{kind}", values, family, experts)
            continue
        if tensor.endswith("sinks"):
            tensor += ".weight"
        to = names.get_name(tensor, try_suffixes=(".weight", ".bias"))
        assert to is not None, tensor
        writer.add_tensor(to, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    "name",
    [
        "llama-bias",
        "mistral",
        "qwen2",
        "qwen2-yarn",
        "qwen3",
        "smollm3",
        "gemma3-pattern",
        "qwen3moe",
        "phi3",
        "phi3-longrope",
        "glm4",
        "granite",
        "gpt-oss",
    ],
)
def test_logits_of_gguf_files_equal_those_of_transformers(name, tmp_path):
    model = make_model(name, tmp_path)
    path = make_gguf(name, model, tmp_path / "model.gguf")
    ids = torch.randint(0, model.config.vocab_size, (1, 200), generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        theirs = model(ids).logits[0].numpy()
    assert relative_error(our_logits(path, ids[0].tolist()), theirs) <= 1e-4


def mxfp4(values):
    """[expert][row][column] as MXFP4 in the two tensors of Hugging Face's files."""
    rows = values.reshape(*values.shape[:-1], -1, 32)
    exponent = np.floor(np.log2(np.abs(rows).max(axis=-1))) - 2  # 6 · 2^exponent is the largest that there is
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    scaled = rows / np.exp2(exponent)[..., None]
    codes = np.abs(np.abs(scaled)[..., None] - levels).argmin(axis=-1).astype(np.uint8) | (scaled < 0) * np.uint8(8)
    blocks = codes[..., 0::2] | codes[..., 1::2] << 4
    return [torch.from_numpy(np.ascontiguousarray(x, dtype=np.uint8)) for x in (blocks, exponent + 127)]


def test_experts_in_mxfp4_give_the_logits_of_what_transformers_makes_of_them(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model = make_model("gpt-oss", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = safetensors.load_file(path)
    weights = model.state_dict()
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        blocks, scales = mxfp4(tensors.pop(name).transpose(1, 2).numpy())
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        weights[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    safetensors.save_file(tensors, path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model.load_state_dict(weights)
    ids = torch.randint(0, VOCAB, (1, 150), generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        theirs = model(ids).logits[0].numpy()
    assert relative_error(our_logits(tmp_path, ids[0].tolist()), theirs) <= 1e-4
    # Packed at 8 bits the codes are what they are; but a token may go to other experts.
    packed = our_logits(tmp_path, ids[0].tolist(), "auto")
    assert np.median(np.abs(packed - theirs).max(axis=1)) / np.abs(theirs).max() <= 0.05

    # Bytes without their scales mean nothing.
    tensors["model.layers.1.mlp.experts.down_proj_sums"] = tensors.pop("model.layers.1.mlp.experts.down_proj_scales")
    safetensors.save_file(tensors, path)
    done = subprocess.run([BIN / "logits_of", tmp_path, "f32", "f32", "8", "1"], input=b"1 2", capture_output=True)
    assert done.returncode == 2
    assert 'down_proj_blocks" has the dtype "U8"; allowed: F32, F16, BF16, and MXFP4' in done.stderr.decode()


def test_experts_in_mxfp4_are_read_from_gguf(tmp_path):
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType.MXFP4
    model = make_model("gpt-oss", tmp_path)
    path = make_gguf("gpt-oss", model, tmp_path / "model.gguf", kind)
    weights = model.state_dict()
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        rows = np.ascontiguousarray(weights[name].numpy().swapaxes(1, 2))
        rounded = gguf.quants.dequantize(gguf.quants.quantize(rows, kind), kind)
        weights[name] = torch.from_numpy(np.ascontiguousarray(rounded.swapaxes(1, 2)))
    model.load_state_dict(weights)
    ids = torch.randint(0, VOCAB, (1, 150), generator=torch.Generator().manual_seed(10))
    with torch.no_grad():
        theirs = model(ids).logits[0].numpy()
    assert relative_error(our_logits(path, ids[0].tolist()), theirs) <= 1e-4


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "mistral",
        "ministral",
        "smollm3",
        "gemma3",
        "qwen3moe",
        "phi3-part-of-heads",
        "glm4",
        "granite",
        "gpt-oss",
    ],
)
def test_phsa_gives_the_logits_of_the_transformers_plugin(name, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "python"))
    phsa = pytest.importorskip("phsa.hf")
    model = make_model(name, tmp_path)
    ids = torch.randint(0, VOCAB, (1, 400), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        dense = model(ids).logits[0].numpy()
        phsa.enable(model, policy="phsa", init=16, local=32, top_k=2, punctuation="none", backend="auto")
        theirs = model(ids, use_cache=False).logits[0].numpy()
    settings = {"attention": "phsa", "init_tokens": 16, "local_tokens": 32, "top_k": 2, "punctuation": "none"}
    ours = our_logits(tmp_path, ids[0].tolist(), settings=settings)
    assert relative_error(dense, theirs) > 0.05, "something must be left out"
    # Where two blocks score nearly the same, one of them is as right as the other: few rows may differ.
    errors = np.abs(ours - theirs).max(axis=1) / np.abs(theirs).max()
    assert np.mean(errors > 1e-4) < 0.03


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_longrope_turns_all_texts_by_the_longest_that_may_come(kind, tmp_path):
    model = make_model("phi3-longrope", tmp_path)
    path = tmp_path if kind == "safetensors" else make_gguf("phi3-longrope", model, tmp_path / "model.gguf")
    ids = torch.randint(0, VOCAB, (1, 100), generator=torch.Generator().manual_seed(11))
    with torch.no_grad():
        short, whole = model(ids[:, :60]).logits[0].numpy(), model(ids).logits[0].numpy()
    assert relative_error(whole[:60], short) > 0.01, "the lists must differ"
    # A context that ends at the original one is all that the short list is for.
    for context, theirs in ((64, short), (65, whole[:60]), (512, whole[:60])):
        ours = our_logits(path, ids[0, :60].tolist(), context=context)
        assert relative_error(ours, theirs) <= 1e-4, context
    # A text that grows past the original context goes on as it began, however it is cut.
    whole_of_ours = our_logits(path, ids[0].tolist(), chunk=100, context=512)
    assert relative_error(whole_of_ours, whole) <= 1e-4
    assert np.array_equal(our_logits(path, ids[0].tolist(), chunk=7, context=512), whole_of_ours)


def test_minicpm_is_granite_with_other_words_for_its_scales(tmp_path):
    """transformers has no MiniCPM of its own; Granite has the same steps, and scales to choose."""
    base, depth, layers = 32, 1.4, 3
    scales = {
        "attention_multiplier": 64**-0.5,
        "embedding_multiplier": 12.0,
        "residual_multiplier": depth / layers**0.5,
        "logits_scaling": 128 / base,
    }
    rope = {**LONGROPE, "short_factor": [1 + i / 8 for i in range(32)], "long_factor": [2 + i / 3 for i in range(32)]}
    del rope["partial_rotary_factor"]
    CASES["minicpm"] = ("Granite", {**scales, "rope_parameters": rope}, None)
    model = make_model("minicpm", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for key in (*scales, "rope_parameters"):
        del config[key]
    config |= {
        "architectures": ["MiniCPMForCausalLM"],
        "model_type": "minicpm",
        "scale_emb": 12,
        "scale_depth": depth,
        "dim_model_base": base,
        "rope_scaling": rope,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    ids = torch.randint(0, VOCAB, (1, 200), generator=torch.Generator().manual_seed(8))
    with torch.no_grad():
        theirs = model(ids).logits[0].numpy()
    assert relative_error(our_logits(tmp_path, ids[0].tolist()), theirs) <= 1e-4

    config["rope_scaling"]["long_factor"].pop()
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = subprocess.run([BIN / "logits_of", tmp_path, "f32", "f32", "8", "1"], input=b"1 2", capture_output=True)
    assert done.returncode == 2 and "long_factor is not a list of 32 numbers" in done.stderr.decode()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_files_are_read(dtype, tmp_path):
    make_model("qwen3", tmp_path, dtype)
    # Read again: casting a model casts its RoPE frequencies too.
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = torch.randint(0, VOCAB, (1, 100), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        theirs = model(ids).logits[0].numpy()
    assert relative_error(our_logits(tmp_path, ids[0].tolist()), theirs) <= 1e-4


@pytest.mark.parametrize("weights, bound", [("bf16", 0.05), ("int8", 0.15), ("auto", 0.05)])
def test_packed_weights_stay_close(weights, bound, tmp_path):
    model = make_model("llama", tmp_path)
    ids = torch.randint(0, VOCAB, (1, 200), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        theirs = model(ids).logits[0].numpy()
    assert relative_error(our_logits(tmp_path, ids[0].tolist(), weights), theirs) <= bound


@pytest.mark.parametrize("weights, kv_type", [("f32", "f32"), ("bf16", "bf16"), ("int8", "f16")])
def test_chunks_and_threads_change_no_bit(weights, kv_type, tmp_path):
    make_model("qwen3", tmp_path)
    ids = np.random.default_rng(4).integers(0, VOCAB, 150).tolist()
    whole = our_logits(tmp_path, ids, weights, kv_type, chunk=150, threads=1)
    for chunk, threads in [(1, 1), (7, 2), (64, 3)]:
        assert np.array_equal(our_logits(tmp_path, ids, weights, kv_type, chunk, threads), whole), (chunk, threads)


def test_a_tensor_of_the_wrong_shape_is_named(tmp_path):
    make_model("qwen2", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["intermediate_size"] += 32
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = subprocess.run([BIN / "logits_of", tmp_path, "f32", "f32", "8", "1"], input=b"1 2", capture_output=True)
    assert done.returncode == 2
    assert "gate_proj" in done.stderr.decode() and "[352, 128]" in done.stderr.decode()


def test_a_missing_tensor_is_named(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    make_model("llama", tmp_path)
    tensors = safetensors.load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    done = subprocess.run([BIN / "logits_of", tmp_path, "f32", "f32", "8", "1"], input=b"1 2", capture_output=True)
    assert done.returncode == 2
    assert "model.layers.1.mlp.down_proj.weight is missing" in done.stderr.decode()
