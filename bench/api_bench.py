"""Does `phsa serve` hold under agents? Fuzzed requests, many clients with tools and schemas, and its memory.

    python bench/api_bench.py fuzz --model MODEL.gguf [--requests 100000] [--seed 1]
    python bench/api_bench.py clients --model MODEL.gguf [--clients 64] [--seconds 120]
    python bench/api_bench.py memory --model MODEL.gguf [--requests 10000]

fuzz: schemas, grammars and requests, made up or valid ones with a part changed, over all paths that write. Each is to
be answered with a status below 500 within 60 seconds, and the server is there at the end; what is answered with 200
under a schema and was not cut is JSON. Clients that leave after half a request are among them.

clients: each client sends one request after the other from a fixed set: chats with tools (auto, asked for, by name),
with schemas, JSON objects and grammars, streams, completions, embeddings, responses, messages, sources. Every answer
must be what the lone client was answered, but for ids and times, and valid: the arguments and texts fulfil their
schemas. The server runs with --weights f32, so that answers do not depend on who else is answered. --answer 400 with
--serve-args '-c 1024 --cache-tokens 2048' makes answers give their pages to older ones; how often is printed.

memory: requests of all these kinds one after the other from eight clients; bytes in memory after each tenth of them.

Needs nothing but the standard library. Loopback only. What stands in --serve-args goes to `phsa serve`.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import http.client
import itertools
import json
import random
import re
import shlex
import sys
import threading
import time

from server_bench import Peer, free_port

JSON = {"Content-Type": "application/json"}
CITY = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Bern", "Köln", "Rom"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "exact": {"type": "boolean"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
LIST = {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 4}
FUNCTIONS = [
    {"name": "weather", "description": "The weather of a city.", "parameters": CITY},
    {"name": "now", "description": "The time."},
    {"name": "pick", "parameters": {"type": "object", "properties": {"of": LIST}, "required": ["of"]}},
]
TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]
TEXTS = ["How is the weather in Köln?", "What time is it?", "Pick one.", "Name a city.", "Say hello."]
DOCUMENT = "The tower is 41 metres high. It was built of granite. A keeper lived there until 1963.\n\n"


def fulfils(value, schema):
    """Whether a value is what the schemas of this file ask for."""
    if "enum" in schema:
        return value in schema["enum"]
    kind = schema.get("type")
    if kind == "object":
        named = schema.get("properties", {})
        whole = isinstance(value, dict) and all(key in value for key in schema.get("required", []))
        return whole and all(key in named and fulfils(part, named[key]) for key, part in value.items())
    if kind == "array":
        whole = isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
        return whole and all(fulfils(part, schema["items"]) for part in value)
    if kind == "integer":
        return (
            isinstance(value, int) and not isinstance(value, bool) and schema["minimum"] <= value <= schema["maximum"]
        )
    return isinstance(value, bool)


def send(connection, path, body):
    """(status, bytes)"""
    connection.request("POST", path, body if isinstance(body, bytes) else json.dumps(body), JSON)
    response = connection.getresponse()
    return response.status, response.read()


# The fixed set.


def workload(answer=0):
    """(path, body) of each kind; with `answer`, half of all are texts of so many tokens."""
    kinds = []
    for number in range(60 if answer else 0):
        body = {"prompt": f"{number}. {DOCUMENT}", "max_tokens": answer, "temperature": 0, "ignore_eos": True}
        kinds.append(("/v1/completions", body))
    for text in TEXTS:
        chat = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 120}
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}
        for more in (
            {"tools": TOOLS},
            {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}, "stream": True},
            {"tools": TOOLS, "response_format": form, "parallel_tool_calls": False},
            {"response_format": form, "stream": True},
            {"response_format": {"type": "json_object"}},
            {"grammar": 'root ::= [a-z]{3,9} (" " [a-z]{3,9}){0,6}'},
            {"max_tokens": 24},
        ):
            kinds.append(("/v1/chat/completions", {**chat, **more}))
        document = [{"role": "user", "content": DOCUMENT + text}]
        kinds.append(("/v1/chat/completions", {**chat, "messages": document, "max_tokens": 16, "phsa": {"sources": 2}}))
        kinds.append(("/v1/completions", {"prompt": text, "max_tokens": 16, "temperature": 0, "logprobs": 2}))
        kinds.append(("/v1/embeddings", {"input": [text, DOCUMENT]}))
        flat = [{"type": "function", **function} for function in FUNCTIONS]
        kinds.append(
            (
                "/v1/responses",
                {
                    "input": text,
                    "tools": flat,
                    "tool_choice": "required",
                    "parallel_tool_calls": False,
                    "temperature": 0,
                    "max_output_tokens": 120,
                },
            )
        )
        own = [{"name": f["name"], "input_schema": f.get("parameters", {"type": "object"})} for f in FUNCTIONS]
        choice = {"type": "tool", "name": "weather"}
        kinds.append(
            (
                "/v1/messages",
                {
                    "messages": chat["messages"],
                    "tools": own,
                    "tool_choice": choice,
                    "temperature": 0,
                    "max_tokens": 120,
                },
            )
        )
    return kinds


def events(data):
    parts = [line[6:] for line in data.decode().split("\n") if line.startswith("data: ")]
    return [json.loads(part) for part in parts if part != "[DONE]"]


def message_of(body, data):
    """What a chat says: content, calls, why it ended; a stream put together."""
    if not body.get("stream"):
        choice = json.loads(data)["choices"][0]
        calls = [(c["function"]["name"], c["function"]["arguments"]) for c in choice["message"].get("tool_calls", [])]
        return choice["message"]["content"], calls, choice["finish_reason"]
    content, calls, reason = "", {}, None
    for event in events(data):
        for choice in event["choices"]:
            reason = choice["finish_reason"] or reason
            content += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls", []):
                name, arguments = calls.get(call["index"], (None, ""))
                function = call["function"]
                calls[call["index"]] = (function.get("name", name), arguments + function.get("arguments", ""))
    return content or None, list(calls.values()), reason


def check_calls(calls, reason, body):
    schemas = {function["name"]: function.get("parameters", {"type": "object"}) for function in FUNCTIONS}
    for i, (name, arguments) in enumerate(calls):
        if reason == "length" and i == len(calls) - 1:
            continue  # cut
        assert name in schemas and fulfils(json.loads(arguments), schemas[name]), (name, arguments, body)


def comparable(path, body, status, data):
    """What is the same whoever else is answered, after it was found to be valid."""
    assert status == 200, (status, data[:300])
    if path == "/v1/chat/completions":
        content, calls, reason = message_of(body, data)
        check_calls(calls, reason, body)
        choice = body.get("tool_choice", "auto")
        if choice != "auto":
            assert calls and not content, (body, content)
            assert isinstance(choice, str) or calls[0][0] == choice["function"]["name"]
        form = body.get("response_format", {}).get("type")
        if form and not calls and reason == "stop":
            value = json.loads(content)
            assert isinstance(value, dict) and (form == "json_object" or fulfils(value, CITY)), content
        if "grammar" in body and reason == "stop":
            assert re.fullmatch(r"[a-z]{3,9}( [a-z]{3,9}){0,6}", content), content
        sources = None if body.get("stream") else json.loads(data)["phsa"].get("sources")
        return content, calls, reason, sources
    answer = json.loads(data)
    if path == "/v1/completions":
        return answer["choices"]
    if path == "/v1/embeddings":
        return answer["data"]
    if path == "/v1/responses":
        calls = [(item["name"], item["arguments"]) for item in answer["output"] if item["type"] == "function_call"]
        check_calls(calls, "length" if answer["status"] == "incomplete" else "stop", body)
        assert calls
        return calls
    calls = [(block["name"], json.dumps(block["input"])) for block in answer["content"] if block["type"] == "tool_use"]
    if answer["stop_reason"] == "tool_use":
        check_calls(calls, "stop", body)
    assert calls
    return calls


def metric(server, name):
    with contextlib.closing(server.connect()) as connection:
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))


def clients(args):
    kinds = workload(args.answer)
    with serving(args, "--weights", "f32") as server:
        with contextlib.closing(server.connect()) as connection:
            alone = [comparable(path, body, *send(connection, path, body)) for path, body in kinds]
        whole = sum(1 for answer in alone if "length" not in answer)
        print(f"{len(kinds)} requests alone, {whole} of their answers ended by themselves", flush=True)
        end = time.monotonic() + args.seconds
        wrong = []

        def run(number):
            chance = random.Random(args.seed * 1000 + number)
            done = 0
            with contextlib.closing(server.connect()) as connection:
                while time.monotonic() < end:
                    which = chance.randrange(len(kinds))
                    path, body = kinds[which]
                    found = comparable(path, body, *send(connection, path, body))
                    if found != alone[which]:
                        wrong.append((path, body, found, alone[which]))
                    done += 1
            return done

        with concurrent.futures.ThreadPoolExecutor(args.clients) as pool:
            done = sum(pool.map(run, range(args.clients)))
        print(
            f"{args.clients} clients, {args.seconds} s: {done} answers, all valid; {len(wrong)} other than the lone "
            f"client's; {metric(server, 'vllm:num_preemptions_total'):.0f} preemptions"
        )
        for one in wrong[:3]:
            print(json.dumps(one, ensure_ascii=False))
    return 1 if wrong else 0


# Memory.


def memory(args):
    kinds = workload()
    with serving(args) as server:
        numbers = itertools.count()
        lock = threading.Lock()

        def run(until):
            with contextlib.closing(server.connect()) as connection:
                while True:
                    with lock:
                        number = next(numbers)
                    if number >= until:
                        return
                    path, body = kinds[number % len(kinds)]
                    # Texts and schemas that were not there before, so that nothing is found in a cache.
                    body = json.loads(json.dumps(body).replace("Pick one", f"Pick {number}"))
                    body.update({"max_tokens": 8} if path != "/v1/responses" else {"max_output_tokens": 8})
                    if number % 3 == 0 and "response_format" in body and "json_schema" in body["response_format"]:
                        body["response_format"]["json_schema"]["schema"]["properties"][f"k{number}"] = {"type": "null"}
                    status, data = send(connection, path, body)
                    assert status == 200, data[:300]

        sizes = []
        for tenth in range(1, 11):
            with concurrent.futures.ThreadPoolExecutor(8) as pool:
                list(pool.map(run, [tenth * args.requests // 10] * 8))
            # Each thread took one number too many.
            sizes.append(server.memory() / 2**20)
            print(f"{tenth * args.requests // 10} requests: {sizes[-1]:.1f} MiB", flush=True)
        print(f"from the third tenth to the last: {sizes[-1] - sizes[2]:+.1f} MiB")
    return 0


# Fuzzing.

WORDS = [
    "type",
    "properties",
    "required",
    "items",
    "enum",
    "const",
    "anyOf",
    "oneOf",
    "allOf",
    "$ref",
    "pattern",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "additionalProperties",
    "format",
    "prefixItems",
    "$defs",
    "not",
    "nullable",
    "default",
    "exclusiveMinimum",
    "multipleOf",
    "description",
]
KINDS = ["object", "array", "string", "integer", "number", "boolean", "null"]
PATTERNS = [
    "^a+$",
    "[0-9]{2,4}",
    "(a|b)*c",
    "^(?:x|y){0,3}$",
    "\\d+",
    "[^a-z]",
    "(",
    "a{9999}",
    ".*",
    "^\\w+@\\w+$",
    "\\p{L}",
]
FORMATS = ["date", "time", "date-time", "uuid", "email", "uri", "ipv4", "ipv6", "hostname", "duration", "other"]
ODD = [
    None,
    True,
    False,
    0,
    -1,
    1,
    3,
    10**9,
    10**30,
    1.5,
    -2e300,
    "",
    "a",
    "\u0000",
    "é😀",
    "<think>",
    "</tool_call>",
    [],
    {},
    [[]],
    {"a": 1},
]


def any_value(chance, depth=0):
    pick = chance.random()
    if depth > 3 or pick < 0.6:
        return chance.choice(ODD)
    if pick < 0.8:
        return [any_value(chance, depth + 1) for _ in range(chance.randrange(4))]
    return {chance.choice(WORDS): any_value(chance, depth + 1) for _ in range(chance.randrange(4))}


def any_schema(chance, depth=0):
    """Mostly a schema, now and then something that is none."""
    if depth > 4 or chance.random() < 0.04:
        return any_value(chance, depth) if chance.random() < 0.5 else {"type": chance.choice(KINDS)}
    schema = {}
    pick = chance.random()
    inner = lambda: any_schema(chance, depth + 1)  # noqa: E731
    if pick < 0.35:
        names = [chance.choice(["a", "b", "name", "é", 'q"', "x y", "a/b"]) for _ in range(chance.randrange(5))]
        schema = {"type": "object", "properties": {name: inner() for name in names}}
        schema["required"] = [name for name in names if chance.random() < 0.5]
        if chance.random() < 0.4:
            schema["additionalProperties"] = chance.choice([True, False, {"type": "integer"}])
    elif pick < 0.5:
        schema = {"type": "array", "items": inner(), "minItems": chance.randrange(3), "maxItems": chance.randrange(5)}
        if chance.random() < 0.3:
            schema["prefixItems"] = [inner()]
    elif pick < 0.65:
        schema = {"type": "string"}
        key = chance.choice(["pattern", "format", "minLength", "maxLength", None])
        values = {"pattern": PATTERNS, "format": FORMATS, "minLength": [0, 3, 20000], "maxLength": [0, 5, -1]}
        if key:
            schema[key] = chance.choice(values[key])
    elif pick < 0.75:
        schema = {"type": chance.choice(["integer", "number"]), "minimum": chance.choice([-5, 0, 0.5, 1e40])}
        schema["maximum"] = chance.choice([-6, 7, 10**25, 0.25])
    elif pick < 0.85:
        schema = {chance.choice(["anyOf", "oneOf", "allOf"]): [inner() for _ in range(chance.randrange(4))]}
    elif pick < 0.92:
        schema = {"enum": [chance.choice(ODD) for _ in range(chance.randrange(4))]}
    else:
        target = chance.choice(["#", "#/$defs/a", "#/$defs/b", "#/properties/a", "other.json", "#/$defs/a/~1"])
        schema = {"$ref": target, "$defs": {"a": inner()}}
    if chance.random() < 0.1:
        schema[chance.choice(WORDS)] = any_value(chance)
    return schema


def any_grammar(chance):
    rules = ["root", "a", "b", "c"]

    def part(depth=0):
        pick = chance.random()
        if depth > 3 or pick < 0.4:
            return chance.choice(['"x"', '"é\\n"', "[a-z]", "[^0-9]", ".", "a", "b", "c", '""', "[\\x00-\\xff]"])
        if pick < 0.6:
            return "(" + " | ".join(part(depth + 1) for _ in range(chance.randrange(1, 4))) + ")"
        if pick < 0.8:
            return part(depth + 1) + chance.choice(["*", "+", "?", "{2}", "{0,3}", "{5,}", "{3,1}", "{99999}"])
        return " ".join(part(depth + 1) for _ in range(chance.randrange(1, 4)))

    text = "\n".join(f"{name} ::= {part()}" for name in rules)
    if chance.random() < 0.3:
        at = chance.randrange(len(text))
        text = text[:at] + chance.choice(["", "(", '"', "::=", "\\", "[", "{", "é"]) + text[at + 1 :]
    return text


def any_tools(chance):
    tools = []
    for _ in range(chance.randrange(4)):
        function = {"name": chance.choice(["f", "g", "weather", "a b", ""]), "parameters": any_schema(chance)}
        if chance.random() < 0.2:
            function["strict"] = True
        tools.append({"type": "function", "function": function})
    return tools


def any_request(chance):
    """(path, body as bytes, whether an answer that is not cut is JSON)"""
    few = chance.choice([1, 4, 12])
    text = chance.choice([*TEXTS, "", "<|im_end|>", "a\n\nb?", "😀" * 5])
    messages = [{"role": "user", "content": text}]
    pick = chance.random()
    is_json = False
    choice = chance.choice(["auto", "none", "required", {"type": "function", "function": {"name": "f"}}, "other", None])
    if pick < 0.3:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": any_schema(chance)}}
        path, body = "/v1/chat/completions", {"messages": messages, "max_tokens": few, "response_format": form}
        is_json = True
    elif pick < 0.4:
        path, body = "/v1/completions", {"prompt": text or "x", "max_tokens": few, "grammar": any_grammar(chance)}
    elif pick < 0.65:
        path = "/v1/chat/completions"
        body = {"messages": messages, "max_tokens": few, "tools": any_tools(chance), "tool_choice": choice}
    elif pick < 0.75:
        flat = [{"type": "function", **tool["function"]} for tool in any_tools(chance)]
        form = {"type": "json_schema", "name": "x", "schema": any_schema(chance)}
        path = "/v1/responses"
        body = {"input": text, "max_output_tokens": few, "tools": flat, "text": {"format": form}}
    elif pick < 0.85:
        own = [{"name": t["function"]["name"], "input_schema": any_schema(chance)} for t in any_tools(chance)]
        own_choice = chance.choice([{"type": "any"}, {"type": "auto"}, {"type": "tool", "name": "f"}, None])
        path = chance.choice(["/v1/messages", "/v1/messages/count_tokens"])
        body = {"messages": messages, "max_tokens": few, "tools": own, "tool_choice": own_choice}
    elif pick < 0.9:
        path, body = "/v1/embeddings", {"input": chance.choice([text, [text, "b"], [1, 2], any_value(chance)])}
    else:
        path, body = chance.choice(workload())
        body = {**body, "max_tokens": few}
    if chance.random() < 0.1:
        body["phsa"] = chance.choice([{"sources": True}, {"sources": 3}, {"sources": -1}, any_value(chance)])
    if chance.random() < 0.1:
        body["stream"] = True
        is_json = False
    if chance.random() < 0.25:
        body[chance.choice(list(body))] = any_value(chance)
        is_json = False
    data = json.dumps(body, ensure_ascii=chance.random() < 0.5).encode()
    if chance.random() < 0.1:
        at = chance.randrange(len(data))
        data = data[:at] + bytes([chance.randrange(256)]) * chance.randrange(3) + data[at + chance.randrange(3) :]
        is_json = False
    return path, data, is_json


def fuzz(args):
    statuses = collections.Counter()
    slow = []
    with serving(args, "--log-file", "none") as server:
        begin = time.monotonic()

        def run(number):
            chance = random.Random(args.seed * 1_000_000 + number)
            connection = server.connect()
            connection.timeout = 60
            for _ in range(number, args.requests, args.clients):
                path, data, is_json = any_request(chance)
                if chance.random() < 0.005:  # half of a request, and gone
                    connection.putrequest("POST", path)
                    connection.putheader("Content-Type", "application/json")
                    connection.putheader("Content-Length", str(len(data)))
                    connection.endheaders(data[: len(data) // 2])
                    connection.close()
                    statuses["left"] += 1
                    continue
                start = time.monotonic()
                try:
                    status, answer = send(connection, path, data)
                except (OSError, http.client.HTTPException) as error:
                    print(f"{path} {data!r}: {error!r}", flush=True)
                    statuses[repr(error)] += 1
                    connection.close()
                    continue
                seconds = time.monotonic() - start
                if seconds > 10:
                    slow.append((seconds, path, data))
                statuses[status] += 1
                if status >= 500:
                    print(f"{status} {path} {data!r}: {answer!r}", flush=True)
                if status == 200 and is_json:
                    choice = json.loads(answer)["choices"][0]
                    if choice["finish_reason"] == "stop":
                        try:
                            json.loads(choice["message"]["content"])
                        except ValueError:
                            print(f"no JSON: {data!r}: {choice}", flush=True)
                            statuses["no JSON"] += 1
            connection.close()

        with concurrent.futures.ThreadPoolExecutor(args.clients) as pool:
            list(pool.map(run, range(args.clients)))
        alive = server.process.poll() is None and server.get("/health")
        seconds = time.monotonic() - begin
    bad = sum(count for status, count in statuses.items() if status not in ("left", 200, 400, 429))
    words = ", ".join(f"{status}: {count}" for status, count in sorted(statuses.items(), key=str))
    print(f"{sum(statuses.values())} requests in {seconds:.0f} s: {words}; {len(slow)} took over 10 s")
    for one in sorted(slow, reverse=True)[:3]:
        print(one)
    print("the server is there" if alive else "the server is gone")
    return 0 if alive and bad == 0 else 1


@contextlib.contextmanager
def serving(args, *more):
    port = free_port()
    command = [args.phsa, "serve", "-m", args.model, "--port", port, "-t", 2, *more, *shlex.split(args.serve_args)]
    server = Peer("phsa", command, port)
    try:
        yield server
    finally:
        server.stop()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["fuzz", "clients", "memory"])
    parser.add_argument("--model", required=True)
    parser.add_argument("--phsa", default="build/release/bin/phsa")
    parser.add_argument("--serve-args", default="")
    parser.add_argument("--requests", type=int)
    parser.add_argument("--clients", type=int)
    parser.add_argument("--seconds", type=int, default=120)
    parser.add_argument("--answer", type=int, default=0, help="clients: long answers too, of so many tokens")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    args.requests = args.requests or (100_000 if args.what == "fuzz" else 10_000)
    args.clients = args.clients or (64 if args.what == "clients" else 16)
    return {"fuzz": fuzz, "clients": clients, "memory": memory}[args.what](args)


if __name__ == "__main__":
    sys.exit(main())
