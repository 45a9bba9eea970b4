"""Messages say what a user can do in their words: flags of the program, keys of a request, arguments of Python."""

import re

import pytest
from conftest import ROOT, run_phsa
from test_cli import write_gguf
from test_server import Server

LIBRARIES = sorted(
    path
    for path in (ROOT / "src").rglob("*")
    if path.suffix in {".cc", ".h", ".cu", ".cuh"} and path.relative_to(ROOT / "src").parts[0] != "cli"
)
STRING = re.compile(r'"((?:[^"\\\n]|\\.)*)"')
FLAG = re.compile(r"(?<![\w-])(?:--[a-z][a-z-]*|-[a-zA-Z])(?![\w:-])")
# Of sampling, for requests and Python alone.
NO_FLAGS = {"frequency_penalty", "presence_penalty", "logit_bias"}


def strings(path):
    """What stands in quotes, comments and includes apart; what the compiler joins is joined."""
    code = re.sub(r"//[^\n]*|^\s*#include[^\n]*", "", path.read_text(), flags=re.MULTILINE)
    return STRING.findall(re.sub(r'"\s*\n\s*"', "", code))


def flags_in(text):
    """Those of a message: the options of other programs, whole arguments and commands in `…`, are not ours."""
    return [] if not re.search(r"\s", text) else FLAG.findall(re.sub(r"`(cmake|openssl) [^`]*`", "", text))


def test_flags_are_found():
    assert flags_in("--weights is {}; allowed: auto") == ["--weights"]
    assert flags_in("a larger context (-c) has more") == ["-c"]
    assert flags_in("models--org--name of -1 and --dark:{}") == []


def test_no_library_names_a_flag():
    assert len(LIBRARIES) > 100
    # Shell commands of ours, and PEM's own words.
    known = ("ulimit -c", "openssl pkey", "-----BEGIN")
    found = [
        f"{path.relative_to(ROOT)}: {text}"
        for path in LIBRARIES
        for text in strings(path)
        if flags_in(text) and not any(one in text for one in known)
    ]
    assert not found, "\n".join(found)


@pytest.fixture(scope="module")
def flags():
    """All that the program has, by its help."""
    commands = re.findall(r"^  (\w+) ", run_phsa("help").stdout.split("Subcommands:")[1], re.MULTILINE)
    commands = [[one] for one in commands] + [["models", "fetch"]]
    texts = [run_phsa("help", *one).stdout for one in commands]
    return set(FLAG.findall("\n".join(texts)))


def test_options_that_messages_name_are_flags_of_the_program(flags):
    assert {"--kv-type", "-K"} <= flags
    spelling = (ROOT / "src/cli/spelling.cc").read_text()
    own = dict(re.findall(r'\{"([\w.]+)", "(-[\w-]+)"\}', spelling))
    assert own["context"] == "-c"
    named = set()
    for path in LIBRARIES:
        for kind, name in re.findall(r'\b(Option|Setting)(?: \w+)?\{"(\w+)"', path.read_text()):
            named.add(name if kind == "Option" else f".{name}")
    named -= NO_FLAGS
    assert {"kv_type", "device", ".punctuation"} <= named
    missing = {one: own.get(one, "--" + one.lstrip(".").replace("_", "-")) for one in named}
    assert not {one: flag for one, flag in missing.items() if flag not in flags}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("messages") / "tiny.gguf", context=512)


@pytest.fixture(scope="module")
def server(tiny):
    with Server(tiny) as running:
        yield running


def asked(tiny, *given):
    done = run_phsa("run", "-m", tiny, "-p", "x", "-n", 1, *given)
    assert done.returncode == 2, done.stderr
    return done.stderr.strip()


def test_one_error_is_a_flag_a_key_and_an_argument(tiny, server):
    phsa = pytest.importorskip("phsa")
    said = "{parts} has no effect: the attention is dense; give {attention} phsa or infllm2, or leave {parts} out"
    flag = said.format(attention="--attention", parts="--parts")
    assert asked(tiny, "--attention", "dense", "--parts", 2) == f"phsa: {flag}"
    key = said.format(attention="attention", parts="parts")
    error = server.post("/v1/completions", 400, prompt="x", phsa={"attention": "dense", "parts": 2})["error"]
    assert (error["message"], error["param"]) == (key, "phsa")
    with pytest.raises(ValueError, match="^" + re.escape(key) + "$"):
        phsa.LLM(tiny, device="cpu", attention="dense", parts=2)


def test_what_is_to_be_done_is_spelt_for_whom_it_is_said(tiny):
    phsa = pytest.importorskip("phsa")
    assert asked(tiny, "-c", 1 << 20).startswith("phsa: -c is 1048576; the model's context is")
    with pytest.raises(ValueError, match=r"^context is 1048576; the model's context is"):
        phsa.LLM(tiny, device="cpu", context=1 << 20)
    with pytest.raises(ValueError, match=r'^device is "tpu"; allowed: '):
        phsa.LLM(tiny, device="tpu")
    assert asked(tiny, "--device", "tpu").startswith('phsa: --device is "tpu"; allowed: ')
    assert asked(tiny, "--temp", -1) == "phsa: --temp is -1; allowed: 0 to 100"
    with pytest.raises(ValueError, match=r"^temperature is -1; allowed: 0 to 100$"):
        phsa.LLM(tiny, device="cpu").generate("x", temperature=-1)


@pytest.mark.parametrize(("field", "value"), [("temperature", 3), ("top_p", 0.0), ("min_p", 2)])
def test_a_request_is_told_of_its_own_field(server, field, value):
    error = server.post("/v1/completions", 400, prompt="x", **{field: value})["error"]
    assert (
        error["param"] == field
        and error["message"].startswith(f"the request: {field} is ")
        and "--" not in error["message"]
    )
