"""Where answers were read from, over the server's APIs."""

import json

import pytest
from conftest import ROOT
from test_server import Server

DOCUMENT = (ROOT / "bench/data/lighthouse.txt").read_text()
QUESTION = "How high is the tower?"


@pytest.fixture(scope="module")
def server(smollm2):
    with Server(smollm2, "-c", 2048) as running:
        yield running


def checked(measured, content, texts):
    """The sources, which say the truth about the texts and the answer."""
    assert measured["sources_s"] >= 0
    for source in measured["sources"]:
        text = texts[source["in"]]
        assert text[source["start"] : source["end"]] == source["text"]
        for used in (source, *source["used_by"]):
            whole = (text if used is source else content).encode("utf-16-le")
            part = (text if used is source else content)[used["start"] : used["end"]]
            assert whole[2 * used["start_utf16"] : 2 * used["end_utf16"]].decode("utf-16-le") == part
            assert 0 < used["weight"] <= 1
    return measured["sources"]


def holds_the_answer(sources):
    found = [source for source in sources[:2] if "41 metres" in source["text"]]
    assert found, sources
    return found[0]


def test_a_chat_names_the_passage_and_the_words_that_used_it(server):
    text = f"🐝 {DOCUMENT}\n\n{QUESTION}"
    body = {"max_tokens": 32, "temperature": 0}
    plain = server.chat(text, **body)
    assert "sources" not in plain["phsa"]
    answer = server.chat(text, phsa={"sources": True}, **body)
    content = answer["choices"][0]["message"]["content"]
    assert content == plain["choices"][0]["message"]["content"]
    sources = checked(answer["phsa"], content, {"messages[0].content": text})
    source = holds_the_answer(sources)
    assert source["message"] == 0 and source["choice"] == 0
    words = "".join(content[used["start"] : used["end"]] for used in source["used_by"])
    assert "4" in words or "metres" in words, (content, source)
    assert all(QUESTION not in one["text"] for one in sources)
    events = server.stream(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": text}],
        phsa={"sources": 2},
        stream_options={"include_usage": True},
        **body,
    )
    last = events[-1]["phsa"]["sources"]
    assert last == sources[:2]


def test_a_cache_of_8_bits_names_the_same_passage(server, smollm2):
    body = {"max_tokens": 32, "temperature": 0, "phsa": {"sources": True}}
    text = f"{DOCUMENT}\n\n{QUESTION}"
    whole = holds_the_answer(server.chat(text, **body)["phsa"]["sources"])
    with Server(smollm2, "-c", 2048, "--kv-type", "int8") as codes:
        answer = codes.chat(text, **body)
    content = answer["choices"][0]["message"]["content"]
    source = holds_the_answer(checked(answer["phsa"], content, {"messages[0].content": text}))
    assert source["text"] == whole["text"]
    assert abs(source["weight"] - whole["weight"]) < 0.2


def test_each_api_names_its_fields(server):
    body = {"max_tokens": 32, "temperature": 0, "phsa": {"sources": True}}
    system = [{"role": "system", "content": DOCUMENT}, {"role": "user", "content": QUESTION}]
    answer = server.post("/v1/chat/completions", messages=system, **body)
    content = answer["choices"][0]["message"]["content"]
    found = checked(answer["phsa"], content, {"messages[0].content": DOCUMENT})
    assert {source["message"] for source in found} == {0}

    prompt = f"{DOCUMENT}\n\nQuestion: {QUESTION}\nAnswer: The tower is"
    answer = server.post("/v1/completions", prompt=prompt, n=2, **body)
    found = answer["phsa"]["sources"]
    assert {source["choice"] for source in found} == {0, 1}
    texts = {"prompt": prompt}
    for choice in answer["choices"]:
        own = [source for source in found if source["choice"] == choice["index"]]
        checked({**answer["phsa"], "sources": own}, choice["text"], texts)

    blocks = [{"type": "text", "text": DOCUMENT}, {"type": "text", "text": "\n" + QUESTION}]
    message = server.post("/v1/messages", messages=[{"role": "user", "content": blocks}], **body)
    joined = {"messages[0].content": f"{DOCUMENT}\n\n{QUESTION}"}
    holds_the_answer(checked(message["phsa"], message["content"][0]["text"], joined))
    asked = {"input": QUESTION, "instructions": DOCUMENT, "max_output_tokens": 32, "temperature": 0}
    response = server.post("/v1/responses", **asked, phsa={"sources": True})
    content = response["output"][0]["content"][0]["text"]
    found = checked(response["phsa"], content, {"instructions": DOCUMENT})
    assert found and all(source["message"] is None for source in found)


def test_streams_of_responses_and_messages_end_with_them(server):
    body = {"temperature": 0, "phsa": {"sources": 1}, "stream": True}
    text = f"{DOCUMENT}\n\n{QUESTION}"
    for path, more, last in (
        ("/v1/responses", {"input": text, "max_output_tokens": 16}, "response.completed"),
        ("/v1/messages", {"messages": [{"role": "user", "content": text}], "max_tokens": 16}, "message_delta"),
    ):
        status, _, answer = server.request("POST", path, {**body, **more})
        assert status == 200
        events = [part.split("\ndata: ") for part in answer.decode().split("\n\n") if part]
        data = [json.loads(data) for name, data in events if name in (f"event: {last}", "event: response.incomplete")]
        assert len(data[-1].get("response", data[-1])["phsa"]["sources"]) == 1


def test_nothing_to_look_at_has_no_sources(server):
    for text in ("Hello", "Hello\n\n", ""):
        answer = server.chat(text, max_tokens=4, phsa={"sources": True})
        assert answer["phsa"]["sources"] == [] and "sources_error" not in answer["phsa"]
