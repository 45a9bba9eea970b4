"""Small random models of every architecture, as transformers and the package gguf write them, for tests of the engine
on the CPU (tests/e2e/test_models.py) and on a GPU (tests/cuda/test_families.py).

    python tests/e2e/families.py FOLDER NAME …     FOLDER/NAME.gguf, for a machine that has no package gguf
"""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import torch
import transformers
from gguf_files import write_out

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

# transformers has no MiniCPM of its own; Granite has the same steps, and words of its own for the scales.
MINICPM_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1 + i / 8 for i in range(32)],
    "long_factor": [2 + i / 3 for i in range(32)],
    "original_max_position_embeddings": 64,
}
MINICPM = {
    "attention_multiplier": 64**-0.5,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 1.4 / 3**0.5,
    "logits_scaling": 128 / 32,
    "rope_parameters": MINICPM_ROPE,
}

# name: architecture, changes of the configuration, largest shard
CASES = {
    "llama": ("Llama", {}, None),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}, None),
    "llama-sharded": ("Llama", {}, "200KB"),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True}, None),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3}, None),
    "llama-linear": ("Llama", {"rope_parameters": LINEAR}, None),
    "llama-heads-of-80": ("Llama", {"head_dim": 80}, None),
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
    "phi3-heads-of-96": (
        "Phi3",
        {"hidden_size": 384, "num_key_value_heads": 4, "pad_token_id": None, "eos_token_id": 2},
        None,
    ),
    "glm4": ("Glm4", {**PARTIAL, "pad_token_id": None, "eos_token_id": 2, "attention_bias": True}, "200KB"),
    "granite": ("Granite", GRANITE, None),
    "minicpm": ("MiniCpm", MINICPM, None),
    "gpt-oss": ("GptOss", GPT_OSS, None),
    "ernie4_5": ("Ernie4_5", {}, None),
    "seed_oss": ("SeedOss", {"attention_bias": True, "attention_out_bias": True}, None),
    "gpt-oss-sharded": (
        "GptOss",
        {**GPT_OSS, "swiglu_limit": 3.0, "swiglu_alpha": 1.3, "layer_types": [FULL, SLIDING, SLIDING, FULL]},
        "400KB",
    ),
    "qwen3-odd": ("Qwen3", {"hidden_size": 120, "intermediate_size": 200, "head_dim": 64, "vocab_size": 509}, None),
}


# The families as docs/support-matrix.md calls them, by what transformers does.
MODELS = {
    "Llama": "Llama",
    "Qwen2": "Qwen2, Qwen2.5",
    "Qwen3": "Qwen3",
    "Mistral": "Mistral",
    "Ministral": "Ministral",
    "SmolLM3": "SmolLM3",
    "Gemma3": "Gemma 3 (text)",
    "Qwen3Moe": "Qwen3-MoE",
    "Phi3": "Phi-3, Phi-4",
    "Glm4": "GLM-4",
    "Granite": "Granite",
    "MiniCpm": "MiniCPM to 4",
    "GptOss": "gpt-oss",
    "Ernie4_5": "ERNIE 4.5",
    "SeedOss": "Seed-OSS",
}
# Families with one case, which every test of all families takes.
OF_ONE_CASE = ["glm4", "granite", "minicpm", "gpt-oss", "ernie4_5", "seed_oss"]
# What tests/cuda/test_families.py runs, in both kinds of files where GGUF has the family, dense and with PHSA.
ON_GPU = [
    "llama",
    "llama-bias",
    "llama-heads-of-80",
    "qwen2",
    "qwen3",
    "mistral-window",
    "ministral",
    "smollm3",
    "gemma3",
    "gemma3-pattern",
    "qwen3moe",
    "qwen3moe-plain-layers",
    "phi3",
    "phi3-part-of-heads",
    "phi3-longrope",
    "phi3-heads-of-96",
    *OF_ONE_CASE,
]
# (model, kind of file, device, dense or phsa): what the tests that were imported prove. scripts/support-matrix.py makes
# the table of models of it.
PROVEN = set()


def prove(names, file, way, device="cpu"):
    for name in names:
        PROVEN.add((MODELS[CASES[name][0] if name in CASES else name], file, device, way))


def proves(names, file, *ways):
    """A test's argument `name`, and that it proves these ways of reading these models on the CPU."""
    import pytest

    for way in ways:
        prove(names, file, way)
    return pytest.mark.parametrize("name", names)


def has_full_layers(name):
    """Whether there is a layer without a window, for PHSA to be of."""
    return name not in ("mistral-window", "phi3")


def make_model(name, folder, dtype=torch.float32):
    family, changes, shard = CASES[name]
    architecture = {"MiniCpm": "Granite"}.get(family, family)
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
    if family == "MiniCpm":
        path = pathlib.Path(folder) / "config.json"
        config = {key: value for key, value in json.loads(path.read_text()).items() if key not in MINICPM}
        config |= {"architectures": ["MiniCPMForCausalLM"], "model_type": "minicpm", "rope_scaling": MINICPM_ROPE}
        config |= {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 32}
        path.write_text(json.dumps(config))
    return model


def write_tokenizer(folder):
    """Qwen2's way of cutting text over a small vocabulary, with three control tokens at the end."""
    data = pathlib.Path(__file__).resolve().parents[1] / "data/tokenizer"
    tokenizer = json.loads((data / "base.json").read_text(encoding="utf-8"))
    tokenizer["pre_tokenizer"] = json.loads((data / "kinds.json").read_text(encoding="utf-8"))["qwen2"]["pre_tokenizer"]
    tokenizer["normalizer"] = {"type": "NFC"}
    # As many as the models have room for.
    vocab = {token: id for token, id in tokenizer["model"]["vocab"].items() if id < 500}
    merges = [merge if isinstance(merge, list) else merge.split(" ") for merge in tokenizer["model"]["merges"]]
    tokenizer["model"]["vocab"] = vocab
    tokenizer["model"]["merges"] = [[a, b] for a, b in merges if {a, b, a + b} <= vocab.keys()]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    first = len(tokenizer["model"]["vocab"])
    tokenizer["added_tokens"] = [{"id": first + i, "content": text, **flags} for i, text in enumerate(control)]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": control[0], "eos_token": control[2]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


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
    "MiniCpm": (
        "minicpm",
        True,
        {
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
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
    "Ernie4_5": ("ernie4_5", False, {}),
    "SeedOss": ("seed_oss", False, {}),
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
    import gguf

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
    import gguf

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
    write_out(writer)
    return path


def our_logits(
    programs,
    folder,
    ids,
    weights="f32",
    kv_type="f32",
    chunk=64,
    threads=2,
    adapter="-",
    settings=None,
    context=None,
    program="logits_of",
    device="cpu",
):
    """Of all tokens; `programs`: the folder of logits_of; device: cuda, for a GPU, or what plays one."""
    more = [json.dumps(settings) if settings else "-"] + ([str(context)] if context else [])
    done = subprocess.run(
        [programs / program, folder, weights, kv_type, str(chunk), str(threads), adapter, *more],
        input=" ".join(map(str, ids)).encode(),
        capture_output=True,
        env={**os.environ, "PHSA_DEVICE": device},
    )
    assert done.returncode == 0, done.stderr.decode()
    return np.frombuffer(done.stdout, np.float32).reshape(len(ids), -1)


def main():
    folder = pathlib.Path(sys.argv[1])
    for name in sys.argv[2:]:
        make_gguf(name, make_model(name, folder / name), folder / f"{name}.gguf")


if __name__ == "__main__":
    main()
