"""The interpreter of chat templates against transformers' rendering, with templates in the ways models write them."""

import itertools
import json
import subprocess

import pytest
from conftest import BIN

utils = pytest.importorskip("transformers.utils.chat_template_utils")
pytest.importorskip("jinja2")

# Tools in the system turn, calls as JSON in tags, results in the user's turn (as Qwen and Hermes write them).
TAGS = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "Functions:\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step and message.role == "user" and message.content is string %}
        {%- set ns.multi_step = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is defined and message.reasoning_content is not none %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if loop.index0 > ns.last and (loop.last or (not loop.last and thought)) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
                {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
                {{- '<tool_call>\\n{"name": "' ~ tool_call.name ~ '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

# Alternating turns, tools before the last question, arguments as a text (as Mistral writes them).
BRACKETS = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("After the system message, roles must alternate user/assistant/...") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS][" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val|tojson }}
                    {%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}
                {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST]" + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST]" + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS][" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id|length != 9 %}
                {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- elif message["role"] == "tool" %}
        {%- if message.content is defined and message.content.content is defined %}
            {%- set content = message.content.content %}
        {%- else %}
            {%- set content = message.content %}
        {%- endif %}
        {{- '[TOOL_RESULTS]{"content": ' + content|string + ", " }}
        {{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported!") }}
    {%- endif %}
{%- endfor %}
"""

# Macros, types of parameters in words, loops with break, blocks, plain text between tags.
WORDS = """{# A comment. #}
{%- macro type_of(spec, many=False) -%}
  {%- if spec.type == 'string' -%}{{ 'strings' if many else 'string' }}
  {%- elif spec.type in ['integer', 'number'] -%}{{ spec.type }}{% if many %}s{% endif %}
  {%- elif spec.type == 'array' -%}{{ type_of(spec['items'], many=True) }}[]
  {%- elif spec.type == 'object' -%}
    { {%- for key, inner in spec.properties.items() | sort -%}
      {{ key }}: {{ type_of(inner) }}{{ ', ' if not loop.last }}
    {%- endfor -%} }
  {%- elif spec.type is iterable and spec.type is not string -%}{{ spec.type | join(' | ') }}
  {%- else -%}any{%- endif -%}
{%- endmacro -%}
{% if tools %}
Functions:
    {% for tool in tools | map(attribute='function') %}
  {{ loop.index }}. {{ tool.name | upper }}: {{ tool.description | replace('\\n', ' ') | default('none', true) }}
        {% for name, spec in tool.parameters.properties | dictsort %}
   - {{ name }}: {{ type_of(spec) }}{% if name in tool.parameters.required | default([]) %} (needed){% endif %}

        {% endfor %}
    {% endfor %}
{% endif %}
{% set documents_text %}{% for doc in documents or [] %}[{{ doc.title }}] {{ doc.text }}
{% endfor %}{% endset %}
{% if documents_text | trim %}Documents:
{{ documents_text | indent(2, first=true) }}{% endif %}
{% for message in messages %}
{% if loop.previtem is defined and loop.previtem.role == message.role %}{% continue %}{% endif %}
{% if loop.index > 6 %}...{% break %}{% endif %}
{{ '<|' ~ message.role ~ '|>' }}{{ message['content'] | string | trim }}{{ '' if loop.last else '\\n' }}
{% generation %}{{ message.tool_calls | default([]) | map(attribute='function') | map(attribute='name')
     | join('+') }}{% endgeneration %}
{% else %}
nothing
{% endfor %}
{%- filter lower %}{{ "X" if add_generation_prompt and messages[-1].role != 'assistant' else "Y" -}}{% endfilter %}
{{ strftime_now('%Y')|int > 2000 }} {{ [1, 2.0, none, 'it\\'s', "é"] }}
{{ {'a': (1,), 'b': {}} }} {{ -7 // 2 }} {{ 1e-7 }}
{{ tools | tojson(indent=2) if tools else 'no tools' }} {{ messages[0] | items | list | length }}
"""

TEMPLATES = {"tags": TAGS, "brackets": BRACKETS, "words": WORDS}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather <of> a 'city' & \"more\".",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "City"},
                    "days": {"type": "integer", "enum": [1, 2, 3], "default": 2},
                    "when": {"type": "array", "items": {"type": "string"}},
                    "deep": {
                        "type": "object",
                        "properties": {"b": {"type": "number"}, "a": {"type": ["string", "null"]}},
                    },
                },
                "required": ["city"],
            },
            "return": {"type": "string"},
        },
    },
    {
        "type": "function",
        "function": {"name": "now", "description": "Zeit — 時刻", "parameters": {"type": "object", "properties": {}}},
    },
]
SYSTEM = {"role": "system", "content": " Sei kurz.\n"}
USER = {"role": "user", "content": "Wie ist das Wetter?  "}
AGAIN = {"role": "user", "content": "\nUnd 明天?"}
ANSWER = {"role": "assistant", "content": "Gut.\n"}
THOUGHT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nAlso ja."}
REASONED = {"role": "assistant", "reasoning_content": "let me see", "content": "Done"}
ARGUMENTS = {"city": 'Köln "x"', "days": 2, "f": 1.5, "n": None, "b": True, "l": [1, "a", {"k": []}]}


def calling(arguments, content, count=1):
    calls = [{"id": "abcdefghi", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}]
    if count > 1:
        calls.append({"id": "123456789", "type": "function", "function": {"name": "now", "arguments": {}}})
    return {"role": "assistant", "content": content, "tool_calls": calls}


def conversations():
    result = {"role": "tool", "tool_call_id": "abcdefghi", "name": "get_weather", "content": '{"temp": 3}'}
    other = {"role": "tool", "tool_call_id": "123456789", "name": "now", "content": "12:00"}
    out = [[USER], [SYSTEM, USER], [SYSTEM, USER, ANSWER, AGAIN], [USER, THOUGHT, AGAIN], [USER, THOUGHT], [SYSTEM]]
    out += [[USER, REASONED, AGAIN, REASONED], [ANSWER], [USER, AGAIN], [SYSTEM, SYSTEM, USER], [USER, ANSWER] * 5]
    for arguments, content in itertools.product((ARGUMENTS, json.dumps(ARGUMENTS)), ("", None, "I call.")):
        for count in (1, 2):
            turn = [USER, calling(arguments, content, count), result] + [other] * (count - 1)
            out += [turn, [SYSTEM, *turn, ANSWER, AGAIN]]
    return out


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_with_tools_render_as_transformers_does(name):
    template = TEMPLATES[name]
    program = utils._compile_jinja_template(template)
    documents = [{"title": "T", "text": "one\ntwo"}]
    cases, wants = [], []
    for messages, tools, prompt, more in itertools.product(
        conversations(), (None, TOOLS), (True, False), ({}, {"enable_thinking": False}, {"documents": documents})
    ):
        variables = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": prompt}
        variables |= {"bos_token": "<s>", "eos_token": "</s>"} | more
        cases.append(json.dumps({"template": template, "variables": variables}))
        try:
            wants.append(program.render(**variables))
        except Exception as error:
            wants.append(error)
    done = subprocess.run([BIN / "jinja_of"], input="\n".join(cases), capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    rendered = 0
    for case, line, want in zip(cases, done.stdout.splitlines(), wants, strict=True):
        got = json.loads(line)
        if isinstance(want, Exception):
            assert "error" in got, (case, got)
        else:
            assert got.get("text") == want, case
            rendered += 1
    assert rendered > 50
