"""The page of `phsa serve`, and the one that `phsa inspect` writes, in Chromium without a window."""

import json
import re

import pytest
from conftest import ROOT, run_phsa
from test_cli import write_gguf
from test_server import Server
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
    settings = {"attention": "phsa", "top_k": 3, "lambda": 0.5, "init_tokens": 16, "local_tokens": 32}
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
        placeholders = "['lambda', 'local', 'max-tokens', 'temperature'].map(id => document.getElementById(id).placeholder)"
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


def test_the_explorer_takes_a_long_document(page, tmp_path):
    browser = page.browser
    long = tmp_path / "long.txt"
    long.write_text(("The keeper wrote the weather into a blue book; it was cold. " * 140)[:8000])
    page.switch("phsa", max_tokens=3)
    page.attach(long)
    page.ask("What?")
    page.explore()
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
        chromium.wait("document.activeElement.id === 'key'")
        chromium.type("#key", "secret")
        chromium.press("Enter")
        page.loaded()
        page.switch("phsa", **SMALL, max_tokens=2)
        page.ask("Who?")
        assert len(page.answers()) == 1
    page.ask("And now?")
    assert "cannot be reached" in page.problem()


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
