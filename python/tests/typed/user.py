"""What a user may write. test_types.py has it checked; nothing runs it."""

from __future__ import annotations

import numpy as np
import torch
from transformers import LlamaForCausalLM
from typing_extensions import assert_type

import phsa
import phsa.hf

llm = phsa.LLM("smollm2-135m", attention="phsa", top_k=2, adapters={"a": "folder"})
ids = torch.tensor([1, 2, 3])
assert_type(llm.generate(ids, max_tokens=5), phsa.Generation)
assert_type(llm.generate("text"), phsa.Generation)
assert_type(llm.generate([1, 2, 3]), phsa.Generation)
assert_type(llm.generate(np.array([1, 2])), phsa.Generation)
assert_type(llm.generate("text", n=2, logit_bias={5: 1.5}), list[phsa.Generation])
assert_type(llm.generate("text", json_schema={"type": "object"}, grammar=None), phsa.Generation)
assert_type(llm.generate(["a", "b"], seed=[1, 2]), list[phsa.Generation])
assert_type(llm.generate([ids, ids]), list[phsa.Generation])
assert_type(llm.generate([[1, 2], [3]], n=2), list[list[phsa.Generation]])
assert_type(llm.chat([{"role": "user", "content": "Hi"}]), phsa.Generation)
assert_type(llm.chat("Hi", n=3, stop_token_ids=[5]), list[phsa.Generation])
for piece in llm.stream(ids, adapter="a"):
    assert_type(piece, str)
scores = llm.loglikelihood([(ids, " b"), ("a", [5])])
logits = llm.logits(ids)
found = llm.inspect(ids)
text = llm.detokenize(ids)


async def read() -> phsa.Generation | None:
    stream = llm.astream("x", logprobs=1)
    async for piece in stream:
        assert_type(piece, str)
    return stream.result


with phsa.LLM("m") as other:
    assert_type(other, phsa.LLM)
    other.set_adapter(None)


def sparse(model: LlamaForCausalLM) -> LlamaForCausalLM:
    return phsa.hf.disable(phsa.hf.enable(model, top_k=4))
