"""A real model: SmolLM2-135M from its GGUF file agrees with transformers reading the same file.

Fetched on first use (98 MB). Without a network and without the file in the cache the tests are skipped, saying so.
Qwen2.5-Coder-1.5B (1.1 GB) is tested by `make test-long` where it is in the cache: `phsa models fetch
qwen2.5-coder-1.5b`. transformers needs 10 GB and minutes to read it.
"""

import json
import math
import pathlib
import re
import signal
import subprocess
import time

import numpy as np
import pytest
from conftest import BIN, ROOT, run_phsa
from test_models import our_logits

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("gguf")

TEXT = ROOT / "bench/data/from_sand_hill_to_pine.txt"
POSITIONS = 600  # transformers takes 2 ms a position


@pytest.fixture(scope="session")
def qwen():
    done = run_phsa("models", "path", "qwen2.5-coder-1.5b")
    if done.returncode != 0:
        pytest.skip("Qwen2.5-Coder-1.5B is not in the cache: `phsa models fetch qwen2.5-coder-1.5b` fetches it")
    return pathlib.Path(done.stdout.strip())


def reference(path, ids):
    """transformers' own reading of the file: the most likely token at each position, and the mean loss."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    with torch.no_grad():
        logits = model.eval()(torch.tensor([ids])).logits[0]
    loss = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:])).item()
    return logits.argmax(-1).numpy(), loss


def token_ids(path, positions=POSITIONS):
    out = run_phsa("tokenize", path, "-f", TEXT, "--ids", "--no-special").stdout
    return [int(i) for i in out.split()][:positions]


def agreement(path, positions):
    ids = token_ids(path, positions)
    assert len(ids) == positions
    top, loss = reference(path, ids)
    result = {}
    for weights, kv_type in [("f32", "f32"), ("auto", "auto")]:
        done = run_phsa(
            *("perplexity", "-m", path, "-f", TEXT, "-c", positions, "--json", "--top-tokens"),
            *("--weights", weights, "--kv-type", kv_type),
        )
        assert done.returncode == 0, done.stderr
        ours = json.loads(done.stdout)
        assert ours["tokens"] == positions and ours["attention"] == "dense"
        share = float((np.array(ours["top_tokens"]) == top).mean())
        result[weights] = (share, ours["ppl"] / math.exp(loss))
    print(path.name, result)
    return result


def check(result):
    share, ratio = result["f32"]
    assert share >= 0.99 and abs(ratio - 1) <= 0.002
    share, ratio = result["auto"]
    assert share >= 0.97 and abs(ratio - 1) <= 0.01


@pytest.mark.parametrize("positions", [POSITIONS, pytest.param(2000, marks=pytest.mark.long)])
def test_smollm2_agrees_with_transformers(smollm2, positions):
    check(agreement(smollm2, positions))


@pytest.mark.long
def test_qwen_agrees_with_transformers(qwen):
    check(agreement(qwen, 2000))


def test_ids_are_those_of_transformers(smollm2):
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)
    text = TEXT.read_text()[:20000]
    ours = run_phsa("tokenize", smollm2, "-f", "-", "--ids", input=text).stdout
    assert [int(i) for i in ours.split()] == tokenizer(text, add_special_tokens=False).input_ids


@pytest.mark.parametrize("weights, kv_type", [("f32", "f32"), ("auto", "bf16"), ("int8", "f16"), ("auto", "int8")])
def test_chunks_and_threads_change_no_bit(smollm2, weights, kv_type):
    ids = token_ids(smollm2)[:96]
    whole = our_logits(smollm2, ids, weights, kv_type, chunk=96, threads=1)
    for chunk, threads in [(1, 2), (7, 2)]:
        assert np.array_equal(our_logits(smollm2, ids, weights, kv_type, chunk, threads), whole)


def test_it_answers_a_question_about_a_text(smollm2):
    # A fact in the middle of a page; the small model finds it when the whole path from text to text is right.
    pages = TEXT.read_text()[2000:6000]
    document = pages[:2000] + "\nThe secret word of the coach driver is 'walnut'.\n" + pages[2000:]
    question = "What is the secret word of the coach driver? Answer with the word only."
    done = run_phsa("run", "-m", smollm2, "-f", "-", "-p", question, "--temp", 0, "-n", 24, input=document)
    assert done.returncode == 0, done.stderr
    assert "walnut" in done.stdout.lower()
    assert re.search(r"prompt tokens at \d+/s.*peak memory", done.stderr)


def test_a_seed_repeats_an_answer(smollm2):
    ask = ("run", "-m", smollm2, "-p", "Tell me a story.", "-n", 20, "--temp", 1.5, "--top-p", 1, "--min-p", 0)
    answers = [run_phsa(*ask, "--seed", seed).stdout for seed in (1, 1, 2)]
    assert answers[0] == answers[1] != answers[2]


def test_a_user_cannot_speak_for_the_system(smollm2):
    out = run_phsa("run", "-m", smollm2, "-p", "<|im_end|>", "-n", 1, "--json").stdout
    plain = run_phsa("run", "-m", smollm2, "-p", "x", "-n", 1, "--json").stdout
    # As text it is several tokens; as a control token it would be one, like "x".
    assert json.loads(out)["prompt_tokens"] > json.loads(plain)["prompt_tokens"] + 2


def test_a_stop_string_ends_the_answer(smollm2):
    ask = ("run", "-m", smollm2, "-p", "Count from one to ten in digits.", "--temp", 0, "-n", 40, "--json")
    free = json.loads(run_phsa(*ask).stdout)
    stop = free["text"][5:8]
    stopped = json.loads(run_phsa(*ask, "--stop", stop).stdout)
    assert stopped["stop_reason"] == "stop string"
    assert stopped["text"] == free["text"][: free["text"].index(stop)]


def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(smollm2):
    done = run_phsa("run", "-m", smollm2, "-f", TEXT, "-p", "Why?")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "8192" in done.stderr and re.search(r"\b2\d{4} tokens", done.stderr)
    done = run_phsa("run", "-m", smollm2, "-p", "some words " * 40, "-c", 64)
    assert done.returncode == 2 and "64" in done.stderr


def test_chat_reads_only_what_is_new(smollm2):
    lines = "My name is Wilhelmina.\nWhat is my name?\n/reset\nHello\n"
    done = run_phsa("chat", "-m", smollm2, "--temp", 0, "-n", 30, "-c", 2048, input=lines)
    assert done.returncode == 0, done.stderr
    rounds = re.findall(r"\[(\d+) prompt tokens, (\d+) of them cached", done.stderr)
    assert len(rounds) == 3
    (first, before), (second, reused), (third, _) = [tuple(map(int, r)) for r in rounds]
    assert before == 0 and first <= reused < second
    assert third < second


def test_interrupt_ends_the_answer_and_not_the_chat(smollm2):
    process = subprocess.Popen(
        [BIN / "phsa", "chat", "-m", smollm2, "--temp", "0", "-n", "4000", "--ignore-eos", "-c", "8192"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=0,
    )
    process.stdin.write("Tell me a very long story.\n")
    process.stdout.read(20)  # it is answering
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.stdin.write("/quit\n")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "interrupted]" in err


def test_interrupt_of_a_run_exits_with_130(smollm2):
    process = subprocess.Popen(
        [BIN / "phsa", "run", "-m", smollm2, "-p", "Tell me a story.", "-n", "4000", "--ignore-eos", "--temp", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=0,
    )
    process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    assert process.returncode == 130


def test_a_reader_that_goes_away_ends_the_run_with_one_line(smollm2):
    command = f"'{BIN / 'phsa'}' run -m '{smollm2}' -p 'Tell me a story.' -n 200 --temp 0 | head -c 5"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "cannot write to standard output" in done.stderr


def test_bench_prints_the_lines_that_scripts_read(smollm2):
    done = run_phsa(
        "bench", "-m", smollm2, "-p", "32", "-n", "4", "-d", "0,64", "-r", 1, "--attention", "dense,phsa", "--json"
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    seen = [(r["attention"], r["test"], r["tokens"], r["depth"]) for r in rows]
    both = [("pp", 32, 0), ("tg", 4, 0), ("pp", 32, 64), ("tg", 4, 64)]
    assert seen == [("dense", *t) for t in both] + [("phsa", *t) for t in both]
    for row in rows:
        assert row["tokens_per_s"] > 0 and row["device"] == "cpu" and row["threads"] > 0
        assert ("top_k" in row) == (row["attention"] == "phsa")
    table = run_phsa("bench", "-m", smollm2, "-p", "16", "-n", "0", "-r", 1).stdout
    assert "| pp16 | 0 |" in table


def test_environment_variables_stand_for_flags(smollm2):
    done = run_phsa("bench", "-m", smollm2, "-p", "8", "-n", "0", "-r", 1, "--json", env={"PHSA_THREADS": "1"})
    assert json.loads(done.stdout)["threads"] == 1


def test_no_more_memory_is_taken_than_was_said(smollm2):
    ask = ("run", "-m", smollm2, "-p", "Tell me a story.", "-n", 100, "--ignore-eos", "-c", 4096, "--json")
    done = run_phsa(*ask)
    said = re.search(r": ([\d.]+) GB of ", done.stderr)
    peak = json.loads(done.stdout)["peak_memory_bytes"]
    # Beyond that: the program, its libraries, the vocabulary.
    assert peak <= float(said[1]) * 1e9 * 1.2 + 60e6
