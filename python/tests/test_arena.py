"""The arena's tables: tasks, metrics, runs that go on, and the page."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import write_model

pytest.importorskip("transformers")

import phsa.arena.__main__ as command
from phsa.arena import longbench, report, statistics, tasks
from phsa.arena.attend import NAME, Pass, Text, read
from phsa.arena.calibrate import calibrate
from phsa.arena.rules import RULES
from phsa.arena.run import Budget, Entry, Records, Table, entries, read_records
from phsa.hf.load import load_model, load_tokenizer

TEXT = "A lighthouse stands by the sea, and its keeper counts the ships; none is lost. Why? He lights the lamp! " * 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("arena")
    write_model(path / "model", layers=2, hidden=128, kv_heads=1, context=4096)
    (path / "prose.txt").write_text(TEXT, encoding="utf-8")
    tokens = load_tokenizer(str(path / "model"))(TEXT, add_special_tokens=False)["input_ids"]
    lines: list[dict[str, Any]] = [
        {"format": "phsa niah samples 1", "vocabulary": 300, "punctuation": {"en+zh": [5, 9]}}
    ]
    for i in range(3):
        record = {"task": "single_2", "length": 256, "sample": i, "attention": {"attention": "dense"}}
        answer = tokens[17 * i + 3 : 17 * i + 8]
        part = tokens[10 * i : 10 * i + 240]
        lines.append({"tokens": part, "answer_tokens": answer, "free_tokens": 1, "records": [record]})
    (path / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    rows = [
        {"context": TEXT[:900], "input": "Who counts?", "answers": ["the keeper", "keeper"], "all_classes": None}
    ] * 2
    (path / "multifieldqa_en.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def table(folder: Path) -> Table:
    model = load_model(str(folder / "model"), torch.float32).eval()
    model.set_attn_implementation(NAME)
    tokenizer = load_tokenizer(str(folder / "model"))
    marks = tasks.Marks.of(model.config.vocab_size, tokenizer, "en+zh", {"en+zh": [5, 9]}, True)
    ids = tokenizer(TEXT[400:], add_special_tokens=False)["input_ids"][:200]
    learned = calibrate(model, ids, True, 3, None, "tiny")
    return Table(model, tokenizer, marks, tail=24, calibration=learned, learned="tiny")


def needles(folder: Path) -> list[tasks.Sample]:
    return list(tasks.needles(str(folder / "samples.jsonl"), 24, None))


ALL = [name for name in RULES if name != "dense"]


def without_time(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if "seconds" not in name}


def test_dense_is_the_model_itself(folder: Path, table: Table) -> None:
    sample = needles(folder)[0]
    plain = copy.deepcopy(table.model)
    plain.config = copy.deepcopy(table.model.config)
    plain.set_attn_implementation("sdpa")
    whole = torch.tensor([[*sample.text, *sample.question, *sample.answer]])
    with torch.no_grad():
        logits = plain(whole).logits[0, sample.prompt - 1 : -1]
    want = torch.nn.functional.cross_entropy(logits, torch.tensor(sample.answer), reduction="none")[1:].mean()
    (found,) = table.answers(sample, [Entry("dense", "dense", "dense", None)])
    assert found["nll"] == pytest.approx(float(want), abs=1e-4)
    assert found["score"] == float((logits.argmax(-1) == torch.tensor(sample.answer))[1:].all())
    assert found["read"]["token_share"] == found["read"]["byte_share"] == 1


def test_answers_do_not_depend_on_who_else_is_asked(folder: Path, table: Table) -> None:
    sample = needles(folder)[0]
    found = entries(ALL, [Budget(0.3)], ["dense"], "all")
    together = {json.dumps(without_time(r)) for r in table.answers(sample, found)}
    alone = {json.dumps(without_time(r)) for entry in reversed(found) for r in table.answers(sample, [entry])}
    assert len(together) == len(found) and together == alone


@pytest.mark.parametrize("question", ["rule", "dense"])
def test_a_large_budget_answers_as_dense_attention_does(folder: Path, table: Table, question: str) -> None:
    sample = needles(folder)[1]
    other = Table(table.model, table.tokenizer, table.marks, question, 24, table.calibration, "tiny")
    # A sampler samples, whatever it may spend; the others have more here than there is.
    found = entries([name for name in ALL if name != "magicpig"], [Budget(30.0)], ["dense"], "all")
    dense, *answers = other.answers(sample, found)
    assert dense["rule"] == "dense" and len(answers) == len(found) - 1
    for answer in answers:
        assert answer["nll"] == pytest.approx(dense["nll"], abs=1e-3), answer["rule"]


def test_a_dense_question_is_read_densely_and_not_counted(folder: Path, table: Table) -> None:
    sample = needles(folder)[0]
    other = Table(table.model, table.tokenizer, table.marks, "dense", 24)
    (found,) = other.answers(sample, [Entry("streaming", "dense", "streaming", Budget(0.1))])
    assert found["read_question"]["token_share"] == 1 and found["read"]["token_share"] == pytest.approx(0.1, abs=0.02)
    (by_rule,) = table.answers(sample, [Entry("streaming", "dense", "streaming", Budget(0.1))])
    assert by_rule["read_question"]["token_share"] == pytest.approx(0.1, abs=0.02)
    assert by_rule["nll"] != found["nll"]


def test_a_stopped_run_goes_on_and_repeats_nothing(folder: Path, table: Table, tmp_path: Path) -> None:
    samples, found = needles(folder), entries(["phsa", "oracle"], [Budget(0.2), Budget(0.4)], ["dense"], "answer")
    header = table.header("tiny")
    whole = tmp_path / "whole.jsonl"
    assert table.run(samples, found, Records(whole, header), quiet=True) == 15
    lines = whole.read_text().splitlines(keepends=True)
    cut = tmp_path / "cut.jsonl"
    cut.write_text("".join(lines[:7]) + lines[7][:30])  # killed while writing
    assert table.run(samples, found, Records(cut, header), quiet=True) == 9
    assert table.run(samples, found, Records(cut, header), quiet=True) == 0
    both = [sorted(json.dumps(without_time(r)) for r in read_records([str(path)])[1]) for path in (whole, cut)]
    assert len(both[0]) == 15 and both[0] == [line.replace("cut.jsonl", "whole.jsonl") for line in both[1]]
    # More of anything is asked for: only that is computed.
    more = entries(["phsa", "oracle"], [Budget(0.2), Budget(0.4), Budget(top_k=2)], ["dense"], "all")
    added = table.run(samples[:2], more, Records(cut, header), quiet=True)
    assert added == 2 * (2 + 2 * 3)
    with pytest.raises(ValueError, match="another weights"):
        Records(cut, {**header, "weights": "others"})
    (tmp_path / "no.jsonl").write_text("hello\n")
    with pytest.raises(ValueError, match="not a file of the arena"):
        Records(tmp_path / "no.jsonl", header)


def test_entries_are_rules_in_their_phases() -> None:
    found = entries(["phsa", "quest", "minference"], [Budget(0.1)], ["dense", "xattention"], "all")
    got = [(e.rule, e.prefill, e.answer) for e in found]
    assert got == [
        ("dense", "dense", "dense"),
        ("phsa", "dense", "phsa"),
        ("phsa", "xattention", "phsa"),
        ("phsa", "phsa", "phsa"),
        ("quest", "dense", "quest"),
        ("quest", "xattention", "quest"),
        ("minference", "minference", "dense"),
    ]


def test_k_is_the_papers_setting_and_all_rules_spend_as_much() -> None:
    sample = tasks.Sample("single_2", 4096, 0, (1,) * 3800, (1,) * 64, (1,) * 5)
    long = tasks.Sample("single_2", 32768, 0, (1,) * 32000, (1,) * 64, (1,) * 5)
    assert Budget(top_k=4).tokens(sample) == 16 + 128 + 64 + 8
    assert Budget(top_k=16).tokens(long) == 128 + 512 + 256 + 8
    assert Budget(0.01).tokens(long) == round(0.01 * 32069)


def test_perplexity_scores_the_end_of_each_stretch(folder: Path, table: Table) -> None:
    path = str(folder / "prose.txt")
    samples = list(tasks.perplexity("prose", path, table.tokenizer, 300, 3, 40, 24))
    assert [len(s.text + s.question + s.answer) for s in samples] == [300] * 3 and len(samples[0].answer) == 40
    assert len({s.digest for s in samples}) > 1
    (found,) = table.answers(samples[1], [Entry("dense", "dense", "dense", None)])
    assert found["score"] == pytest.approx(-found["nll"], abs=1e-5)
    with pytest.raises(ValueError, match="tokens"):
        list(tasks.perplexity("prose", path, table.tokenizer, 10**6, 1, 40, 24))


def test_written_answers_are_those_of_generate(folder: Path, table: Table) -> None:
    sample = next(iter(tasks.long_bench(str(folder), ["multifieldqa_en"], table.tokenizer, 600, 24, 1)))
    assert "Who counts?" in table.tokenizer.decode(sample.question) and sample.tokens == 64
    sample = dataclasses.replace(sample, tokens=10)
    wanted = entries(ALL, [Budget(0.3)], ["dense"], "answer")
    found = {r["rule"] + r["prefill"]: r for r in table.answers(sample, wanted)}
    plain = copy.deepcopy(table.model)
    plain.config = copy.deepcopy(table.model.config)
    plain.set_attn_implementation("sdpa")
    prompt = torch.tensor([sample.text + sample.question])
    options = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "pad_token_id": 0}
    out = plain.generate(prompt, max_new_tokens=10, **options)[0, sample.prompt :]
    assert found["densedense"]["text"] == table.tokenizer.decode(out, skip_special_tokens=True)
    assert len(found) == len(wanted) == len(RULES)
    for record in found.values():
        assert 0 <= record["score"] <= 1 and record["read"]["tokens"] > 0


def test_long_prompts_lose_their_middle(folder: Path, table: Table) -> None:
    (short,) = tasks.long_bench(str(folder), ["multifieldqa_en"], table.tokenizer, 100, 24, 1)
    text = table.tokenizer.decode(short.text + short.question)
    assert "Read the following text" in text and "Who counts?" in text and short.prompt < 160
    assert longbench.truncated(list(range(10)), 4) == [0, 1, 8, 9] and longbench.truncated([1, 2], 4) == [1, 2]


# LongBench's metrics, by hand


def test_f1_counts_words_without_articles_and_marks() -> None:
    assert longbench.qa_f1("The keeper, of ships!", "a keeper") == pytest.approx(2 * (1 / 3) * 1 / (1 / 3 + 1))
    assert longbench.qa_f1("no", "yes") == 0
    assert longbench.score("multifieldqa_en", "keeper", ["nobody", "the keeper"], None) == 1


def test_f1_of_chinese_counts_words() -> None:
    pytest.importorskip("jieba")
    assert longbench.qa_f1_zh("厦门大学。", "厦门大学") == 1
    assert 0 < longbench.qa_f1_zh("在厦门大学", "厦门大学") < 1


def test_rouge_l_is_the_f_of_the_longest_common_subsequence() -> None:
    # Common: "the cat mat" of 6 different words here and 5 there.
    got = longbench.rouge_l("the cat sat on a mat", "the black cat mat rests")
    assert got == pytest.approx(2 * (3 / 6) * (3 / 5) / (3 / 6 + 3 / 5), abs=1e-6)
    assert longbench.rouge_l("", "x") == 0
    # Sentences of the reference are looked for one by one.
    assert longbench.rouge_l("b c. a", "a. b c") == pytest.approx(1, abs=1e-6)


def test_classification_divides_by_the_classes_that_are_named() -> None:
    classes = ["Food", "Food and drink", "Sport"]
    assert longbench.classification("Sport", "Sport", classes) == 1
    assert longbench.classification("Sport or Food", "Sport", classes) == 0.5
    assert longbench.classification("Food and drink", "Food and drink", classes) == 1  # "Food" is a part of it
    assert longbench.classification("Art", "Sport", classes) == 0
    assert longbench.score("trec", "\n\nSport\nFood", ["Sport"], classes) == 1  # the first line counts


def test_numbers_are_right_as_a_share_of_those_named() -> None:
    assert longbench.count("12, perhaps 13", "12") == 0.5
    assert longbench.count("none", "12") == 0
    assert longbench.retrieval("Paragraph 3", "Paragraph 3") == 1
    assert longbench.retrieval("3 or 30", "Paragraph 30") == 0.5
    assert longbench.retrieval_zh("段落7", "段落7") == 1 and longbench.retrieval_zh("段落8", "段落7") == 0


def test_code_is_compared_by_its_first_line_that_is_no_comment() -> None:
    assert longbench.code_similarity("# a comment\nreturn x\nmore", "return x") == 1
    assert longbench.code_similarity("abcd", "abce") == 0.75
    assert longbench.code_similarity("", "x") == 0


def test_metrics_are_those_of_the_packages_that_longbench_uses() -> None:
    harness = pytest.importorskip("lm_eval.tasks.longbench.metrics")
    texts = [*TEXT[:400].split(", "), "He lights. The lamp", "its keeper counts. . ships", "a b c d", "d c b a b"]
    for a in texts:
        for b in texts:
            assert longbench.rouge_l(a, b) == pytest.approx(harness.rouge_score(a, b), abs=1e-9)
            assert longbench.qa_f1(a, b) == pytest.approx(harness.qa_f1_score(a, b))
            assert longbench.code_similarity(a, b) == pytest.approx(harness.code_sim_score(a, b))
    zh = ["厦门大学，1921年", "全国美国文学研究会。会议", "会议在厦门大学召开"]
    for a in zh:
        for b in zh:
            assert longbench.qa_f1_zh(a, b) == pytest.approx(harness.qa_f1_zh_score(a, b))
            assert longbench.rouge_l_zh(a, b) == pytest.approx(harness.rouge_zh_score(a, b), abs=1e-9)


def test_all_sets_of_the_paper_have_prompts_and_metrics() -> None:
    paper = [one for one in longbench.SETS.values() if one.paper]
    assert len(longbench.SETS) == 21 and len(paper) == 14
    for one in longbench.SETS.values():
        assert "{context}" in one.prompt and one.metric in longbench.METRICS
        one.prompt.format(context="{}", input="{x}")


def test_rows_come_from_longbench_and_from_what_it_was_drawn_from(tmp_path: Path) -> None:
    meeting = {
        "meeting_transcripts": [{"speaker": "A", "content": "Hello."}, {"speaker": "B", "content": "Yes."}],
        "general_query_list": [{"query": "Who?", "answer": "A and B"}],
        "specific_query_list": [{"query": "What?", "answer": "Yes"}],
    }
    (tmp_path / "upstream_qmsum_test.jsonl").write_text(json.dumps(meeting) + "\n")
    summary = {"av_num": 4, "summary": "kurz"}
    segment = {"av_num": 4, "speaker": [1, 2], "context": [["一。", "二。"], ["三。"]]}
    (tmp_path / "upstream_vcsum_long_test.txt").write_text(json.dumps(summary) + "\n")
    (tmp_path / "upstream_vcsum_short_test.txt").write_text(json.dumps(segment) + "\n")
    assert longbench.present(tmp_path) == ["qmsum", "vcsum"]
    assert [row["input"] for row in longbench.rows(tmp_path, "qmsum")] == ["Who?", "What?"]
    assert longbench.rows(tmp_path, "qmsum")[0]["context"] == "A: Hello.\nB: Yes."
    assert longbench.rows(tmp_path, "vcsum") == [{"context": "1：一。二。\n2：三。", "input": "", "answers": ["kurz"]}]
    with pytest.raises(ValueError, match="no trec"):
        longbench.rows(tmp_path, "trec")
    (tmp_path / "trec.jsonl").write_text('{"context": "x"}\n')
    with pytest.raises(ValueError, match="lacks answers, input"):
        longbench.rows(tmp_path, "trec")


# Statistics and the page


def test_intervals_are_wilsons_and_bonett_and_prices() -> None:
    low, high = statistics.interval([1.0] * 8 + [0.0] * 2)
    assert (low, high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))
    a, b = [1.0] * 6 + [0.0] * 4, [1.0] * 2 + [0.0] * 8
    mean, low, high = statistics.difference(a, b)
    # (5 - 1) / 12, and the variance of (4, 0) of 10 with one added to each.
    half = statistics.Z * math.sqrt((6 / 12 - (4 / 12) ** 2) / 12)
    assert mean == pytest.approx(0.4) and (low, high) == (pytest.approx(1 / 3 - half), pytest.approx(1 / 3 + half))
    mean, low, high = statistics.difference([1.0, 2.0, 3.5], [0.5, 1.0, 2.0])
    assert mean == pytest.approx(1.0) and high - mean == pytest.approx(statistics.Z * 0.5 / math.sqrt(3))


def test_ranks_are_paired_and_equals_share_one() -> None:
    tables = [{"a": [1.0, 0.0, 1.0, 1.0], "b": [0.0, 0.0, 1.0, 0.0], "c": [0.0, 0.0, 1.0, 0.0]}]
    found = statistics.mean_ranks(tables, 200)
    assert found["a"][0] == 1 and found["b"][0] == found["c"][0] == 2.5
    # b and c have the same samples in every draw: they always tie, and never lead a.
    assert found["b"] == found["c"] and found["a"][2] <= 2 <= found["b"][1]


def test_the_page_regenerates_to_the_byte(folder: Path, table: Table, tmp_path: Path, capsys: Any) -> None:
    samples = needles(folder) + list(
        tasks.perplexity("prose", str(folder / "prose.txt"), table.tokenizer, 300, 2, 40, 24)
    )
    found = entries(["phsa", "phsa:parts=8", "quest", "xattention"], [Budget(0.1), Budget(0.3)], ["dense"], "answer")
    path = tmp_path / "records.jsonl"
    table.run(samples, found, Records(path, table.header("tiny<&>")), quiet=True)
    pages = []
    for name in ("a.html", "b.html"):
        command.main(["report", str(path), "--html", str(tmp_path / name), "--draws", "50"])
        pages.append((tmp_path / name).read_text())
    assert pages[0] == pages[1]
    assert pages[0].count("<svg") == 4 and "tiny<&>" not in pages[0] and "tiny&lt;&amp;&gt;" in pages[0]
    assert "<script" not in pages[0] and "Mean rank by score" in pages[0] and "Mean rank by nll" in pages[0]
    assert "phsa:parts=8" in pages[0]
    import xml.etree.ElementTree as ElementTree

    for svg in pages[0].split("<svg")[1:]:
        ElementTree.fromstring("<svg" + svg.split("</svg>")[0] + "</svg>")
    document = tmp_path / "arena.md"
    document.write_text(f"before\n{report.BEGIN}\nobsolete\n{report.END}\nafter\n")
    command.main(["report", str(path), "--into", str(document), "--draws", "50"])
    text = document.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "obsolete" not in text
    assert "| quest | answer | 10 % | 3 |" in text and "python -m phsa.arena table --model" in text
    assert "| xattention | prefill | 30 % |" in text
    capsys.readouterr()


def test_the_command_makes_a_table_and_goes_on(folder: Path, tmp_path: Path, capsys: Any) -> None:
    out = str(tmp_path / "o.jsonl")
    args = [
        "table",
        "--model",
        str(folder / "model"),
        "--niah",
        str(folder / "samples.jsonl"),
        "--tail",
        "24",
        "--quiet",
    ]
    args += [
        "--rules",
        "phsa,double-sparsity,hashattention",
        "--budget",
        "0.2",
        "--dtype",
        "float32",
        "--device",
        "cpu",
    ]
    args += ["--calibration", str(folder / "prose.txt"), "--calibration-tokens", "128", "--hash-steps", "2"]
    command.main([*args, "--out", out, "--samples", "1"])
    out_lines = capsys.readouterr().out
    assert "double-sparsity" in out_lines and "dense" in out_lines
    first = Path(out).read_text()
    command.main([*args, "--out", out, "--samples", "2"])
    assert Path(out).read_text().startswith(first) and len(Path(out).read_text().splitlines()) == 1 + 2 * 4
    capsys.readouterr()


def test_punctuation_may_come_from_a_file_of_samples(folder: Path, tmp_path: Path, capsys: Any) -> None:
    args = ["table", "--model", str(folder / "model"), "--perplexity", f"prose={folder / 'prose.txt'}", "--quiet"]
    args += ["--length", "200", "--scored", "20", "--samples", "1", "--rules", "phsa,xattention", "--budget", "0.3"]
    args += ["--dtype", "float32", "--device", "cpu", "--punctuation-from", str(folder / "samples.jsonl")]
    command.main([*args, "--out", str(tmp_path / "o.jsonl")])
    lines = capsys.readouterr().out.splitlines()
    # A rule for the prefill is shown with what the prefill read.
    assert len(lines) == 3 and " xattention " in lines[2] and "tokens 100.0 %" not in lines[2]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (["--rules", "quist"], "allowed: dense"),
        (["--budget", "2"], "from 1e-05 to 1"),
        (["--rules", "double-sparsity"], "--calibration FILE"),
        (["--niah", "/nowhere.jsonl"], "nowhere"),
        (["--model", "/nowhere"], "nowhere"),
        (["--perplexity", "prose"], "NAME=FILE"),
        (["--tail", "-1"], "--tail"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(folder: Path, tmp_path: Path, change: list[str], word: str) -> None:
    args = {
        "--model": str(folder / "model"),
        "--rules": "phsa",
        "--budget": "0.1",
        "--niah": str(folder / "samples.jsonl"),
    }
    args.update(dict([change]))
    with pytest.raises(SystemExit) as stopped:
        command.main(["table", *[x for pair in args.items() for x in pair], "--out", str(tmp_path / "o.jsonl")])
    assert (
        isinstance(stopped.value.code, str) and stopped.value.code.startswith("phsa: ") and word in stopped.value.code
    )


def test_the_rules_table_of_the_document_is_the_codes() -> None:
    document = Path(__file__).resolve().parents[2] / "docs" / "arena.md"
    assert report.rules_table(list(RULES)) in document.read_text(encoding="utf-8")


def test_a_model_that_ignores_the_arena_is_refused(folder: Path, table: Table) -> None:
    other = load_model(str(folder / "model"), torch.float32).eval()
    with pytest.raises(ValueError, match="0 of 2 layers"):
        read(other, Pass(RULES["dense"](9), 9, 9, True, Text()), [1, 2, 3], None)
