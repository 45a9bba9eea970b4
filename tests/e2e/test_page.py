"""The page of `phsa serve`, and the one that `phsa inspect` writes, in Chromium without a window."""

import json
import re
import shutil

import pytest
from conftest import ROOT, run_phsa
from test_cli import write_gguf
from test_server import Server, write_docx
from webdriver import Browser, missing

pytest.importorskip("gguf")
if missing():
    pytest.skip(f"{missing()} is not installed: the page is not tested", allow_module_level=True)

CONTEXT = 9216  # of the tiny model: one byte is one token, so a text of 8,000 characters fits
DOCUMENT = "Bees, wasps; and a hive. " * 20
# Budgets for a text of a few hundred tokens: something is left out.
SMALL = {"top_k": 2, "init": 16, "local": 32}
NASTY = "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script>"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", context=CONTEXT)


@pytest.fixture(scope="module")
def tiny_server(tiny):
    with Server(tiny, "--weights", "f32", "--alias", "tiny") as running:
        yield running


@pytest.fixture(scope="module")
def smollm2_server(smollm2):
    with Server(smollm2) as running:
        yield running


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


def write_pdf(*pages):
    """A PDF with a line of text on each page."""
    kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(len(pages)))
    objects = ["<</Type/Catalog/Pages 2 0 R>>", f"<</Type/Pages/Kids[{kids}]/Count {len(pages)}>>"]
    objects.append("<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>")
    for i, text in enumerate(pages):
        stream = f"BT /F1 12 Tf 72 700 Td ({text}) Tj ET"
        used = f"/Resources<</Font<</F1 3 0 R>>>>/Contents {5 + 2 * i} 0 R"
        objects.append(f"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]{used}>>")
        objects.append(f"<</Length {len(stream)}>>stream\n{stream}\nendstream")
    data, offsets = "%PDF-1.4\n", []
    for i, text in enumerate(objects):
        offsets.append(len(data))
        data += f"{i + 1} 0 obj{text}endobj\n"
    table = "".join(f"{offset:010d} 00000 n \n" for offset in offsets)
    end = f"trailer<</Size {len(objects) + 1}/Root 1 0 R>>\nstartxref\n{len(data)}\n%%EOF"
    return f"{data}xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}{end}".encode()


class Page:
    """What a user does with the page."""

    def __init__(self, browser, server):
        self.browser = browser
        self.server = server
        self.origin = f"http://127.0.0.1:{server.port}/"
        browser.resize(1280, 900)
        browser.go(self.origin)

    def loaded(self):
        self.browser.wait("document.querySelector('#model').textContent.trim()")
        return self

    def switch(self, attention, **numbers):
        """Greedy unless told."""
        self.browser.run("document.querySelector('#more').open = true")
        self.browser.click(f"fieldset label:has([value={attention}])")
        for name, value in {"temperature": 0, **numbers}.items():
            self.browser.type("#" + name.replace("_", "-"), str(value))

    def attach(self, path):
        count = self.browser.run("document.querySelectorAll('#documents .tokens').length")
        self.browser.upload("#document-file", path)
        self.browser.wait(
            "(chips => chips.length === arguments[0] && chips.every(e => /^[\\d,]+ tokens/.test(e.textContent)))"
            "([...document.querySelectorAll('#documents .tokens')])",
            args=[count + 1],
        )

    def ask(self, question):
        self.browser.type("#question", question)
        self.browser.click("#send")
        self.done()

    def done(self):
        self.browser.wait("document.querySelector('#stop').hidden && !document.querySelector('[aria-busy=true]')")

    def problem(self):
        self.browser.wait("!document.querySelector('#problem').hidden")
        return self.browser.text("#problem")

    def answers(self):
        """Their texts, as their buttons copy them."""
        self.browser.run("(navigator.clipboard.writeText = async text => { (window.copied ??= []).push(text); }, 0)")
        return self.browser.run(
            "(window.copied = [], document.querySelectorAll('.copy').forEach(e => e.click()), window.copied)"
        )

    def explore(self):
        self.browser.click(".turn:last-of-type .answer-card:last-child .explore")
        self.explored()

    def explored(self):
        self.browser.wait("document.querySelector('.explorer .map') && !document.querySelector('.stale')")

    def blocks(self, kind):
        """The blocks of the map that have this class."""
        return self.browser.run(f"[...document.querySelectorAll('.map .{kind}')].map(e => Number(e.dataset.b))")


@pytest.fixture
def page(chromium, tiny_server):
    yield from visit(chromium, tiny_server)


@pytest.fixture
def smollm2_page(chromium, smollm2_server):
    yield from visit(chromium, smollm2_server)


def visit(browser, server):
    browser.requests(), browser.log("browser")  # those of the test before
    page = Page(browser, server).loaded()
    yield page
    # Whatever was done: nothing from elsewhere, no script that fails, nothing that the page's own policy forbids.
    # (A request that the page before it began late may go to that one's server.)
    assert {url for url in browser.requests() if not url.startswith(("http://127.0.0.1:", "data:"))} == set()
    wrong = [entry["message"] for entry in browser.log("browser") if entry["source"] != "network"]
    assert wrong == []


@pytest.fixture
def document(tmp_path):
    path = tmp_path / "hive.txt"
    path.write_text(DOCUMENT)
    return path


def sent(browser, path):
    """The bodies that the page posted to this path since the last look."""
    events = (json.loads(entry["message"])["message"] for entry in browser.log("performance"))
    requests = (e["params"]["request"] for e in events if e["method"] == "Network.requestWillBeSent")
    return [json.loads(r["postData"]) for r in requests if r["url"].endswith(path)]


def test_a_document_is_asked_about_and_the_conversation_goes_on(page, document):
    browser, server = page.browser, page.server
    page.switch("phsa", **SMALL, max_tokens=8)
    page.attach(document)
    text = DOCUMENT.strip()
    assert browser.text("#documents .tokens") == f"{server.post('/tokenize', content=text)['count']} tokens"
    page.ask("Who?")
    messages = [{"role": "user", "content": text + "\n\nWho?"}]
    settings = {"attention": "phsa", **SMALL}
    options = {"temperature": 0, "max_tokens": 8, "phsa": settings}
    expected = server.post("/v1/chat/completions", messages=messages, **options)
    said = expected["choices"][0]["message"]["content"]
    assert page.answers() == [said]
    assert re.fullmatch(
        r"first token [\d.]+ s · prefill [\d,.]+ tokens/s · decode [\d,.]+ tokens/s · [\d.]+ % read",
        browser.text(".answer-card footer p"),
    )
    assert browser.text("#said").startswith("Answer complete")
    (row,) = browser.texts("#compare tr")
    assert row.split("\t")[:3] == ["PHSA", "2", str(expected["usage"]["prompt_tokens"])]
    assert 0 < float(row.split("\t")[7].removesuffix(" %")) < 100

    page.ask("And then?")
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "And then?"}]
    expected = server.post("/v1/chat/completions", messages=messages, **options)
    assert page.answers() == [said, expected["choices"][0]["message"]["content"]]
    assert browser.texts("#compare tr")[0].split("\t")[2].split()[0] == str(expected["usage"]["prompt_tokens"])
    browser.wait("/^[\\d,]+ of 9,216 tokens$/.test(document.querySelector('#count').textContent)")

    browser.click("#new")
    assert page.answers() == [] and browser.run("!document.querySelector('#welcome').hidden")
    assert len(browser.texts("#compare tr")) == 2  # the speeds stay


def test_a_document_can_be_dropped_and_pasted(page):
    browser = page.browser
    hand_over = """(() => {
      const data = new DataTransfer();
      arguments[1] ? data.items.add(new File([arguments[2]], arguments[1])) : data.setData("text/plain", arguments[2]);
      const options = { bubbles: true, cancelable: true, dataTransfer: data, clipboardData: data };
      const target = document.querySelector("#question");
      target.dispatchEvent(arguments[0] === "paste" ? new ClipboardEvent("paste", options)
        : new DragEvent(arguments[0], options));
    })()"""
    browser.run(hand_over, "dragover", "hive.txt", DOCUMENT)
    assert browser.run("!document.querySelector('#drop').hidden")
    browser.run(hand_over, "drop", "hive.txt", DOCUMENT)
    browser.wait("document.querySelector('#documents .tokens')?.textContent === '499 tokens'")
    assert browser.text("#documents .name") == "hive.txt" and browser.run("document.querySelector('#drop').hidden")
    browser.click("#documents .remove")
    browser.wait("document.querySelector('#documents').hidden")
    browser.run(hand_over, "paste", "", "short")
    assert browser.run("document.querySelector('#documents').hidden")
    browser.run(hand_over, "paste", "", "long " * 500)
    browser.wait("document.querySelector('#documents .tokens')?.textContent === '2,499 tokens'")
    assert browser.text("#documents .name") == "pasted text"


def test_the_switch_says_how_each_request_is_read(page, document):
    browser = page.browser
    page.switch("phsa", **SMALL, max_tokens=4)
    browser.type("#lambda", "0.75")
    page.attach(document)
    page.ask("Who?")
    page.switch("infllm2", top_k=3)
    browser.click(".again")
    page.done()
    page.switch("dense")
    assert browser.run("['top-k', 'lambda', 'init', 'local'].every(id => document.getElementById(id).disabled)")
    browser.click(".answer-card:last-child .again")
    page.done()
    budgets = {"init": 16, "local": 32}
    bodies = sent(browser, "/v1/chat/completions")
    told = {"progress": True, "sources": True}
    assert [body["phsa"] for body in bodies] == [
        {"attention": "phsa", "top_k": 2, "lambda": 0.75, **budgets, **told},
        {"attention": "infllm2", "top_k": 3, **budgets, **told},
        told,  # dense is the server's own
    ]
    assert all(body["messages"] == bodies[0]["messages"] for body in bodies)
    used = "init 16, local 32"
    assert browser.texts(".by") == [f"PHSA, K 2, λ 0.75, {used}", f"InfLLM v2, K 3, {used}", "dense"]
    rows = [row.split("\t") for row in browser.texts("#compare tr")]
    assert [row[:2] for row in rows] == [["dense", "–"], ["InfLLM v2", "3"], ["PHSA", "2"]]
    shares = [float(row[7].removesuffix(" %")) for row in rows]
    assert shares[0] == 100 > shares[1] > shares[2]
    browser.click("#compare-clear")
    assert browser.texts("#compare tr") == []


def test_what_the_user_left_alone_is_left_to_the_model(chromium, tmp_path):
    settings = {"attention": "phsa", "top_k": 3, "lambda": 0.5, "init": 16, "local": 32}
    with Server(write_gguf(tmp_path / "carrying.gguf", context=CONTEXT, phsa_settings=settings), "-n", 6) as server:
        page = Page(chromium, server).loaded()
        page.ask("Who?")
        page.browser.run("document.querySelector('#more').open = true")
        page.browser.type("#max-tokens", "3")
        page.browser.type("#top-k", "5")
        page.ask("Who?")
        first, second = sent(chromium, "/v1/chat/completions")
        assert first["phsa"] == {"progress": True} and not {"max_tokens", "temperature"} & set(first)
        assert second["phsa"] == {"top_k": 5, "progress": True} and second["max_tokens"] == 3
        placeholders = (
            "['lambda', 'local', 'max-tokens', 'temperature'].map(id => document.getElementById(id).placeholder)"
        )
        assert page.browser.run(placeholders) == ["0.5", "32", "6", "0.8"]
        assert page.browser.texts(".by")[0] == "PHSA, K 3, λ 0.5, init 16, local 32"
        assert [row.split("\t")[1] for row in page.browser.texts("#compare tr")] == ["5", "3"]


def test_an_answer_can_be_stopped(smollm2_page):
    browser = smollm2_page.browser
    smollm2_page.switch("dense", max_tokens=2000)
    browser.type("#question", "Write a very long story about the sea.")
    browser.click("#send")
    browser.wait("/ tokens · [\\d.]+ tokens\\/s · 100.0 % read/.test(document.querySelector('footer p').textContent)")
    browser.click("#stop")
    smollm2_page.done()
    assert browser.text(".answer-card footer p").endswith("stopped")
    (said,) = smollm2_page.answers()
    assert said
    assert browser.texts("#compare tr") == []
    smollm2_page.server.wait_for(lambda: smollm2_page.server.metric("vllm:num_requests_running") == 0)
    smollm2_page.switch("dense", max_tokens=3)
    smollm2_page.ask("Go on.")
    assert len(smollm2_page.answers()) == 2
    (body,) = [b for b in sent(browser, "/v1/chat/completions") if len(b["messages"]) == 3]
    assert body["messages"][1] == {"role": "assistant", "content": said}


def test_the_explorer_shows_what_inspect_says(smollm2_page):
    browser = smollm2_page.browser
    smollm2_page.switch("phsa", top_k=4, init=16, local=64, max_tokens=6)
    smollm2_page.attach(ROOT / "bench/data/lighthouse.txt")
    smollm2_page.ask("Who built the lighthouse?")
    smollm2_page.explore()
    (asked,) = sent(browser, "/inspect")
    assert asked.pop("stream")
    found = smollm2_page.server.post("/inspect", **asked)
    queries = found["queries"][:-1]  # nothing was written after the last token
    chips = browser.run("[...document.querySelectorAll('.queries button')].map(e => e.textContent)")
    answer = found["text"][found["prompt_tokens"] :]
    assert chips == ["all", *(text.replace("\n", "⏎") for text in answer)] and len(answer) == 6
    assert browser.run("document.querySelectorAll('.text .p').length") == len(found["punctuation"])
    assert browser.run("document.querySelectorAll('.text .c').length") == len(found["special"])
    assert browser.run("document.querySelector('.text').textContent") == "".join(found["text"])

    def check(query, layers, heads):
        chosen = {}
        recall = []
        for layer in layers:
            for head in heads:
                choice = query["layers"][layer]["heads"][head]
                recall += choice["recall_by_query_head"]
                for block, score in zip(choice["blocks"], choice["scores"], strict=True):
                    chosen[block] = chosen.get(block, 0) + score
        assert smollm2_page.blocks("hot") == sorted(chosen)
        assert f"Recall {sum(recall) / len(recall):.3f}" in browser.text(".explorer .status")
        first, last = query["layers"][0]["init"][1], query["layers"][0]["local"]
        assert smollm2_page.blocks("init") == list(range(first))
        assert smollm2_page.blocks("local") == list(range(*last))
        return chosen

    check(queries[0], range(30), range(3))
    browser.click('.queries button[data-q="3"]')
    check(queries[3], range(30), range(3))
    browser.run("document.querySelector('.tools select').focus()")
    browser.choose(".tools label:nth-child(1) select", 20)
    check(queries[3], [20], range(3))
    browser.choose(".tools label:nth-child(2) select", 1)
    chosen = check(queries[3], [20], [1])
    assert len(chosen) == 4

    # Scores where the mouse points, and where the keyboard is.
    best = max(chosen, key=lambda block: (chosen[block], -block))
    browser.hover(f'.map [data-b="{best}"]')
    assert browser.text(".detail h3") == f"Block {best}"
    assert f"{chosen[best]:.3f}" in browser.text(".detail")
    browser.hover(".bar h1")
    assert browser.text(".detail h3") == "Point at a block"
    browser.run("document.querySelectorAll('.switch button[data-by]')[1].focus()")
    browser.press("Tab")
    assert browser.text(".detail h3") == f"Block {best}"
    browser.press("ArrowRight")
    assert browser.text(".detail h3") == f"Block {best + 1}"
    label = browser.run(
        "document.getElementById(document.activeElement.getAttribute('aria-activedescendant')).ariaLabel"
    )
    assert label.startswith(f"Block {best + 1}, ")
    browser.press("Escape")
    assert browser.text(".detail h3") == "Point at a block"

    # The same answer, as another policy would have read it.
    browser.choose("#explore-as", "infllm2")
    browser.wait("document.querySelector('#explore-note').textContent.startsWith('Written with PHSA')")
    (asked,) = sent(browser, "/inspect")
    assert asked["phsa"] == {"attention": "infllm2", "top_k": 4, "init": 16, "local": 64}


def test_a_dense_answer_shows_what_phsa_would_choose(page, document):
    browser = page.browser
    browser.click("#tab-explorer")
    assert browser.run("!document.querySelector('#explore-empty').hidden")
    browser.press("ArrowLeft")  # the tabs' own key
    page.switch("phsa", **SMALL)
    page.switch("dense", max_tokens=3)
    page.attach(document)
    page.ask("Who?")
    page.switch("phsa")
    page.explore()
    assert browser.text("#explore-note") == "Written with dense; shown is what PHSA would choose."
    (asked,) = sent(browser, "/inspect")
    assert asked["phsa"] == {"attention": "phsa", **SMALL}


def explore_long_text(page, tmp_path):
    long = tmp_path / "long.txt"
    long.write_text(("The keeper wrote the weather into a blue book; it was cold. " * 140)[:8000])
    page.switch("phsa", max_tokens=3)
    page.attach(long)
    page.ask("What?")
    page.explore()


def test_the_explorer_takes_a_long_document(page, tmp_path):
    browser = page.browser
    explore_long_text(page, tmp_path)
    blocks = browser.run("document.querySelectorAll('.map i').length")
    assert blocks > 500 and browser.run("document.querySelectorAll('.text > span').length") == blocks
    hot = page.blocks("hot")
    assert len(hot) == 16
    browser.click(f'.map [data-b="{hot[8]}"]')
    assert browser.text(".detail h3") == f"Block {hot[8]}"
    inside = browser.run(
        "(r => r.top >= 0 && r.bottom <= innerHeight)(document.querySelector('.text .pin').getBoundingClientRect())"
    )
    assert inside


def test_what_the_server_refuses_is_one_sentence_and_the_question_stays(page, document):
    browser = page.browser
    page.attach(document)
    page.switch("phsa", **SMALL)
    browser.type("#top-k", "-3")
    page.ask("Who?")
    expected = page.server.post(
        "/v1/chat/completions", 400, messages=[{"role": "user", "content": "x"}], phsa={"top_k": -3}
    )
    assert page.problem() == expected["error"]["message"]
    assert page.answers() == [] and browser.run("document.querySelector('#question').value") == "Who?"
    assert browser.text("#documents .name") == "hive.txt"
    page.switch("phsa", **SMALL, max_tokens=2)
    browser.click("#send")
    page.done()
    assert len(page.answers()) == 1 and browser.run("document.querySelector('#problem').hidden")


def test_documents_that_cannot_be_read_are_told(page, tmp_path):
    browser = page.browser
    files = {
        "long.txt": (b"word " * 3000, "14,999 tokens", "9,216"),
        "picture.png": (b"\x89PNG\r\n\x1a\n\xff\xfe", "not UTF-8"),
        "zeros.txt": (b"a\0b", "neither text nor a PDF"),
        "empty.txt": (b"  \n", "no text"),
    }
    for name, (data, *words) in files.items():
        (tmp_path / name).write_bytes(data)
        browser.upload("#document-file", tmp_path / name)
        browser.wait(f"document.querySelector('#problem').textContent.startsWith({json.dumps(name)})")
        for word in words:
            assert word in page.problem()
        browser.run("document.querySelectorAll('#documents .remove').forEach(e => e.click())")
    browser.upload("#document-file", tmp_path / "long.txt")
    browser.wait("document.querySelector('#problem').textContent.startsWith('long.txt')")
    browser.type("#question", "Who?")
    browser.click("#send")
    assert "14,999 tokens" in page.problem() and page.answers() == []


def test_text_from_outside_stays_text(page, tmp_path):
    browser = page.browser
    document = tmp_path / "a<img src=x onerror=alert(1)>.txt"
    document.write_text(NASTY)
    page.switch("phsa", **SMALL, max_tokens=2)
    page.attach(document)
    page.ask(NASTY)
    assert NASTY in browser.text(".asked") and document.name in browser.text(".asked")
    page.explore()
    assert NASTY in browser.run("document.querySelector('.text').textContent")
    assert browser.run("document.querySelectorAll('img, main script').length") == 0
    assert browser.run("document.title") == "phsa"


def test_a_server_that_is_gone_or_wants_a_key_is_told(chromium, tiny):
    with Server(tiny, "--api-key", "secret") as server:
        page = Page(chromium, server)
        chromium.wait("!document.querySelector('#key-form').hidden")
        chromium.type("#key", "wrong")
        chromium.press("Enter")
        chromium.wait("document.querySelector('#key-label').textContent.startsWith('This key is wrong')")
        chromium.wait("document.activeElement.id === 'key'")
        chromium.type("#key", "secret")
        chromium.press("Enter")
        page.loaded()
        page.switch("phsa", **SMALL, max_tokens=2)
        page.ask("Who?")
        assert len(page.answers()) == 1
    page.ask("And now?")
    assert "cannot be reached" in page.problem()


def test_a_prefill_tells_how_far_it_is_and_the_explorer_can_be_stopped(smollm2_page, tmp_path):
    browser = smollm2_page.browser
    long = tmp_path / "long.txt"
    long.write_text((ROOT / "bench/data/from_sand_hill_to_pine.txt").read_text()[:24000])
    smollm2_page.switch("dense", max_tokens=4)
    browser.run("document.querySelector('#want-sources').click()")
    smollm2_page.attach(long)
    progress = "document.querySelector('.progress .soft')?.textContent ?? ''"
    foreseen = "/^prefill: [\\d,]+ of [\\d,]+ tokens, (less than 1|\\d+) s left$/.test(" + progress + ")"
    browser.type("#question", "Who?")
    browser.click("#send")
    browser.wait(foreseen, 60)
    bar = browser.run("(e => [e.value, e.max])(document.querySelector('.progress progress'))")
    assert 0 < bar[0] < bar[1]
    # Stopped before anything was said, the question and its document are where they were.
    browser.press("Escape")
    smollm2_page.done()
    assert smollm2_page.answers() == [] and browser.run("document.querySelector('#question').value") == "Who?"
    assert browser.text("#documents .name") == "long.txt"
    browser.click("#send")
    smollm2_page.done()
    (body, again) = sent(browser, "/v1/chat/completions")
    assert body == again and body["phsa"] == {"progress": True}

    # Dense attention chose nothing: the text is read again, as PHSA reads it.
    browser.click(".explore")
    browser.wait(foreseen, 60)
    browser.click("#explore-stop")
    browser.wait("!document.querySelector('#explore-again').hidden")
    assert browser.text("#explore-note") == "Stopped."
    browser.click("#explore-again")
    smollm2_page.explored()
    assert browser.run("document.querySelector('#explore-stop').hidden")
    # What was shown once is shown again without asking.
    sent(browser, "/inspect")
    browser.choose("#explore-as", "infllm2")
    smollm2_page.explored()
    browser.choose("#explore-as", "phsa")
    smollm2_page.explored()
    browser.choose("#explore-as", "infllm2")
    smollm2_page.explored()
    assert [body["phsa"]["attention"] for body in sent(browser, "/inspect")] == ["infllm2"]


def test_steps_of_a_prefill_that_are_told_at_once_foresee_nothing(page):
    browser = page.browser
    browser.run("(import('/progress.js').then(found => { window.progress = found; }), 0)")
    browser.wait("window.progress")
    line = browser.run("""(() => {
      const now = performance.now;
      performance.now = () => 5000;
      const shown = window.progress.createProgress();
      for (const done of [0, 512, 512]) shown.take({ done, total: 2000 });
      performance.now = now;
      return shown.element.textContent;
    })()""")
    assert line == "prefill: 512 of 2,000 tokens, 0.0 s"


def test_sentences_lead_to_passages_and_passages_to_the_words_that_used_them(smollm2_page, tmp_path):
    browser, server = smollm2_page.browser, smollm2_page.server
    smollm2_page.switch("dense", max_tokens=60)
    lighthouse, other = ROOT / "bench/data/lighthouse.txt", tmp_path / "bees \U0001f41d.txt"
    other.write_text("\U0001f41d A hive has one queen. " * 9)
    smollm2_page.attach(other)
    smollm2_page.attach(lighthouse)
    smollm2_page.ask("Who built the lighthouse of Port Amsel, and what are its walls made of?")
    texts = [other.read_text().strip(), lighthouse.read_text().strip()]
    said = "".join(f"File: {path.name}\n\n{text}\n\n" for path, text in zip((other, lighthouse), texts, strict=True))
    asked = {
        "role": "user",
        "content": said + "Who built the lighthouse of Port Amsel, and what are its walls made of?",
    }
    options = {"temperature": 0, "max_tokens": 60, "phsa": {"sources": True}}
    found = server.post("/v1/chat/completions", messages=[asked], **options)
    sources = found["phsa"]["sources"]
    answer = found["choices"][0]["message"]["content"]
    assert smollm2_page.answers() == [answer] and len(sources) > 1
    assert browser.run("[...document.querySelectorAll('.source .quote')].map(e => e.textContent)") == [
        re.sub(r"\s+", " ", source["text"]) for source in sources
    ]
    line = texts[1][: texts[1].index(sources[0]["text"])].count("\n") + 1
    assert browser.texts(".source .place")[0] == f"lighthouse.txt, line {line}"

    def words(source):
        return [answer[use["start"] : use["end"]].strip() for use in source["used_by"]]

    def shown():
        assert browser.text("#reader-name") == "lighthouse.txt"
        assert browser.run("document.querySelector('#reader-text').textContent") == texts[1]
        lit = browser.run("[...document.querySelectorAll('.lit')].map(e => e.textContent).join('')")
        return browser.run("document.querySelector('mark[aria-pressed=true]').textContent"), lit

    browser.click(".source")
    passage, lit = shown()
    assert passage == sources[0]["text"] and lit.replace(" ", "") == "".join(words(sources[0])).replace(" ", "") != ""
    marks = browser.run("[...document.querySelectorAll('mark')].map(e => e.textContent)")
    assert sorted(marks) == sorted(source["text"] for source in sources)
    # From a passage to its words, with the mouse and with the keyboard.
    index = next(i for i, source in enumerate(sources) if i > 0 and source["used_by"])
    browser.click(f'mark[data-index="{index}"]')
    passage, lit = shown()
    assert passage == sources[index]["text"] and lit.replace(" ", "") == "".join(words(sources[index])).replace(" ", "")
    browser.press("Escape")
    assert browser.run("document.querySelector('#reader').hidden")
    browser.run("[...document.querySelectorAll('.source')].find(e => e.tabIndex === 0).focus()")
    browser.press("Enter")
    opened = browser.run("document.querySelector('mark[aria-pressed=true]').textContent")
    assert browser.run("document.activeElement.textContent") == opened
    browser.press("ArrowRight")
    browser.press("Enter")
    assert shown()[0] == browser.run("document.activeElement.textContent") != opened
    browser.press("Escape")
    assert browser.run("document.activeElement.className") == "source"
    # From a sentence to its passage.
    number = int(browser.text(".cite"))
    browser.click(".cite")
    assert shown()[0] == sources[number - 1]["text"]
    inside = """(() => {
      const mark = document.querySelector("mark[aria-pressed=true]").getBoundingClientRect();
      const box = document.querySelector("#reader-text").getBoundingClientRect();
      return mark.top < box.bottom && mark.bottom > box.top;
    })()"""
    assert browser.run(inside)
    browser.press("Escape")
    assert browser.run("document.querySelector('#reader').hidden && document.querySelectorAll('.lit').length") == 0


def test_a_model_without_a_chat_template_goes_on_with_the_text_and_has_sources_too(chromium, tmp_path, monkeypatch):
    gguf = pytest.importorskip("gguf")
    monkeypatch.setattr(gguf.GGUFWriter, "add_chat_template", lambda *_: None)
    path = tmp_path / "hive.txt"
    path.write_text("  The hive is old. It has one queen; nobody saw her yet. Bees come and go all day.")
    with Server(write_gguf(tmp_path / "bare.gguf", context=CONTEXT), "--weights", "f32", "-n", 7) as server:
        page = Page(chromium, server).loaded()
        page.switch("dense")
        page.ask("Hello?")
        page.attach(path)
        page.ask("Who?")
        first, second = sent(chromium, "/v1/completions")
        assert first["prompt"] == "Hello?" and first["max_tokens"] == second["max_tokens"] == 7
        said = page.answers()[0]
        assert second["prompt"] == f"Hello?\n\n{said}\n\n{path.read_text().strip()}\n\nWho?"
        found = server.post("/v1/completions", **{**second, "stream": False, "stream_options": None})
        passages = [source["text"] for source in found["phsa"]["sources"] if source["text"] in path.read_text()]
        assert (
            chromium.run("[...document.querySelectorAll('.source .quote')].map(e => e.textContent)") == passages != []
        )
        chromium.click(".source")
        assert chromium.run("document.querySelector('mark[aria-pressed=true]').textContent") == passages[0]


def test_one_of_several_models_is_chosen(page, document):
    """As a server of several lists them; this one answers to every name."""
    browser = page.browser
    twice = """(() => {
      const ask = window.fetch;
      window.fetch = async (path, options) => {
        const answer = await ask(path, options);
        if (path !== "v1/models") return answer;
        const found = await answer.json(), other = structuredClone(found.data[0]);
        Object.assign(other, { id: "other", max_model_len: 600 });
        other.phsa.settings.top_k = 7;
        found.data.push(other);
        return new Response(JSON.stringify(found));
      };
    })()"""
    added = browser.devtools("Page.addScriptToEvaluateOnNewDocument", source=twice)
    try:
        browser.go(page.origin)
        page.loaded()
        page.switch("dense", max_tokens=3)
        page.attach(document)
        page.ask("Who?")
        browser.choose("#models", "other")
        browser.wait("/600 tokens/.test(document.querySelector('#model').textContent)")
        assert browser.run("document.querySelector('#top-k').placeholder") == "7"
        page.ask("And?")
        assert [body["model"] for body in sent(browser, "/v1/chat/completions")] == ["tiny", "other"]
        assert browser.texts(".by") == ["tiny: dense", "other: dense"]
        browser.choose("#models", "tiny")
        page.explore()
        assert [body["model"] for body in sent(browser, "/inspect")] == ["other"]  # whose tokens they are
        kept = browser.run("location.hash")
        browser.resize(390, 844, mobile=True)
        ends = browser.run(
            "['#models', '#tab-explorer', '#theme'].map(css => "
            "document.querySelector(css).getBoundingClientRect().right)"
        )
        assert all(0 < end <= 390 for end in ends)
        assert browser.run("(e => e.scrollWidth <= e.clientWidth)(document.querySelector('.tabs'))")
        browser.resize(1280, 900)
    finally:
        browser.devtools("Page.removeScriptToEvaluateOnNewDocument", **added)
    # Where that model is not served, nobody else explores its tokens.
    browser.go("about:blank")
    browser.go(page.origin + kept)
    browser.wait("document.querySelectorAll('.copy').length === 2")
    assert browser.texts(".by") == ["dense", "other: dense"]
    browser.click(".turn:last-of-type .explore")
    browser.wait("!document.querySelector('#explore-problem').hidden")
    assert "other" in browser.text("#explore-problem") and sent(browser, "/inspect") == []


def test_files_that_are_no_plain_text_are_documents_too(page, tmp_path):
    browser = page.browser
    (tmp_path / "keeper.docx").write_bytes(write_docx("The keeper was Jonas.", "He trimmed the wick."))
    (tmp_path / "page.html").write_text("<html><body><p>The lamp &amp; the oil.</p><script>alert(1)</script>")
    page.switch("dense", max_tokens=2)
    for name in ("keeper.docx", "page.html"):
        page.attach(tmp_path / name)
    page.ask("Who?")
    (body,) = sent(browser, "/v1/chat/completions")
    said = "File: keeper.docx\n\nThe keeper was Jonas.\n\nHe trimmed the wick.\n\n"
    said += "File: page.html\n\nThe lamp & the oil.\n\nWho?"
    assert body["messages"] == [{"role": "user", "content": said}]
    assert browser.texts(".asked .name") == ["keeper.docx", "page.html"]
    assert browser.run("document.querySelector('#documents').hidden")  # the next question goes without them


@pytest.mark.skipif(shutil.which("pdftotext") is None, reason="pdftotext is not here")
def test_a_source_in_a_pdf_is_named_by_its_page(smollm2_page, tmp_path):
    browser = smollm2_page.browser
    pages = ("The harbour is old. Ships come in May.", "The keeper is called Jonas Brandt.", "Bees live in the hive.")
    (tmp_path / "paper.pdf").write_bytes(write_pdf(*pages))
    smollm2_page.switch("dense", max_tokens=12)
    smollm2_page.attach(tmp_path / "paper.pdf")
    smollm2_page.ask("What is the keeper called?")
    assert "Brandt" in smollm2_page.answers()[0]
    found = dict(zip(browser.texts(".source .place"), browser.texts(".source .quote"), strict=True))
    assert found["paper.pdf, page 2"].startswith(pages[1])


def test_all_three_are_asked_and_compared(page, tmp_path):
    browser = page.browser
    document = tmp_path / "three.txt"
    document.write_text("Three ways to read. " * 90)  # nobody has read it before
    page.switch("phsa", **SMALL, max_tokens=4)
    page.switch("dense")
    page.attach(document)
    browser.type("#question", "Who?")
    browser.click("#send-all")
    browser.wait("document.querySelectorAll('.answer-card[aria-busy=false] .copy').length === 3")
    page.done()
    ways = [body["phsa"].get("attention", "dense") for body in sent(browser, "/v1/chat/completions")]
    assert ways == ["dense", "infllm2", "phsa"]
    rows = [row.split("\t") for row in browser.texts("#compare tr")]
    assert [row[0] for row in rows] == ["PHSA", "InfLLM v2", "dense"] and rows[2][6] == "–"
    speeds = [[float(row[at].replace(",", "")) for at in (4, 5)] for row in rows]
    for row, own in zip(rows[:2], speeds, strict=False):
        for ratio, value, dense in zip(row[6].split(), own, speeds[2], strict=True):
            assert float(ratio.removesuffix("×")) == pytest.approx(value / dense, rel=0.2, abs=0.06)
    lines = browser.run(
        "[...document.querySelectorAll('.bars')].map(b => [...b.querySelectorAll('.bar-line span:first-child')]"
        ".map(e => e.textContent))"
    )
    assert lines == [["dense", "InfLLM v2", "PHSA"]] * 2
    widths = browser.run(
        "[...document.querySelectorAll('.bars')].map(b => [...b.querySelectorAll('i')]"
        ".map(e => e.getBoundingClientRect().width))"
    )
    for kind, own in zip((0, 1), widths, strict=True):
        fastest = max(speed[kind] for speed in speeds)
        track = browser.run("document.querySelector('.track').getBoundingClientRect().width")
        expected = [track * speed[kind] / fastest for speed in reversed(speeds)]
        assert own == pytest.approx(expected, abs=2)


def test_a_question_is_edited_and_what_came_after_it_goes(page, document):
    browser = page.browser
    page.switch("dense", max_tokens=3)
    page.attach(document)
    for question in ("One?", "Two?", "Three?"):
        page.ask(question)
    sent(browser, "/v1/chat/completions")
    browser.click(".turn:nth-of-type(2) .edit")
    assert browser.run("document.activeElement.value") == "Two?"
    assert "1 question" in browser.text(".editing")
    browser.press("Escape")
    assert len(page.answers()) == 3 and browser.texts(".question") == ["One?", "Two?", "Three?"]
    browser.click(".turn:nth-of-type(2) .edit")
    browser.type(".editing textarea", "Deux?")
    browser.click(".editing .strong")
    page.done()
    browser.wait("document.querySelectorAll('.copy').length === 2")
    assert browser.texts(".question") == ["One?", "Deux?"]
    (body,) = sent(browser, "/v1/chat/completions")
    assert [m["content"] for m in body["messages"]] == [DOCUMENT.strip() + "\n\nOne?", page.answers()[0], "Deux?"]
    assert browser.run("document.querySelectorAll('#explore-answer option').length") == 2


def test_conversations_and_the_theme_are_kept_in_the_browser(smollm2_page):
    browser = smollm2_page.browser
    smollm2_page.switch("phsa", top_k=4, init=16, local=64, max_tokens=40)
    smollm2_page.attach(ROOT / "bench/data/lighthouse.txt")
    smollm2_page.ask("Who built the lighthouse?")
    browser.wait("location.hash.length > 1")
    (said,) = smollm2_page.answers()
    seen = browser.texts(".answer-card")
    browser.click("#theme")
    dark = browser.run("document.documentElement.dataset.theme")
    browser.go(browser.run("location.href"))
    browser.run("location.reload()")
    browser.wait("document.querySelector('.copy')")
    assert browser.run("document.documentElement.dataset.theme") == dark
    browser.run("localStorage.removeItem('phsa-theme')")
    assert smollm2_page.answers() == [said] and browser.texts(".answer-card") == seen
    assert browser.texts("#compare tr")[0].startswith("PHSA\t4\t")
    # It goes on from there: sources, explorer, the next question.
    browser.click(".source")
    assert browser.text("#reader-name") == "lighthouse.txt"
    browser.run("document.querySelector('#reader-close').click()")
    smollm2_page.switch("dense", max_tokens=3)
    smollm2_page.ask("And then?")
    body = sent(browser, "/v1/chat/completions")[-1]
    assert [m["content"] for m in body["messages"]][1:] == [said, "And then?"]
    smollm2_page.explore()
    browser.click("#tab-chat")

    browser.click("#new")
    assert smollm2_page.answers() == [] and browser.run("location.hash") == ""
    smollm2_page.ask("Something else?")
    browser.wait("location.hash.length > 1")
    browser.click("#conversations-open")
    browser.wait("document.querySelectorAll('#kept .open').length >= 2")
    assert browser.texts("#kept .open span")[:2] == ["Something else?", "Who built the lighthouse?"]
    browser.click("#kept li:nth-child(2) .open")
    browser.wait("document.querySelectorAll('.copy').length === 2")
    assert smollm2_page.answers()[0] == said
    browser.click("#conversations-open")
    browser.wait("document.querySelector('#conversations').open")
    for _ in range(2):
        count = browser.run("document.querySelectorAll('#kept .open').length")
        browser.click("#kept .remove")
        browser.wait(f"document.querySelectorAll('#kept .open').length === {count - 1}")
    assert smollm2_page.answers() == []  # what was open is gone
    browser.press("Escape")
    assert browser.run("!document.querySelector('#conversations').open")


MARKDOWN = {
    "one\ntwo\n\nthree": "<p>one<br>two</p><p>three</p>",
    "# A *b*\n## C ##\ntext": "<h3>A <em>b</em></h3><h4>C</h4><p>text</p>",
    "**a** __b__ *c* _d_ ~~e~~ `f*g*`": "<p><strong>a</strong> <strong>b</strong> <em>c</em> <em>d</em> <del>e</del> "
    "<code>f*g*</code></p>",
    "snake_case_name 2 * 3 * 4 \\*no\\*": "<p>snake_case_name 2 * 3 * 4 *no*</p>",
    "**a *b* c**": "<p><strong>a <em>b</em> c</strong></p>",
    "- a\n- b\n  - c\n- d": "<ul><li>a</li><li>b<ul><li>c</li></ul></li><li>d</li></ul>",
    "3. a\n4. b": '<ol start="3"><li>a</li><li>b</li></ol>',
    "- a\n\n  b": "<ul><li><p>a</p><p>b</p></li></ul>",
    "> a\n> - b": "<blockquote><p>a</p><ul><li>b</li></ul></blockquote>",
    "a | b\n--|--\n`c` | d": '<div class="table"><table><tr><th>a</th><th>b</th></tr><tr><td><code>c</code></td>'
    "<td>d</td></tr></table></div>",
    "---": "<hr>",
    "<b>x</b> &amp; <script>": "<p>&lt;b&gt;x&lt;/b&gt; &amp;amp; &lt;script&gt;</p>",
    "![x](http://e.org/x.png)": '<p><a href="http://e.org/x.png" title="http://e.org/x.png" target="_blank" '
    'rel="noopener noreferrer nofollow">x</a></p>',
    "[x](javascript:alert(1)) [y](data:text/html,z)": "<p>[x](javascript:alert(1)) [y](data:text/html,z)</p>",
    "https://e.org/a.": '<p><a href="https://e.org/a" title="https://e.org/a" target="_blank" '
    'rel="noopener noreferrer nofollow">https://e.org/a</a>.</p>',
    "```py\nx = '<b>'\n\n# y\n```\nz": '<div class="code"><div class="code-head"><span class="soft">py</span>'
    '<button type="button">Copy</button></div><pre tabindex="-1"><code>x = \'&lt;b&gt;\'\n\n# y</code></pre></div>'
    "<p>z</p>",
}


def test_markdown_becomes_the_elements_that_it_means_and_no_others(page):
    browser = page.browser
    browser.run("(import('/markdown.js').then(found => { window.markdown = found; }), 0)")
    browser.wait("window.markdown")
    drawn = """((text, whole) => {
      const box = document.createElement("div"), drawing = markdown.createMarkdown(box);
      for (let end = whole ? text.length : 0; end <= text.length; end++) drawing.draw(text.slice(0, end));
      return box.innerHTML.replaceAll(' class=""', "");
    })(arguments[0], arguments[1])"""
    for text, html in MARKDOWN.items():
        assert browser.run(drawn, text, True) == html
        assert browser.run(drawn, text, False) == html, "drawn as it came"
    # Anything at all: it ends, and makes nothing that could load or run something.
    browser.run("""(() => {
      const parts = ["a", " ", "\\n", "\\n\\n", "*", "**", "_", "`", "```", "~~", "[", "]", "](", ")", "!", "<",
        ">", "> ", "- ", "1. ", "  ", "    ", "|", "|-|", "#", "\\\\", "http://", "javascript:", "\\u{1f41d}", "\\0",
        "<img src=x>"];
      const allowed = new Set(("P BR STRONG EM DEL CODE A UL OL LI BLOCKQUOTE HR H3 H4 H5 H6 DIV SPAN BUTTON PRE " +
        "TABLE TBODY TR TH TD").split(" "));
      let seed = 1;
      const random = n => (seed = (seed * 1103515245 + 12345) % 2147483648) % n;
      const wrong = [];
      for (let i = 0; i < 3000; i++) {
        let text = "";
        for (let n = random(60); n > 0; n--) text += parts[random(parts.length)];
        const box = document.createElement("div");
        markdown.createMarkdown(box).draw(text);
        for (const e of box.querySelectorAll("*")) {
          const fine = allowed.has(e.tagName) && [...e.attributes].every(a =>
            ["class", "href", "title", "target", "rel", "type", "tabindex", "start"].includes(a.name));
          if (!fine || (e.href && !/^(https?|mailto):/.test(e.href))) wrong.push(text);
        }
      }
      for (const part of parts) {
        markdown.createMarkdown(document.createElement("div")).draw(part.repeat(4000));
        markdown.createMarkdown(document.createElement("div")).draw((part + "a").repeat(4000));
      }
      window.wrong = wrong;
    })()""")
    assert browser.run("window.wrong") == []


def test_few_stops_lie_on_the_way_of_the_tab_key(page, document):
    browser = page.browser
    stops = """[...document.querySelectorAll("button, input, select, textarea, summary, a, [tabindex]")].filter(e =>
      e.tabIndex >= 0 && !e.disabled && e.checkVisibility({ visibilityProperty: true })).length"""
    page.switch("phsa", **SMALL, max_tokens=60)
    page.attach(document)
    page.ask("Who?")
    browser.run("document.querySelector('#more').open = false")
    # Three of the answer and its question at most: its text adds none, whatever it links to.
    assert browser.run(stops) <= 23
    page.explore()
    assert browser.run("document.querySelectorAll('.queries button').length") > 20
    assert browser.run(stops) <= 14
    browser.run("[...document.querySelectorAll('.queries button')].find(e => e.tabIndex === 0).focus()")
    browser.press("ArrowRight", "ArrowRight")
    assert browser.run("document.activeElement === document.querySelectorAll('.queries button')[2]")


def test_a_block_that_is_chosen_is_scrolled_to(page, tmp_path):
    browser = page.browser
    explore_long_text(page, tmp_path)
    for css in (".top button", f'.map [data-b="{page.blocks("hot")[5]}"]'):
        browser.run("scrollTo(0, 0)")
        browser.click(css)
        box = """(css => (r => [r.top, r.bottom])(document.querySelector(css).getBoundingClientRect()))"""
        top, bottom = browser.run(box + "('.text .pin')")
        assert top >= 0 and bottom <= 900
        (top, bottom), (first, last) = browser.run(f"['.map .pin', '.map'].map({box})")
        assert top >= first - 1 and bottom <= last + 1
        browser.press("Escape")


def test_it_fits_a_phone(page, document):
    browser = page.browser
    browser.resize(390, 844, mobile=True)
    page.switch("phsa", **SMALL, max_tokens=12)
    page.attach(document)
    page.ask("Who built the hive, and why, and when, and how long did it take them to finish it?")
    outside = """[...document.querySelectorAll('button, input, textarea, select, label, p, h2')].filter(e => {
      const box = e.getBoundingClientRect();
      return box.width > 1 && (box.left < 0 || box.right > 390) && !e.closest('.scroll');
    }).map(e => e.outerHTML.slice(0, 80))"""
    assert browser.run("document.documentElement.scrollWidth") == 390 and browser.run(outside) == []
    page.explore()
    assert browser.run("document.documentElement.scrollWidth") == 390 and browser.run(outside) == []
    # A tap on a block opens its sheet at the bottom.
    assert not browser.run("document.querySelector('.detail').checkVisibility()")
    browser.click(f'.map [data-b="{page.blocks("hot")[0]}"]')
    sheet = browser.run("(r => [r.left, r.right, r.bottom])(document.querySelector('.detail').getBoundingClientRect())")
    assert sheet == [0, 390, 844]
    browser.click(".detail .close")
    assert not browser.run("document.querySelector('.detail').checkVisibility()")


def test_dark_and_light_follow_the_system_until_switched(page):
    browser = page.browser
    brightness = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).reduce((a, b) => a + Number(b), 0) / 3"
    features = {"dark": [{"name": "prefers-color-scheme", "value": "dark"}], "light": []}
    browser.devtools("Emulation.setEmulatedMedia", features=features["light"])
    assert browser.run(brightness) > 200
    browser.devtools("Emulation.setEmulatedMedia", features=features["dark"])
    browser.wait(f"{brightness} < 60")
    browser.click("#theme")
    assert browser.run(brightness) > 200
    assert browser.run("document.querySelector('#theme').getAttribute('aria-pressed')") == "false"
    browser.run("localStorage.removeItem('phsa-theme')")
    browser.devtools("Emulation.setEmulatedMedia", features=features["light"])


def test_it_works_with_the_keyboard_alone(page):
    browser = page.browser
    page.switch("phsa", **SMALL, max_tokens=2)
    browser.run("document.querySelector('#question').focus()")
    browser.type("#question", "Who?")
    browser.press("Enter")
    page.browser.wait("document.querySelectorAll('.answer-card').length === 1")
    page.done()
    unnamed = """[...document.querySelectorAll('button, input, textarea, select')].filter(e =>
      !(e.labels?.length || e.ariaLabel || e.textContent.trim())).map(e => e.outerHTML)"""
    assert browser.run(unnamed) == []
    browser.run("document.querySelector('.explore').focus()")
    browser.press("Enter")
    page.explored()
    assert browser.run("document.activeElement.id") == "tab-explorer"
    browser.press("ArrowLeft")
    assert browser.run("document.activeElement.id") == "tab-chat" and browser.run(
        "document.querySelector('#explorer').hidden"
    )
    assert browser.run(unnamed) == []


def test_the_page_that_inspect_writes_draws_the_same(chromium, tiny, tmp_path, document):
    path = tmp_path / "page.html"
    budgets = ("--init", 16, "--local", 32, "-K", 2)
    done = run_phsa("inspect", "-m", tiny, "-f", document, "--last", 2, *budgets, "--json", "--html", path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    chromium.requests(), chromium.log("browser")
    query = found["queries"][1]
    (head,) = query["layers"][0]["heads"]
    block = head["blocks"][1]
    chromium.go(f"{path.as_uri()}#query={query['position']}&layer=0&block={block}")
    assert chromium.run("[...document.querySelectorAll('.map .hot')].map(e => Number(e.dataset.b))") == head["blocks"]
    assert chromium.text("h1") == "What the attention read" and chromium.text(".detail h3") == f"Block {block}"
    assert f"{head['scores'][1]:.3f}" in chromium.text(".detail")
    assert f"block={block}" in chromium.run("location.hash")
    chromium.press("ArrowRight")
    assert f"block={block + 1}" in chromium.run("location.hash")
    assert chromium.log("browser") == []
    assert {url.split("#")[0] for url in chromium.requests()} == {path.as_uri()}
