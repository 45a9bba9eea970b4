"""A model that says what it is told to: every token has one token that follows it."""

import itertools

import gguf
import numpy as np
import tokenizers
from gguf_files import write_out

HIDDEN = 256


def letters(text):
    """The text as a GPT-2 vocabulary writes it."""
    pieces = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return "".join(piece for piece, _ in pieces)


def write_scripted(path, template, script, after="\n", control=(), more=(), context=4096):
    """Behind the token `after`, which ends the prompt, the tokens of the script follow, each once, and then the end.
    What of it is in `control` are control tokens; so are `more`, which the vocabulary has besides."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = [word if word in control else letters(word) for word in script]
    assert len(set(words)) == len(words) and not set(words) & set(alphabet), "each follows one token"
    tokens = [*alphabet, "<|endoftext|>", "<|im_start|>", "<|im_end|>", *more, *words]
    kinds = [1] * len(alphabet) + [3, 3, 3] + [3] * len(more) + [3 if word in control else 1 for word in words]
    tokens += [f"<unused{i}>" for i in range(-len(tokens) % 32)]
    kinds += [3] * (len(tokens) - len(kinds))
    end = tokens.index("<|im_end|>")
    chain = [tokens.index(after if after in more else letters(after)), *(tokens.index(word) for word in words), end]

    random = np.random.default_rng(3)
    embedding = random.normal(0, 1, (len(tokens), HIDDEN)).astype(np.float32)
    output = random.normal(0, 0.01, (len(tokens), HIDDEN)).astype(np.float32)
    for token, following in itertools.pairwise(chain):
        output[following] = embedding[token]

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("scripted")
    writer.add_context_length(context)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(4)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([])
    writer.add_eos_token_id(end)
    writer.add_chat_template(template)
    one = np.ones(HIDDEN, np.float32)
    head = HIDDEN // 4
    for name, values in {
        "token_embd.weight": embedding,
        "output.weight": output,
        "output_norm.weight": one,
        "blk.0.attn_norm.weight": one,
        "blk.0.ffn_norm.weight": one,
        "blk.0.attn_q.weight": np.zeros((HIDDEN, HIDDEN), np.float32),
        "blk.0.attn_k.weight": np.zeros((head, HIDDEN), np.float32),
        "blk.0.attn_v.weight": np.zeros((head, HIDDEN), np.float32),
        "blk.0.attn_output.weight": np.zeros((HIDDEN, HIDDEN), np.float32),
        "blk.0.ffn_gate.weight": np.zeros((32, HIDDEN), np.float32),
        "blk.0.ffn_up.weight": np.zeros((32, HIDDEN), np.float32),
        "blk.0.ffn_down.weight": np.zeros((HIDDEN, 32), np.float32),
    }.items():
        writer.add_tensor(name, values)
    write_out(writer)
    return path
