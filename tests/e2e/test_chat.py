"""`phsa chat`: its commands, as scripts give them, and its line editor, in a terminal."""

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import threading
import time

import pytest
from conftest import BIN, run_phsa
from test_cli import write_gguf

pytest.importorskip("gguf")
GREEDY = ("-n", 4, "--temp", 0, "--ignore-eos", "-t", 1)
CONTEXT = 32768
UP, LEFT, HOME, BACKSPACE, DELETE = "\x1b[A", "\x1b[D", "\x1b[H", "\x7f", "\x1b[3~"
ALT_ENTER, CTRL_C, CTRL_D, TAB = "\x1b\r", "\x03", "\x04", "\t"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", context=CONTEXT)


def talk(model, *lines, flags=GREEDY):
    done = run_phsa("chat", "-m", model, *flags, input="".join(line + "\n" for line in lines))
    assert done.returncode == 0, done.stderr
    return done


def prompt_tokens(done):
    return [int(count) for count in re.findall(r"\[(\d+) prompt tokens", done.stderr)]


def errors(done):
    return [line for line in done.stderr.splitlines() if line.startswith("phsa: ")]


def said(path, role="user"):
    return [one["content"] for one in json.loads(path.read_text())["messages"] if one["role"] == role]


def test_an_unknown_command_is_refused_and_the_chat_goes_on(tiny):
    done = talk(
        tiny, "/fiel x", "/rest", "/etc/passwd is what?", "/help me", " /fiel is a word", "/quit", "never asked"
    )
    wrong = errors(done)
    for word, line in zip(("/file?", "/reset?", "/help lists", "takes nothing"), wrong, strict=True):
        assert word in line, line
    assert len(prompt_tokens(done)) == 1, "a blank before it makes it a question"


def test_a_conversation_is_saved_and_loaded(tiny, tmp_path):
    path = tmp_path / "talk.json"
    first = talk(tiny, "/system Be brief.", "one", "two", f"/save {path}", f'/save "{path}"', "three")
    assert said(path, "system") == ["Be brief."] and said(path) == ["one", "two"] and len(said(path, "assistant")) == 2
    second = talk(tiny, "/system Something else.", f"/load {path}", "three")
    assert prompt_tokens(second) == prompt_tokens(first)[2:]
    assert second.stdout == first.stdout.splitlines(keepends=True)[-1] or first.stdout.endswith(second.stdout)
    # What is no conversation is neither overwritten nor taken.
    mine = tmp_path / "mine.json"
    for text, word in (
        ("{}", "messages"),
        ("no json", "JSON"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "here it is user"),
        ('{"messages": [{"role": "user", "content": 3}]}', "content"),
        ('{"messages": ["x"]}', "an object"),
    ):
        mine.write_text(text)
        done = talk(tiny, "one", f"/save {mine}", f"/load {mine}", f"/load {tmp_path}/absent", "two")
        assert mine.read_text() == text
        (refused, wrong, absent) = errors(done)
        assert "another name" in refused and word in wrong and "absent" in absent
        assert len(prompt_tokens(done)) == 2 and prompt_tokens(done)[1] > prompt_tokens(done)[0]
    assert "no conversation" in errors(talk(tiny, f"/save {tmp_path}/new.json"))[0]


def test_retry_asks_the_last_question_again_and_no_more(tiny, tmp_path):
    path = tmp_path / "talk.json"
    done = talk(tiny, "/retry", "one", "two", "/retry", "/retry", f"/save {path}")
    assert "no question" in errors(done)[0]
    first, second, *again = prompt_tokens(done)
    assert first < second and again == [second, second]
    assert said(path) == ["one", "two"]
    # A question that was never answered, from a file.
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "one"}]}))
    assert prompt_tokens(talk(tiny, f"/load {path}", "/retry")) == [first]
    # Without a seed another answer may come.
    hot = talk(tiny, "one", *["/retry"] * 9, flags=("-n", 8, "--temp", 2, "--top-k", 0, "--top-p", 1, "--min-p", 0))
    assert len(set(hot.stdout.splitlines())) > 1


def test_flags_of_the_sampling_change_as_one_goes(tiny):
    want = talk(tiny, "one", flags=("-n", 6, "--temp", 0, "--ignore-eos")).stdout
    done = talk(tiny, "/set n 6", "/set temp=0", "/set ignore-eos", "/set", "one", flags=())
    assert done.stdout == want and "temp 0, " in done.stderr and "predict 6" in done.stderr
    done = talk(tiny, "/set tmep 1", "/set temp", "/set temp hot", "/set temp -1", "/set n 0", "/set K 3", "one")
    wrong = errors(done)
    for word, line in zip(
        ("did you mean temp?", "needs a value", "hot", "temp", "", "nothing to set"), wrong, strict=True
    ):
        assert word in line, line
    assert len(prompt_tokens(done)) == 1
    assert done.stdout == talk(tiny, "one").stdout, "what was refused has changed nothing"


def test_the_system_message_can_be_seen_changed_and_taken_away(tiny):
    lines = ("/system", "one", "/reset", "/system Be brief.", "one", "/system", "/reset", "one", "/system -", "/reset")
    done = talk(tiny, *lines, "one")
    plain, brief, again, without = prompt_tokens(done)
    assert plain == without < brief == again
    assert "there is no system message" in done.stderr and "Be brief." in done.stderr


def test_a_file_that_does_not_fit_is_taken_back_by_itself(tiny, tmp_path):
    long, short, page = tmp_path / "long.txt", tmp_path / "short text.txt", tmp_path / "page.html"
    long.write_text("word " * CONTEXT)
    short.write_text("Bees and wasps.")
    page.write_text("<html><script>no()</script><p>A hive of <b>bees</b></p></html>")
    plain = prompt_tokens(talk(tiny, "one"))
    path = tmp_path / "talk.json"
    lines = (
        f"/file {long}",
        "one",
        "/file /absent",
        "/file",
        f'/file "{short}"',
        f"/file {page}",
        "two",
        f"/save {path}",
    )
    done = talk(tiny, *lines)
    too_long, absent, nothing = errors(done)
    assert str(CONTEXT) in too_long and re.search(r"\b163\d{3} tokens", too_long)
    assert "absent" in absent and "path" in nothing
    assert prompt_tokens(done)[:1] == plain
    assert said(path) == ["one", f"File: {short}\n\nBees and wasps.\n\nFile: {page}\n\nA hive of bees\n\ntwo"]
    # It fits, and the question does not: the file goes back, the chat does not end.
    nearly = tmp_path / "nearly.txt"
    nearly.write_text("x" * (CONTEXT - 200))
    done = talk(tiny, f"/file {nearly}", "y" * 300, "one")
    assert "taken back" in errors(done)[0] and prompt_tokens(done) == plain
    # The one that the chat is to begin with is refused before the weights are loaded.
    done = run_phsa("chat", "-m", tiny, "-f", long, input="one\n")
    assert done.returncode == 2 and done.stdout == "" and str(CONTEXT) in done.stderr


class Terminal:
    """`phsa chat` in a terminal of 80 columns."""

    def __init__(self, *args, **variables):
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.ours, self.theirs, self.out = ours, theirs, b""
        self.before = termios.tcgetattr(theirs)
        self.process = subprocess.Popen(
            [BIN / "phsa", "chat", *map(str, args)],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm", "NO_COLOR": "1", "LC_ALL": "C", **variables},
            preexec_fn=self.take_terminal,
        )
        self.collector = threading.Thread(target=self.collect, daemon=True)
        self.collector.start()
        self.prompted = 0
        self.prompt()

    @staticmethod
    def take_terminal():
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    def collect(self):
        while True:
            try:
                part = os.read(self.ours, 65536)
            except OSError:
                return
            if not part:
                return
            self.out += part

    def until(self, condition, what):
        end = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < end, (what, self.text()[-2000:])
            time.sleep(0.01)

    def text(self):
        return self.out.decode(errors="replace")

    def prompt(self):
        """Until it waits for a line again: the terminal is then told to mark what is pasted."""
        self.prompted += 1
        self.until(lambda: self.out.count(b"\x1b[?2004h") >= self.prompted, "no prompt")

    def send(self, *keys):
        for key in keys:
            os.write(self.ours, key.encode())

    def line(self, *keys):
        self.send(*keys, "\r")
        self.prompt()

    def paste(self, text):
        self.send("\x1b[200~", text.replace("\n", "\r"), "\x1b[201~")

    def end(self, *keys):
        self.send(*keys)
        code = self.process.wait(60)
        assert termios.tcgetattr(self.theirs) == self.before, "the terminal is as it was"
        os.close(self.theirs)
        self.collector.join()  # or it would read from whoever gets this number next
        os.close(self.ours)
        return code


@pytest.fixture
def terminal(tiny, tmp_path):
    opened = []

    def start(*args, flags=GREEDY):
        history = () if "--history" in args else ("--history", tmp_path / "state/history")
        opened.append(Terminal("-m", tiny, *flags, *history, *args))
        return opened[-1]

    yield start
    for one in opened:
        if one.process.poll() is None:
            one.process.kill()


def test_a_line_is_edited_with_wide_characters_too(terminal, tmp_path):
    path = tmp_path / "talk.json"
    chat = terminal()
    chat.line("helo", LEFT, "l")
    chat.line("漢字字", BACKSPACE, "é😀", LEFT, LEFT, DELETE)
    chat.line("two words", HOME, "the ", "\x1b[1;5C", "!")
    chat.line(f"/save {path}")
    assert said(path) == ["hello", "漢字😀", "the two! words"]
    assert chat.end(CTRL_D) == 0


def test_the_history_is_found_again_and_kept(terminal, tmp_path):
    first = terminal()
    first.line("the first question")
    first.line("the second\\\rone")
    first.line("/set n 3")
    assert first.end("/quit\r") == 0
    kept = tmp_path / "state/history"
    assert [json.loads(line) for line in kept.read_text().splitlines()] == [
        "the first question",
        "the second\none",
        "/set n 3",
        "/quit",
    ]
    assert kept.stat().st_mode & 0o777 == 0o600
    path = tmp_path / "talk.json"
    with kept.open("a") as file:
        file.write("no json\n")
    second = terminal()
    second.line(UP, UP, UP, " again")
    second.line("\x12first")  # Ctrl-R
    second.line(f"/save {path}")
    assert said(path)[0] == "the second\none again" and "the first question" in said(path)
    assert second.end(CTRL_D) == 0
    none = terminal("--history", "none")
    none.line("not kept")
    none.end(CTRL_D)
    assert "not kept" not in kept.read_text()


def test_text_of_several_lines_is_typed_and_pasted(terminal, tmp_path):
    path = tmp_path / "talk.json"
    chat = terminal()
    chat.line("one", ALT_ENTER, "two\\", "\r", "three", UP, UP, "!")
    chat.send("pasted: ")
    chat.paste("a line\nand /another\n")
    chat.line("end")
    long = "".join(f"Line {i} of many: 漢字, \x1b[31m\ttab.\n" for i in range(300))
    chat.send("About this: ")
    chat.paste(long)
    chat.line(" What is it?")
    chat.line(f"/save {path}")
    shown = long.replace("\x1b", "")
    assert said(path) == [
        "one!\ntwo\nthree",
        "pasted: a line\nand /another\nend",
        f"About this: {shown} What is it?",
    ]
    assert "[paste 1: 301 lines" in chat.text()
    assert chat.text().count("Line 7 of many") == 0, "it does not fill the screen"
    assert chat.end(CTRL_D) == 0
    assert "many" not in (tmp_path / "state/history").read_text()


def test_interrupts_end_an_answer_and_pressed_twice_the_chat(terminal, tmp_path):
    chat = terminal(flags=("-n", -1, "--ignore-eos", "--temp", 0, "-t", 1))
    chat.send("never sent", CTRL_C)
    chat.prompt()
    assert "once more" in chat.text()
    chat.send("a story\r")
    chat.until(lambda: b"a story" in chat.out, "the question")
    time.sleep(0.5)
    assert b"interrupted]" not in chat.out
    chat.send(CTRL_C)
    chat.prompt()
    assert "interrupted]" in chat.text()
    chat.line("/set n 2")
    chat.line("go on")
    path = tmp_path / "talk.json"
    chat.line(f"/save {path}")
    assert said(path) == ["a story", "go on"] and said(path, "assistant")[0]
    chat.send(CTRL_C)
    chat.prompt()
    chat.line("")
    chat.send(CTRL_C)  # the first one again: something was typed in between
    chat.prompt()
    assert chat.process.poll() is None
    assert chat.end(CTRL_C) == 130


def test_a_signal_ends_it_and_leaves_the_terminal_as_it_was(terminal):
    chat = terminal()
    chat.process.send_signal(signal.SIGTERM)
    assert chat.end() == 130


def test_the_tabulator_completes_commands_and_paths(terminal, tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "hive one.txt").write_text("Bees.")
    (folder / "hive two.txt").write_text("Wasps.")
    chat = terminal()
    chat.send(f"/fi{TAB}{folder}/h{TAB}{TAB}")
    chat.until(lambda: b"hive two.txt" in chat.out and b"hive one.txt" in chat.out, "the list")
    chat.line(f"o{TAB}")
    assert "the document goes with your next question" in chat.text()
    assert chat.end(CTRL_D) == 0


def test_a_terminal_that_can_only_print_is_talked_to_line_by_line(tiny, tmp_path):
    chat = Terminal.__new__(Terminal)
    chat.prompt = lambda: None
    Terminal.__init__(chat, "-m", tiny, *GREEDY, "--history", "none", TERM="dumb")
    chat.until(lambda: chat.out.endswith(b"> "), "the prompt")
    assert b"\x1b[?2004h" not in chat.out
    chat.send("one\r")
    chat.until(lambda: b"prompt tokens" in chat.out and chat.out.endswith(b"> "), "the answer")
    chat.send(CTRL_C)
    chat.until(lambda: b"once more" in chat.out, "the warning")
    assert chat.end(CTRL_C) == 130
