"""A small random model with a small tokenizer, as a Hugging Face folder: quick, and transformers reads it too."""

import json
from pathlib import Path

import torch
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


def write_model(folder: Path, *, layers: int = 2, hidden: int = 128, context: int = 512) -> LlamaForCausalLM:
    folder.mkdir(parents=True, exist_ok=True)
    first = write_tokenizer(folder)
    config = LlamaConfig(
        vocab_size=first + len(_CONTROL) + 5,  # padded, as many models are
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=context,
        bos_token_id=first,
        eos_token_id=first + 2,
        initializer_range=0.15,
    )
    torch.manual_seed(7)
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model
