"""A small random model with a small tokenizer, as a Hugging Face folder: quick, and transformers reads it too."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

_TOKENIZER = Path(__file__).resolve().parents[2] / "tests/data/tokenizer"
_CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_tokenizer(folder: Path) -> int:
    """Returns the id of the first control token; there are three, the last ones."""
    tokenizer = json.loads((_TOKENIZER / "base.json").read_text(encoding="utf-8"))
    kinds = json.loads((_TOKENIZER / "kinds.json").read_text(encoding="utf-8"))
    first = len(tokenizer["model"]["vocab"])
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["pre_tokenizer"] = kinds["qwen2"]["pre_tokenizer"]
    tokenizer["added_tokens"] = [{"id": first + i, "content": text, **flags} for i, text in enumerate(_CONTROL)]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    configuration = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _CONTROL[0],
        "eos_token": _CONTROL[2],
        "chat_template": _CHATML,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(configuration), encoding="utf-8")
    return first


def write_model(
    folder: Path,
    *,
    layers: int = 2,
    hidden: int = 128,
    kv_heads: int = 1,
    context: int = 512,
    tied: bool = False,
) -> LlamaForCausalLM:
    folder.mkdir(parents=True, exist_ok=True)
    first = write_tokenizer(folder)
    config = LlamaConfig(
        vocab_size=first + len(_CONTROL) + 5,  # padded, as many models are
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=kv_heads,
        head_dim=64,
        max_position_embeddings=context,
        bos_token_id=first,
        eos_token_id=first + 2,
        initializer_range=0.15,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(7)
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def write_adapter(folder: Path, *, layers: int = 2, hidden: int = 128, rank: int = 4, settings: str = "") -> Path:
    """A random LoRA adapter in PEFT's form for such a model, without PEFT. Another rank makes another adapter."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(rank)
    tensors = {}
    for layer in range(layers):
        at = f"base_model.model.model.layers.{layer}.mlp.down_proj.lora_"
        tensors[at + "A.weight"] = torch.randn(rank, 2 * hidden, generator=generator) * 0.2
        tensors[at + "B.weight"] = torch.randn(hidden, rank, generator=generator) * 0.2
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": ["down_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    if settings:
        (folder / "phsa.json").write_text(settings, encoding="utf-8")
    return folder
