"""`phsa serve` with several models, adapters by name, and texts as embeddings."""

import base64
import concurrent.futures
import json
import re
import shutil
import struct

import numpy as np
import pytest
from conftest import run_phsa
from families import write_tokenizer
from test_adapter import ADAPTERS, make_adapter
from test_models import make_model
from test_server import JSON, POST, Server

torch = pytest.importorskip("torch")
openai = pytest.importorskip("openai")
pytest.importorskip("peft")

TEXTS = ["Bees build in wax.", "A tower of granite", "é 😀, and more. " * 20, "x"]
PROMPT = "The keeper of the light had a dog, and the dog had "
SPARSE = {"attention": "phsa", "init": 16, "local": 16, "top_k": 1}


def direction(model, ids):
    """The mean of the hidden states that transformers gives, of length 1."""
    with torch.no_grad():
        hidden = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]
    mean = hidden.double().mean(0)
    return (mean / mean.norm()).numpy()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two models, of which one has two adapters."""
    folder = tmp_path_factory.mktemp("models")
    make_model("llama-bias", folder / "other")
    write_tokenizer(folder / "other")
    make_model("qwen2", folder / "base")
    write_tokenizer(folder / "base")
    for i, kind in enumerate(["all-linear", "patterns"]):
        # PEFT changes the model that it adapts.
        make_adapter(make_model("qwen2", folder / f"unused-{i}"), folder / f"lora-{i}", seed=5 + i, **ADAPTERS[kind])
    return folder


def peft_model(folder, adapter=None):
    import peft
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32).eval()
    return model if adapter is None else peft.PeftModel.from_pretrained(model, folder / adapter).eval()


@pytest.fixture(scope="module")
def server(folder):
    loras = [f"--lora=first={folder / 'lora-0'}", f"--lora=base:second={folder / 'lora-1'}"]
    with Server(folder / "base", "--weights", "f32", "--kv-type", "f32", *loras) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)


# Embeddings.


@pytest.mark.parametrize(("name", "adapter"), [("base", None), ("first", "lora-0"), ("second", "lora-1")])
def test_embeddings_are_the_mean_of_the_hidden_states_of_transformers(folder, server, client, name, adapter):
    model = peft_model(folder, adapter)
    answer = client.embeddings.create(model=name, input=TEXTS)  # the client asks for base64
    assert answer.model == name and [one.index for one in answer.data] == list(range(len(TEXTS)))
    ids = [server.post("/tokenize", prompt=text, model=name)["tokens"] for text in TEXTS]
    for one, tokens in zip(answer.data, ids, strict=True):
        theirs = direction(model, tokens)
        assert np.abs(np.array(one.embedding) - theirs).max() < 2e-5
        assert abs(np.linalg.norm(one.embedding) - 1) < 1e-5
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))


def test_an_embedding_does_not_depend_on_its_form_or_on_who_else_asks(server, client):
    alone = [server.post("/v1/embeddings", input=text, model="base")["data"][0]["embedding"] for text in TEXTS]
    together = server.post("/v1/embeddings", input=TEXTS, model="base")["data"]
    assert [one["embedding"] for one in together] == alone
    ids = [server.post("/tokenize", prompt=text, model="base")["tokens"] for text in TEXTS]
    assert [one["embedding"] for one in server.post("/v1/embeddings", input=ids)["data"]] == alone
    assert server.post("/v1/embeddings", input=ids[1])["data"][0]["embedding"] == alone[1]
    packed = server.post("/v1/embeddings", input=TEXTS, encoding_format="base64")["data"]
    for one, values in zip(packed, alone, strict=True):
        unpacked = struct.unpack(f"<{len(values)}f", base64.b64decode(one["embedding"]))
        assert np.array_equal(np.array(unpacked, np.float32), np.array(values, np.float32))
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        answers = [threads.submit(server.complete, PROMPT, max_tokens=30, model="first") for _ in range(3)]
        asked = [threads.submit(server.post, "/v1/embeddings", input=text, model="base") for text in TEXTS * 2]
        assert [one.result()["data"][0]["embedding"] for one in asked] == alone * 2
        assert len({one.result()["choices"][0]["text"] for one in answers}) == 1


def test_fewer_dimensions_are_the_first_ones_of_length_one(server):
    whole = np.array(server.post("/v1/embeddings", input=TEXTS[0])["data"][0]["embedding"])
    short = np.array(server.post("/v1/embeddings", input=TEXTS[0], dimensions=10)["data"][0]["embedding"])
    assert short.shape == (10,) and np.abs(short - whole[:10] / np.linalg.norm(whole[:10])).max() < 1e-6


def test_a_text_that_is_read_sparsely_has_another_embedding(server):
    dense = server.post("/v1/embeddings", input=TEXTS[2])["data"][0]["embedding"]
    assert server.post("/v1/embeddings", input=TEXTS[2], phsa=SPARSE)["data"][0]["embedding"] != dense


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": {}}, "input"),
        ({"input": [[0, 100000]]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 100000}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
    ],
)
def test_a_wrong_field_of_embeddings_is_named(server, body, param):
    assert server.post("/v1/embeddings", status=400, **body)["error"]["param"] == param


# Adapters by name.


def answers(server, name, prompts, **body):
    return [server.complete(prompt, model=name, max_tokens=24, **body)["choices"][0]["text"] for prompt in prompts]


def test_an_adapter_answers_as_it_does_alone(folder, server):
    prompts = [PROMPT, *TEXTS[:2]]
    own = {name: answers(server, name, prompts) for name in ("base", "first", "second")}
    assert own["base"] != own["first"] != own["second"] != own["base"]
    for name, i in (("first", 0), ("second", 1)):
        with Server(folder / "base", "--weights", "f32", "--kv-type", "f32", "--adapter", folder / f"lora-{i}") as lone:
            assert answers(lone, "whoever", prompts) == own[name]
    assert answers(server, "base:first", prompts) == own["first"]


@pytest.mark.parametrize("how", [{}, {"phsa": SPARSE}], ids=["dense", "sparse"])
def test_requests_for_different_adapters_share_batches_and_no_text(server, how):
    prompts = [f"{i}. {PROMPT * 4}" for i in range(4)]
    names = ["base", "first", "second"]
    asked = [(name, prompt) for prompt in prompts for name in names]
    alone = {(name, prompt): answers(server, name, [prompt], **how)[0] for name, prompt in asked}
    assert len(set(alone.values())) > len(prompts)
    with concurrent.futures.ThreadPoolExecutor(len(asked)) as threads:
        for _ in range(3):
            for one, answer in threads.map(lambda one: (one, answers(server, one[0], [one[1]], **how)[0]), asked):
                assert answer == alone[one], one
    # What was read is of use to the same adapter, and to no other.
    new = "Another one: " + PROMPT * 2
    cached = [server.complete(new, model=name, max_tokens=1, **how)["phsa"]["cached_prompt_tokens"] for name in names]
    assert cached == [0, 0, 0]
    cached = [server.complete(new, model=name, max_tokens=1, **how)["phsa"]["cached_prompt_tokens"] for name in names]
    assert min(cached) > 16


def test_all_names_are_listed_and_others_are_not_found(server):
    listed = {model["id"]: model for model in server.get("/v1/models")["data"]}
    assert list(listed) == ["base", "first", "second"]
    assert listed["first"]["parent"] == "base" and "parent" not in listed["base"]
    assert server.get("/v1/models/second") == listed["second"]
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/embeddings", {"input": "a"}),
        ("/tokenize", {"content": "a"}),
    ):
        error = server.post(path, status=404, model="third", **body)["error"]
        assert error["code"] == "model_not_found" and error["param"] == "model"
        assert all(name in error["message"] for name in ('"base"', '"first"', '"second"'))
    message = {"model": "third", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
    assert server.post("/v1/messages", status=404, **message)["error"]["type"] == "not_found_error"


@pytest.mark.parametrize("lora", ["first", "=folder", "first=", "other:first=folder"])
def test_a_wrong_adapter_is_refused_at_the_start(folder, lora):
    done = run_phsa("serve", "-m", folder / "base", "--lora", lora, timeout=60)
    assert done.returncode == 2 and "--lora" in done.stderr, done.stderr


def test_what_is_no_adapter_is_refused_at_the_start(folder):
    done = run_phsa("serve", "-m", folder / "other", "--lora", f"first={folder / 'base'}", timeout=60)
    assert done.returncode == 2 and "adapter" in done.stderr, done.stderr


# Several models.


@pytest.fixture
def two(folder):
    with Server(folder / "base", "-m", folder / "other", "--keep-alive", "1.5", "-c", "512") as running:
        yield running


def loaded(server):
    return {model["id"]: model["phsa"]["loaded"] for model in server.get("/v1/models")["data"]}


def test_models_are_loaded_when_asked_for_and_dropped_when_idle(two):
    assert loaded(two) == {"base": True, "other": False}
    ask = lambda name: two.complete(PROMPT, model=name, max_tokens=16)  # noqa: E731
    first, second = ask("base"), ask("other")
    assert (first["model"], second["model"]) == ("base", "other")
    assert first["choices"][0]["text"] != second["choices"][0]["text"]
    assert two.complete(PROMPT, max_tokens=16)["model"] == "base"  # the first of them
    assert two.metric("vllm:generation_tokens_total", model_name="other") == 16
    two.wait_for(lambda: loaded(two) == {"base": False, "other": False})
    assert two.metric("vllm:kv_cache_usage_perc", model_name="other") == 0
    again = two.complete(PROMPT, model="base", max_tokens=16)
    assert again["choices"][0]["text"] == first["choices"][0]["text"]
    assert any("other was dropped: nobody asked for it" in line for line in two.lines)


def test_clients_of_several_models_get_what_lone_ones_get(two):
    names = ["base", "other"]
    ask = lambda i: two.complete(f"{i // 2}. {PROMPT}", model=names[i % 2], max_tokens=16)["choices"]  # noqa: E731
    alone = [ask(i) for i in range(8)]
    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        assert list(threads.map(ask, list(range(8)) * 3)) == alone * 3


def test_a_model_that_is_answering_stays_until_it_has_ended(two):
    connection = two.connect()
    body = {"prompt": PROMPT, "max_tokens": 400, "model": "other", "stream": True, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body), JSON)
    stream = connection.getresponse()
    assert stream.status == 200
    text = stream.read().decode()
    connection.close()
    assert text.endswith("data: [DONE]\n\n") and "error" not in text


def test_a_model_that_needs_the_room_takes_an_idle_ones_place(folder):
    planned = 1_000_000
    with Server(folder / "base", "-c", "512", "--cache-tokens", planned) as server:
        bytes_of, free = map(
            float, re.search(r": ([\d.]+) GB of ([\d.]+) GB available", "".join(server.lines)).groups()
        )
    # Caches of which only one fits. Memory is taken when it is written to, so that this takes none.
    tokens = int(0.6 * free / bytes_of * planned)
    with Server(folder / "base", "-m", folder / "other", "-c", "512", "--cache-tokens", tokens) as server:
        for name, gone in (("other", "base"), ("base", "other")):
            assert loaded(server) == {gone: True, name: False}
            assert server.complete(PROMPT, model=name, max_tokens=4)["model"] == name
            assert loaded(server) == {name: True, gone: False}
            assert any(f"{gone} was dropped: another model needs its room" in line for line in server.lines)
        # Asked for at the same time, each has its turn.
        with concurrent.futures.ThreadPoolExecutor(8) as threads:
            ask = lambda name: server.complete(PROMPT, model=name, max_tokens=4)["model"]  # noqa: E731
            names = ["base", "other"] * 4
            assert list(threads.map(ask, names)) == names


def test_a_model_that_cannot_be_loaded_is_an_error_of_its_own(folder, tmp_path):
    gone = shutil.copytree(folder / "other", tmp_path / "gone")
    with Server(folder / "base", "-m", gone, "-c", "512") as server:
        for file in gone.glob("*.safetensors"):
            file.unlink()
        for _ in range(2):
            error = server.post("/v1/completions", status=503, prompt="a", model="gone")["error"]
            assert error["code"] == "model_not_loaded" and "gone" in error["message"]
        assert server.complete(PROMPT, max_tokens=4)["model"] == "base"
        assert server.get("/health") == {"status": "ok"}


def test_a_model_that_is_loaded_while_the_server_stops_is_waited_for(folder):
    with Server(folder / "base", "-m", folder / "other", "-c", "512") as server:
        server.get("/health")  # it has the signals by now
        asked = server.socket()
        asked.sendall(POST + b"Content-Length: 32\r\n\r\n" + b'{"prompt": "a", "model":"other"}')
        server.process.terminate()
        assert server.process.wait(30) == 0
        asked.close()


def test_names_that_are_given_twice_are_refused(folder):
    done = run_phsa("serve", "-m", folder / "base", "-m", folder / "base", timeout=60)
    assert done.returncode == 2 and "--alias" in done.stderr, done.stderr
    done = run_phsa("serve", "-m", folder / "base", "--alias", "a", "--alias", "b", timeout=60)
    assert done.returncode == 2 and "--alias" in done.stderr, done.stderr
