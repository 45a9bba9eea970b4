"""`phsa inspect` and `phsa perplexity --recall`: what they say, and what users can get wrong."""

import json
import os
import resource
import subprocess

import pytest
from conftest import BIN, ROOT, run_phsa
from test_cli import refused, write_gguf

pytest.importorskip("gguf")

TEXT = ROOT / "bench/data/from_sand_hill_to_pine.txt"
# Budgets for a text of 200 tokens: something is left out.
SMALL = ("--init", 16, "--local", 32, "-K", 2)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "document.txt"
    path.write_text("Bees, wasps; and a hive. " * 8)
    return path


def page_data(path):
    page = path.read_text()
    begin = page.index('<script type="application/json" id="data">') + 42
    return json.loads(page[begin : page.index("</script>", begin)])


def test_the_table_the_json_and_the_page_say_the_same(tiny, document, tmp_path):
    page = tmp_path / "page.html"
    ask = ("inspect", "-m", tiny, "-f", document, "-p", "Who?", "--last", 3, *SMALL)
    table = run_phsa(*ask)
    assert table.returncode == 0, table.stderr
    done = run_phsa(*ask, "--json", "--html", page)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    data = page_data(page)
    assert found["text"] == data["text"] and "".join(found["text"]).startswith("<|im_start|>user\nBees, wasps;")
    assert len(found["queries"]) == len(data["queries"]) == 3
    assert f"recall {found['recall']:.4f}" in table.stdout
    for query, shown in zip(found["queries"], data["queries"], strict=True):
        assert query["position"] == shown["at"]
        assert f"Query {query['position']} " in table.stdout
        layer = query["layers"][0]
        init, local = layer["init"], layer["local"]
        assert init == [0, 1] and local[1] == query["position"] // 16 + 1 and local[0] == local[1] - 3
        assert layer["heads"][0]["blocks"] == shown["layers"][0][4][0]
        assert all(init[1] <= block < local[0] for block in layer["heads"][0]["blocks"])
        assert 0 < layer["heads"][0]["recall"] < 1
    punctuation = {i for i, text in enumerate(found["text"]) if text in set(",;.?<|>")}
    assert set(found["punctuation"]) == punctuation


def test_the_answer_is_that_of_run_and_its_tokens_are_queries(tiny, document):
    ask = ("-m", tiny, "-f", document, "-n", 5, "--attention", "phsa", *SMALL)
    inspected = json.loads(run_phsa("inspect", *ask, "--json").stdout)
    answered = json.loads(run_phsa("run", *ask, "--temp", 0, "--json").stdout)
    assert inspected["answer"] == answered["text"]
    assert [q["answer"] for q in inspected["queries"]] == [False] + [True] * (len(inspected["queries"]) - 1)
    assert len(inspected["queries"]) == min(5, answered["tokens"] + 1)


def test_auto_shows_phsa_where_the_model_carries_no_settings(tiny, document):
    done = run_phsa("inspect", "-m", tiny, "-f", document, "--json")
    assert json.loads(done.stdout)["attention"]["attention"] == "phsa"
    assert "phsa" in done.stderr.splitlines()[0]


def test_auto_shows_the_settings_that_the_model_carries(document, tmp_path):
    carried = {"attention": "quest", "init": 16, "local": 32, "top_k": 3, "dense_below": 64}
    model = write_gguf(tmp_path / "carries.gguf", phsa_settings=carried)
    done = run_phsa("inspect", "-m", model, "-f", document, "--json", "--last", 150)
    found = json.loads(done.stdout)
    assert {key: found["attention"][key] for key in carried} == carried
    for query in found["queries"]:
        (layer,) = query["layers"]
        assert ("init" in layer) == (query["position"] >= 64)
        assert len(layer["heads"][0]["blocks"]) == (
            0 if query["position"] < 64 else min(3, query["position"] // 16 - 3)
        )


@pytest.mark.parametrize("policy", ["infllm2", "infllm2-64", "streaming", "quest"])
def test_every_policy_can_be_inspected(tiny, document, policy, tmp_path):
    page = tmp_path / "page.html"
    budget = {"infllm2-64": (), "streaming": ("--init", 16, "--local", 16)}.get(policy, SMALL)
    ask = ("inspect", "-m", tiny, "-f", document, "--attention", policy, *budget, "--html", page)
    done = run_phsa(*ask, *(() if policy == "streaming" else ("--group-reduce", "none")))
    assert done.returncode == 0, done.stderr
    assert page_data(page)["attention"]["attention"] == policy


def test_what_cannot_be_inspected_is_refused(tiny, document, tmp_path):
    refused(run_phsa("inspect", "-m", tiny), "-p", "-f")
    refused(run_phsa("inspect", "-m", tiny, "-p", "x", "--attention", "dense"), "dense", "phsa")
    refused(run_phsa("inspect", "-m", tiny, "-p", "x", "--raw", "--last", 2, *SMALL), "--last", "1 tokens")
    long = tmp_path / "long.txt"
    long.write_text("word " * 100)
    refused(run_phsa("inspect", "-m", tiny, "-f", long, "--raw", "--attention", "phsa"), "500 tokens", "256")
    both = run_phsa("inspect", "-m", tiny, "-p", "x", "--attention", "phsa,quest")
    refused(both, "--attention")
    assert run_phsa("inspect", "-m", tiny, "-p", "x", "--last", 0).returncode == 2


def test_a_page_that_cannot_be_written_is_told_before_any_work(document, tmp_path):
    # There is no such model: the path is judged first.
    ask = ("inspect", "-m", tmp_path / "absent.gguf", "-f", document, "--html")
    refused(run_phsa(*ask, tmp_path), str(tmp_path))
    refused(run_phsa(*ask, "/dev/null"), "/dev/null")
    refused(run_phsa(*ask, tmp_path / "absent" / "page.html"), "page.html", "No such file", code=1)
    assert os.listdir(tmp_path) == []


def test_a_full_disk_leaves_no_half_page(tiny, document, tmp_path):
    page = tmp_path / "page.html"
    page.write_text("what was there before")

    def small_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

    done = subprocess.run(
        [BIN / "phsa", *map(str, ("inspect", "-m", tiny, "-f", document, "--html", page))],
        capture_output=True,
        text=True,
        preexec_fn=small_files,
        restore_signals=False,  # Python ignores SIGXFSZ: the write fails instead
    )
    assert done.returncode == 1 and "cannot be written" in done.stderr
    assert os.listdir(tmp_path) == ["page.html"] and page.read_text() == "what was there before"


def test_text_from_outside_stays_text(tiny, tmp_path):
    nasty = tmp_path / "nasty.txt"
    nasty.write_text("</script><script>alert(1)</script><!-- \u2028 \x1b[2J é 汉字 😀 " * 2)
    page = tmp_path / "page.html"
    done = run_phsa("inspect", "-m", tiny, "-f", nasty, "--raw", *SMALL, "--html", page)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert page.read_text().count("</script>") == 2
    assert "".join(page_data(page)["text"]) == nasty.read_text()


def perplexities(model, *args):
    done = run_phsa("perplexity", "-m", model, "-f", TEXT, *args, "--json")
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("kv_type", ["auto", "int8"])
def test_recall_is_one_where_everything_is_read(tiny, kv_type):
    flags = ("--init", 16, "--local", 16, "--recall", "--kv-type", kv_type)
    rows = perplexities(tiny, "-c", 200, "--attention", "dense,phsa", "-K", "100", *flags)
    for row in rows:
        assert row["recall"] == pytest.approx(1, abs=1e-4)
        assert row["recall_sparse"] is None and row["recall_sparse_by_layer"] == [None]
        assert row["read_share"] == 1 and row["sparsity"] == 0


def test_read_share_and_sparsity_are_there_without_recall(tiny):
    (row,) = perplexities(tiny, "-c", 200, "--attention", "phsa", *SMALL)
    assert "recall" not in row
    assert row["sparsity"] == pytest.approx(1 - (16 + 32 + 2 * 16) / 200)
    read = dense = 0
    for position in range(200):
        block = position // 16
        local = max(1, block - 2)  # block 0 is init
        dense += position + 1
        read += position + 1 if local - 1 <= 2 else 16 + position + 1 - local * 16 + 2 * 16
    assert row["read_share"] == pytest.approx(read / dense)


def test_more_blocks_hold_more_of_the_attention(smollm2):
    rows = perplexities(
        *(smollm2, "-c", 1024, "--attention", "dense,streaming,infllm2,phsa,quest", "-K", "2,8,32", "--recall"),
    )
    by_policy = {}
    for row in rows:
        by_policy.setdefault(row["attention"], []).append(row)
    assert by_policy["dense"][0]["recall"] == pytest.approx(1, abs=1e-5)
    assert by_policy["dense"][0]["read_share"] == 1
    (streaming,) = by_policy["streaming"]
    for policy in ("infllm2", "phsa", "quest"):
        found = by_policy[policy]
        assert [row["top_k"] for row in found] == [2, 8, 32]
        for less, more in zip([streaming, *found], found, strict=False):
            for name in ("recall", "recall_sparse", "read_share"):
                assert more[name] > less[name]
        for row in found:
            assert len(row["recall_by_layer"]) == 30
            assert sum(row["recall_by_layer"]) / 30 == pytest.approx(row["recall"], abs=1e-6)
            assert len(row["recall_by_kv_head"]) == 30 and len(row["recall_by_kv_head"][0]) == 3
            assert row["recall_sparse"] < row["recall"] < 1
    # What is chosen is worth reading: the window alone predicts worse.
    assert by_policy["phsa"][2]["ppl"] < streaming["ppl"]


def test_the_table_has_a_line_for_each_policy_and_k(tiny):
    done = run_phsa(
        "perplexity", "-m", tiny, "-f", TEXT, "-c", 100, "--attention", "dense,phsa", "-K", "1,2", "--recall"
    )
    rows = [line.split("|")[1:-1] for line in done.stdout.splitlines() if line.startswith("|")]
    assert [cell.strip() for cell in rows[0]][:2] == ["attention", "K"]
    assert [(row[0].strip(), row[1].strip()) for row in rows[2:]] == [("dense", "-"), ("phsa", "1"), ("phsa", "2")]
    assert {len(row) for row in rows} == {9}
