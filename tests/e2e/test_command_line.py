"""The command line itself: help, misspellings, where questions come from, what is printed where, completion."""

import json
import os
import pty
import signal
import subprocess
import threading
import time

import pytest
from conftest import BIN, run_phsa
from test_cli import refused, tiny, write_gguf

__all__ = ["tiny"]  # a fixture
GREEDY = ("--temp", 0, "--ignore-eos")
FLAGS = ("-n", 5, *GREEDY)


def test_help_and_version_are_commands_and_flags():
    assert run_phsa("help").stdout == run_phsa("--help").stdout
    assert run_phsa("help", "run").stdout == run_phsa("run", "--help").stdout
    assert "phsa models fetch" in run_phsa("help", "models", "fetch").stdout
    versions = {run_phsa(*words).stdout for words in (["version"], ["-v"], ["--version"])}
    assert len(versions) == 1 and versions.pop().startswith("phsa ")
    refused(run_phsa("help", "rnu"), "rnu", "did you mean run?")


def test_a_misspelt_command_or_flag_gets_the_nearest_spelling(tiny):
    refused(run_phsa("rnu", "-m", tiny), 'no command "rnu" (did you mean run?)', "phsa help")
    refused(run_phsa("models", "fetsh", "x"), "models: ", "did you mean fetch?")
    refused(run_phsa("run", "--modle", tiny, "-p", "x"), 'run: there is no flag "--modle" (did you mean --model?)')
    refused(run_phsa("run", "-m", tiny, "-p", "x", "--tmep=0"), '"--tmep" (did you mean --temp?)')
    refused(run_phsa("run", "-m", tiny, "-p", "x", "--something-else"), "--something-else", "phsa help run")
    refused(run_phsa("info", tiny, "again"), '"again" is one argument too many')
    refused(run_phsa("run", "-p", "x"), "run: --model is required")
    refused(run_phsa(), "there is no command", "run, chat")
    refused(run_phsa("run", "-m", tiny, "-p", "x", "--attention", "pshsa"), "did you mean phsa?")


def test_errors_list_only_what_the_engine_runs(tiny):
    for name in ("fast", "sepllm"):
        done = run_phsa("run", "-m", tiny, "-p", "x", "--attention", name)
        refused(done, name, "allowed: auto, dense, phsa, ")
        assert "sepllm" not in done.stderr.split("allowed")[1]


def test_help_says_the_defaults():
    text = " ".join(run_phsa("run", "--help").stdout.split())
    for part in ("--ctx-size INT=0", "--device TEXT=auto", "--predict INT", "=512", "=auto", "(the model's, else 0.8)"):
        assert part in text, part
    wanted = (
        "0 to 1 (0.9)",
        "always read; multiples of the block (128; 16 up to 4k of context)",
        "tokens of a block; 16, 32, 64 (16)",
    )
    for part in wanted:
        assert part in text, part
    assert "[]" not in text and "TEXT=512" in " ".join(run_phsa("bench", "--help").stdout.split())


def test_a_text_may_come_through_a_pipe_of_the_shell(tiny):
    want = run_phsa("run", "-m", tiny, "-f", "-", "-p", "why", *FLAGS, input="some text")
    command = f"{BIN}/phsa run -m {tiny} -f <(printf 'some text') -p why -n 5 --temp 0 --ignore-eos"
    got = subprocess.run(["bash", "-c", command], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert want.returncode == 0 and got.stdout == want.stdout, got.stderr


def test_a_question_may_come_from_standard_input(tiny, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("some text")
    want = run_phsa("run", "-m", tiny, "-f", text, "-p", "why", *FLAGS)
    assert want.returncode == 0
    for flags in (["-f", text], ["-f", text, "-p", "-"]):
        assert run_phsa("run", "-m", tiny, *flags, *FLAGS, input="why\n").stdout == want.stdout
    alone = run_phsa("run", "-m", tiny, "-p", "why", *FLAGS).stdout
    assert run_phsa("run", "-m", tiny, *FLAGS, input="why\n").stdout == alone
    # A loop over a list keeps its list, and a text to go on from needs no question.
    plain = run_phsa("run", "-m", tiny, "-f", text, *FLAGS).stdout
    with open(text) as file:
        command = [BIN / "phsa", "run", "-m", tiny, "-f", text, *map(str, FLAGS)]
        assert subprocess.run(command, stdin=file, capture_output=True, text=True).stdout == plain
    raw = run_phsa("run", "-m", tiny, "-f", text, "--raw", *FLAGS, input="why").stdout
    assert raw == run_phsa("run", "-m", tiny, "-f", text, "--raw", *FLAGS).stdout
    refused(run_phsa("run", "-m", tiny, "-f", "-", "-p", "-", input="x"), "-f -", "-p -")


def test_without_a_number_of_tokens_the_answer_ends_with_the_context(tiny):
    done = run_phsa("run", "-m", tiny, "-p", "x", "-n", -1, "--temp", 0, "--ignore-eos", "--json")
    answer = json.loads(done.stdout)
    assert answer["stop_reason"] == "context full" and answer["prompt_tokens"] + answer["tokens"] == 257
    assert json.loads(run_phsa("run", "-m", tiny, "-p", "x", "-n-1", "-c", 64, *GREEDY, "--json").stdout)["tokens"] < 64
    assert run_phsa("run", "-m", tiny, "-p", "x", "-n", -2).returncode == 2


def test_quiet_prints_nothing_but_the_answer_and_errors(tiny):
    want = run_phsa("run", "-m", tiny, "-p", "x", "-t", 999, *FLAGS)
    for flags, env in ((["--quiet"], {}), (["-q"], {}), ([], {"PHSA_QUIET": "1"})):
        done = run_phsa("run", "-m", tiny, "-p", "x", *FLAGS, *flags, env=env)
        assert (done.stdout, done.stderr) == (want.stdout, "")
    chat = run_phsa("chat", "-m", tiny, "-n", 3, "-q", input="hello\n/file /absent\n")
    assert chat.stderr.count("\n") == 1 and chat.stderr.startswith("phsa: ")
    assert run_phsa("models", "--quiet").returncode == 0


def test_far_more_threads_than_cores_are_warned_of(tiny):
    done = run_phsa("run", "-m", tiny, "-p", "x", "-t", 999, *FLAGS)
    assert done.returncode == 0 and f"the {os.cpu_count()} cores" in done.stderr
    assert "cores" not in run_phsa("run", "-m", tiny, "-p", "x", "-t", 1, *FLAGS).stderr


def on_a_terminal(*args, **variables):
    """What `phsa ARGS` writes to a terminal as standard error."""
    ours, theirs = pty.openpty()
    env = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    process = subprocess.Popen(
        [BIN / "phsa", *map(str, args)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=theirs,
        env={**env, "TERM": "xterm", **variables},
    )
    os.close(theirs)
    out = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # how a terminal ends
            break
        if not part:
            break
        out += part
    os.close(ours)
    process.wait()
    return out.decode()


def test_colours_are_for_terminals_and_heed_no_color():
    red = "\x1b[1;31mphsa:\x1b[0m"
    wrong = ("info", "/absent")
    assert red in on_a_terminal(*wrong)
    assert "\x1b" not in on_a_terminal(*wrong, NO_COLOR="1")
    assert "\x1b" not in on_a_terminal(*wrong, TERM="dumb")
    assert "\x1b" not in on_a_terminal(*wrong, "--color", "never")
    assert red in on_a_terminal(*wrong, "--color", "always", NO_COLOR="1")
    assert "\x1b" not in run_phsa(*wrong).stderr
    assert red in run_phsa(*wrong, "--color", "always").stderr
    refused(run_phsa(*wrong, "--color", "green"), "auto,always,never")


def test_an_interrupted_prefill_says_what_it_did(tmp_path):
    model = write_gguf(tmp_path / "long.gguf", context=1 << 20)
    text = tmp_path / "text.txt"
    text.write_text("abc " * 200_000)
    command = [BIN / "phsa", "run", "-m", model, "-f", text, "--raw", "--chunk", "64", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    lines = []
    reader = threading.Thread(target=lambda: lines.extend(process.stderr))
    reader.start()
    while not any(line.startswith("memory: ") for line in lines):  # loading comes next, and takes no time
        assert process.poll() is None, lines
        time.sleep(0.01)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    out = process.stdout.read()
    reader.join()
    assert process.wait() == 130
    answer = json.loads(out)
    assert answer["stop_reason"] == "interrupted" and answer["time_to_first_token_s"] is None
    assert 0 < answer["prefilled_tokens"] < answer["prompt_tokens"]
    assert answer["prefill_tokens_per_s"] > 0 and answer["read_share"] > 0


def test_an_answer_that_only_repeats_itself_ends(tmp_path):
    # Greedy answers of a small random model fall into a loop soon.
    model = write_gguf(tmp_path / "loop.gguf", context=4096)
    flags = ("-m", model, "-p", "x", "-n", 2000, "--temp", 0, "--json")
    ended = run_phsa("run", *flags)
    answer = json.loads(ended.stdout)
    assert answer["stop_reason"] == "repeats itself" and 160 <= answer["tokens"] < 2000
    assert "--allow-loops" in ended.stderr
    for flag in ("--allow-loops", "--ignore-eos"):
        whole = json.loads(run_phsa("run", *flags, flag).stdout)
        assert whole["tokens"] == 2000 and whole["text"].startswith(answer["text"])


def test_info_shows_settings_as_a_person_reads_them(tmp_path):
    settings = {
        "attention": "phsa",
        "top_k": 4,
        "lambda": 0.75,
        "layers": {"2-4": {"top_k": 8}, "6": {"attention": "dense"}},
    }
    done = run_phsa("info", write_gguf(tmp_path / "tiny.gguf", phsa_settings=settings))
    lines = [line[15:] for line in done.stdout.splitlines()]
    assert any(
        line.startswith("phsa, blocks of 16, K 4, init 128, local 512, lambda 0.75, punctuation") for line in lines
    )
    assert "layers 2-4: K 8" in lines and "layer 6: dense" in lines
    assert '"tiny"' in lines  # general.name


# --- completion and the manual page ---


def complete(script, *words):
    """What bash offers for the last of the words."""
    quoted = " ".join(f"'{word}'" for word in words)
    lines = ["source " + str(script), f"COMP_WORDS=({quoted})", f"COMP_CWORD={len(words) - 1}", "_phsa"]
    lines.append("printf '%s\\n' \"${COMPREPLY[@]}\"")
    done = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


def test_bash_completes_commands_flags_and_values(tmp_path):
    script = tmp_path / "phsa.bash"
    script.write_text(run_phsa("completion", "bash").stdout)
    assert complete(script, "phsa", "ru") == ["run"]
    assert {"run", "serve", "help", "version"} <= set(complete(script, "phsa", ""))
    assert "completion" not in complete(script, "phsa", "")
    assert complete(script, "phsa", "run", "--attention-t") == ["--attention-top-k"]
    assert complete(script, "phsa", "run", "-p", "x", "--weights", "") == ["auto", "f32", "bf16", "int8"]
    assert "smollm2-135m" in complete(script, "phsa", "run", "-m", "smol")
    assert complete(script, "phsa", "models", "fe") == ["fetch"]
    assert complete(script, "phsa", "run", "-f", "") == []  # then bash completes files
    assert "-o default" in script.read_text()


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_are_offered_every_command_and_flag(shell, tmp_path):
    text = run_phsa("completion", shell).stdout
    for command in ("run", "chat", "serve", "models"):
        assert command in text
    assert ("--attention-top-k[" if shell == "zsh" else "-l attention-top-k") in text
    assert "completion for phsa" in text and ("#compdef phsa" in text) == (shell == "zsh")
    script = tmp_path / "script"
    script.write_text(text)
    try:
        done = subprocess.run([shell, "-n", script], capture_output=True, text=True)
    except FileNotFoundError:
        return  # no such shell here
    assert (done.returncode, done.stderr) == (0, "")
    refused(run_phsa("completion", "tcsh"), "bash,zsh,fish")


def test_the_manual_page_has_every_command_and_flag(tmp_path):
    page = run_phsa("man").stdout
    assert page.startswith(".TH PHSA 1")
    for part in (".SH NAME", ".SH SYNOPSIS", ".SS phsa run", ".SS phsa models fetch", ".SH EXIT STATUS"):
        assert part in page.splitlines() or part in page, part
    flags = [line for line in page.splitlines() if line.startswith("\\fB\\-")]
    assert "\\fB\\-m\\fR, \\fB\\-\\-model\\fR \\fITEXT\\fR" in flags
    assert "\\-\\-attention\\-top\\-k" in page and "completion" not in page
    requests = {line.split()[0] for line in page.splitlines() if line.startswith((".", "'"))}
    assert requests <= {".TH", ".SH", ".SS", ".TP", ".B", ".I", ".RI"}
    file = tmp_path / "phsa.1"
    file.write_text(page)
    try:
        done = subprocess.run(
            ["man", "--warnings", "-l", file],
            capture_output=True,
            text=True,
            env={**os.environ, "LC_ALL": "C.UTF-8", "MANPAGER": "cat"},
        )
    except FileNotFoundError:
        return  # no man here
    if "minimized" not in done.stdout:
        assert (done.returncode, done.stderr) == (0, "")
        assert "phsa run" in done.stdout
