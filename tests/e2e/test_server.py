"""`phsa serve` over real sockets: what it answers, and what clients and the system can do to it."""

import concurrent.futures
import contextlib
import http.client
import io
import json
import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile

import pytest
from conftest import BIN, ROOT, run_phsa
from test_cli import write_gguf

pytest.importorskip("gguf")

TEXT = ROOT / "bench/data/from_sand_hill_to_pine.txt"
CONTEXT = 2048  # of the tiny model: long enough to be read sparsely
JSON = {"Content-Type": "application/json"}
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
# Budgets for a few hundred tokens: something is left out.
SMALL = {"attention": "phsa", "init": 16, "local": 32, "top_k": 2}


class Server:
    """`phsa serve` on a free port."""

    def __init__(self, model, *args, env=None):
        self.process = subprocess.Popen(
            [BIN / "phsa", "serve", "-m", model, "--port", "0", "-t", "2", *map(str, args)],
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        self.lines = []
        self.port = None
        ready = threading.Event()

        def read():
            for line in self.process.stderr:
                self.lines.append(line)
                if found := re.match(r"serving .* at https?://.*:(\d+)$", line):
                    self.port = int(found[1])
                    ready.set()
            ready.set()

        self.reader = threading.Thread(target=read, daemon=True)
        self.reader.start()
        assert ready.wait(120) and self.port, "".join(self.lines)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.reader.join(10)

    def connect(self, timeout=60):
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def wrap(self, raw):
        """A connected socket as clients of this server use it."""
        return raw

    def socket(self):
        return self.wrap(socket.create_connection(("127.0.0.1", self.port), timeout=30))

    def request(self, method, path, body=None, headers=None):
        """status, headers, body"""
        connection = self.connect()
        with contextlib.closing(connection):
            data = json.dumps(body) if isinstance(body, dict) else body
            connection.request(method, path, data, JSON if headers is None else headers)
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()

    def get(self, path):
        status, _, body = self.request("GET", path)
        assert status == 200, body
        return json.loads(body)

    def post(self, path, status=200, **body):
        got, _, answer = self.request("POST", path, body)
        assert got == status, answer
        return json.loads(answer)

    def complete(self, prompt, **body):
        return self.post("/v1/completions", prompt=prompt, **{"temperature": 0, **body})

    def chat(self, text, **body):
        return self.post("/v1/chat/completions", messages=[{"role": "user", "content": text}], **body)

    def stream(self, path, **body):
        status, headers, answer = self.request("POST", path, {**body, "stream": True})
        assert status == 200 and headers["Content-Type"].startswith("text/event-stream"), answer
        events = answer.decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]

    def metric(self, name, **labels):
        _, _, body = self.request("GET", "/metrics")
        total = 0.0
        for line in body.decode().splitlines():
            if line.startswith(name + "{") and all(f'{key}="{value}"' in line for key, value in labels.items()):
                total += float(line.rsplit(" ", 1)[1])
        return total

    def wait_for(self, condition, seconds=20):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "".join(self.lines[-20:])
            time.sleep(0.02)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", context=CONTEXT)


@pytest.fixture(scope="module")
def server(tiny):
    with Server(tiny, "--weights", "f32", "--alias", "tiny") as running:
        yield running


def write_docx(*paragraphs):
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        space = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
        body = "".join(f"<w:p><w:r><w:t>{text}</w:t></w:r></w:p>" for text in paragraphs)
        document = f'<w:document xmlns:w="{space}"><w:body>{body}</w:body></w:document>'
        archive.writestr("word/document.xml", document)
    return data.getvalue()


def refused(answer, param, *words):
    error = answer["error"]
    assert error["type"] == "invalid_request_error" and error["param"] == param, error
    for word in words:
        assert word in error["message"], error


# What it answers.


def test_small_endpoints_answer(server):
    assert server.get("/health") == {"status": "ok"}
    assert re.fullmatch(r"\d+\.\d+\.\d+", server.get("/version")["version"])
    (model,) = server.get("/v1/models")["data"]
    assert model["id"] == "tiny" and model["max_model_len"] == CONTEXT
    assert server.get("/v1/models/tiny") == model
    assert server.request("GET", "/v1/models/other")[0] == 404
    info = server.get("/tokenizer_info")
    assert info["eos_token"] == "<|im_end|>" and info["vocab_size"] == 300
    status, headers, page = server.request("GET", "/")
    assert status == 200 and b"<title>" in page
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"


def test_tokens_and_text_turn_into_each_other(server):
    text = "é <|im_end|> 😀"
    found = server.post("/tokenize", content=text, with_pieces=True)
    assert found["count"] == len(found["tokens"]) == len(found["pieces"])
    assert "<|im_end|>" in found["pieces"]
    assert server.post("/detokenize", tokens=found["tokens"])["content"] == text
    assert "<|im_end|>" not in server.post("/tokenize", prompt=text, parse_special=False, with_pieces=True)["pieces"]
    messages = [{"role": "user", "content": "Hi"}]
    rendered = server.post("/apply-template", messages=messages)["prompt"]
    assert rendered == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert server.post("/tokenize", messages=messages)["tokens"] == server.post("/tokenize", prompt=rendered)["tokens"]


def test_a_prompt_is_a_text_or_tokens_or_a_list_of_either(server):
    texts = ["One sentence.", "Another one"]
    ids = [server.post("/tokenize", prompt=text)["tokens"] for text in texts]
    alone = [server.complete(text, max_tokens=12)["choices"][0]["text"] for text in texts]
    assert [choice["text"] for choice in server.complete(texts, max_tokens=12)["choices"]] == alone
    assert [choice["text"] for choice in server.complete(ids, max_tokens=12)["choices"]] == alone
    assert server.complete(ids[1], max_tokens=12)["choices"][0]["text"] == alone[1]
    echoed = server.complete(ids[0], max_tokens=12, echo=True)["choices"][0]["text"]
    assert echoed == texts[0] + alone[0]


def test_log_probabilities_of_an_answer_are_those_of_the_same_text_echoed(server):
    written = server.complete("Bees and wasps", max_tokens=20, logprobs=3, return_token_ids=True)["choices"][0]
    prompt, answer = written["prompt_token_ids"], written["token_ids"]
    for body in ({"prompt": prompt + answer, "max_tokens": 0}, {"prompt": [prompt + answer], "max_tokens": 1}):
        scored = server.complete(body.pop("prompt"), echo=True, logprobs=3, **body)["choices"][0]["logprobs"]
        end = len(prompt) + len(answer)
        assert scored["token_logprobs"][0] is None and scored["top_logprobs"][0] is None
        # Read in one piece and token by token: the same bits.
        assert scored["token_logprobs"][len(prompt) : end] == written["logprobs"]["token_logprobs"]
        assert scored["top_logprobs"][len(prompt) : end] == written["logprobs"]["top_logprobs"]
    for value, top in zip(written["logprobs"]["token_logprobs"], written["logprobs"]["top_logprobs"], strict=True):
        assert value == max(top.values()) <= 0  # greedy


def test_text_offsets_point_at_the_tokens(server):
    choice = server.complete("Ça va, 😀?", max_tokens=8, echo=True, logprobs=0)["choices"][0]
    found = choice["logprobs"]
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        if not token.startswith("bytes:") and not token.startswith("<"):
            assert choice["text"][offset : offset + len(token)] == token


@pytest.mark.parametrize("chat", [False, True])
def test_a_stream_says_what_the_whole_answer_says(server, chat):
    path = "/v1/chat/completions" if chat else "/v1/completions"
    body = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 2}
    if not chat:
        body = {"prompt": ["One", "Two"], "logprobs": 2, "echo": True}
    body |= {"temperature": 0.9, "seed": 5, "n": 2, "max_tokens": 15, "return_token_ids": True}
    whole = server.post(path, **body)
    chunks = server.stream(path, **body, stream_options={"include_usage": True})
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    assert (
        chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    )
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["phsa"]["time_to_first_token_s"] > 0 and "phsa" not in chunks[-2]
    for choice in whole["choices"]:
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == [choice["finish_reason"]]
        ids = [token for part in parts for token in part.get("token_ids", [])]
        assert ids == choice["token_ids"]
        if chat:
            assert parts[0]["delta"]["role"] == "assistant"
            text = "".join(part["delta"].get("content", "") for part in parts)
            assert text == choice["message"]["content"]
            scored = [one for part in parts if part["logprobs"] for one in part["logprobs"]["content"]]
            assert scored == choice["logprobs"]["content"]
        else:
            assert "".join(part["text"] for part in parts) == choice["text"]
            for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                joined = [one for part in parts if part["logprobs"] for one in part["logprobs"][key]]
                assert joined == choice["logprobs"][key]
    last = server.stream(path, **body)[-1]
    assert last["phsa"]["decode_tokens_per_s"] > 0 and "usage" not in last


def test_seeds_repeat_and_answers_differ(server):
    ask = {"temperature": 1.5, "n": 3, "max_tokens": 20}
    first, second = (server.complete("Hi", seed=3, **ask)["choices"] for _ in range(2))
    assert first == second
    assert len({choice["text"] for choice in first}) == 3
    assert server.complete("Hi", seed=4, **ask)["choices"][0] == {**first[1], "index": 0}


def test_a_stop_text_ends_the_answer_and_is_not_part_of_it(server):
    text = server.complete("Bees", max_tokens=30)["choices"][0]["text"]
    stop = text[10:13]
    choice = server.complete("Bees", max_tokens=30, stop=["never there", stop])["choices"][0]
    assert choice["text"] == text[: text.index(stop)] and choice["finish_reason"] == "stop"


def test_usage_and_measurements_are_there(server):
    answer = server.complete("x" * 700, max_tokens=5)
    again = server.complete("x" * 700, max_tokens=5)
    assert answer["usage"]["prompt_tokens"] == 700 and answer["usage"]["total_tokens"] == 705
    assert again["phsa"]["cached_prompt_tokens"] == 699
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 699
    assert again["choices"] == answer["choices"]
    sparse = server.complete("x" * 700, max_tokens=5, phsa=SMALL)
    assert sparse["phsa"]["attention"] == "phsa" and sparse["phsa"]["top_k"] == 2
    assert sparse["phsa"]["read_share"] < 0.4 and answer["phsa"]["read_share"] == 1
    # What dense attention read is of no use to a text that is read sparsely, and the other way round.
    assert sparse["phsa"]["cached_prompt_tokens"] == 0
    assert server.metric("phsa:blocks_chosen_total") > 0
    assert 0 < server.metric("phsa:read_share") < 1
    assert server.metric("phsa:representative_bytes") < server.metric("phsa:cache_bytes") / 4
    assert (
        server.metric("vllm:time_to_first_token_seconds_count") == server.metric("vllm:request_prompt_tokens_count") > 0
    )


def test_texts_that_are_read_in_different_ways_share_a_batch(server):
    text = TEXT.read_text()[:1200]
    ways = [{}, SMALL, {**SMALL, "top_k": 5}, {"attention": "infllm2-64"}, {"attention": "streaming"}] * 3
    alone = [server.complete(text, max_tokens=24, phsa=way)["choices"] for way in ways[:5]]
    with concurrent.futures.ThreadPoolExecutor(len(ways)) as pool:
        together = list(pool.map(lambda way: server.complete(text, max_tokens=24, phsa=way)["choices"], ways))
    assert together == alone * 3


def test_an_inspection_is_what_the_program_prints(server, tiny, tmp_path):
    document = tmp_path / "document.txt"
    document.write_text("Bees, wasps; and a hive. " * 16)
    ask = ("-f", document, "--raw", "--init", 16, "--local", 32, "-K", 2, "--attention", "phsa")
    done = run_phsa("inspect", "-m", tiny, "--weights", "f32", *ask, "-n", 6, "--json")
    assert done.returncode == 0, done.stderr
    found = server.post("/inspect", prompt=document.read_text(), max_tokens=6, phsa=SMALL)
    assert found == json.loads(done.stdout)
    assert [query["answer"] for query in found["queries"]] == [False] + [True] * 5
    # The same answer again, given: the same choices, now of tokens that are read and not written.
    given = found["tokens"][found["prompt_tokens"] :]
    again = server.post("/inspect", prompt=document.read_text(), answer=given[:5], phsa=SMALL)
    assert again["tokens"] == found["tokens"][:-1] and again["prompt_tokens"] == found["prompt_tokens"]
    blocks = [[query["layers"][0]["heads"][0]["blocks"] for query in one["queries"]] for one in (found, again)]
    assert blocks[0] == blocks[1] and [query["answer"] for query in again["queries"]] == [False] + [True] * 5
    refused(server.post("/inspect", status=400, prompt="x", phsa={"attention": "dense"}), "phsa", "dense")


def test_an_inspection_of_an_answer_reads_its_end_only_and_tells_how_far_it_is(server):
    text = TEXT.read_text()[:1700]
    total = server.post("/tokenize", content=text)["count"]
    events = server.stream("/inspect", prompt=text, max_tokens=3, phsa={**SMALL, "top_k": 3})
    done = [event["phsa"]["prefill"] for event in events[:-1]]
    assert done == [{"done": begin, "total": total} for begin in (0, 512, 1024, 1536)]
    whole = server.post("/inspect", prompt=text, max_tokens=3, phsa={**SMALL, "top_k": 3})
    assert events[-1] == whole
    # What a completion read in the same way is there already.
    answer = server.complete(text, max_tokens=8, return_token_ids=True, phsa=SMALL)["choices"][0]["token_ids"]
    *progress, found = server.stream("/inspect", prompt=text, answer=answer, phsa=SMALL)
    assert [event["phsa"]["prefill"]["done"] for event in progress] == [total - 1]
    assert len(found["queries"]) == 9
    refused(server.post("/inspect", status=400, prompt="x", stream=1), "stream")


def test_inspections_and_answers_share_a_cache_that_holds_one_text(tiny):
    text = TEXT.read_text()[:900]
    with Server(tiny, "--weights", "f32", "-c", "1024", "--cache-tokens", "1024") as server:
        ways = [SMALL, {**SMALL, "top_k": 3}]
        answers = [server.complete(text, max_tokens=20, return_token_ids=True, phsa=way)["choices"] for way in ways]
        alone = [
            server.post("/inspect", prompt=text, answer=choices[0]["token_ids"], phsa=way)
            for choices, way in zip(answers, ways, strict=True)
        ]

        def ask(i):
            way, choices = ways[i % 2], answers[i % 2]
            if i % 3 == 0:
                return server.complete(text, max_tokens=20, return_token_ids=True, phsa=way)["choices"] == choices
            return server.post("/inspect", prompt=text, answer=choices[0]["token_ids"], phsa=way) == alone[i % 2]

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            assert all(pool.map(ask, range(24)))


def test_a_stream_tells_how_far_the_prompt_is_where_it_is_asked_to(server):
    text = "Prefill. " + TEXT.read_text()[:1500]
    events = server.stream("/v1/completions", prompt=text, max_tokens=2, phsa={"progress": True})
    told = [event["phsa"]["prefill"] for event in events if "prefill" in event.get("phsa", {})]
    total = server.post("/tokenize", content=text)["count"]
    assert told == [{"choice": 0, "done": done, "total": total} for done in (0, 512, 1024)]
    assert all(event["choices"] == [] for event in events[: len(told)])
    plain = server.stream("/v1/completions", prompt=text, max_tokens=2)
    assert not any("prefill" in event.get("phsa", {}) for event in plain)
    chat = server.stream(
        "/v1/chat/completions", messages=[{"role": "user", "content": text}], max_tokens=2, phsa={"progress": True}
    )
    assert sum("prefill" in event.get("phsa", {}) for event in chat) == 3


def test_a_document_becomes_text_with_the_places_of_its_parts(server):
    def read(name, data, status=200, kind="application/octet-stream"):
        path = "/documents" + (f"?name={name}" if name else "")
        got, _, body = server.request("POST", path, data, {"Content-Type": kind})
        assert got == status, body
        return json.loads(body)

    found = read("na%20me.txt", "\U0001f41d bees\nand wasps\n".encode())
    assert found == {
        "name": "na me.txt",
        "text": "\U0001f41d bees\nand wasps\n",
        "unit": "line",
        "places": [
            {"number": 1, "start": 0, "start_utf16": 0},
            {"number": 2, "start": 7, "start_utf16": 8},
            {"number": 3, "start": 17, "start_utf16": 18},
        ],
    }
    page = read("", b"<!doctype html><title>T</title><p>One &amp; <b>two</b></p><script>no</script><p>three")
    assert page["name"] == "document" and page["text"].endswith("One & two\n\nthree")
    book = read("book.docx", write_docx("A keeper.", "A lamp."))
    assert book["text"] == "A keeper.\n\nA lamp." and book["unit"] == "paragraph"
    assert [place["number"] for place in book["places"]] == [1, 2]
    assert "neither text nor" in read("x.png", b"\x89PNG\0", 400)["error"]["message"]
    assert "x.pdf" in read("x.pdf", b"%PDF-1.4 nothing", 400)["error"]["message"]
    assert read("%ff", b"x", 400)["error"]["param"] == "name"
    assert "octet-stream" in read("x", b"x", 415, "application/json")["error"]["message"]
    # More than a request in JSON may have.
    assert len(read("long.txt", b"a bee " * 1_000_000)["text"]) == 6_000_000
    status, headers, _ = server.request(
        "POST", "/documents", b"x", {"Content-Type": "application/octet-stream", "Content-Length": str(80 << 20)}
    )
    assert status == 413 and headers["Connection"] == "close"


def test_others_are_answered_during_an_inspection(server):
    text = TEXT.read_text()[:1500]
    alone = server.complete("Bees", max_tokens=40)["choices"]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        inspections = [pool.submit(server.post, "/inspect", prompt=text, max_tokens=64, phsa=SMALL) for _ in range(2)]
        answers = list(pool.map(lambda _: server.complete("Bees", max_tokens=40)["choices"], range(8)))
    assert answers == [alone] * 8
    first, second = (inspection.result() for inspection in inspections)
    assert first == second and len(first["queries"]) == 64


def test_the_openai_package_works(server):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    ask = {"model": "tiny", "messages": messages, "max_tokens": 10, "temperature": 0}
    answer = client.chat.completions.create(**ask, logprobs=True, top_logprobs=2, extra_body={"phsa": SMALL})
    assert answer.usage.completion_tokens == len(answer.choices[0].logprobs.content) == 10
    assert answer.model_extra["phsa"]["attention"] == "phsa"
    pieces = client.chat.completions.create(**ask, stream=True, extra_body={"phsa": SMALL})
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == answer.choices[0].message.content
    ask = {"model": "tiny", "prompt": "Hello", "max_tokens": 5, "temperature": 0}
    completion = client.completions.create(**ask, logprobs=1, echo=True)
    assert len(completion.choices[0].logprobs.tokens) == 10
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model="tiny", prompt="x" * (CONTEXT + 1))
    assert error.value.code == "context_length_exceeded" and error.value.param == "prompt"


def test_lm_eval_works(server):
    pytest.importorskip("tenacity")  # lm_eval[api]
    models = pytest.importorskip("lm_eval.models.openai_completions")
    instance = pytest.importorskip("lm_eval.api.instance").Instance
    url = f"http://127.0.0.1:{server.port}/v1/completions"
    model = models.LocalCompletionsAPI(
        base_url=url, model="tiny", batch_size=3, max_length=CONTEXT - 1, num_concurrent=1
    )
    pairs = [("Bees and", " wasps"), ("Bees and", " a hive"), ("One.", " Two."), ("x" * 300, "y")]
    asked = [instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    found = model.loglikelihood(asked, disable_tqdm=True)
    for (context, continuation), (score, greedy) in zip(pairs, found, strict=True):
        scored = server.complete(context + continuation, max_tokens=0, echo=True, logprobs=1)["choices"][0]["logprobs"]
        begin = len(server.post("/tokenize", prompt=context)["tokens"])
        assert score == pytest.approx(sum(scored["token_logprobs"][begin:]), abs=1e-4)
        tops = [max(top.values()) for top in scored["top_logprobs"][begin:]]
        assert greedy == (tops == scored["token_logprobs"][begin:])
    asked = [instance("generate_until", {}, ("Bees", {"until": ["\n"], "max_gen_toks": 9}), 0)]
    (text,) = model.generate_until(asked, disable_tqdm=True)
    assert text == server.complete("Bees", max_tokens=9, stop=["\n"])["choices"][0]["text"]


def test_lm_eval_chats(server):
    pytest.importorskip("tenacity")
    models = pytest.importorskip("lm_eval.models.openai_completions")
    instance = pytest.importorskip("lm_eval.api.instance").Instance
    chat_text = pytest.importorskip("lm_eval.models.api_models").JsonChatStr
    model = models.LocalChatCompletion(
        base_url=f"http://127.0.0.1:{server.port}/v1/chat/completions", model="tiny", num_concurrent=1
    )
    texts = ["What is a hive?", "Name a city.", "é 😀"]
    how = {"until": ["zz"], "max_gen_toks": 12, "temperature": 0}
    asked = [
        instance("generate_until", {}, (chat_text(json.dumps([{"role": "user", "content": text}])), how), i)
        for i, text in enumerate(texts)
    ]
    own = [server.chat(text, max_tokens=12, temperature=0, stop=["zz"])["choices"][0]["message"] for text in texts]
    assert model.generate_until(asked, disable_tqdm=True) == [message["content"] for message in own]


# What is refused, and how.


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [1, "x"]}, "prompt"),
        ({"prompt": [300]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": ["x"] * 129}, "prompt"),
        ({"prompt": "x", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "x", "max_tokens": "5"}, "max_tokens"),
        ({"prompt": "x", "temperature": 2.1}, "temperature"),
        ({"prompt": "x", "temperature": "hot"}, "temperature"),
        ({"prompt": "x", "top_p": 0}, "top_p"),
        ({"prompt": "x", "n": 0}, "n"),
        ({"prompt": ["x", "y"], "n": 65}, "n"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "logprobs": True}, "logprobs"),
        ({"prompt": "x", "stop": 1}, "stop"),
        ({"prompt": "x", "stop": ["x"] * 17}, "stop"),
        ({"prompt": "x", "stream": "yes"}, "stream"),
        ({"prompt": "x", "seed": 1.5}, "seed"),
        ({"prompt": "x", "frequency_penalty": 2.5}, "frequency_penalty"),
        ({"prompt": "x", "logit_bias": {"300": 1}}, "logit_bias"),
        ({"prompt": "x", "logit_bias": {"3": 101}}, "logit_bias.3"),
        ({"prompt": "x", "grammar": "root ::= ("}, "grammar"),
        ({"prompt": "x", "response_format": "json"}, "response_format"),
        ({"prompt": "x", "best_of": 3}, "best_of"),
        ({"prompt": "x", "phsa": {"attention": "sparse"}}, "phsa"),
        ({"prompt": "x", "phsa": {"topk": 4}}, "phsa"),
        ({"prompt": "x", "phsa": {"top_k": -1}}, "phsa.top_k"),
        ({"prompt": "x", "phsa": {"attention": "phsa", "block": 32}}, "phsa.block"),
        ({"prompt": "x", "phsa": {"attention": "phsa", "block": 32, "init": 16, "local": 32}}, "phsa"),
        ({"prompt": "x", "phsa": {"punctuation": "/etc/passwd"}}, "phsa.punctuation"),
    ],
)
def test_a_wrong_field_is_named(server, body, param):
    refused(server.post("/v1/completions", status=400, **body), param)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": ["x"]}, "messages"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x"}], "top_logprobs": 21}, "top_logprobs"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": [{}]}, "tools[0].type"),
        (
            {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json"}},
            "response_format.type",
        ),
    ],
)
def test_a_wrong_field_of_a_chat_is_named(server, body, param):
    refused(server.post("/v1/chat/completions", status=400, **body), param)


WORDS = 'root ::= word (", " word){1,3} "."\nword ::= [a-d]{2,4}'
WORDS_PATTERN = r"[a-d]{2,4}(, [a-d]{2,4}){1,3}\."
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}


def fulfils_schema(text):
    value = json.loads(text)
    assert list(value) in (["name", "age", "kind"], ["name", "age", "kind", "tags"])
    assert len(value["name"]) <= 6 and 0 <= value["age"] <= 150 and value["kind"] in ("cat", "dog")
    return all(isinstance(tag, bool) for tag in value.get("tags", []))


def test_texts_follow_their_grammar_alone_together_and_in_streams(server):
    asked = {"grammar": WORDS, "max_tokens": 60, "n": 4, "seed": 3, "temperature": 1.5}
    choices = server.complete("One:", **asked)["choices"]
    assert len({choice["text"] for choice in choices}) > 1
    for choice in choices:
        assert choice["finish_reason"] == "stop" and re.fullmatch(WORDS_PATTERN, choice["text"])
    streamed = [""] * 4
    for chunk in server.stream("/v1/completions", prompt="One:", **asked):
        for choice in chunk["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert streamed == [choice["text"] for choice in choices]
    cut = server.complete("One:", **{**asked, "n": 1, "max_tokens": 2})["choices"][0]
    assert cut["finish_reason"] == "length"


def test_a_chat_answers_in_json(server):
    message = {"role": "user", "content": "Who?"}
    described = {"type": "json_schema", "json_schema": {"name": "animal", "strict": True, "schema": SCHEMA}}
    for seed in range(6):
        asked = {"messages": [message], "seed": seed, "temperature": 1, "max_tokens": 300, "logprobs": True}
        answer = server.post("/v1/chat/completions", response_format=described, **asked)["choices"][0]
        assert answer["finish_reason"] in ("stop", "length")
        if answer["finish_reason"] == "stop":
            assert fulfils_schema(answer["message"]["content"])
    answer = server.post(
        "/v1/chat/completions",
        messages=[message],
        response_format={"type": "json_object"},
        logit_bias={},
        max_tokens=400,
        temperature=1,
        seed=2,
    )["choices"][0]
    assert answer["message"]["content"].startswith("{")
    if answer["finish_reason"] == "stop":
        assert isinstance(json.loads(answer["message"]["content"]), dict)


def test_a_bias_and_a_penalty_are_those_of_the_api(server):
    free = server.complete("Hi", max_tokens=30, temperature=0, return_token_ids=True, ignore_eos=True)["choices"][0]
    first = free["token_ids"][0]
    never = server.complete(
        "Hi", max_tokens=30, temperature=0, return_token_ids=True, ignore_eos=True, logit_bias={str(first): -100}
    )["choices"][0]
    assert first not in never["token_ids"]
    varied, alike = (
        server.complete(
            "Hi",
            max_tokens=30,
            temperature=0,
            return_token_ids=True,
            ignore_eos=True,
            frequency_penalty=penalty,
            presence_penalty=penalty,
        )["choices"][0]["token_ids"]
        for penalty in (2, -2)
    )
    assert len(set(varied)) > len(set(alike))


def test_unknown_fields_and_nulls_change_nothing(server):
    plain = server.complete("Hi", max_tokens=5)["choices"]
    assert (
        server.complete("Hi", max_tokens=5, user="me", n=None, stop=None, phsa=None, extra={"a": 1})["choices"] == plain
    )


@pytest.mark.parametrize(
    "body", ["", "{", "[]", "5", '{"prompt": "x", "prompt": "y"}', "[" * 1000, '{"prompt": "\\ud800"}']
)
def test_what_is_no_json_object_is_refused(server, body):
    status, _, answer = server.request("POST", "/v1/completions", body)
    assert status == 400 and "body" in json.loads(answer)["error"]["message"], answer


def test_a_prompt_one_token_too_long_is_refused_with_both_numbers(server):
    fits = server.complete("x" * (CONTEXT - 1), max_tokens=5)
    assert fits["usage"]["completion_tokens"] == 2 and fits["choices"][0]["finish_reason"] == "length"
    answer = server.post("/v1/completions", status=400, prompt="x" * CONTEXT)
    refused(answer, "prompt", str(CONTEXT))
    answer = server.post("/v1/completions", status=400, prompt=[1] * (CONTEXT + 1))
    refused(answer, "prompt", str(CONTEXT), str(CONTEXT + 1))
    assert answer["error"]["code"] == "context_length_exceeded"


def test_paths_and_methods(server):
    assert server.request("GET", "/nothing")[0] == 404
    status, headers, _ = server.request("GET", "/v1/completions")
    assert status == 405 and headers["Allow"] == "POST, OPTIONS"
    status, headers, _ = server.request("DELETE", "/health")
    assert status == 405 and headers["Allow"] == "GET, HEAD, OPTIONS"
    status, headers, body = server.request("HEAD", "/v1/models")
    assert status == 200 and body == b"" and int(headers["Content-Length"]) > 100
    status, headers, _ = server.request("OPTIONS", "/v1/completions")
    assert status == 204 and "Access-Control-Allow-Origin" not in headers
    assert server.request("POST", "/v1/completions", "x", {"Content-Type": "text/plain"})[0] == 415
    assert (
        server.request(
            "POST", "/v1/completions", '{"prompt":"x"}', {"Content-Type": "Application/JSON; charset=utf-8"}
        )[0]
        == 200
    )


def test_a_large_body_is_read(server):
    assert server.post("/tokenize", content="x" * 2_000_000)["count"] == 2_000_000


def test_a_connection_serves_one_request_after_the_other(server):
    connection = server.connect()
    with contextlib.closing(connection):
        for i in range(5):
            connection.request(
                "POST", "/v1/completions", json.dumps({"prompt": "x", "max_tokens": 3, "stream": i % 2 == 1}), JSON
            )
            answer = connection.getresponse()
            assert answer.status == 200 and answer.read()
            assert connection.sock is not None
    # Two at once, the second one while the first is answered.
    body = b'{"prompt": "x", "max_tokens": 30}'
    head = POST + b"Content-Length: %d\r\n\r\n" % len(body)
    with server.socket() as raw:
        raw.sendall((head + body) * 2 + b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        received = b"".join(iter(lambda: raw.recv(65536), b""))
    assert received.count(b"HTTP/1.1 200 OK") == 3 and received.endswith(b'{"status":"ok"}')


def test_a_body_is_sent_after_a_continue(server):
    body = b'{"prompt": "x", "max_tokens": 3}'
    with server.socket() as raw:
        raw.sendall(POST + b"Connection: close\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body))
        assert raw.recv(100).startswith(b"HTTP/1.1 100")
        raw.sendall(body)
        assert b"".join(iter(lambda: raw.recv(65536), b"")).startswith(b"HTTP/1.1 200")


def test_old_clients_get_a_stream_without_chunks(server):
    body = b'{"prompt": "x", "max_tokens": 3, "stream": true}'
    with server.socket() as raw:
        raw.sendall(
            b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
            + body
        )
        received = b"".join(iter(lambda: raw.recv(65536), b""))
    assert b"chunked" not in received and received.endswith(b"data: [DONE]\n\n")


def test_keys_origins_and_limits(tiny, tmp_path):
    key = tmp_path / "key"
    key.write_text("secret\n")
    flags = ("--api-key-file", key, "--cors", "https://example.org", "--max-body", 2000, "--max-header", 2000)
    with Server(tiny, *flags) as server:
        bearer = {**JSON, "Authorization": "Bearer secret"}
        body = {"prompt": "x", "max_tokens": 2}
        assert server.request("POST", "/v1/completions", body, bearer)[0] == 200
        for wrong in (
            {},
            {"Authorization": "Bearer secre"},
            {"Authorization": "secret"},
            {"Authorization": "Bearer secret2"},
        ):
            status, headers, answer = server.request("POST", "/v1/completions", body, {**JSON, **wrong})
            assert status == 401 and headers["WWW-Authenticate"] == "Bearer"
            assert json.loads(answer)["error"]["code"] == "invalid_api_key"
        assert server.request("GET", "/metrics")[0] == 401
        assert server.request("GET", "/health")[0] == server.request("GET", "/")[0] == 200
        for origin, allowed in (("https://example.org", "https://example.org"), ("https://example.com", None)):
            headers = server.request("OPTIONS", "/v1/completions", headers={"Origin": origin})[1]
            assert headers["Access-Control-Allow-Origin"] == allowed
        for size in (3000, 3_000_000):  # the second one is still being sent when it is refused
            status, headers, _ = server.request("POST", "/v1/completions", {"prompt": "x" * size}, bearer)
            assert status == 413 and headers["Connection"] == "close"
        assert server.request("GET", "/health", headers={"X-Large": "x" * 4000})[0] == 431
        assert server.request("GET", "/health")[0] == 200
    assert not any("secret" in line for line in server.lines)


def test_a_server_without_a_key_answers_under_its_own_names_only(server, tiny):
    def ask(port, host):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        with contextlib.closing(connection):
            connection.request("GET", "/v1/models", headers={"Host": host})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

    assert ask(server.port, "localhost")[0] == ask(server.port, f"[::1]:{server.port}")[0] == 200
    status, answer = ask(server.port, f"evil.example:{server.port}")
    assert status == 403 and answer["error"]["code"] == "host_not_allowed"
    assert "evil.example" in answer["error"]["message"] and "that name allowed" in answer["error"]["message"]
    with Server(tiny, env={**os.environ, "PHSA_ALLOW_HOST": "a.example,b.example"}) as other:
        assert [ask(other.port, f"{name}.example:80")[0] for name in "abc"] == [200, 200, 403]
    flags = ("--allow-host", "a.example", "--allow-host", "http://b.example:80")
    done = run_phsa("serve", "-m", tiny, *flags)
    assert done.returncode == 2 and "http://b.example:80" in done.stderr and "without a port" in done.stderr


def test_an_open_address_needs_a_key(tiny):
    done = run_phsa("serve", "-m", tiny, "--host", "0.0.0.0", "--port", 0)
    assert done.returncode == 2 and "--api-key" in done.stderr
    done = run_phsa("serve", "-m", tiny, "--host", "nowhere", "--api-key", "x")
    assert done.returncode == 2 and "--host" in done.stderr


def test_a_port_in_use_is_told(server, tiny):
    done = run_phsa("serve", "-m", tiny, "--port", server.port)
    assert done.returncode == 1 and str(server.port) in done.stderr


# What clients and the system can do to it.


@pytest.fixture
def impatient(tiny):
    """Short timeouts, one answer at a time, one that may wait."""
    waits = ("--header-timeout", 0.5, "--body-timeout", 0.5, "--write-timeout", 1, "--idle-timeout", 1)
    with Server(tiny, *waits, "--parallel", 1, "--queue", 1) as running:
        yield running


def long_stream(server, **body):
    """A request whose answer takes a while, on a socket that nobody reads."""
    raw = server.socket()
    data = json.dumps(
        {"prompt": "x", "max_tokens": 1500, "stream": True, "ignore_eos": True, "temperature": 0, **body}
    ).encode()
    raw.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(data) + data)
    return raw


def test_a_full_queue_refuses_and_empties_again(impatient):
    # So many that they are not done before the others have asked, however slow the machine is.
    stream = long_stream(impatient, n=20)
    impatient.wait_for(lambda: impatient.metric("vllm:num_requests_waiting") >= 1)
    status, headers, body = impatient.request("POST", "/v1/completions", {"prompt": "x"})
    assert status == 429 and int(headers["Retry-After"]) >= 1 and "queue" in json.loads(body)["error"]["message"]
    assert impatient.metric("phsa:requests_refused_total") == 1
    assert impatient.request("GET", "/health")[0] == 200
    stream.close()
    impatient.wait_for(lambda: impatient.metric("vllm:num_requests_running") == 0)
    assert impatient.complete("x", max_tokens=2)["usage"]["completion_tokens"] == 2


def test_an_answer_ends_when_its_client_has_gone(server):
    aborted = server.metric("vllm:request_success_total", finished_reason="abort")
    plain = server.complete("Bees", max_tokens=20)["choices"]
    for streaming in (True, False):
        raw = long_stream(server, stream=streaming, n=4)
        server.wait_for(lambda: server.metric("vllm:num_requests_running") == 4)
        assert server.complete("Bees", max_tokens=20)["choices"] == plain
        raw.close()
        server.wait_for(lambda: server.metric("vllm:num_requests_running") == 0)
    assert server.metric("vllm:request_success_total", finished_reason="abort") == aborted + 8
    server.wait_for(lambda: any("client has gone" in line for line in server.lines))


# The second does not fit into what is taken in of it.
@pytest.mark.parametrize("ahead", [b"G", b"GET /health HTTP/1.1\r\nX: " + b"x" * 100_000], ids=["a byte", "too much"])
def test_an_answer_ends_when_its_client_has_sent_more_and_gone(server, ahead):
    def metric(name, **labels):
        return server.metric(f"vllm:{name}", **labels)

    for streaming in (True, False):
        aborted = metric("request_success_total", finished_reason="abort")
        raw = long_stream(server, stream=streaming, n=20)  # more than the cache holds at once: they take a while
        server.wait_for(lambda: metric("num_requests_waiting") > 0)
        raw.sendall(ahead)
        time.sleep(0.1)  # so that the end comes by itself
        raw.shutdown(socket.SHUT_WR)  # close() would reset the connection where a part of the stream was not read
        server.wait_for(lambda: metric("num_requests_running") == 0)
        raw.close()
        assert metric("request_success_total", finished_reason="abort") > aborted


def test_a_request_that_comes_during_an_answer_is_answered_behind_it(server):
    with server.socket() as raw:
        body = b'{"prompt": "x", "max_tokens": 1000, "stream": true, "ignore_eos": true}'
        raw.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        received = raw.recv(65536)
        for part in (b"GET /hea", b"lth HTTP/1.1\r\nHost: localhost\r\n", b"Connection: close\r\n\r\n"):
            raw.sendall(part)
            received += raw.recv(65536)
        received += b"".join(iter(lambda: raw.recv(65536), b""))
    assert received.count(b"HTTP/1.1 200 OK") == 2 and received.endswith(b'{"status":"ok"}')


def test_a_client_that_does_not_read_is_left(impatient):
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.connect(("127.0.0.1", impatient.port))
    raw = impatient.wrap(raw)
    # Far more than the system's buffers hold.
    data = json.dumps(
        {"prompt": "x", "max_tokens": 2000, "n": 100, "logprobs": 20, "stream": True, "ignore_eos": True}
    ).encode()
    raw.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(data) + data)
    impatient.wait_for(lambda: any("did not read in time" in line for line in impatient.lines), 60)
    impatient.wait_for(lambda: impatient.metric("vllm:num_requests_running") == 0)
    raw.close()
    assert impatient.complete("x", max_tokens=2)["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    "sent",
    [
        b"POST /v1/comp",
        POST + b"Content-Length: 99\r\n\r\n{",
    ],
)
def test_a_half_sent_request_is_ended(impatient, sent):
    with impatient.socket() as raw:
        raw.sendall(sent)
        assert b"".join(iter(lambda: raw.recv(65536), b"")).startswith(b"HTTP/1.1 408")
    with impatient.socket() as raw:  # gone instead of slow
        raw.sendall(sent)
    with impatient.socket() as raw:  # silent: closed without a word
        assert raw.recv(100) == b""
    assert impatient.get("/health") == {"status": "ok"}


def test_garbage_is_refused(server):
    garbage = [
        b"\x00\xff\xfe\x01\r\n\r\n",
        b"GET\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 10,
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Type: application/json\r\n\r\nzz\r\n",
    ]
    for sent in garbage:
        with server.socket() as raw:
            raw.sendall(sent + b"\r\n\r\n")
            answer = b""
            with contextlib.suppress(ConnectionResetError):
                answer = b"".join(iter(lambda: raw.recv(65536), b""))
            assert answer == b"" or re.match(rb"HTTP/1\.1 4\d\d ", answer), answer
    assert server.get("/health") == {"status": "ok"}


def test_a_thousand_idle_connections_disturb_nobody(server):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1200:
        pytest.skip(f"only {hard} open files are allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    before = server.metric("phsa:connections")
    idle = []
    try:
        idle = [server.socket() for _ in range(1000)]
        server.wait_for(lambda: server.metric("phsa:connections") > 1000)
        assert server.complete("x", max_tokens=5)["usage"]["completion_tokens"] == 5
    finally:
        for raw in idle:
            raw.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    server.wait_for(lambda: server.metric("phsa:connections") <= before)


def test_sigterm_lets_answers_end_and_takes_no_new_ones(tiny):
    with Server(tiny, "--grace", 60) as server:
        streams = [long_stream(server, max_tokens=1000, n=8) for _ in range(4)]
        idle = server.socket()
        server.wait_for(lambda: server.metric("vllm:num_requests_running") > 0)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for(lambda: any("stopping" in line for line in server.lines))
        assert idle.recv(10) == b""
        status, _, body = server.request("POST", "/v1/completions", {"prompt": "x"})
        assert status == 503 and "stop" in json.loads(body)["error"]["message"]
        for raw in streams:
            received = b"".join(iter(lambda raw=raw: raw.recv(65536), b""))
            assert received.count(b'"finish_reason":"length"') == 8 and received.endswith(
                b"data: [DONE]\n\n\r\n0\r\n\r\n"
            )
        assert server.process.wait(20) == 0


def test_the_grace_period_ends(tiny):
    with Server(tiny, "--grace", 0.1) as server:
        whole = long_stream(server, n=128, max_tokens=2000, stream=False)
        server.wait_for(lambda: server.metric("vllm:num_requests_running") > 0)
        server.process.send_signal(signal.SIGINT)
        assert b"".join(iter(lambda: whole.recv(65536), b"")).startswith(b"HTTP/1.1 503")
        assert server.process.wait(20) == 0


def test_a_log_that_cannot_be_written_stops_nothing(tiny, tmp_path):
    with Server(tiny, "--log-file", "/dev/full") as server:
        for _ in range(3):
            assert server.get("/health") == {"status": "ok"}
        server.wait_for(lambda: any("/dev/full" in line for line in server.lines))
        assert sum("/dev/full" in line for line in server.lines) == 1
    log = tmp_path / "access.log"
    with Server(tiny, "--log-file", log) as server:
        server.request("GET", "/nothing?x=%0a\x1b".replace("\x1b", "%1b"))
    assert re.search(r'127\.0\.0\.1 GET "/nothing\?x=%0a%1b" 404 \d+ B', log.read_text())


def test_many_clients_get_what_a_lone_one_gets(smollm2):
    with Server(smollm2, "--weights", "f32", "-c", 2048) as server:
        document = TEXT.read_text()
        sparse = {"attention": "phsa", "init": 64, "local": 128, "top_k": 4}
        asks = [
            {
                "text": f"{document[i * 900 : i * 900 + length]}\n\nWhat is this about?",
                "phsa": sparse if i % 3 == 2 else {},
            }
            for i, length in enumerate([40, 2400, 80, 700, 20, 1500, 300, 60, 1000])
        ]

        def ask(one):
            return server.chat(one["text"], phsa=one["phsa"], max_tokens=24, temperature=0)["choices"]

        alone = [ask(one) for one in asks]
        with concurrent.futures.ThreadPoolExecutor(2 * len(asks)) as pool:
            assert list(pool.map(ask, asks * 2)) == alone * 2


def test_a_long_prompt_does_not_hold_an_answer_up(smollm2):
    with Server(smollm2, "-c", 8192, "--chunk", 128) as server:
        raw = long_stream(server, prompt="Once upon a time", max_tokens=400)
        raw.recv(65536)
        answering = threading.Event()
        threading.Thread(
            target=lambda: (server.complete(TEXT.read_text()[:8000], max_tokens=1), answering.set())
        ).start()
        pieces = 0
        while not answering.is_set() and pieces < 30:
            assert select.select([raw], [], [], 30)[0]
            pieces += raw.recv(65536).count(b"data: ")
        assert pieces >= 5  # all through the reading of the other prompt
        raw.close()
        assert answering.wait(60)


# Texts that are kept.


def keeps(server, body):
    answer = server.post("/v1/completions", temperature=0, **body)
    return answer["phsa"]["cached_prompt_tokens"], answer["choices"][0]["text"]


def test_a_document_is_not_read_again_after_a_restart(tiny, tmp_path):
    document = TEXT.read_text()[:1400]  # a character is a token of this model
    cache = tmp_path / "cache"
    first, second = ({"prompt": f"{document}\n\nWho is {name}?", "max_tokens": 12} for name in ("Clara", "the keeper"))
    sparse = {**first, "phsa": SMALL}
    plain = ["--weights", "f32", "--log-file", "none"]
    with Server(tiny, *plain) as server:
        tokens = server.post("/tokenize", content=document)["count"]
        assert 1100 < tokens < CONTEXT - 100
        expected = [keeps(server, body)[1] for body in (first, second, sparse)]
    with Server(tiny, *plain, "--cache-dir", cache) as server:
        assert keeps(server, first) == (0, expected[0])
    assert len(list(cache.iterdir())) == 1
    with Server(tiny, *plain, "--cache-dir", cache) as server:
        cached, text = keeps(server, second)
        assert tokens - 5 < cached and text == expected[1]
        # What was read in one way is of no use to another.
        assert keeps(server, sparse) == (0, expected[2])
        server.wait_for(lambda: len(list(cache.iterdir())) == 2)
    for more in (["--kv-type", "bf16"], ["--attention", "phsa", "-K", "3", "--init", "16", "--local", "32"]):
        with Server(tiny, *plain, "--cache-dir", cache, *more) as server:
            assert keeps(server, first)[0] == 0
    with Server(tiny, *plain, "--cache-dir", cache) as server:
        assert keeps(server, sparse)[1] == expected[2] and keeps(server, sparse)[0] > tokens - 5


def test_a_folder_of_texts_stays_within_its_size_and_what_is_damaged_is_read_again(tiny, tmp_path):
    prompts = [{"prompt": f"{i}. " + TEXT.read_text()[:1400], "max_tokens": 4} for i in range(4)]
    cache = tmp_path / "cache"
    size = lambda: sum(file.stat().st_size for file in cache.iterdir())  # noqa: E731
    with Server(tiny, "--weights", "f32", "--cache-dir", cache) as server:
        answers = [keeps(server, body)[1] for body in prompts[:2]]
    one = size() / 2
    with Server(tiny, "--weights", "f32", "--cache-dir", cache, "--cache-size", 2.5 * one / 2**30) as server:
        for body in prompts:
            keeps(server, body)
    assert len(list(cache.iterdir())) == 2 and size() < 2.5 * one
    with Server(tiny, "--weights", "f32", "--cache-dir", cache) as server:
        keeps(server, prompts[0])
    for file in cache.iterdir():
        with file.open("r+b") as data:
            data.seek(-5, os.SEEK_END)
            data.write(b"x")
    with Server(tiny, "--weights", "f32", "--cache-dir", cache) as server:
        assert keeps(server, prompts[0]) == (0, answers[0])
        assert any("damaged" in line for line in server.lines)
    with Server(tiny, "--weights", "f32", "--cache-dir", "/dev/null/x") as server:
        assert keeps(server, prompts[0]) == (0, answers[0])


# The description of the API.


def test_the_description_is_served_with_the_models_numbers(server):
    served = server.get("/openapi.json")
    written = json.loads((ROOT / "docs/openapi.json").read_text())
    assert served["components"]["schemas"]["Token"].pop("maximum") == 299
    dimensions = served["components"]["schemas"]["EmbeddingsRequest"]["properties"]["dimensions"]
    assert dimensions.pop("maximum") == 64
    assert served["info"].pop("version") == server.get("/version")["version"]
    del written["info"]["version"]
    assert served == written
    paths = set(re.findall(r'^      \{"(/[^"]*)"', (ROOT / "src/server/service.cc").read_text(), re.M))
    assert set(written["paths"]) == paths


def test_the_description_is_true(tiny, tmp_path):
    """Thousands of requests that it allows, and as many that it does not, over all paths."""
    pytest.importorskip("schemathesis")
    with Server(tiny, "--api-key", "secret", "--log-file", "none") as server:
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"http://127.0.0.1:{server.port}/openapi.json"]
        command += ["-H", "Authorization: Bearer secret", "--seed", "1", "--no-color"]
        # Functions have any parameters: what is made up of them may be too long for the context. And no schema says
        # that a product, that of `n` and the prompts of a completion, has a limit.
        more_limits = ["completions", "chat/completions", "responses", "messages", "messages/count_tokens"]
        # And not every file is a document.
        limited = [*(f"/v1/{path}" for path in more_limits), "/documents"]
        paths = [word for path in limited for word in ("PATHS", path)]
        for which, examples, more in (
            ("--exclude-path", 30, []),
            ("--include-path", 10, ["--exclude-checks", "positive_data_acceptance"]),
        ):
            asked = [which if word == "PATHS" else word for word in paths] + ["--max-examples", str(examples), *more]
            done = subprocess.run([*command, *asked], capture_output=True, text=True, timeout=240, cwd=tmp_path)
            assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
            assert int(re.search(r"(\d+) generated", done.stdout)[1]) > 500
        assert server.process.poll() is None
