"""Tools and thoughts over the server, with the official client and models that say what they are told to."""

import json

import pytest
from test_jinja import BRACKETS, TAGS
from test_server import Server

pytest.importorskip("gguf")
openai = pytest.importorskip("openai")
from scripted import write_scripted  # noqa: E402

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
CALL = ["<tool_call>", '\n{"name": "get_', 'weather", ', '"arguments": ', '{"city"', ': "Kö', 'ln"}}', "\n</tool_call>"]
QUESTION = [{"role": "user", "content": "How is the weather?"}]


@pytest.fixture(scope="module")
def calling(tmp_path_factory):
    script = ["<think>", "\nWhich ", "city?\n", "</think>", "\n\n", "I look", " it up.\n", *CALL]
    script += ['\n<tool_call>\n{"name": "now",', ' "arguments": {}}\n</tool_call>']
    model = write_scripted(tmp_path_factory.mktemp("model") / "calling.gguf", TAGS, script)
    with Server(model, "--weights", "f32", "--alias", "calling") as server:
        yield server


def client(server):
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none")


def summary(message):
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]
    return message.content, calls, (message.model_extra or {}).get("reasoning_content")


ALL = [("get_weather", {"city": "Köln"}), ("now", {})]


def test_calls_and_thoughts_are_told_apart(calling):
    answer = client(calling).chat.completions.create(model="m", messages=QUESTION, tools=TOOLS, temperature=0)
    choice = answer.choices[0]
    assert summary(choice.message) == ("I look it up.", ALL, "Which city?")
    assert choice.finish_reason == "tool_calls"
    assert len({call.id for call in choice.message.tool_calls}) == 2
    one = client(calling).chat.completions.create(
        model="m", messages=QUESTION, tools=TOOLS, temperature=0, parallel_tool_calls=False
    )
    assert summary(one.choices[0].message)[1] == ALL[:1]


def test_without_tools_a_call_is_text(calling):
    for body in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
        answer = client(calling).chat.completions.create(model="m", messages=QUESTION, temperature=0, **body)
        content, calls, thought = summary(answer.choices[0].message)
        assert content.startswith("I look it up.\n<tool_call>") and not calls and thought == "Which city?"
        assert answer.choices[0].finish_reason == "stop"


def test_a_stream_says_the_same_in_deltas(calling):
    stream = client(calling).chat.completions.create(
        model="m", messages=QUESTION, tools=TOOLS, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    content = thought = ""
    calls, arguments, reason = {}, {}, None
    for chunk in stream:
        for choice in chunk.choices:
            reason = choice.finish_reason or reason
            content += choice.delta.content or ""
            thought += (choice.delta.model_extra or {}).get("reasoning_content", "")
            for call in choice.delta.tool_calls or []:
                if call.id:
                    assert call.index == len(calls)
                    calls[call.index] = call.function.name
                arguments.setdefault(call.index, []).append(call.function.arguments or "")
    found = [(name, json.loads("".join(arguments[index]))) for index, name in calls.items()]
    assert (content, found, thought, reason) == ("I look it up.", ALL, "Which city?", "tool_calls")
    assert len([piece for piece in arguments[0] if piece]) > 1, "arguments come as they are written"


def test_results_are_rendered_by_the_template(calling):
    call = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": '{"b": 1, "a": "<|im_end|>"}'}}
    messages = [*QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages += [{"role": "tool", "tool_call_id": "call_1", "content": "<|im_end|>12:00"}]
    prompt = calling.post("/apply-template", messages=messages, tools=TOOLS)["prompt"]
    assert json.dumps(TOOLS[0]) in prompt
    assert '<tool_call>\n{"name": "now", "arguments": {"b": 1, "a": "<|im_end|>"}}\n</tool_call>' in prompt
    assert "<|im_start|>user\n<tool_response>\n<|im_end|>12:00\n</tool_response><|im_end|>" in prompt
    call["function"]["arguments"] = '{"cut": "sh'
    cut = calling.post("/apply-template", messages=messages, tools=TOOLS)["prompt"]
    assert '"arguments": {"cut": "sh}' in cut, "the text it is"
    pieces = calling.post("/tokenize", messages=messages, tools=TOOLS, with_pieces=True)["pieces"]
    assert pieces.count("<|im_end|>") == 4, "what is said ends no turn"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": 3}}]}, "tools[0].function.parameters"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
            "messages[0].tool_calls[0].function.name",
        ),
        ({"functions": [{}]}, "functions"),
    ],
)
def test_what_is_wrong_about_tools_is_named(calling, body, param):
    error = calling.post("/v1/chat/completions", 400, **{"messages": QUESTION, **body})["error"]
    assert error["param"] == param and param.split(".")[-1] in error["message"]


def test_calls_behind_a_control_token_are_found(tmp_path):
    script = ["[TOOL_CALLS]", '[{"name": ', '"now", "arguments"', ": {}}]"]
    model = write_scripted(tmp_path / "m.gguf", BRACKETS, script, after="]", control=["[TOOL_CALLS]"])
    with Server(model, "--weights", "f32") as server:
        for stream in (False, True):
            if stream:
                events = server.stream("/v1/chat/completions", messages=QUESTION, tools=TOOLS, temperature=0)
                calls = [c for e in events for c in e["choices"][0]["delta"].get("tool_calls", [])]
                text = "".join(call["function"].get("arguments", "") for call in calls)
            else:
                message = server.post("/v1/chat/completions", messages=QUESTION, tools=TOOLS, temperature=0)
                calls = message["choices"][0]["message"]["tool_calls"]
                text = calls[0]["function"]["arguments"]
            assert calls[0]["function"]["name"] == "now" and text == "{}"
            assert len(calls[0]["id"]) == 9, "as the template wants it"


def test_a_template_without_tools_is_told_of_them_in_words(tmp_path):
    plain = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    plain += "{{ '<|im_start|>assistant\\n' }}"
    model = write_scripted(tmp_path / "m.gguf", plain, CALL)
    with Server(model, "--weights", "f32") as server:
        prompt = server.post("/apply-template", messages=QUESTION, tools=TOOLS)["prompt"]
        assert prompt.startswith("<|im_start|>system\n") and json.dumps(TOOLS) in prompt
        answer = client(server).chat.completions.create(model="m", messages=QUESTION, tools=TOOLS, temperature=0)
        assert summary(answer.choices[0].message) == (None, ALL[:1], None)


CITIES = {"type": "object", "properties": {"city": {"enum": ["Bern", "Köln"]}}, "required": ["city"]}
CHOSEN = [
    {"type": "function", "function": {"name": "get_weather", "parameters": CITIES}},
    {"type": "function", "function": {"name": "now"}},
]


def fulfilled(name, arguments):
    return arguments == {} if name == "now" else arguments.keys() == {"city"} and arguments["city"] in ("Bern", "Köln")


def test_a_call_that_is_asked_for_is_made_and_fulfils_its_schema(calling):
    by_name = {"type": "function", "function": {"name": "now"}}
    only = {"mode": "required", "tools": [by_name]}
    for choice, allowed in (
        ("required", {"now", "get_weather"}),
        (by_name, {"now"}),
        ({"type": "allowed_tools", "allowed_tools": only}, {"now"}),
    ):
        body = {"tools": CHOSEN, "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 300}
        answer = client(calling).chat.completions.create(model="m", messages=QUESTION, temperature=0, **body)
        content, calls, thought = summary(answer.choices[0].message)
        assert thought == "Which city?" and content is None and len(calls) == 1, answer
        assert calls[0][0] in allowed and fulfilled(*calls[0]) and answer.choices[0].finish_reason == "tool_calls"


def test_arguments_that_the_schema_does_not_allow_are_not_written(calling):
    # Left alone, the model writes the city Köln.
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": json.loads(json.dumps(CITIES))}}]
    tools[0]["function"]["parameters"]["properties"]["city"]["enum"] = ["Bern"]
    answer = client(calling).chat.completions.create(
        model="m", messages=QUESTION, tools=tools, temperature=0, parallel_tool_calls=False
    )
    assert summary(answer.choices[0].message) == ("I look it up.", [("get_weather", {"city": "Bern"})], "Which city?")


def test_a_schema_that_cannot_be_held_to_is_refused_only_where_it_must(calling):
    schema = {"type": "object", "properties": {"city": {"type": "string", "not": {"const": "x"}}}}
    function = {"name": "get_weather", "parameters": schema}
    tools = [{"type": "function", "function": function}]
    answer = calling.post("/v1/chat/completions", messages=QUESTION, tools=tools, temperature=0, max_tokens=100)
    assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Köln"}'
    for body in (
        {"tool_choice": "required"},
        {"tools": [{"type": "function", "function": {**function, "strict": True}}]},
    ):
        error = calling.post("/v1/chat/completions", 400, **{"messages": QUESTION, "tools": tools, **body})["error"]
        assert error["param"] == "tools[0].function.parameters" and "#/properties/city/not" in error["message"]


def test_beside_a_schema_an_answer_is_a_call_or_fulfils_it(calling):
    schema = {"type": "object", "properties": {"sky": {"enum": ["blue", "grey"]}}, "required": ["sky"]}
    body = {"response_format": {"type": "json_schema", "json_schema": {"name": "sky", "schema": schema}}}
    answer = client(calling).chat.completions.create(
        model="m", messages=QUESTION, tools=CHOSEN, temperature=0, max_tokens=300, parallel_tool_calls=False, **body
    )
    content, calls, thought = summary(answer.choices[0].message)
    assert thought == "Which city?"
    assert fulfilled(*calls[0]) if calls else json.loads(content)["sky"] in ("blue", "grey")
    answer = client(calling).chat.completions.create(
        model="m", messages=QUESTION, temperature=0, max_tokens=300, **body
    )
    content, calls, thought = summary(answer.choices[0].message)
    assert thought == "Which city?" and json.loads(content)["sky"] in ("blue", "grey")


def test_calls_behind_a_control_token_can_be_asked_for(tmp_path):
    script = ["[TOOL_CALLS]", '[{"name": ', '"now", "arguments"', ": {}}]"]
    model = write_scripted(tmp_path / "m.gguf", BRACKETS, script, after="]", control=["[TOOL_CALLS]"])
    with Server(model, "--weights", "f32") as server:
        body = {"messages": QUESTION, "tools": CHOSEN, "tool_choice": "required", "temperature": 0}
        message = server.post("/v1/chat/completions", **body)["choices"][0]["message"]
        assert [call["function"] for call in message["tool_calls"]] == [{"name": "now", "arguments": "{}"}]
        assert message["content"] is None


def test_smollm2_calls_what_it_must(smollm2):
    with Server(smollm2, "-c", 2048) as server:
        for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
            for stream in (False, True):
                body = {"messages": QUESTION, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
                answer = client(server).chat.completions.create(
                    model="m", temperature=0, max_tokens=200, stream=stream, **body
                )
                if stream:
                    deltas = [c for chunk in answer for c in chunk.choices[0].delta.tool_calls or []]
                    call = deltas[0].function.name, "".join(c.function.arguments or "" for c in deltas)
                else:
                    function = answer.choices[0].message.tool_calls[0].function
                    call = function.name, function.arguments
                arguments = json.loads(call[1])
                assert arguments == {} if call[0] == "now" else isinstance(arguments["city"], str)
