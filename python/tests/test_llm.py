"""phsa.LLM: the engine as Python sees it, against the program, transformers and itself."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_model import write_adapter, write_model

import phsa
from phsa import _library

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(os.environ.get("PHSA_BIN_DIR", ROOT / "build/release/bin"))
TEXT = (ROOT / "bench/data/from_sand_hill_to_pine.txt").read_text(encoding="utf-8")
SPARSE = {"attention": "phsa", "init": 16, "local": 32, "top_k": 2}
GREEDY = {"temperature": 0, "ignore_eos": True}
# Exact, so that what is read in another order or company gives the same bits.
F32 = {"weights": "f32", "threads": 1}

try:
    _library.load_engine()
except phsa.LibraryError as error:
    pytest.skip(f"the engine's module is not built: {error}", allow_module_level=True)


def run_phsa(*args: object) -> str:
    done = subprocess.run([BIN / "phsa", *map(str, args)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    write_model(folder)
    return folder


@pytest.fixture(scope="session")
def slow_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that takes many seconds to read its context."""
    folder = tmp_path_factory.mktemp("slow") / "model"
    write_model(folder, layers=8, hidden=768, context=65536)
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> phsa.LLM:
    return phsa.LLM(folder, **F32)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M, fetched on first use (93 MB)."""
    if not (BIN / "phsa").exists():
        pytest.skip(f"{BIN / 'phsa'} is not built: what it answers is not compared")
    done = subprocess.run([BIN / "phsa", "models", "fetch", "smollm2-135m"], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"SmolLM2 cannot be had here: {done.stderr.strip().splitlines()[-1]}")
    return Path(run_phsa("models", "path", "smollm2-135m").strip())


def run_python(program: str, *args: object, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": str(ROOT / "python")},
    )


# --- the same as others say ---


def test_chat_answers_what_the_program_answers(smollm2: Path) -> None:
    question = TEXT[:4000] + "\n\nWho is the man?"
    flags = ("--attention", "phsa", "-K", 8, "-c", 4096, "--temp", 0, "-n", 40, "--json")
    theirs = json.loads(run_phsa("run", "-m", smollm2, "-p", question, *flags))
    llm = phsa.LLM(smollm2, attention="phsa", top_k=8, context=4096)
    ours = llm.chat(question, temperature=0, max_tokens=40)
    assert ours.text == theirs["text"] and len(ours.tokens) == theirs["tokens"]
    assert ours.prompt_tokens == theirs["prompt_tokens"]
    assert ours.read_share == pytest.approx(theirs["read_share"]) and ours.read_share < 1
    assert llm.detokenize(ours.tokens) == ours.text
    assert phsa.LLM("smollm2-135m").name == llm.name, "by its name"


def test_logits_are_those_of_transformers(llm: phsa.LLM, folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = llm.tokenize(TEXT[:900])[:300]
    with torch.no_grad():
        want = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0].numpy()
    got = llm.logits(ids)
    assert got.shape == (300, llm.vocab_size) == want.shape and got.dtype == np.float32
    # Sums of 128 to 256 products in f32, in another order.
    assert np.abs(got - want).max() < 1e-4 * np.abs(want).max()


def test_an_adapter_is_applied_and_its_settings_are_taken(folder: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="the package peft makes the adapter")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    adapted.save_pretrained(tmp_path)
    ids = np.arange(100, 200, dtype=np.int32)
    with torch.no_grad():
        want = adapted(torch.from_numpy(ids.astype(np.int64))[None]).logits[0].numpy()
        with adapted.disable_adapter():
            assert np.abs(adapted(torch.from_numpy(ids.astype(np.int64))[None]).logits[0].numpy() - want).max() > 0.1
    llm = phsa.LLM(folder, adapter=tmp_path, **F32)
    assert llm.attention["attention"] == "dense"
    assert np.abs(llm.logits(ids) - want).max() < 1e-4 * np.abs(want).max()
    (tmp_path / "phsa.json").write_text('{"attention": "phsa", "top_k": 3}')
    assert phsa.LLM(folder, adapter=str(tmp_path), **F32).attention["top_k"] == 3
    with pytest.raises(ValueError, match="is no folder"):
        phsa.LLM(folder, adapter=tmp_path / "absent")
    with pytest.raises(TypeError):
        phsa.LLM(folder, adapter=5)  # type: ignore[arg-type]


def test_adapters_are_chosen_by_name_and_by_call(folder: Path, tmp_path: Path) -> None:
    one = write_adapter(tmp_path / "one", rank=3)
    two = write_adapter(tmp_path / "two", rank=5, settings='{"attention": "phsa", "top_k": 3}')
    ids = np.arange(100, 180, dtype=np.int32)
    alone = {name: phsa.LLM(folder, adapter=path, **F32) for name, path in (("one", one), ("two", two), (None, None))}
    want = {name: each.logits(ids) for name, each in alone.items()}
    answers = {name: each.generate(ids, max_tokens=8, **GREEDY).tokens.tolist() for name, each in alone.items()}
    assert np.abs(want["one"] - want[None]).max() > 0.1 and np.abs(want["one"] - want["two"]).max() > 0.1

    llm = phsa.LLM(folder, adapters={"one": one, "two": str(two)}, **F32)
    weights = llm.memory["weights"]
    assert llm.adapter is None and np.array_equal(llm.logits(ids), want[None])
    for name in ("one", "two", None, "two", "one"):
        assert llm.generate(ids, max_tokens=8, adapter=name, **GREEDY).tokens.tolist() == answers[name]
    assert llm.generate(ids, max_tokens=8, **GREEDY).tokens.tolist() == answers[None], "the others' choice is theirs"
    assert np.array_equal(llm.logits(ids), want[None])
    llm.set_adapter("two")
    assert llm.adapter == "two" and np.array_equal(llm.logits(ids), want["two"])
    assert llm.attention["attention"] == "phsa" and llm.attention["top_k"] == 3, "what the adapter carries"
    assert llm.memory["weights"] > weights
    llm.set_attention("dense")
    llm.set_adapter(one)
    assert llm.attention["attention"] == "dense" and np.array_equal(llm.logits(ids), want["one"])

    stream = llm.stream(ids, max_tokens=20, **GREEDY)
    next(stream)
    with pytest.raises(RuntimeError, match="another adapter: a stream of this LLM is open"):
        llm.generate(ids, adapter="two")
    assert llm.generate(ids, max_tokens=8, adapter="one", **GREEDY).tokens.tolist() == answers["one"]
    stream.close()
    # One that is not for this model changes nothing, and is told when the model is made.
    config = json.loads((one / "adapter_config.json").read_text())
    (one / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    with pytest.raises(ValueError, match="use_dora"):
        phsa.LLM(folder, adapters={"one": one}, **F32)
    llm.set_adapter(None)
    with pytest.raises(ValueError, match="use_dora"):
        llm.set_adapter(one)
    assert llm.adapter is None and np.array_equal(llm.logits(ids), want[None])


def test_tokens_and_templates_are_those_of_transformers(llm: phsa.LLM, folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "Bees, wasps; <|im_end|> 老残游记\n\n  x"
    assert llm.tokenize(text).tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert llm.detokenize(llm.tokenize(text)) == text
    assert llm.detokenize(llm.tokenize(text), special=False) == text.replace("<|im_end|>", "")
    assert len(llm.tokenize("<|im_end|>")) == 1 < len(llm.tokenize("<|im_end|>", special=False))
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    for prompt in (True, False):
        want = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
        assert llm.apply_chat_template(chat, add_generation_prompt=prompt) == want
        ids = llm.apply_chat_template(chat, add_generation_prompt=prompt, tokenize=True)
        assert ids.tolist() == llm.tokenize(want).tolist()
    # A message cannot end itself.
    sly = llm.apply_chat_template("<|im_end|>", tokenize=True)
    assert list(sly).count(llm.tokenize("<|im_end|>")[0]) == 1


def test_log_likelihoods_are_those_of_the_logits(llm: phsa.LLM) -> None:
    beginning = llm.tokenize(TEXT[:200])
    pairs = [(beginning, llm.tokenize(word)) for word in (" Paris", " Rome, or so", ".")]
    pairs += [(beginning[:50], beginning[50:80]), ("A text", " goes on")]
    scores = llm.loglikelihood(pairs)
    assert len(scores) == len(pairs)
    for (context, continuation), score in zip(pairs, scores, strict=True):
        first, second = (llm.tokenize(p) if isinstance(p, str) else p for p in (context, continuation))
        logits = llm.logits(np.concatenate([first, second]))[len(first) - 1 : -1].astype(np.float64)
        probabilities = logits - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
        want = (probabilities - logits.max(1, keepdims=True))[np.arange(len(second)), second]
        assert np.allclose(score.tokens, want, atol=1e-4) and score.tokens.dtype == np.float32
        assert score.total == pytest.approx(want.sum(), abs=1e-3)
        assert score.greedy == bool((logits.argmax(1) == second).all())
    best = llm.logits(beginning)[-1].argmax()
    assert llm.loglikelihood([(beginning, [best])])[0].greedy


def test_inspect_finds_what_the_program_finds(folder: Path) -> None:
    if not (BIN / "phsa").exists():
        pytest.skip(f"{BIN / 'phsa'} is not built: what it finds is not compared")
    text = TEXT[:900]
    llm = phsa.LLM(folder, **SPARSE, **F32)
    found = llm.inspect(text, last=3, max_tokens=2)
    flags = ("--raw", "--last", 3, "-n", 2, "--attention", "phsa", "--init", 16, "--local", 32, "-K", 2)
    want = json.loads(
        run_phsa("inspect", "-m", folder, "-p", text, "-c", 512, "--weights", "f32", "-t", 1, *flags, "--json")
    )
    assert found.data == want
    queries = len(found.positions)
    assert queries == len(want["queries"]) and found.positions[2] == len(llm.tokenize(text)) - 1
    assert found.blocks.shape == found.scores.shape == (queries, 2, 1, 2) and found.recall.shape == (queries, 2, 2)
    head = want["queries"][1]["layers"][1]["heads"][0]
    assert found.blocks[1, 1, 0].tolist() == head["blocks"] and np.allclose(found.scores[1, 1, 0], head["scores"])
    assert found.recall.mean() == pytest.approx(want["recall"], abs=1e-5)
    assert "<html" in found.html() and "Query" in str(found)
    cell = found._repr_html_()
    assert cell.startswith("<iframe") and "srcdoc" in cell and "<html" not in cell, "a page of its own, in a frame"


# --- the same in every way to ask ---


def test_a_batch_answers_as_its_prompts_alone(llm: phsa.LLM) -> None:
    prompts: list[Any] = [TEXT[i * 100 : i * 150 + 40] for i in range(6)]
    prompts.append(llm.tokenize(TEXT[:300]))
    alone = [llm.generate(prompt, max_tokens=12, **GREEDY) for prompt in prompts]
    for size in (1, 3, 8):
        together = llm.generate(prompts, max_tokens=12, max_batch=size, **GREEDY)
        assert [a.text for a in together] == [a.text for a in alone]
        assert all((a.tokens == b.tokens).all() for a, b in zip(together, alone, strict=True))
    assert llm.generate([]) == []


def test_a_stream_is_the_answer_in_pieces(llm: phsa.LLM) -> None:
    prompt = TEXT[:200]
    whole = llm.generate(prompt, max_tokens=20, **GREEDY)
    pieces = list(llm.stream(prompt, max_tokens=20, **GREEDY))
    assert "".join(pieces) == whole.text and len(pieces) > 5
    chat = [{"role": "user", "content": "Hi"}]
    assert "".join(llm.stream(chat, max_tokens=5, **GREEDY)) == llm.chat(chat, max_tokens=5, **GREEDY).text
    assert llm.chat("Hi", max_tokens=5, **GREEDY).text == llm.chat(chat, max_tokens=5, **GREEDY).text

    def keep(result: list[phsa.Generation]) -> Any:
        result.append((yield from llm.stream(prompt, max_tokens=20, **GREEDY)))

    results: list[phsa.Generation] = []
    assert "".join(keep(results)) == whole.text == results[0].text and results[0].reason == "max_tokens"


def test_sampling_follows_the_seed(llm: phsa.LLM) -> None:
    options = {"temperature": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "max_tokens": 20, "ignore_eos": True}
    answers = [llm.generate(TEXT[:50], seed=seed, **options).text for seed in (1, 1, 2)]
    assert answers[0] == answers[1] != answers[2]
    assert llm.generate(TEXT[:50], **options).text != llm.generate(TEXT[:50], **options).text
    assert llm.generate(TEXT[:50], seed=2**64 - 1, max_tokens=1).prompt_tokens > 0


DRAWN = {"temperature": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "max_tokens": 12, "ignore_eos": True}


def test_a_prompt_may_have_several_answers(llm: phsa.LLM) -> None:
    one, two = TEXT[:120], TEXT[200:300]
    lists = llm.generate([one, two], n=3, seed=5, **DRAWN)
    assert [len(answers) for answers in lists] == [3, 3] and len({answer.text for answer in lists[0]}) == 3
    # Answer i is that of the seed 5 + i, alone too.
    assert [answer.text for answer in lists[1]] == [llm.generate(two, seed=5 + i, **DRAWN).text for i in range(3)]
    llm.logits([1])  # empties the cache
    alone = llm.generate(one, n=3, seed=5, **DRAWN)
    assert [answer.text for answer in alone] == [answer.text for answer in lists[0]]
    assert [answer.reused_tokens > 0 for answer in alone] == [False, True, True], "the prompt is read once"
    assert len(llm.generate(one, n=1, **DRAWN)) == 1
    assert len(llm.chat("Hi", n=2, **DRAWN)) == 2
    last = llm.generate(one, n=2, seed=2**64 - 1, **DRAWN)
    assert last[1].text == llm.generate(one, seed=0, **DRAWN).text, "after the largest seed comes 0"


def test_the_prompts_of_a_batch_may_have_seeds_of_their_own(llm: phsa.LLM) -> None:
    texts = [answer.text for answer in llm.generate([TEXT[:50]] * 3, seed=[1, 2, 1], **DRAWN)]
    assert texts[0] == texts[2] != texts[1]
    assert texts[1] == llm.generate(TEXT[:50], seed=2, **DRAWN).text
    assert [answer.text for answer in llm.generate([TEXT[:50]] * 3, seed=np.array([1, 2, 1]), **DRAWN)] == texts
    assert len({answer.text for answer in llm.generate([TEXT[:50]] * 3, seed=range(3), **DRAWN)}) == 3


def test_log_probabilities_are_those_of_the_logits(llm: phsa.LLM) -> None:
    prompt = llm.tokenize(TEXT[:200])
    answer = llm.generate(prompt, max_tokens=8, logprobs=4, **GREEDY)
    assert answer.logprobs is not None and answer.top_ids is not None and answer.top_logprobs is not None
    logits = llm.logits(np.concatenate([prompt, answer.tokens]))[len(prompt) - 1 : -1].astype(np.float64)
    want = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    assert np.allclose(answer.logprobs, want[np.arange(8), answer.tokens], atol=1e-4)
    assert answer.top_ids.shape == answer.top_logprobs.shape == (8, 4)
    assert (answer.top_ids[:, 0] == answer.tokens).all(), "greedy"
    assert np.allclose(answer.top_logprobs, np.take_along_axis(want, answer.top_ids, 1), atol=1e-4)
    alone = llm.generate(prompt, max_tokens=8, logprobs=0, **GREEDY)
    assert alone.top_ids is not None and alone.top_ids.shape == (8, 0)
    assert alone.logprobs is not None and np.allclose(alone.logprobs, answer.logprobs, atol=1e-5)
    assert llm.generate(prompt, max_tokens=2, **GREEDY).logprobs is None
    nothing = llm.generate(prompt, logprobs=2, stop_token_ids=answer.tokens[:1], **GREEDY)
    assert nothing.top_ids is not None and nothing.top_ids.shape == (0, 0) and len(nothing.tokens) == 0


def test_penalties_and_biases_change_what_is_chosen(llm: phsa.LLM) -> None:
    prompt = TEXT[:200]
    free = llm.generate(prompt, max_tokens=40, **GREEDY).tokens
    first = int(free[0])
    assert first not in llm.generate(prompt, max_tokens=10, logit_bias={first: -100}, **GREEDY).tokens
    wanted = {np.int64(7): np.float32(100)}
    assert set(llm.generate(prompt, max_tokens=5, logit_bias=wanted, **GREEDY).tokens) == {7}
    # What was said is asked for again, or not, over the answer alone.
    assert set(llm.generate(prompt, max_tokens=9, logit_bias={7: 100}, frequency_penalty=2, **GREEDY).tokens) == {7}
    varied = llm.generate(prompt, max_tokens=40, presence_penalty=2, frequency_penalty=2, **GREEDY).tokens
    alike = llm.generate(prompt, max_tokens=40, presence_penalty=-2, frequency_penalty=-2, **GREEDY).tokens
    assert len(set(varied)) > len(set(alike)) and varied[0] == alike[0] == first


def test_choices_follow_the_formula_of_penalties_and_biases(folder: Path) -> None:
    llm = phsa.LLM(folder, device="cpu", weights="f32", kv_type="f32")
    rng = np.random.default_rng(3)
    for _ in range(4):
        frequency, presence, repetition = rng.uniform(-2, 2), rng.uniform(-2, 2), rng.uniform(0.7, 1.6)
        bias = {int(token): float(rng.uniform(-4, 4)) for token in rng.choice(300, 40, replace=False)}
        prompt = llm.tokenize(TEXT[:120])
        answer = llm.generate(
            prompt,
            max_tokens=24,
            frequency_penalty=frequency,
            presence_penalty=presence,
            repetition_penalty=repetition,
            logit_bias=bias,
            ignore_eos=True,
            temperature=0,
        )
        text = np.concatenate([np.asarray(prompt), answer.tokens])
        logits = llm.logits(text)
        for i, chosen in enumerate(answer.tokens):
            row = logits[len(prompt) - 1 + i].astype(np.float64)
            for token, value in bias.items():
                row[token] += value
            for token in set(text[: len(prompt) + i].tolist()):
                row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
            for token in set(answer.tokens[:i].tolist()):
                row[token] -= frequency * int((answer.tokens[:i] == token).sum()) + presence
            assert row[chosen] >= row.max() - 1e-3


def test_an_answer_follows_its_grammar_or_schema(llm: phsa.LLM) -> None:
    grammar = 'root ::= word (", " word){1,3} "."\nword ::= [a-d]{2,4}'
    for answer in llm.generate(["One", TEXT[:99]], n=3, seed=1, temperature=2, grammar=grammar, max_tokens=60):
        for each in answer:
            assert each.reason == "end_of_text"
            assert re.fullmatch(r"[a-d]{2,4}(, [a-d]{2,4}){1,3}\.", each.text)
    schema = {
        "type": "object",
        "properties": {"z": {"type": "integer"}, "a": {"enum": ["x", "y"]}, "l": {"type": "array", "maxItems": 2}},
        "required": ["z", "a"],
        "additionalProperties": False,
    }
    for given in (schema, json.dumps(schema)):
        answer = llm.generate("Say it in JSON:", json_schema=given, seed=4, temperature=1, max_tokens=800)
        read = json.loads(answer.text) if answer.reason == "end_of_text" else None
        assert read is None or (list(read)[:2] == ["z", "a"] and read["a"] in ("x", "y"))
    pieces = llm.stream(TEXT[:50], grammar=grammar, **GREEDY)
    assert re.fullmatch(r"[a-d]{2,4}(, [a-d]{2,4}){1,3}\.", "".join(pieces))
    both = llm.generate("x", grammar='root ::= "abc"', logprobs=1, **GREEDY)
    assert both.text == "abc" and both.logprobs is not None and len(both.logprobs) == len(both.tokens)


def test_numpy_numbers_are_taken_everywhere(folder: Path) -> None:
    numbers = {"top_k": np.int64(2), "lam": np.float32(0.75), "init": np.int32(16), "local": np.uint16(32)}
    llm = phsa.LLM(folder, attention="phsa", context=np.int64(256), threads=np.int8(1), **numbers)
    want = llm.attention
    assert (want["top_k"], want["lambda"], llm.context) == (2, 0.75, 256)
    llm.set_attention("dense")
    whole = {"attention": "phsa", "top_k": np.int64(2), "lambda": np.float64(0.75)}
    llm.set_attention(settings={**whole, "init": np.int64(16), "local": np.int64(32)})
    assert (llm.attention["top_k"], llm.attention["lambda"]) == (2, 0.75)
    llm.set_attention(settings=phsa.Settings(**numbers))
    assert (llm.attention["top_k"], llm.attention["init"]) == (2, 16)
    options = {"max_tokens": np.int64(3), "temperature": np.float32(0), "top_p": np.float64(1), "seed": np.uint64(3)}
    assert len(llm.generate(torch.tensor([1, 2, 3]), ignore_eos=np.bool_(True), **options).tokens) == 3
    assert len(llm.inspect("Bees, wasps.", last=np.int64(2)).positions) == 2


def test_what_ends_an_answer_is_told(llm: phsa.LLM) -> None:
    free = llm.generate(TEXT[:200], max_tokens=30, **GREEDY)
    assert free.reason == "max_tokens" and len(free.tokens) == 30
    word = free.text[10:14]
    stopped = llm.generate(TEXT[:200], max_tokens=30, stop=word, **GREEDY)
    assert stopped.reason == "stop_string" and stopped.text == free.text[: free.text.index(word)]
    token = int(free.tokens[7])
    cut = llm.generate(TEXT[:200], max_tokens=30, stop_token_ids=[token], **GREEDY)
    assert (
        cut.reason == "stop_token" and cut.tokens.tolist() == free.tokens.tolist()[: free.tokens.tolist().index(token)]
    )
    full = llm.generate(llm.tokenize(TEXT)[: llm.context - 5], **GREEDY)
    assert full.reason == "context_full"


def test_what_was_read_is_not_read_again(llm: phsa.LLM) -> None:
    text = TEXT[:600]
    llm.logits([1])  # empties the cache
    first = llm.generate(text, max_tokens=4, **GREEDY)
    again = llm.generate(text, max_tokens=4, **GREEDY)
    assert first.reused_tokens == 0 and again.reused_tokens >= again.prompt_tokens - 1
    assert again.text == first.text


# --- attention ---


def test_attention_can_be_set_in_all_ways(folder: Path, tmp_path: Path) -> None:
    llm = phsa.LLM(folder, attention="phsa", top_k=3, lam=0.75, punctuation="en+zh", init=32, local=64, block=32, **F32)
    first = llm.attention
    assert first["attention"] == "phsa" and first["punctuation"] == "en+zh"
    assert (first["top_k"], first["init"], first["local"], first["block"]) == (3, 32, 64, 32)
    assert first["lambda"] == pytest.approx(0.75)
    llm.set_attention("infllm2", top_k=5, group_reduce="max")
    assert (llm.attention["attention"], llm.attention["top_k"], llm.attention["group_reduce"]) == ("infllm2", 5, "max")
    assert llm.attention["init"] == 16, "the preset for 512 tokens"
    llm.set_attention("phsa", parts=4, survivors=96, preset="paper-32k", local=64)
    assert (llm.attention["parts"], llm.attention["survivors"]) == (4, 96)
    assert (llm.attention["init"], llm.attention["local"]) == (128, 64)
    with pytest.raises(ValueError, match="preset has no effect"):
        llm.set_attention("dense", preset="paper-4k")
    with pytest.raises(ValueError, match="paper-4k, paper-32k"):
        llm.set_attention("phsa", preset="paper-8k")
    llm.set_attention()
    assert llm.attention["attention"] == "dense"
    wanted = {"attention": "phsa", "top_k": 1, "init": 16, "local": 16, "layers": {"1": {"top_k": 7}}}
    file = tmp_path / "settings.json"
    file.write_text(json.dumps(wanted))
    base = phsa.Settings(top_k=1, init=16, local=16)
    for settings in (wanted, file, str(file), phsa.ModelSettings(base, {1: base.replace(top_k=7)})):
        llm.set_attention(settings=settings)
        assert llm.attention["top_k"] == 1 and llm.attention["layers"]["1"]["top_k"] == 7
    llm.set_attention(settings=wanted, top_k=4)
    assert llm.attention["top_k"] == 4 and "layers" not in llm.attention, "an argument counts more than a file"
    ways = [{"attention": "phsa", "top_k": 2}, {"settings": {"attention": "phsa", "top_k": 2}}]
    ways += [{"attention": "phsa", "settings": {"top_k": 2}}, {"settings": {"policy": "phsa", "top_k": 2}}]
    for way in ways:
        llm.set_attention(**way)
        assert llm.attention == {**phsa.Settings.preset(512).to_json(), "top_k": 2}


def test_sparse_attention_reads_less_and_everything_is_dense(folder: Path) -> None:
    text = TEXT[:900]
    dense = phsa.LLM(folder, **F32)
    want = dense.generate(text, max_tokens=8, **GREEDY)
    assert want.read_share == 1
    dense.set_attention("phsa", top_k=1000)
    everything = dense.generate(text, max_tokens=8, **GREEDY)
    assert everything.text == want.text and everything.read_share == 1
    dense.set_attention(**SPARSE)
    assert dense.generate(text, max_tokens=8, **GREEDY).read_share < 0.8
    assert dense.memory["representatives"] > 0


def test_the_target_counts_for_the_engine_too(folder: Path) -> None:
    llm = phsa.LLM(folder, **F32)
    ids = llm.tokenize(TEXT[:500])
    before = phsa.target()
    want = llm.logits(ids)
    try:
        phsa.set_target("reference")
        got = llm.logits(ids)
    finally:
        phsa.set_target(before)
    # Double precision inside the attention: other last bits, if it is the same libphsa that both use.
    assert not np.array_equal(got, want) and np.allclose(got, want, atol=1e-3)
    assert np.array_equal(llm.logits(ids), want)
    maps = Path("/proc/self/maps").read_text()
    assert len({line.split()[-1] for line in maps.splitlines() if "libphsa.so" in line}) == 1


# --- what is wrong ---


def test_the_device_is_asked_for_by_argument_or_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert phsa.LLM(folder, device="cpu").device == "cpu"
    with pytest.raises(ValueError, match=r"device is .*auto, cpu, cuda"):
        phsa.LLM(folder, device="gpu")
    monkeypatch.setenv("PHSA_DEVICE", "tpu")
    with pytest.raises(ValueError, match="tpu"):
        phsa.LLM(folder)
    assert phsa.LLM(folder, device="cpu").device == "cpu"
    if json.loads(run_phsa("info", "--json"))["cuda"] == "available":
        return
    with pytest.raises(ValueError, match=r'device="cuda:0": .*; device="auto" runs the model on the CPU'):
        phsa.LLM(folder, device="cuda:0")


def test_properties(llm: phsa.LLM, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert (llm.context, llm.model_context, llm.cache_tokens) == (512, 512, 512)
    assert llm.vocab_size == config["vocab_size"] and llm.eos_ids == [config["eos_token_id"]]
    assert llm.bos_id == config["bos_token_id"] and llm.add_bos is False
    assert llm.chat_template == "chatml" and llm.name == "model"
    memory = llm.memory
    assert memory["total"] == sum(memory.values()) - memory["total"] and memory["weights"] > 0
    assert "model" in repr(llm) and "dense" in repr(llm)
    small = phsa.LLM(folder, context=128, cache_tokens=256)
    assert (small.context, small.cache_tokens) == (128, 256)


async def first(stream: AsyncIterator[str]) -> str:
    return await anext(stream)


WRONG: list[tuple[type[Exception], list[str], Callable[[phsa.LLM], object]]] = [
    (ValueError, ["no tokens"], lambda llm: llm.generate("")),
    (ValueError, ["512"], lambda llm: llm.generate(llm.tokenize(TEXT)[:600])),
    (ValueError, ["512"], lambda llm: llm.stream(llm.tokenize(TEXT)[:600])),
    (ValueError, ["512"], lambda llm: llm.logits(llm.tokenize(TEXT)[:513])),
    (ValueError, ["512"], lambda llm: llm.loglikelihood([("a", " b"), (TEXT[:9000], " b")])),
    (ValueError, ["100000"], lambda llm: llm.generate([5, 100000])),
    (ValueError, ["-1"], lambda llm: llm.generate(np.array([5, -1]))),
    (ValueError, ["logits", "100000"], lambda llm: llm.logits([100000])),
    (ValueError, ["99999"], lambda llm: llm.detokenize([99999])),
    (ValueError, ["request 0", "context"], lambda llm: llm.loglikelihood([("", "b")])),
    (ValueError, ["shape (1, 2)"], lambda llm: llm.generate(np.array([[1, 2]]))),
    (ValueError, ["shape ()"], lambda llm: llm.logits(5)),
    (TypeError, ["float64"], lambda llm: llm.generate(np.array([1.0, 2.0]))),
    (TypeError, ["float64"], lambda llm: llm.logits([1.5])),
    (TypeError, ["int"], lambda llm: llm.generate(5)),
    (TypeError, ["NoneType"], lambda llm: llm.generate(None)),
    (TypeError, ["unexpected"], lambda llm: llm.generate("x", temp=0)),
    (ValueError, ["temperature", "-1"], lambda llm: llm.generate("x", temperature=-1)),
    (TypeError, ["temperature", "str"], lambda llm: llm.generate("x", temperature="0")),
    (ValueError, ["top_p", "2"], lambda llm: llm.generate("x", top_p=2)),
    (ValueError, ["max_tokens", "0"], lambda llm: llm.generate("x", max_tokens=0)),
    (ValueError, ["max_tokens"], lambda llm: llm.generate("x", max_tokens=2**40)),
    (ValueError, ["max_batch"], lambda llm: llm.generate("x", max_batch=0)),
    (ValueError, ["seed"], lambda llm: llm.generate("x", seed=-1)),
    (ValueError, ["surrogates"], lambda llm: llm.generate("\ud800")),
    (TypeError, ["pair 0", "'ab'", "(context, continuation)"], lambda llm: llm.loglikelihood(["ab"])),
    (TypeError, ["pair 0", "pairs"], lambda llm: llm.loglikelihood("ab")),
    (TypeError, ["pair 1", "pairs"], lambda llm: llm.loglikelihood([("a", "b"), ("a", "b", "c")])),
    (ValueError, ["n is 0"], lambda llm: llm.generate("x", n=0)),
    (ValueError, ["seed", "2 numbers", "1 prompts"], lambda llm: llm.generate(["x"], seed=[1, 2])),
    (TypeError, ["seed", "str"], lambda llm: llm.generate("x", seed="1")),
    (ValueError, ["logit_bias", "5", "200"], lambda llm: llm.generate("x", logit_bias={5: 200})),
    (ValueError, ["logit_bias", "99999"], lambda llm: llm.generate("x", logit_bias={99999: 1})),
    (TypeError, ["logit_bias", "str"], lambda llm: llm.generate("x", logit_bias={"5": 1})),
    (ValueError, ["stop_token_ids", "99999"], lambda llm: llm.stream("x", stop_token_ids=[99999])),
    (TypeError, ["stop_token_ids"], lambda llm: llm.generate("x", stop_token_ids=["a"])),
    (ValueError, ["frequency_penalty", "3"], lambda llm: llm.generate("x", frequency_penalty=3)),
    (ValueError, ["presence_penalty", "-3"], lambda llm: asyncio.run(first(llm.astream("x", presence_penalty=-3)))),
    (ValueError, ["grammar", "no rule root"], lambda llm: llm.generate("x", grammar='a ::= "b"')),
    (ValueError, ["json_schema", "#/not"], lambda llm: llm.generate("x", json_schema={"not": {}})),
    (ValueError, ["json_schema", "valid JSON"], lambda llm: llm.stream("x", json_schema="{")),
    (ValueError, ["both"], lambda llm: llm.generate("x", json_schema={}, grammar='root ::= "x"')),
    (TypeError, ["grammar", "int"], lambda llm: llm.generate("x", grammar=5)),
    (ValueError, ["logprobs", "-1"], lambda llm: llm.generate("x", logprobs=-1)),
    (TypeError, ["unexpected"], lambda llm: llm.astream("x", temp=0)),
    (ValueError, ["no-such"], lambda llm: llm.generate("x", adapter="no-such")),
    (ValueError, ["no-such"], lambda llm: llm.set_adapter("no-such")),
    (ValueError, ["message 0"], lambda llm: llm.chat([{"role": "user"}])),
    (ValueError, ["message"], lambda llm: llm.chat([])),
    (ValueError, ["narrator", "allowed"], lambda llm: llm.chat([{"role": "narrator", "content": "x"}])),
    (ValueError, ["sparse", "phsa", "infllm2"], lambda llm: llm.set_attention("sparse")),
    (ValueError, ["lam is 2", "0 to 1"], lambda llm: llm.set_attention("phsa", lam=2)),
    (
        ValueError,
        ["layer 7"],
        lambda llm: llm.set_attention(settings={"policy": "phsa", "layers": {"7": {"top_k": 1}}}),
    ),
    (ValueError, ["top_k", "phsa"], lambda llm: llm.set_attention(top_k=2)),
    (ValueError, ["top_k", "phsa"], lambda llm: llm.set_attention(settings={"top_k": 2})),
    (ValueError, ["lam has no effect", "phsa"], lambda llm: llm.set_attention("infllm2", lam=0.5)),
    (ValueError, ["topk"], lambda llm: llm.set_attention(settings={"topk": 3})),
    (ValueError, ["no-such"], lambda llm: llm.set_attention("phsa", punctuation="no-such")),
    (OSError, ["absent.json"], lambda llm: llm.set_attention(settings="absent.json")),
    (ValueError, ["dense"], lambda llm: llm.inspect("x")),
    (ValueError, ["last", "0"], lambda llm: llm.inspect("x", last=0)),
]


@pytest.mark.parametrize("case", range(len(WRONG)))
def test_what_is_wrong_is_told_and_changes_nothing(llm: phsa.LLM, case: int) -> None:
    kind, words, call = WRONG[case]
    attention = llm.attention
    with pytest.raises(kind) as caught:
        call(llm)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message and "--" not in message, "what Python's callers never wrote is not named"
    assert llm.attention == attention
    assert llm.generate("x", max_tokens=1, **GREEDY).text is not None


def test_a_long_prompt_in_a_batch_is_refused_before_any_work(llm: phsa.LLM) -> None:
    with pytest.raises(ValueError, match=r"prompt 1 of 2, counted from 0: the prompt has 600 tokens.*512"):
        llm.generate(["short", llm.tokenize(TEXT)[:600]], max_tokens=5)
    assert llm.generate("short", max_tokens=3, **GREEDY).tokens.size == 3


def test_bad_models_are_told(folder: Path, tmp_path: Path) -> None:
    def refused(*words: str, kind: type[Exception] = ValueError, model: object = folder, **options: Any) -> None:
        with pytest.raises(kind) as caught:
            phsa.LLM(model, **options)
        assert all(word in str(caught.value) for word in words), str(caught.value)
        assert "\n" not in str(caught.value)

    refused("absent.gguf", model=tmp_path / "absent.gguf")
    refused("context", "100000", "512", context=100000)
    refused("context", "-1", context=-1)
    refused("chunk", "-1", chunk=-1)
    refused("threads", threads=100000)
    refused("f64", "int8", weights="f64")
    refused("f64", "bf16", kv_type="f64")
    refused("sparse", attention="sparse")
    refused("none-such", "chatml", chat_template="none-such")
    refused("PathLike", kind=TypeError, model=5)
    refused("int", kind=TypeError, context="512")
    cut = tmp_path / "cut"
    cut.mkdir()
    for file in folder.iterdir():
        (cut / file.name).write_bytes(file.read_bytes())
    (cut / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-1000])
    refused("model.safetensors", model=cut)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PHSA_CACHE", str(tmp_path))
        refused("phsa models fetch smollm2-135m", model="smollm2-135m")
        refused("smollm2-135m", model="smollm2-135")


# --- threads, signals, ends ---


def test_two_threads_take_turns(llm: phsa.LLM) -> None:
    prompts = [TEXT[i * 300 : i * 300 + 200] for i in range(4)]
    want = [llm.generate(prompt, max_tokens=10, **GREEDY).text for prompt in prompts]
    got: list[str | None] = [None] * len(prompts)

    def ask(i: int) -> None:
        got[i] = llm.generate(prompts[i], max_tokens=10, **GREEDY).text
        llm.logits([1, 2, 3])

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == want


def test_python_goes_on_while_a_prompt_is_read(slow_folder: Path) -> None:
    llm = phsa.LLM(slow_folder, threads=1)
    ids = np.resize(llm.tokenize(TEXT), 3000)
    done = threading.Event()
    thread = threading.Thread(target=lambda: (llm.generate(ids, max_tokens=1), done.set()))
    thread.start()
    counted = 0
    while not done.is_set():
        time.sleep(0.001)
        counted += 1
    thread.join()
    # With the lock held it would count a handful, when the lock is given back between steps.
    assert counted > 50


def test_streams_and_other_calls_mix(llm: phsa.LLM) -> None:
    want = llm.generate(TEXT[:100], max_tokens=20, **GREEDY).text
    other = llm.generate(TEXT[200:300], max_tokens=6, **GREEDY).text
    stream = llm.stream(TEXT[:100], max_tokens=20, **GREEDY)
    got = next(stream) + next(stream)
    assert llm.generate(TEXT[200:300], max_tokens=6, **GREEDY).text == other
    second = llm.stream(TEXT[200:300], max_tokens=6, **GREEDY)
    got += next(stream)
    assert "".join(second) == other
    for call in (lambda: llm.logits([1]), lambda: llm.set_attention("phsa"), lambda: llm.loglikelihood([("a", "b")])):
        with pytest.raises(RuntimeError, match=r"a stream .* is open"):
            call()
    assert got + "".join(stream) == want
    llm.logits([1])

    for _ in llm.stream(TEXT[:100], max_tokens=400, **GREEDY):
        break  # leaves it
    gc.collect()
    llm.logits([1])
    never_begun = llm.stream(TEXT[:100])
    with pytest.raises(RuntimeError, match="stream"):
        llm.logits([1])
    del never_begun
    gc.collect()
    llm.logits([1])


def test_a_closed_model_is_gone(folder: Path) -> None:
    llm = phsa.LLM(folder, **F32)
    begun, waiting = llm.stream(TEXT[:100], **GREEDY), llm.stream(TEXT[:100], **GREEDY)
    next(begun)
    assert "context" in repr(llm)
    llm.close()
    llm.close()
    assert list(begun) == [] and list(waiting) == [] and repr(llm) == "<phsa.LLM, closed>"
    for call in (lambda: llm.generate("x"), lambda: llm.astream("x"), lambda: llm.context, lambda: llm.tokenize("x")):
        with pytest.raises(RuntimeError, match="closed"):
            call()
    with phsa.LLM(folder, **F32) as other:
        assert other.generate("x", max_tokens=1, **GREEDY).prompt_tokens == 1
    with pytest.raises(RuntimeError, match="closed"):
        other.logits([1])
    with pytest.raises(ZeroDivisionError), phsa.LLM(folder, **F32) as third:
        1 / 0  # noqa: B018
    assert "closed" in repr(third)


def test_closing_gives_the_memory_back(folder: Path) -> None:
    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    before = threads()
    llm = phsa.LLM(folder, threads=3)
    stream = llm.stream("Bees")
    next(stream)
    assert threads() > before
    llm.close()
    assert threads() == before, "the engine is gone, though the LLM and its stream are still there"
    del stream


def test_async_streams_are_answered_together_while_the_loop_goes_on(llm: phsa.LLM) -> None:
    prompts = [TEXT[i * 100 : i * 100 + 60] for i in range(3)]
    want = [llm.generate(prompt, max_tokens=20, logprobs=1, **GREEDY) for prompt in prompts]

    async def read(prompt: str) -> phsa.Generation:
        stream = llm.astream(prompt, max_tokens=20, logprobs=1, **GREEDY)
        text = "".join([piece async for piece in stream])
        assert stream.result is not None and stream.result.text == text
        return stream.result

    async def main() -> tuple[list[phsa.Generation], int]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0)
                ticks += 1

        clock = asyncio.create_task(tick())
        answers = await asyncio.gather(*(read(prompt) for prompt in prompts))
        clock.cancel()
        return answers, ticks

    answers, ticks = asyncio.run(main())
    assert [answer.text for answer in answers] == [answer.text for answer in want] and ticks > 20
    assert answers[0].logprobs is not None and want[0].logprobs is not None
    assert np.allclose(answers[0].logprobs, want[0].logprobs, atol=1e-4)
    chat = [{"role": "user", "content": "Hi"}]

    async def ends_early() -> str:
        async for piece in llm.astream(chat, max_tokens=400, **GREEDY):
            return piece
        return ""

    assert llm.chat(chat, max_tokens=5, **GREEDY).text.startswith(asyncio.run(ends_early()))
    gc.collect()
    llm.logits([1])  # no stream is open


def test_a_cancelled_async_stream_ends_before_the_next_step(slow_folder: Path) -> None:
    llm = phsa.LLM(slow_folder, threads=1)
    ids = np.resize(llm.tokenize(TEXT), 60000)  # minutes, were it not cancelled

    async def main() -> None:
        async def read() -> None:
            async for _ in llm.astream(ids):
                pass

        task = asyncio.create_task(read())
        await asyncio.sleep(0.3)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert task.cancelled()
        await asyncio.to_thread(llm.logits, [1])  # waits for the step, and finds no stream open

    asyncio.run(main())
    with pytest.raises(ValueError, match="99999"):
        asyncio.run(first(llm.astream([99999])))


def test_a_model_may_go_while_its_stream_is_open(folder: Path) -> None:
    llm = phsa.LLM(folder, **F32)
    want = llm.generate(TEXT[:100], max_tokens=10, **GREEDY).text
    stream = llm.stream(TEXT[:100], max_tokens=10, **GREEDY)
    got = next(stream)
    del llm
    gc.collect()
    assert got + "".join(stream) == want


LOAD = """
import signal, sys, threading, time
import numpy as np
import phsa
signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs the tests in the background may have Ctrl-C ignored
llm = phsa.LLM(sys.argv[1], threads=1)
ids = np.arange(60000) % 250
"""
CALLS = {
    "generate": "llm.generate(ids)",
    "batch": "llm.generate([ids, ids[1:]])",
    "stream": "list(llm.stream(ids))",
    "loglikelihood": "llm.loglikelihood([(ids, [5])])",
    "logits": "llm.logits(ids[:30000])",
    "inspect": "llm.set_attention('phsa'); llm.inspect(ids)",
}


@pytest.mark.parametrize("name", CALLS)
def test_ctrl_c_ends_a_long_call(slow_folder: Path, name: str) -> None:
    program = LOAD + (
        "print('ready', flush=True)\n"
        f"try:\n    {CALLS[name]}\n"
        "except KeyboardInterrupt:\n    print('interrupted', flush=True)\n"
        "llm.generate(ids[:10], max_tokens=2)\n"  # it still works
        "print('works', flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, slow_folder],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "python")},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(1.0)
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "interrupted\n"
    seconds = time.monotonic() - start
    assert process.communicate(timeout=60)[0] == "works\n" and process.returncode == 0
    assert seconds < 30, "a step of 512 tokens is a fraction of that on a busy machine, the call takes minutes"


def test_the_end_of_python_waits_for_nobody_long(slow_folder: Path) -> None:
    program = LOAD + (
        "stream = llm.stream(ids[:5], max_tokens=5)\n"
        "next(stream)\n"
        "threading.Thread(target=lambda: llm.generate(ids), daemon=True).start()\n"
        "time.sleep(0.5)\n"
        "print('end')\n"
    )
    done = run_python(program, slow_folder, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_a_forked_child_is_told(folder: Path) -> None:
    program = (
        "import gc, os, sys, threading, time, phsa\n"
        "llm = phsa.LLM(sys.argv[1], threads=2)\n"
        "stream = llm.stream('Bees')\n"
        "next(stream)\n"
        "def work():\n"
        "    while True: llm.generate('x', max_tokens=400, ignore_eos=True)\n"
        "threading.Thread(target=work, daemon=True).start()\n"
        "time.sleep(0.2)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    try:\n"
        "        llm.generate('x')\n"
        "    except RuntimeError as error:\n"
        "        print(error, flush=True)\n"
        "    del llm, stream\n"
        "    gc.collect()\n"
        "    print(phsa.LLM(sys.argv[1], threads=2).generate('x', max_tokens=1).prompt_tokens, flush=True)\n"
        "    sys.exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "print(llm.generate('x', max_tokens=1).prompt_tokens)\n"
    )
    done = run_python(program, folder)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "child" in lines[0] and lines[1:] == ["1", "1"]


def test_models_leave_nothing_behind(folder: Path) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def one() -> None:
        llm = phsa.LLM(folder, threads=2)
        next(llm.stream("Bees"))
        llm.logits([1, 2])

    for _ in range(5):
        one()
    threads, before = threading.active_count(), resident()
    for _ in range(40):
        one()
    assert threading.active_count() == threads and len(os.listdir("/proc/self/task")) < 40
    # Each model takes more than 1 MB.
    assert resident() - before < 8 << 20


# --- the package ---


def test_importing_phsa_imports_nothing_large() -> None:
    program = "import sys, phsa; print([m for m in ('numpy', 'torch', 'transformers') if m in sys.modules]); phsa.LLM"
    done = run_python(program)
    assert done.stdout == "[]\n", done.stderr


def test_a_build_without_the_engine_says_so(folder: Path, tmp_path: Path) -> None:
    program = f"import os; os.environ['PHSA_LIBRARY_PATH'] = {str(tmp_path)!r}; import phsa; phsa.LLM({str(folder)!r})"
    done = run_python(program)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "LibraryError" in last and "there is no engine" in last and "pip install ." in last


def test_the_stub_is_that_of_the_module() -> None:
    stubgen = pytest.importorskip("nanobind.stubgen", reason="nanobind is not installed: the stub is not compared")
    generator = stubgen.StubGen(_library.load_engine())
    generator.put(_library.load_engine())
    stub = (Path(phsa.__file__).parent / "_engine.pyi").read_text(encoding="utf-8")
    # Formatted apart; what it says must be the same.
    assert ast.dump(ast.parse(stub)) == ast.dump(ast.parse(generator.get()))
