"""Small random models of every architecture: our logits are transformers' logits."""

import json
import subprocess

import numpy as np
import pytest
from conftest import BIN, ROOT

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
import families  # noqa: E402
from families import CASES, OF_ONE_CASE, VOCAB, has_full_layers, make_gguf, make_model, proves  # noqa: E402

PHSA = {"attention": "phsa", "init": 16, "local": 32, "top_k": 2, "punctuation": "none"}


def our_logits(folder, ids, *args, **kwargs):
    return families.our_logits(BIN, folder, ids, *args, **kwargs)


def relative_error(ours, theirs):
    return np.abs(ours - theirs).max() / np.abs(theirs).max()


@proves(list(CASES), "safetensors", "dense")
def test_logits_equal_those_of_transformers(name, tmp_path):
    model = make_model(name, tmp_path)
    if CASES[name][2]:
        assert len(list(tmp_path.glob("*.safetensors"))) > 1, "the case must be sharded"
    ids = torch.randint(0, model.config.vocab_size, (1, 300), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        theirs = model(ids).logits[0].numpy()
    ours = our_logits(tmp_path, ids[0].tolist())
    assert relative_error(ours, theirs) <= 1e-4


@proves(
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
        *OF_ONE_CASE,
    ],
    "gguf",
    "dense",
    "phsa",
)
def test_logits_of_gguf_files_equal_those_of_transformers(name, tmp_path):
    model = make_model(name, tmp_path)
    path = make_gguf(name, model, tmp_path / "model.gguf")
    ids = torch.randint(0, model.config.vocab_size, (1, 200), generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        theirs = model(ids).logits[0].numpy()
    assert relative_error(our_logits(path, ids[0].tolist()), theirs) <= 1e-4
    # The folder's logits with PHSA are those of transformers' plug-in (below).
    sparse = our_logits(path, ids[0].tolist(), settings=PHSA)
    of_folder = our_logits(tmp_path, ids[0].tolist(), settings=PHSA)
    assert not has_full_layers(name) or relative_error(sparse, theirs) > 0.02, "something must be left out"
    assert np.mean(np.abs(sparse - of_folder).max(axis=1) > 1e-4 * np.abs(of_folder).max()) < 0.03


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


@proves(
    [
        "llama",
        "qwen2",
        "qwen3",
        "mistral",
        "ministral",
        "smollm3",
        "gemma3",
        "qwen3moe",
        "phi3-part-of-heads",
        *OF_ONE_CASE,
    ],
    "safetensors",
    "phsa",
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
    ours = our_logits(tmp_path, ids[0].tolist(), settings=PHSA)
    assert relative_error(dense, theirs) > 0.05, "something must be left out"
    # Where two blocks score nearly the same, one of them is as right as the other: few rows may differ.
    errors = np.abs(ours - theirs).max(axis=1) / np.abs(theirs).max()
    assert np.mean(errors > 1e-4) < 0.03


@pytest.mark.parametrize("settings", [None, PHSA], ids=["dense", "phsa"])
@pytest.mark.parametrize(
    "name",
    ["llama-bias", "gemma3-pattern", "qwen3moe-plain-layers", "phi3-heads-of-96", "glm4", "minicpm", "gpt-oss"],
)
def test_the_backend_for_gpus_errs_as_bf16_does(name, settings, tmp_path):
    """On a host that plays the GPU (tests/host_gpu.cc): prefill in chunks, and decode by graphs."""
    if not (BIN / "logits_of_gpu").exists():
        pytest.skip("built without CUDA")
    make_model(name, tmp_path)
    ids = torch.randint(0, VOCAB, (150,), generator=torch.Generator().manual_seed(12)).tolist()
    want = our_logits(tmp_path, ids, settings=settings)

    def error(*args, **kwargs):
        rows = np.abs(our_logits(tmp_path, ids, *args, settings=settings, **kwargs) - want).mean(axis=1)
        # A row that chooses another block or expert, where two are nearly alike, is far off on either side, and what
        # attends to a row with another expert is off too: with experts, a quarter of the rows is before or beside it.
        if name in ("qwen3moe-plain-layers", "gpt-oss"):
            return np.quantile(rows, 0.25)
        return np.median(rows) if settings else rows.mean()

    limit = error("bf16", "bf16")
    for chunk, kv_type in ((150, "bf16"), (37, "f16"), (3, "bf16"), (1, "bf16")):
        assert error("bf16", kv_type, chunk, program="logits_of_gpu", device="cuda") <= 1.5 * limit, (chunk, kv_type)


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


def test_longrope_lists_have_a_number_for_each_pair(tmp_path):
    make_model("minicpm", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
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


@pytest.mark.parametrize("name", ["qwen3moe", "qwen3moe-plain-layers"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_experts_that_stay_in_the_file_have_the_bits_of_copied_ones(name, dtype, phsa, tmp_path, monkeypatch):
    make_model(name, tmp_path, dtype)
    weights = "bf16" if dtype == torch.bfloat16 else "f32"
    ids = torch.randint(0, VOCAB, (120,), generator=torch.Generator().manual_seed(15)).tolist()
    copied = our_logits(tmp_path, ids, weights, "f32")
    monkeypatch.setenv("PHSA_EXPERTS_IN_FILE", "1")
    for chunk in (120, 7, 1):
        assert np.array_equal(our_logits(tmp_path, ids, weights, "f32", chunk), copied), chunk
    plans = json.loads(phsa("info", tmp_path, "--json").stdout)["memory"]["weights"]
    assert 0.15 * plans[weights]["bytes"] < plans[weights]["experts_in_file"] < plans[weights]["bytes"]
    assert plans["int8"]["experts_in_file"] == 0


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


def test_info_says_what_memory_a_model_takes_before_it_is_loaded(phsa, tmp_path):
    config = make_model("qwen3moe", tmp_path / "model", torch.float16).config
    info = json.loads(phsa("info", tmp_path / "model", "--json").stdout)
    memory, count = info["memory"], info["parameters"]
    for mode, least, most in (("f32", 4, 4.5), ("bf16", 2, 2.5), ("int8", 1, 1.5)):
        assert least * count <= memory["weights"][mode]["bytes"] <= most * count, mode
    assert 2 * count <= memory["gpu_weights"]["bf16"]["bytes"] <= 2.5 * count
    assert "int8" not in memory["gpu_weights"], "there are no kernels for experts in int8"
    numbers = config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim
    for dtype, size in (("f32", 4), ("bf16", 2)):
        assert 1000 * numbers * size <= memory["cache_of_1000_tokens"][dtype] <= 1.02 * 1000 * numbers * size
        assert 0 < memory["representatives_of_1000_tokens"][dtype] < 0.2 * 1000 * numbers * size
    text = phsa("info", tmp_path / "model").stdout
    assert "weights, --weights bf16" in text and "on a GPU, --weights bf16" in text and "cache of 1,000 tokens" in text


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
