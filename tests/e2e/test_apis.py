"""The APIs of responses and of messages, with their official clients and models that say what they are told to."""

import json

import pytest
from test_jinja import TAGS
from test_server import Server
from test_tools import CALL

pytest.importorskip("gguf")
openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")
from scripted import write_scripted  # noqa: E402

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
RESPONSE_TOOLS = [
    {"type": "function", "name": "get_weather", "description": "The weather.", "parameters": SCHEMA, "strict": False}
]
MESSAGE_TOOLS = [{"name": "get_weather", "description": "The weather.", "input_schema": SCHEMA}]
TOLD = '{"type": "function", "function": {"name": "get_weather", "description": "The weather.", "parameters": {'
KEY = "secret"


@pytest.fixture(scope="module")
def calling(tmp_path_factory):
    script = ["<think>", "\nWhich ", "city?\n", "</think>", "\n\n", "I look", " it up.\n", *CALL]
    model = write_scripted(tmp_path_factory.mktemp("model") / "calling.gguf", TAGS, script)
    with Server(model, "--weights", "f32", "--alias", "calling", "--api-key", KEY) as server:
        yield server


@pytest.fixture(scope="module")
def responses(calling):
    return openai.OpenAI(base_url=f"http://127.0.0.1:{calling.port}/v1", api_key=KEY, max_retries=0).responses


@pytest.fixture(scope="module")
def messages(calling):
    client = anthropic.Anthropic(base_url=f"http://127.0.0.1:{calling.port}", api_key=KEY, max_retries=0)
    return client.messages


def items(response):
    found = []
    for item in response.output:
        if item.type == "function_call":
            found.append((item.type, item.name, json.loads(item.arguments)))
        else:
            found.append((item.type, "".join(part.text for part in item.content)))
    return found


OUTPUT = [
    ("reasoning", "Which city?"),
    ("message", "I look it up."),
    ("function_call", "get_weather", {"city": "Köln"}),
]


def test_a_response_has_thoughts_text_and_calls(responses):
    response = responses.create(model="m", input="How is it?", instructions="Be brief.", tools=RESPONSE_TOOLS)
    assert items(response) == OUTPUT
    assert response.status == "completed" and response.output_text == "I look it up."
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    cut = responses.create(model="m", input="How is it?", max_output_tokens=6, tools=RESPONSE_TOOLS)
    assert (cut.status, cut.incomplete_details.reason, cut.output_text) == ("incomplete", "max_output_tokens", "I look")


def test_a_streamed_response_is_built_up_as_the_client_expects(responses):
    with responses.stream(model="m", input="How is it?", tools=RESPONSE_TOOLS) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert items(final) == OUTPUT
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    arguments = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert text == "I look it up." and json.loads("".join(arguments)) == {"city": "Köln"} and len(arguments) > 1


def test_a_response_goes_on_with_calls_and_results(calling, responses, messages):
    turns = [
        {"role": "user", "content": [{"type": "input_text", "text": "How is it?"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Rom"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "Sunny."},
    ]
    response = responses.create(model="m", input=turns, instructions="Be brief.", tools=RESPONSE_TOOLS)
    blocks = [
        {"role": "user", "content": "How is it?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "c1", "name": "get_weather", "input": {"city": "Rom"}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "Sunny."}]},
    ]
    count = messages.count_tokens(model="m", system="Be brief.", messages=blocks, tools=MESSAGE_TOOLS)
    # One conversation, three ways to write it, one prompt.
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How is it?"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rom"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "Sunny."},
    ]
    function = {"name": "get_weather", "description": "The weather.", "parameters": SCHEMA}
    body = {"messages": chat, "tools": [{"type": "function", "function": function}]}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    _, _, answer = calling.request("POST", "/apply-template", body, headers)
    assert TOLD in json.loads(answer)["prompt"]
    _, _, answer = calling.request("POST", "/tokenize", body, headers)
    assert response.usage.input_tokens == count.input_tokens == json.loads(answer)["count"]


PLACE = {"type": "object", "properties": {"city": {"enum": ["Bern", "Rom"]}}, "required": ["city"]}


def test_a_response_may_have_to_fulfil_a_schema_or_to_be_a_call(responses):
    form = {"type": "json_schema", "name": "place", "schema": PLACE, "strict": True}
    response = responses.create(model="m", input="How is it?", text={"format": form}, temperature=0)
    assert json.loads(response.output_text)["city"] in ("Bern", "Rom") and response.text.format.name == "place"
    tools = [{**RESPONSE_TOOLS[0], "parameters": PLACE, "strict": True}]
    for choice in ("required", {"type": "function", "name": "get_weather"}):
        response = responses.create(
            model="m", input="How is it?", tools=tools, tool_choice=choice, parallel_tool_calls=False, temperature=0
        )
        kinds = [item.type for item in response.output]
        assert kinds == ["reasoning", "function_call"] and items(response)[1][2]["city"] in ("Bern", "Rom")
    for body, param in (
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}}, "text.format"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"tools": [{**tools[0], "parameters": {"not": {}}}]}, "tools[0].parameters"),
    ):
        with pytest.raises(openai.BadRequestError) as error:
            responses.create(model="m", input="x", **body)
        assert error.value.param == param


def test_what_is_wrong_with_a_response_is_named(responses):
    for body, param in (
        ({"input": []}, "input"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice"),
    ):
        with pytest.raises(openai.BadRequestError) as error:
            responses.create(model="m", **body)
        assert error.value.param == param


def blocks_of(message):
    return [block.model_dump(include={"type", "text", "thinking", "name", "input"}) for block in message.content]


BLOCKS = [
    {"type": "thinking", "thinking": "Which city?"},
    {"type": "text", "text": "I look it up."},
    {"type": "tool_use", "name": "get_weather", "input": {"city": "Köln"}},
]
ASK = [{"role": "user", "content": "How is it?"}]


def test_a_message_has_thoughts_text_and_calls(messages):
    message = messages.create(model="m", max_tokens=100, messages=ASK, tools=MESSAGE_TOOLS, system="Be brief.")
    assert blocks_of(message) == BLOCKS
    assert message.stop_reason == "tool_use" and message.usage.output_tokens > 5
    cut = messages.create(model="m", max_tokens=6, messages=ASK, system=[{"type": "text", "text": "Be brief."}])
    assert (cut.stop_reason, cut.content[-1].text) == ("max_tokens", "I look")
    stopped = messages.create(model="m", max_tokens=50, messages=ASK, stop_sequences=["look"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "look")


def test_a_message_may_have_to_fulfil_a_schema_or_to_be_a_call(calling, messages):
    def create(more=None, **body):
        extra = {"temperature": 0, **(more or {})}  # what the client has no words for
        message = messages.create(model="m", max_tokens=300, messages=ASK, extra_body=extra, **body)
        return blocks_of(message)[1:]  # behind the thought

    form = {"type": "json_schema", "schema": PLACE}
    for body in ({"output_config": {"format": form}}, {"more": {"output_format": form}}):
        (block,) = create(**body)
        assert json.loads(block["text"])["city"] in ("Bern", "Rom")
    tools = [{"name": "get_weather", "input_schema": PLACE, "strict": True}, {"name": "now", "input_schema": {}}]
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "get_weather"}):
        (block,) = create(tools=tools, tool_choice=choice)
        assert block["type"] == "tool_use"
        assert block["name"] == "now" or block["input"]["city"] in ("Bern", "Rom")
    for body, word in (
        ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "output_config.format"),
        ({"tools": tools, "tool_choice": {"type": "tool", "name": "other"}}, "other"),
        ({"tools": [{**tools[0], "input_schema": {"not": {}}}]}, "tools[0].input_schema"),
    ):
        with pytest.raises(anthropic.BadRequestError) as error:
            create(**body)
        assert word in error.value.body["error"]["message"]


def test_a_streamed_message_is_built_up_as_the_client_expects(messages):
    with messages.stream(model="m", max_tokens=100, messages=ASK, tools=MESSAGE_TOOLS) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert blocks_of(final) == BLOCKS and final.stop_reason == "tool_use"
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop" and kinds.count("content_block_start") == 3


def test_errors_have_the_shape_of_their_api(calling, messages):
    for body, word in (
        ({"messages": [], "max_tokens": 5}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}], "max_tokens": 5}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 5}, "image"),
        ({"messages": ASK, "max_tokens": 5, "tools": [{"name": "f"}]}, "input_schema"),
        ({"messages": ASK, "max_tokens": 5, "tool_choice": {"type": "any"}}, "tools"),
    ):
        with pytest.raises(anthropic.BadRequestError) as error:
            messages.create(model="m", **body)
        assert error.value.body["type"] == "error" and error.value.body["error"]["type"] == "invalid_request_error"
        assert word in error.value.body["error"]["message"]
    stranger = anthropic.Anthropic(base_url=f"http://127.0.0.1:{calling.port}", api_key="wrong", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError):
        stranger.messages.count_tokens(model="m", messages=ASK)


def test_a_model_that_can_fill_in_is_given_what_follows(tmp_path, calling):
    marks = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>"]
    script = ["return a", " + b"]
    model = write_scripted(tmp_path / "m.gguf", TAGS, [*script, "never"], after="<|fim_middle|>", more=marks)
    with Server(model, "--weights", "f32") as server:
        body = {"prompt": "def f(a, b):\n    ", "suffix": "\n\nf(1, 2)", "max_tokens": 2, "return_token_ids": True}
        choice = server.complete(**body)["choices"][0]
        assert choice["text"] == "return a + b"
        pieces = server.post("/detokenize", tokens=choice["prompt_token_ids"])["content"]
        assert pieces == "<|fim_prefix|>def f(a, b):\n    <|fim_suffix|>\n\nf(1, 2)<|fim_middle|>"
        assert server.post("/v1/completions", 400, prompt=[1], suffix="x")["error"]["param"] == "suffix"
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    status, _, answer = calling.request("POST", "/v1/completions", {"prompt": "x", "suffix": "y"}, headers)
    assert status == 400 and json.loads(answer)["error"]["param"] == "suffix"
