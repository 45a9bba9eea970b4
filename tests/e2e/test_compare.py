"""`phsa compare`: the report of all parts, what it agrees with, what is refused, and what an interruption leaves."""

import html.parser
import json
import os
import pty
import re
import signal
import subprocess
import threading
import time
import xml.etree.ElementTree

import pytest
from conftest import BIN, ROOT, run_phsa
from test_cli import refused, write_gguf

TEXT = ROOT / "bench/data/from_sand_hill_to_pine.txt"
# Budgets for a text of some hundred tokens: something is left out.
BUDGET = ("--init", 16, "--local", 32)
POLICIES = ("--attention", "dense,infllm2,phsa", "-K", "2,4", *BUDGET)
LABELS = ["dense", "InfLLM v2 K=2", "InfLLM v2 K=4", "PHSA K=2", "PHSA K=4"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", context=2048)


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "document.txt"
    path.write_text(TEXT.read_text()[2000:3000])
    return path


VOID = {"meta", "path", "rect", "circle", "line"}  # elements that have no end of their own


class Page(html.parser.HTMLParser):
    """Notes the elements of a page, and whether they are closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag, (tag, self.getpos())


def check_page(path):
    """A whole page that asks for nothing from elsewhere; its plots are XML."""
    text = path.read_text()
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object", "embed"} & set(page.tags)
    assert not {"src", "href", "srcset", "action", "data"} & {name for name, _ in page.attributes}
    assert not any(name.startswith("on") for name, _ in page.attributes)
    assert "url(" not in text and "@import" not in text
    assert set(re.findall(r"https?://[^\"' <]*", text)) <= {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in text
    plots = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    for plot in plots:
        xml.etree.ElementTree.fromstring(plot)
    return text, plots


def read_all(descriptor):
    """So that a process which writes to a terminal is never kept waiting."""
    try:
        while os.read(descriptor, 4096):
            pass
    except OSError:  # what Linux says where the other side is closed
        pass


def report(folder):
    return json.loads((folder / "report.json").read_text())


def test_all_parts_of_a_tiny_model(tiny, document, tmp_path):
    out = tmp_path / "deep" / "er"
    questions = ("-p", "Who <b>is</b> it?", "--expect", "nobody", "-p", "Where | when?")
    sizes = ("--lengths", "128,512", "--depths", "0,256", "-n", 3, "-r", 2, "--samples", 2, "--niah-lengths", "1k")
    more = ("--text-tokens", 700, "--flops-lengths", "4k,128k,1024k", "--answer-tokens", 4)
    done = run_phsa("compare", "-m", tiny, "-f", document, "--out", out, *questions, *sizes, *more, *POLICIES)
    assert done.returncode == 0, done.stderr
    assert sorted(file.name for file in out.iterdir()) == ["report.html", "report.json", "report.md"]
    found = report(out)
    assert [policy["label"] for policy in found["policies"]] == LABELS
    assert found["about"]["model"] == "tiny" and not found["about"]["interrupted"]
    # What the environment says stands before it, as `make test` does with PHSA_DEVICE.
    said = f"PHSA_DEVICE={os.environ['PHSA_DEVICE']} " if "PHSA_DEVICE" in os.environ else ""
    assert found["about"]["command"].startswith(f"{said}phsa compare -m {tiny} -f {document}")
    assert "'Who <b>is</b> it?'" in found["about"]["command"]

    answers = found["answers"]
    assert [a["policy"] for a in answers] == [label for label in LABELS for _ in range(2)]
    assert all(a["right"] is False for a in answers[::2]) and all(a["right"] is None for a in answers[1::2])
    assert answers[0]["reused_tokens"] == 0 and answers[1]["reused_tokens"] > 900, "the text is read once"

    speed = found["speed"]
    points = [("pp", 128, 0), ("pp", 512, 0), ("tg", 3, 0), ("tg", 3, 256)]
    assert [(s["policy"], s["test"], s["tokens"], s["depth"]) for s in speed] == [
        (label, *point) for label in LABELS for point in points
    ]
    for row in speed:
        assert row["tokens_per_s"] >= row["tokens_per_s_mean"] > 0 and len(row["seconds"]) == row["repeats"] == 2
        dense = next(
            s
            for s in speed
            if s["policy"] == "dense"
            and s["test"] == row["test"]
            and s["tokens"] == row["tokens"]
            and s["depth"] == row["depth"]
        )
        assert row["times_dense"] == pytest.approx(row["tokens_per_s"] / dense["tokens_per_s"])
        assert row["read_share"] <= dense["read_share"] == 1

    assert [(n["policy"], n["length"], n["samples"]) for n in found["niah"]] == [(label, 1024, 2) for label in LABELS]
    flops = {(f["policy"], f["length"]): f for f in found["flops"]}
    assert len(flops) == 15
    for length in (4096, 131072, 1048576):
        assert flops["dense", length]["total"] == 4 * 64 * length * (length + 1) / 2
        assert flops["PHSA K=4", length]["total"] < flops["dense", length]["total"]
        assert flops["PHSA K=4", length]["representative_flops"] == 2 * 64 * length

    page, plots = check_page(out / "report.html")
    assert len(plots) == 5
    markdown = (out / "report.md").read_text()
    for label in LABELS:
        assert label in page and label in markdown and label in done.stdout
    assert "Who &lt;b&gt;is&lt;/b&gt; it?" in page
    for text in (page, done.stdout):
        assert "never trained" in text
    assert "1M" in page


def test_numbers_are_those_of_the_other_commands(tiny, document, tmp_path):
    done = run_phsa(
        *("compare", "-m", tiny, "-f", document, "--out", tmp_path, "--sections", "perplexity,recall,niah"),
        *("--text-tokens", 600, "--niah-lengths", "1k", "--samples", 3, *POLICIES, "--json"),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found == report(tmp_path) and not {"speed", "flops", "answers"} & found.keys()
    ask = ("perplexity", "-m", tiny, "-f", document, "-c", 600, *POLICIES, "--recall", "--json")
    expected = [json.loads(line) for line in run_phsa(*ask).stdout.splitlines()]
    for ours, theirs in zip(found["text"]["policies"], expected, strict=True):
        for key in ("ppl", "loss", "read_share", "sparsity", "tokens", "attention"):
            assert ours[key] == theirs[key], key
        if ours["policy"] == "dense":
            assert "recall" not in ours and "loss_difference" not in ours
            continue
        assert ours["top_k"] == theirs["top_k"]
        for key in ("recall", "recall_sparse", "recall_sparse_by_layer"):
            assert ours[key] == theirs[key], key
        low, high = ours["loss_difference_ci95"]
        assert low <= ours["loss_difference"] <= high
        assert ours["loss_difference"] == pytest.approx(theirs["loss"] - expected[0]["loss"])
    ask = ("niah", "-m", tiny, "--lengths", "1k", "--samples", 3, *POLICIES, "--json")
    needles = [json.loads(line) for line in run_phsa(*ask).stdout.splitlines()]
    assert [{k: v for k, v in row.items() if k != "policy"} for row in found["niah"]] == needles


def test_speed_is_told_as_bench_tells_it(tiny, tmp_path):
    flags = ("-n", 4, "-r", 1, "--attention", "dense,phsa", "-K", 2, *BUDGET)
    done = run_phsa(
        "compare", "-m", tiny, "--sections", "speed", "--lengths", 700, "--depths", 300, "--out", tmp_path, *flags
    )
    assert done.returncode == 0, done.stderr
    ours = report(tmp_path)["speed"]
    bench = run_phsa("bench", "-m", tiny, "-p", 700, "-d", "0,300", *flags, "--json").stdout.splitlines()
    theirs = {(r["attention"], r["test"], r["tokens"], r["depth"]): r for r in map(json.loads, bench)}
    assert len(ours) == 4
    for row in ours:
        other = theirs[row["attention"], row["test"], row["tokens"], row["depth"]]
        assert row["read_share"] == other["read_share"]
        assert row["repeats"] == other["repeats"] == 1 and other["tokens_per_s"] > 0


def test_policies_that_are_the_same_count_once(tiny, tmp_path):
    flags = ("--sections", "flops", "--flops-lengths", "4k", "--attention", "auto,dense,phsa,phsa", "-K", "2,2")
    done = run_phsa("compare", "-m", tiny, "--out", tmp_path, *flags)
    assert done.returncode == 0, done.stderr
    assert [(p["label"], p["same"]) for p in report(tmp_path)["policies"]] == [
        ("auto (dense)", ["dense"]),
        ("PHSA K=2", []),
    ]
    assert "dense is the same as auto (dense) here" in done.stderr


def test_all_parts_of_a_row_have_one_configuration(document, tmp_path):
    """The speed part reads more than the 4096 tokens at which the preset changes; the others read less."""
    model = write_gguf(tmp_path / "long.gguf", context=8192)
    flags = ("--attention", "dense,phsa", "-K", 4)
    sizes = ("--lengths", 4200, "--depths", 0, "-n", 1, "-r", 1, "--text-tokens", 900, "--flops-lengths", "4k")
    parts = ("--sections", "speed,perplexity,niah,flops", "--niah-lengths", "1k", "--samples", 1)
    done = run_phsa("compare", "-m", model, "-f", document, "--out", tmp_path / "out", *parts, *sizes, *flags)
    assert done.returncode == 0, done.stderr
    found = report(tmp_path / "out")
    settings = found["policies"][1]["settings"]
    assert (settings["init"], settings["local"]) == (128, 512)
    assert "init 128, local 512, K 4, λ 0.9" in done.stdout
    assert found["niah"][1]["settings"] == settings
    ask = ("perplexity", "-m", model, "-f", document, "-c", 900, "--json", *flags, "--init", 128, "--local", 512)
    expected = [json.loads(line) for line in run_phsa(*ask).stdout.splitlines()]
    assert [row["read_share"] for row in found["text"]["policies"]] == [row["read_share"] for row in expected]


def test_sizes_follow_the_model(tmp_path):
    small = write_gguf(tmp_path / "small.gguf", context=300)
    done = run_phsa("compare", "-m", small, "--quick", "--sections", "speed,perplexity", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    found = report(tmp_path / "out")
    assert {(r["tokens"], r["depth"]) for r in found["speed"]} == {(300, 0), (32, 0), (32, 268)}
    assert found["text"]["tokens"] == 300


@pytest.mark.parametrize(
    "flags, words",
    [
        (("--sections", "speed,volume"), ["volume", "perplexity"]),
        (("--sections", "answers"), ["-p", "-f"]),
        (("-p", "Who?"), ["-f"]),
        (("-f", "{document}", "-p", "Who?", "--expect", "a", "--expect", "b"), ["--expect"]),
        (("-f", "-"), ["-f"]),
        (("-f", "/no/such/text"), ["/no/such/text"]),
        (("--lengths", "64k"), ["--lengths", "65536", "2048"]),
        (("--lengths", "4x"), ["4x"]),
        (("--depths", "2k"), ["--depths", "2048", "2016"]),
        (("--niah-lengths", "4k"), ["--niah-lengths", "4096", "2048"]),
        (("--niah-lengths", "100"), ["100"]),
        (("--text-tokens", "4k"), ["--text-tokens", "4096", "2048"]),
        (("-f", "{document}", "--text-tokens", "1500"), ["1500", "document.txt", "999"]),
        (("--flops-lengths", "100000k"), ["--flops-lengths"]),
        (("-n", 5000), ["-n", "5000", "2048"]),
        (("--task", "single_9"), ["single_9"]),
        (("--attention", "sparse"), ["sparse", "phsa"]),
        (("--attention", "sepllm"), ["sepllm"]),
        (("--haystack", "{document}", "--niah-lengths", "2k"), ["document.txt"]),
    ],
)
def test_bad_input_is_refused_before_any_work(tiny, document, tmp_path, flags, words):
    out = tmp_path / "new" / "folder"
    start = time.monotonic()
    done = run_phsa("compare", "-m", tiny, "--out", out, *[str(flag).format(document=document) for flag in flags])
    assert time.monotonic() - start < 10
    assert done.returncode == 2 and done.stdout == "", done.stderr
    last = done.stderr.strip().splitlines()[-1]
    for word in words:
        assert word in last, last
    assert not (tmp_path / "new").exists(), "nothing was made"


def test_a_folder_that_cannot_be_written_is_told_before_any_work(tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    # There is no such model: the folder is judged first.
    for out in (file, file / "under", "/proc/nothing/here"):
        refused(run_phsa("compare", "-m", tmp_path / "absent.gguf", "--out", out), str(out))
    taken = tmp_path / "taken"
    (taken / "report.md").mkdir(parents=True)
    refused(run_phsa("compare", "-m", tmp_path / "absent.gguf", "--out", taken), "report.md")
    assert sorted(p.name for p in taken.iterdir()) == ["report.md"]
    assert file.read_text() == "mine"


def test_a_failed_run_leaves_an_older_report_as_it_was(tiny, tmp_path):
    flags = ("--sections", "flops", "--flops-lengths", "4k", "--out", tmp_path)
    assert run_phsa("compare", "-m", tiny, *flags).returncode == 0
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert run_phsa("compare", "-m", tmp_path / "absent.gguf", *flags).returncode == 2
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    assert run_phsa("compare", "-m", tiny, *flags, "--attention", "phsa").returncode == 0
    assert report(tmp_path)["policies"][0]["label"] == "PHSA K=16", "a new one takes its place"


def test_an_interrupted_run_has_a_report_of_what_is_done(smollm2, tmp_path):
    command = ["compare", "-m", smollm2, "--sections", "niah,flops", "--niah-lengths", "512", "--samples", "30"]
    screen, terminal = pty.openpty()  # the progress bar shows itself to terminals alone
    process = subprocess.Popen(
        [BIN / "phsa", *map(str, command), "--attention", "dense,phsa", "--out", tmp_path],
        stdout=subprocess.PIPE,
        stderr=terminal,
        text=True,
    )
    os.close(terminal)
    seen = b""
    while not re.search(rb" ([5-9]|[1-9]\d) % needles", seen):
        seen += os.read(screen, 4096)
    process.send_signal(signal.SIGINT)
    drain = threading.Thread(target=read_all, args=(screen,))
    drain.start()
    out, _ = process.communicate(timeout=120)
    drain.join()
    os.close(screen)
    assert process.returncode == 130
    found = report(tmp_path)
    assert found["about"]["interrupted"] and len(found["flops"]) == 12
    assert 1 <= found["niah"][0]["samples"] < 30
    page, _ = check_page(tmp_path / "report.html")
    assert "interrupted" in page and "interrupted" in out


def test_smollm2_reads_less_and_keeps_its_perplexity(smollm2, tmp_path):
    flags = ("--quick", "--lengths", "2k", "--depths", "2k", "--samples", 2, "--niah-lengths", "512")
    done = run_phsa("compare", "-m", smollm2, *flags, "--attention", "dense,phsa", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    found = report(tmp_path)
    assert found["about"]["num_layers"] == 30 and found["about"]["cpu"]
    dense, phsa = found["text"]["policies"]
    assert dense["tokens"] == 2048 and 5 < dense["ppl"] < 100
    assert abs(phsa["loss_difference"]) < 0.1
    assert phsa["read_share"] < 0.5 < phsa["recall"] < 1
    assert len(phsa["recall_sparse_by_layer"]) == 30
    check_page(tmp_path / "report.html")
