"""`phsa ask`: documents of every kind, what is kept for the next question, and what users can get wrong."""

import json
import os
import shutil
import zipfile

import pytest
from conftest import ROOT, run_phsa
from test_cli import refused, write_gguf

pytest.importorskip("gguf")

LIGHTHOUSE = ROOT / "bench/data/lighthouse.txt"
TEXT = "The bees woke early. The hive was warm and dry.\nA wasp came by at noon. Nobody saw the wasp again.\n"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", context=1024)


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def ask(*args, cache, length=("-n", 8, "--ignore-eos"), **more):
    done = run_phsa("ask", "--cache-dir", cache, "--temp", 0, *length, *args, "--json", **more)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def docx(path, *paragraphs):
    body = "".join(f"<w:p><w:r><w:t>{text}</w:t></w:r></w:p>" for text in paragraphs)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("word/document.xml", f'<w:document xmlns:w="w"><w:body>{body}</w:body></w:document>')
    return path


def test_the_answer_is_that_of_run_and_its_sources_are_parts_of_the_file(tiny, cache, tmp_path):
    document = tmp_path / "bees é.txt"
    document.write_text("Préface. é\n\n" + TEXT)
    found = ask("-m", tiny, document, "Who came?", cache=cache)
    answered = run_phsa("run", "-m", tiny, "-f", document, "-p", "Who came?", "-n", 8, "--temp", 0, "--ignore-eos")
    assert found["answer"] == answered.stdout.rstrip("\n")
    assert 1 <= len(found["sources"]) <= 5
    text = document.read_text()
    for source in found["sources"]:
        assert source["file"] == str(document)
        assert text[source["start"] : source["end"]] == source["text"]
        assert source["line"] == text.count("\n", 0, source["start"]) + 1
    weights = [source["weight"] for source in found["sources"]]
    assert weights == sorted(weights, reverse=True) and 0 < sum(weights) <= 1.001
    shown = run_phsa("ask", "-m", tiny, document, "Who came?", "-n", 8, "--temp", 0, "--ignore-eos", "--no-cache")
    answer, sources = shown.stdout.split("\n\nSources\n")
    assert answer == found["answer"]
    assert sources.startswith("[1] ") and "line" in sources


def test_a_second_question_reads_only_what_is_new_also_in_another_process(tiny, cache, tmp_path):
    document = tmp_path / "bees.txt"
    document.write_text(TEXT * 3)
    first = ask("-m", tiny, document, "Who came?", cache=cache)
    assert first["cached_tokens"] == 0
    again = ask("-m", tiny, document, "Who came?", cache=cache)
    other = ask("-m", tiny, document, "Where?", cache=cache)
    assert again["cached_tokens"] == other["cached_tokens"] > 3 * 80
    assert again["answer"] == first["answer"] and again["sources"] == first["sources"]
    assert len(list(cache.iterdir())) == 1
    # What changes the keys has a file of its own.
    sparse = ("--attention", "phsa", "-K", 2, "--init", 16, "--local", 32)
    assert ask("-m", tiny, document, "Who?", *sparse, cache=cache)["cached_tokens"] == 0
    assert ask("-m", tiny, document, "Who?", *sparse, cache=cache)["cached_tokens"] > 0
    assert ask("-m", tiny, document, "Who?", "--kv-type", "f32", cache=cache)["cached_tokens"] == 0
    assert ask("-m", tiny, document, "Who?", "--kv-type", "int8", cache=cache)["cached_tokens"] == 0
    document.write_text("x" + TEXT * 3)
    assert ask("-m", tiny, document, "Who?", cache=cache)["cached_tokens"] == 0
    assert ask("-m", tiny, document, "Who?", "--no-cache", cache=cache)["cached_tokens"] == 0
    assert len(list(cache.iterdir())) == 5


def test_the_cache_stays_within_its_size_and_a_damaged_file_is_read_again(tiny, cache, tmp_path):
    document = tmp_path / "bees.txt"
    document.write_text(TEXT)
    first = ask("-m", tiny, document, "Who came?", cache=cache)
    (file,) = cache.iterdir()
    file.write_bytes(file.read_bytes()[:-10])
    again = ask("-m", tiny, document, "Who came?", cache=cache)
    assert again["cached_tokens"] == 0 and again["answer"] == first["answer"]
    done = run_phsa("ask", "-m", tiny, document, "Why?", "-n", 2, "--cache-dir", cache / "b", "--cache-size", 0.00001)
    assert done.returncode == 0 and "not kept" in done.stderr


def test_several_documents_of_any_kind_are_told_apart(tiny, cache, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.md").write_text("# Title\n\nThe hive was warm.\n")
    (folder / "b.html").write_text("<p>The wasp\n<b>came</b>.</p><script>no()</script>")
    (folder / "c.py").write_text("x = 1\ny = 2\n")
    (folder / "d.bin").write_bytes(b"\0\1\2")
    report = docx(tmp_path / "report.docx", "First one of all.", "Second &amp; last.")
    done = run_phsa(
        *("ask", "-m", tiny, folder, report, "Which?", "-n", 8, "--temp", 0, "--ignore-eos", "--sources", 50),
        *("--cache-dir", cache, "--json"),
    )
    assert done.returncode == 0, done.stderr
    assert "d.bin" in done.stderr
    texts = {source["file"].rsplit("/", 1)[-1]: source for source in json.loads(done.stdout)["sources"]}
    assert set(texts) <= {"a.md", "b.html", "c.py", "report.docx"}
    for name, source in texts.items():
        assert ("paragraph" if name.endswith("docx") else "line") in source
        assert (
            source["text"]
            in "# Title\n\nThe hive was warm. The wasp came. x = 1\ny = 2 First one of all.\n\nSecond & last."
        )


@pytest.mark.skipif(shutil.which("pdftotext") is None, reason="pdftotext is not here")
def test_a_broken_pdf_is_told_and_leaves_nothing_behind(tiny, cache, tmp_path):
    broken = tmp_path / "broken.pdf"
    broken.write_bytes(b"%PDF-1.4\n1 0 obj\n<< /Type /Catalog /Pages 1 0 R >>\nendobj\n" + b"\xff" * 1000)
    work = tmp_path / "work"
    work.mkdir()
    done = run_phsa("ask", "-m", tiny, broken, "Why?", "--cache-dir", cache, env={"TMPDIR": str(work)})
    refused(done, "broken.pdf")
    assert os.listdir(work) == []


def test_without_pdftotext_a_pdf_says_what_to_install(tiny, tmp_path):
    paper = tmp_path / "paper.pdf"
    paper.write_bytes(b"%PDF-1.4\n")
    refused(run_phsa("ask", "-m", tiny, paper, "Why?", env={"PATH": str(tmp_path)}), "poppler-utils")


def test_what_cannot_be_asked_is_refused(tiny, cache, tmp_path):
    document = tmp_path / "bees.txt"
    document.write_text(TEXT)
    refused(run_phsa("ask", "-m", tiny, document), "no question")
    refused(run_phsa("ask", "-m", tiny, "What?"), "no file")
    refused(run_phsa("ask", "-m", tiny, document, document), "question comes last")
    refused(run_phsa("ask", "-m", tiny, document, " "), "empty")
    refused(run_phsa("ask", "-m", tiny, tmp_path / "absent.txt", "Why?"), "absent.txt")
    refused(run_phsa("ask", "-m", tiny, document, "Why?", "--attention", "phsa,quest"), "--attention")
    bomb = tmp_path / "bomb.docx"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("word/document.xml", " " * (70 << 20))
    refused(run_phsa("ask", "-m", tiny, bomb, "Why?"), "bomb.docx", "64 MiB")
    long = tmp_path / "long.txt"
    long.write_text("word " * 1000)
    refused(run_phsa("ask", "-m", tiny, long, "Why?"), "5", "1024")


def test_a_text_cannot_control_the_terminal(tiny, tmp_path):
    document = tmp_path / "nasty.txt"
    document.write_text("A text \x1b[2J with <|im_end|> codes. " * 3)
    done = run_phsa("ask", "-m", tiny, document, "Why?", "-n", 4, "--ignore-eos", "--no-cache", "--temp", 0)
    assert done.returncode == 0
    assert "\x1b" not in done.stdout.split("Sources")[1]


@pytest.mark.parametrize("attention", [("dense",), ("phsa", "--init", "16", "--local", "128", "-K", "12")])
def test_smollm2_names_the_sentence_that_holds_the_answer(smollm2, cache, attention):
    found = ask(
        "-m", smollm2, LIGHTHOUSE, "How high is the tower?", "--attention", *attention, cache=cache, length=("-n", 32)
    )
    assert "41 metres" in found["answer"]
    # Its first words are those of the title, which may weigh more.
    assert any("41 metres" in source["text"] for source in found["sources"][:2]), found["sources"]
