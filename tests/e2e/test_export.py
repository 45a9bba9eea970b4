"""Models of every family through `phsa export`: GGUF files and folders have the numbers of what they are made of."""

import json

import pytest
from families import OF_ONE_CASE, make_model, write_tokenizer
from test_models import our_logits, relative_error

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

EXPORTED = [
    "llama-bias",
    "qwen2",
    "smollm3",
    "gemma3-pattern",
    "qwen3moe",
    "phi3",
    "phi3-longrope",
    *OF_ONE_CASE,
]


def run(phsa, *args, code=0):
    done = phsa(*args)
    assert done.returncode == code, done.stderr
    return done


def logits_of(model, ids):
    with torch.no_grad():
        return model(ids).logits[0].float().numpy()


@pytest.mark.parametrize("name", EXPORTED)
def test_a_file_and_a_folder_made_of_it_are_the_same_model(phsa, name, tmp_path):
    model = make_model(name, tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    ids = torch.randint(0, 400, (1, 150), generator=torch.Generator().manual_seed(3))
    theirs = logits_of(model, ids)
    run(phsa, "export", "-m", tmp_path / "model", "--out", tmp_path / "model.gguf")
    assert relative_error(our_logits(tmp_path / "model.gguf", ids[0].tolist()), theirs) <= 1e-4
    run(phsa, "export", "-m", tmp_path / "model.gguf", "--out", tmp_path / "again")
    assert relative_error(our_logits(tmp_path / "again", ids[0].tolist()), theirs) <= 1e-4
    if name == "minicpm":
        return  # transformers has no such class
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()
    assert relative_error(logits_of(again, ids), theirs) <= 1e-4


@pytest.mark.parametrize("name", ["ministral", "qwen3moe-plain-layers", "gpt-oss", "gemma3-scaled"])
def test_a_folder_is_written_where_gguf_may_have_no_words(phsa, name, tmp_path):
    model = make_model(name, tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    settings = {"attention": "phsa", "top_k": 2, "init": 16, "local": 32}
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    out = tmp_path / "out"
    run(phsa, "export", "-m", tmp_path / "model", "--out", out, "--phsa-config", tmp_path / "settings.json")
    again = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    assert again.config.phsa["top_k"] == 2
    ids = torch.randint(0, 400, (1, 100), generator=torch.Generator().manual_seed(4))
    assert relative_error(logits_of(again, ids), logits_of(model, ids)) <= 1e-4


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("mistral-window", "the layers' windows"),
        ("qwen2-windows", "the layers' windows"),
        ("smollm3-list", "layers without RoPE"),
        ("qwen3moe-plain-layers", "layers without experts"),
        ("gpt-oss-sharded", "the layers' windows"),
        ("gemma3-scaled", "the layers' windows"),
    ],
)
def test_what_gguf_has_no_keys_for_is_refused(phsa, name, what, tmp_path):
    make_model(name, tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    done = run(phsa, "export", "-m", tmp_path / "model", "--out", tmp_path / "model.gguf", code=2)
    assert what in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "model.gguf").exists()


def test_experts_in_mxfp4_are_written_as_numbers(phsa, tmp_path):
    from test_models import mxfp4

    safetensors = pytest.importorskip("safetensors.torch")
    make_model("gpt-oss", tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    path = tmp_path / "model/model.safetensors"
    tensors = safetensors.load_file(path)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        blocks, scales = mxfp4(tensors.pop(name).transpose(1, 2).numpy())
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    safetensors.save_file(tensors, path)
    config = json.loads((tmp_path / "model/config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    ids = torch.randint(0, 400, (1, 100), generator=torch.Generator().manual_seed(5))
    ours = our_logits(tmp_path / "model", ids[0].tolist())
    run(phsa, "export", "-m", tmp_path / "model", "--out", tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert relative_error(logits_of(again, ids), ours) <= 1e-4


def test_an_adapter_is_added_to_rows_in_the_order_of_its_files(phsa, tmp_path):
    """GLM-4's files have rows for RoPE over neighbours, and so has an adapter; in memory they lie half a head apart."""
    pytest.importorskip("peft")
    from test_adapter import make_adapter

    model = make_model("glm4", tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    ids = torch.randint(0, 400, (1, 100), generator=torch.Generator().manual_seed(6))
    config = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "k_proj", "o_proj", "down_proj"]}
    theirs = logits_of(make_adapter(model, tmp_path / "adapter", **config), ids)
    ours = our_logits(tmp_path / "model", ids[0].tolist(), adapter=tmp_path / "adapter")
    assert relative_error(ours, theirs) <= 1e-4
    for out in ("out", "out.gguf"):
        run(phsa, "export", "-m", tmp_path / "model", "--adapter", tmp_path / "adapter", "--out", tmp_path / out)
        assert relative_error(our_logits(tmp_path / out, ids[0].tolist()), theirs) <= 1e-4
