"""LoRA adapters, made by PEFT itself: our logits are transformers' with PEFT's, and what is exported is their sum."""

import json
import shutil

import numpy as np
import pytest
from conftest import ROOT
from families import write_tokenizer
from test_models import make_model, our_logits, relative_error

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

SETTINGS = {"attention": "phsa", "top_k": 2, "lambda": 0.8, "init": 16, "local": 32, "dense_below": 0}

# Every way in which a module's rank and scale can be said.
ADAPTERS = {
    "plain": {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    "all-linear": {"r": 4, "lora_alpha": 12, "target_modules": "all-linear"},
    "rslora": {"r": 9, "lora_alpha": 4, "use_rslora": True, "target_modules": ["gate_proj", "up_proj", "down_proj"]},
    "patterns": {
        "r": 6,
        "lora_alpha": 6,
        "target_modules": r".*\.(q_proj|k_proj|up_proj|down_proj)",
        "rank_pattern": {"q_proj": 3, r"layers\.[12]\.mlp\.up_proj": 40},
        "alpha_pattern": {"model.layers.0.self_attn.k_proj": 30, "down_proj": 1},
    },
    "one layer": {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1]},
}


def make_adapter(model, folder, dtype=torch.float32, seed=3, size=0.1, **config):
    """A random one; PEFT starts with B = 0, which would change nothing."""
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **config)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_((torch.randn(parameter.shape, generator=generator) * size).to(dtype))
    adapted.save_pretrained(folder)
    if dtype != torch.float32:
        from safetensors.torch import load_file, save_file

        path = folder / "adapter_model.safetensors"
        save_file({name: tensor.to(dtype) for name, tensor in load_file(path).items()}, path)
    return adapted


def token_ids(vocab, count=150, seed=1):
    return torch.randint(0, vocab, (1, count), generator=torch.Generator().manual_seed(seed))


def logits_of(model, ids):
    with torch.no_grad():
        return model(ids).logits[0].float().numpy()


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("name", ["llama-bias", "qwen2", "qwen3-tied"])
def test_logits_equal_those_of_transformers_with_peft(name, kind, tmp_path):
    model = make_model(name, tmp_path / "model")
    ids = token_ids(model.config.vocab_size)
    plain = logits_of(model, ids)
    adapted = make_adapter(model, tmp_path / "adapter", **ADAPTERS[kind])
    theirs = logits_of(adapted, ids)
    assert relative_error(plain, theirs) > 0.05, "the adapter must matter"
    ours = our_logits(tmp_path / "model", ids[0].tolist(), adapter=tmp_path / "adapter")
    assert relative_error(ours, theirs) <= 1e-4


@pytest.mark.parametrize("rank", [1, 3, 33])
def test_many_rows_threads_and_small_ranks_have_room(rank, tmp_path):
    model = make_model("qwen3", tmp_path / "model")
    ids = token_ids(model.config.vocab_size, 1200)
    config = {"r": rank, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}
    theirs = logits_of(make_adapter(model, tmp_path / "adapter", **config), ids)
    ours = our_logits(tmp_path / "model", ids[0].tolist(), "bf16", chunk=1200, threads=32, adapter=tmp_path / "adapter")
    assert (ours.argmax(-1) == theirs.argmax(-1)).mean() > 0.9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_adapters_are_read(dtype, tmp_path):
    model = make_model("qwen3", tmp_path / "model")
    ids = token_ids(model.config.vocab_size)
    theirs = logits_of(make_adapter(model, tmp_path / "adapter", dtype, **ADAPTERS["all-linear"]), ids)
    ours = our_logits(tmp_path / "model", ids[0].tolist(), adapter=tmp_path / "adapter")
    assert relative_error(ours, theirs) <= 1e-4


def test_chunks_and_threads_change_nothing(tmp_path):
    model = make_model("llama-bias", tmp_path / "model")
    ids = token_ids(model.config.vocab_size, 70)[0].tolist()
    make_adapter(model, tmp_path / "adapter", **ADAPTERS["patterns"])
    for weights in ["f32", "auto", "int8"]:
        whole = our_logits(tmp_path / "model", ids, weights=weights, chunk=70, adapter=tmp_path / "adapter")
        for chunk, threads in [(1, 2), (1, 1), (7, 3)]:
            parts = our_logits(
                tmp_path / "model", ids, weights=weights, chunk=chunk, threads=threads, adapter=tmp_path / "adapter"
            )
            assert np.array_equal(whole, parts), (weights, chunk, threads)


# ------------------------------------------------------------------------------------------------------- the program


@pytest.fixture(scope="module", params=["llama-llama3", "qwen2-yarn-factor", "qwen3-tied"])
def adapted(request, tmp_path_factory):
    """A model with a tokenizer, an adapter with settings, and what PEFT computes with them."""
    folder = tmp_path_factory.mktemp("adapted")
    model = make_model(request.param, folder / "model")
    write_tokenizer(folder / "model")
    ids = token_ids(400)
    adapted = make_adapter(model, folder / "adapter", **ADAPTERS["all-linear"])
    (folder / "adapter/phsa.json").write_text(json.dumps(SETTINGS))
    return folder, ids, logits_of(adapted, ids)


def run(phsa, *args, code=0):
    done = phsa(*args)
    assert done.returncode == code, done.stderr
    return done


def test_a_folder_that_is_exported_is_read_by_transformers(phsa, adapted, tmp_path):
    folder, ids, theirs = adapted
    out = tmp_path / "out"
    run(phsa, "export", "-m", folder / "model", "--adapter", folder / "adapter", "--out", out)
    model = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    assert model.dtype == torch.float32
    assert relative_error(logits_of(model, ids), theirs) <= 1e-4
    assert model.config.phsa["top_k"] == SETTINGS["top_k"] and model.config.phsa_punctuation_ids
    assert relative_error(our_logits(out, ids[0].tolist()), theirs) <= 1e-4
    text = "One, two; 345 ünïcödé <|im_end|>"
    wanted = transformers.AutoTokenizer.from_pretrained(folder / "model")(text)["input_ids"]
    assert transformers.AutoTokenizer.from_pretrained(out)(text)["input_ids"] == wanted


def test_a_gguf_file_that_is_exported_is_the_same_model(phsa, adapted, tmp_path):
    folder, ids, theirs = adapted
    out = tmp_path / "out.gguf"
    run(phsa, "export", "-m", folder / "model", "--adapter", folder / "adapter", "--out", out)
    assert relative_error(our_logits(out, ids[0].tolist()), theirs) <= 1e-4
    for source in [folder / "model", out]:
        text = run(phsa, "tokenize", source, "-p", "One, two; 345 ünïcödé <|im_end|>", "--ids").stdout
        assert text == run(phsa, "tokenize", folder / "model", "-p", "One, two; 345 ünïcödé <|im_end|>", "--ids").stdout
    carried = json.loads(json.loads(run(phsa, "info", out, "--json").stdout)["phsa_settings"])
    assert {**carried, **SETTINGS} == carried and carried["punctuation"] == "en+zh", "what is saved is complete"
    # And back again: a folder made of the file.
    run(phsa, "export", "-m", out, "--out", tmp_path / "again")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()
    assert relative_error(logits_of(model, ids), theirs) <= 1e-4
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "again")
    wanted = transformers.AutoTokenizer.from_pretrained(folder / "model")("One, two; 345 ünïcödé <|im_end|>")
    assert tokenizer("One, two; 345 ünïcödé <|im_end|>")["input_ids"] == wanted["input_ids"]


@pytest.mark.parametrize("type", ["f16", "bf16", "q8_0"])
def test_other_types_are_the_same_up_to_their_rounding(phsa, type, tmp_path):
    model = make_model("llama-tied", tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    ids = token_ids(400, 100)
    theirs = logits_of(make_adapter(model, tmp_path / "adapter", **ADAPTERS["plain"]), ids)
    out = tmp_path / "out.gguf"
    run(phsa, "export", "-m", tmp_path / "model", "--adapter", tmp_path / "adapter", "--out", out, "--type", type)
    # A logit sums hundreds of rounded products, through all layers.
    bound = {"f16": 2**-11, "bf16": 2**-8, "q8_0": 2**-7}[type] * 16
    assert 1e-6 < relative_error(our_logits(out, ids[0].tolist()), theirs) <= bound


def test_an_output_that_is_there_is_kept(phsa, tmp_path):
    make_model("llama-tied", tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    for out in [tmp_path / "out", tmp_path / "out.gguf"]:
        export = ["export", "-m", tmp_path / "model", "--out", out]
        run(phsa, *export)
        again = run(phsa, *export, code=2)
        assert "is there already; --force replaces it" in again.stderr
        run(phsa, *export, "--force")
    (tmp_path / "home").mkdir()
    (tmp_path / "home/letters.txt").write_text("dear")
    other = run(phsa, "export", "-m", tmp_path / "model", "--out", tmp_path / "home", "--force", code=2)
    assert "not a model that could be replaced" in other.stderr
    full = run(phsa, "export", "-m", tmp_path / "model", "--out", tmp_path / "none/out.gguf", code=1)
    assert "cannot be written" in full.stderr
    safetensors = run(phsa, "export", "-m", tmp_path / "model", "--out", tmp_path / "x", "--type", "q8_0", code=2)
    assert "allowed for safetensors" in safetensors.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "model", "out", "out.gguf"]


def test_settings_of_the_adapter_are_those_of_auto(phsa, adapted, tmp_path):
    folder, _, _ = adapted
    (tmp_path / "text.txt").write_text("One, two; three. " * 40)
    command = ["perplexity", "-m", folder / "model", "-f", tmp_path / "text.txt", "-c", "200", "--json"]
    alone = json.loads(run(phsa, *command).stdout)
    with_adapter = json.loads(run(phsa, *command, "--adapter", folder / "adapter").stdout)
    assert alone["attention"] == "dense"
    assert (with_adapter["attention"], with_adapter["top_k"]) == ("phsa", SETTINGS["top_k"])
    assert with_adapter["ppl"] != alone["ppl"]
    flags = json.loads(run(phsa, *command, "--adapter", folder / "adapter", "-K", "3").stdout)
    assert flags["top_k"] == 3
    info = json.loads(run(phsa, "info", folder / "model", "--adapter", folder / "adapter", "--json").stdout)
    assert info["adapter"]["matrices"] == 21 and json.loads(info["phsa_settings"]) == SETTINGS


def test_a_prompt_cache_of_another_adapter_is_refused(phsa, adapted, tmp_path):
    folder, _, _ = adapted
    other = tmp_path / "other"
    shutil.copytree(folder / "adapter", other)
    config = json.loads((other / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 13}))
    command = ["run", "-m", folder / "model", "--raw", "-p", "One, two; three. " * 9, "-n", "2", "--temp", "0"]
    command += ["--prompt-cache", tmp_path / "cache"]
    run(phsa, *command, "--adapter", folder / "adapter")
    again = run(phsa, *command, "--adapter", folder / "adapter", "--json")
    assert json.loads(again.stdout)["reused_tokens"] > 0
    for adapter in [[], ["--adapter", other]]:
        assert "made with another" in run(phsa, *command, *adapter, code=2).stderr


def test_bad_adapters_are_one_line_and_exit_code_2(phsa, adapted, tmp_path):
    folder, _, _ = adapted
    missing = run(phsa, "run", "-m", folder / "model", "--adapter", tmp_path / "none", "-p", "x", code=2)
    assert "is no folder" in missing.stderr and missing.stderr.count("\n") == 1
    swapped = run(phsa, "info", folder / "adapter", code=2)
    assert "give its folder as --adapter" in swapped.stderr
    make_model("llama-heads", tmp_path / "model")
    other = run(phsa, "info", tmp_path / "model", "--adapter", folder / "adapter", code=2)
    assert "the adapter is of another model" in other.stderr and other.stderr.count("\n") == 1


# ---------------------------------------------------------------------------------------------------------- SmolLM2


def test_smollm2_with_an_adapter_agrees_with_transformers_and_peft(phsa, smollm2, tmp_path):
    pytest.importorskip("gguf")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32
    ).eval()
    text = (ROOT / "bench/data/from_sand_hill_to_pine.txt").read_text(encoding="utf-8")
    (tmp_path / "text.txt").write_text(text[:4000], encoding="utf-8")
    ids = [int(i) for i in run(phsa, "tokenize", smollm2, "-f", tmp_path / "text.txt", "--ids").stdout.split()][:300]
    adapted = make_adapter(model, tmp_path / "adapter", size=0.02, **ADAPTERS["patterns"])
    theirs = logits_of(adapted, torch.tensor([ids]))
    with adapted.disable_adapter():
        assert relative_error(logits_of(adapted, torch.tensor([ids])), theirs) > 0.01, "the adapter must matter"
    # Its q and k rows lie in another order in the file.
    assert relative_error(our_logits(smollm2, ids, adapter=tmp_path / "adapter"), theirs) <= 1e-4
    auto = our_logits(smollm2, ids, weights="auto", kv_type="bf16", adapter=tmp_path / "adapter")
    assert (auto.argmax(-1) == theirs.argmax(-1)).mean() >= 0.95

    out = tmp_path / "out"
    run(phsa, "export", "-m", smollm2, "--adapter", tmp_path / "adapter", "--out", out, "--type", "f32")
    exported = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    assert relative_error(logits_of(exported, torch.tensor([ids])), theirs) <= 1e-4
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer(text[:4000])["input_ids"][:300] == ids
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert "<|im_start|>user\nHi<|im_end|>" in chat
