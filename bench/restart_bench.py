"""A second question about a long document, after a restart of `phsa serve --cache-dir`: when is its first token there?

    python bench/restart_bench.py -m MODEL [--tokens 30000] [--phsa build/release/bin/phsa] [--serve-args='…']

The document is bench/data/from_sand_hill_to_pine.txt, from its beginning, cut (or repeated, with a number before each
copy) to the number of tokens. A server is asked one question about it, stopped by SIGTERM, started anew and asked
another one; with --check a server without a cache is asked that one, too, and must answer the same. Prints a line of
JSON: seconds to the first token as the client sees them, tokens that were found in the cache, the file's bytes. Needs
nothing but the standard library. Loopback only.
"""

import argparse
import http.client
import json
import os
import pathlib
import shlex
import sys
import tempfile
import time

from server_bench import TEXT, Peer, free_port

QUESTIONS = ["Who is the first person that is named in the text?", "Where does the story take place?"]


def start(args, *more):
    port = free_port()
    command = [args.phsa, "serve", "-m", args.model, "--port", port, "--log-file", "none"]
    return Peer("phsa", [*command, *shlex.split(args.serve_args), *more], port)


def post(server, path, body):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=7200)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()[:500]
    return answer


def document(server, tokens):
    text = TEXT.read_text()
    whole = text
    count = lambda part: json.loads(post(server, "/tokenize", {"content": part}).read())["count"]  # noqa: E731
    copies = 1
    while (there := count(whole)) < tokens:
        copies += 1
        whole += f"\n\n{copies}.\n\n{text}"
    return whole[: int(len(whole) * tokens / there)]


def cpu_seconds(server):
    fields = pathlib.Path(f"/proc/{server.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def ask(server, text, question):
    """Seconds to the first token, the server's CPU seconds by then, the tokens of prompt and cache, and the answer."""
    before = cpu_seconds(server)
    messages = [{"role": "user", "content": f"{text}\n\n{question}"}]
    begin = time.monotonic()
    body = {"messages": messages, "stream": True, "temperature": 0, "max_tokens": 16}
    body["stream_options"] = {"include_usage": True}
    first, used, words, measured, usage = None, 0.0, "", {}, {}
    for line in post(server, "/v1/chat/completions", body):
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        assert "error" not in event, event
        for choice in event["choices"]:
            if choice["delta"].get("content"):
                if first is None:
                    first, used = time.monotonic() - begin, cpu_seconds(server) - before
                words += choice["delta"]["content"]
        measured, usage = event.get("phsa") or measured, event.get("usage") or usage
    return {
        "first_token_s": round(first, 2),
        "cpu_s": round(used, 2),
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": measured["cached_prompt_tokens"],
        "answer": words,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--tokens", type=int, default=30_000)
    parser.add_argument("--phsa", default="build/release/bin/phsa")
    parser.add_argument("--serve-args", default="")
    parser.add_argument("--check", action="store_true", help="the second answer, too, without a cache")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = []
        for question in QUESTIONS:
            server = start(args, "--cache-dir", folder)
            try:
                text = document(server, args.tokens)
                results.append(ask(server, text, question))
            finally:
                begin = time.monotonic()
                server.stop()
            results[-1]["stop_s"] = round(time.monotonic() - begin, 2)
        size = sum(file.stat().st_size for file in pathlib.Path(folder).iterdir())
    same = None
    if args.check:
        server = start(args)
        try:
            same = ask(server, text, QUESTIONS[1])["answer"] == results[1]["answer"]
        finally:
            server.stop()
    print(json.dumps({"model": args.model, "flags": args.serve_args, "first": results[0], "after_restart": results[1]}))
    print(f"cache of {size / 1e6:.0f} MB; the answer is that without a cache: {same}", flush=True)
    return 0 if same in (None, True) else 1


if __name__ == "__main__":
    sys.exit(main())
