"""The harness's model `phsa`, and the tasks that need no network."""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("lm_eval", reason="lm_eval is not installed: the adapter for it is not tested")
pytest.importorskip("jieba", reason="jieba, which LongBench's metrics need, is not installed")

import lm_eval
import yaml
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

import phsa
import phsa.lm_eval as subject
from phsa.lm_eval import PhsaLM, adapter, data, metrics

GENERAL = {
    "phsa_local_gsm8k": 1319,
    "phsa_local_mathqa": 2985,
    "phsa_local_arc_challenge": 1172,
    "phsa_local_arc_easy": 2376,
    "phsa_local_hellaswag": 10042,
    "phsa_local_humaneval": 164,
    "phsa_local_lambada": 5153,
}
LONGBENCH = {"phsa_local_longbench_multifieldqa_zh": 200, "phsa_local_longbench_qmsum": 281}


# --- the tasks ---


@pytest.fixture(scope="module")
def manager() -> TaskManager:
    return TaskManager(include_path=subject.TASKS)


@pytest.fixture
def local_data() -> Path:
    try:
        return data.folder()
    except FileNotFoundError as error:
        pytest.skip(f"the local tasks are not tested: {error}")


def requests_of(task: Any, *, shots: int, rows: int = 3) -> list[tuple[Any, ...]]:
    task.set_config(key="num_fewshot", value=shots)
    task.set_fewshot_seed(1234)
    task.build_all_requests(limit=rows, rank=0, world_size=1)
    return [instance.args for instance in task.instances]


def names_in(group: str) -> list[str]:
    [path] = [p for p in subject.TASKS.glob("**/*.yaml") if f"group: {group}\n" in p.read_text(encoding="utf-8")]
    return yaml.safe_load(path.read_text(encoding="utf-8"))["task"]


@pytest.mark.usefixtures("local_data")
def test_every_local_task_builds_its_prompts(manager: TaskManager) -> None:
    loaded = manager.load(["phsa_local_general", "phsa_local_longbench"])
    assert sorted(loaded["tasks"]) == sorted(n for n in manager.all_subtasks if n.startswith("phsa_local_"))
    for name, task in loaded["tasks"].items():
        requests = requests_of(task, shots=0, rows=2)
        assert len(requests) >= 2, name
        assert all(isinstance(args[0], str) and args[0] for args in requests), name


@pytest.mark.usefixtures("local_data")
def test_the_local_tasks_have_all_the_rows_that_there_are(manager: TaskManager) -> None:
    for name, rows in {**GENERAL, **LONGBENCH}.items():
        assert len(manager.load(name)["tasks"][name].eval_docs) == rows, name
    for group, rows in {"phsa_local_mmlu": 57 * 20, "phsa_local_mmlu_val": 1542}.items():
        tasks = manager.load(group)["tasks"].values()
        assert (len(tasks), sum(len(task.eval_docs) for task in tasks)) == (57, rows)


@pytest.mark.usefixtures("local_data")
@pytest.mark.parametrize(
    ("name", "rows_of", "shots"),
    [
        ("gsm8k", data.gsm8k, 5),
        ("mathqa", data.mathqa, 4),
        ("arc_easy", lambda **_: data.arc(level="Easy"), 0),
        ("arc_challenge", lambda **_: data.arc(level="Challenge"), 4),
        ("lambada_openai", data.lambada, 2),
        ("mmlu_high_school_us_history", lambda **_: data.mmlu(subject="high_school_us_history"), 5),
        ("longbench_multifieldqa_zh", data.multifieldqa_zh, 0),
        ("longbench_qmsum", data.qmsum, 0),
    ],
)
def test_prompts_are_those_of_the_harness(
    manager: TaskManager, name: str, rows_of: Callable[..., data.Splits], shots: int
) -> None:
    # The harness's own task, on our rows.
    override: dict[str, Any] = {"task": name, "custom_dataset": rows_of}
    if name in ("mathqa", "arc_easy", "arc_challenge"):
        override |= {"training_split": None, "validation_split": "validation" if name == "arc_challenge" else None}
    theirs = manager._factory.build(manager.task_index[name], overrides=override, registry=manager.task_index)
    local = f"phsa_local_{name.removesuffix('_openai')}"
    ours = manager.load(local)["tasks"][local]
    assert requests_of(ours, shots=shots) == [
        tuple(_without_temperature(part) for part in args) for args in requests_of(theirs, shots=shots)
    ]
    assert list(ours.aggregation()) == list(theirs.aggregation())


def _without_temperature(part: Any) -> Any:
    """LongBench's tasks carry a temperature that `do_sample: false` makes void; the harness warns of it."""
    if isinstance(part, dict) and part.get("temperature") == 1:
        return {key: value for key, value in part.items() if key != "temperature"}
    return part


def test_hellaswag_is_written_as_the_harness_writes_it() -> None:
    from lm_eval.tasks.hellaswag.utils import preprocess

    for before, begun in [("A man sits.", "he"), ("Go! Is it far?", "the man in Paris"), ("One. Two.", "")]:
        want = preprocess(f"Label: {before} {begun.capitalize()}")
        assert data._capitalise_last_fragment(f"Label: {before} {begun}".strip()) == want


def test_arc_is_read_from_its_text(local_data: Path) -> None:
    originals = (local_data / "arc/ARC-Challenge-Test.jsonl").read_text(encoding="utf-8").splitlines()
    want = set()
    for row in map(json.loads, originals):
        choices = row["question"]["choices"]
        right = [choice["label"] for choice in choices].index(row["answerKey"])
        want.add((row["question"]["stem"], tuple(choice["text"] for choice in choices), right))
    got = {
        (row["question"], tuple(row["choices"]["text"]), int(row["answerKey"]) - 1)
        for row in data.arc(level="Challenge")["test"]
    }
    # The original's rows are here those with four choices, of all 1,172.
    assert (len(want), len(got), want - got) == (1150, 1172, set())


def test_the_papers_groups_name_tasks_that_the_harness_has(manager: TaskManager) -> None:
    general, longbench = names_in("phsa_paper_general"), names_in("phsa_paper_longbench")
    assert (len(set(general)), len(set(longbench))) == (15, 14)
    assert [name for name in general + longbench if name not in manager.all_tasks] == []


def test_missing_data_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PHSA_DATA", str(tmp_path / "no"))
    with pytest.raises(FileNotFoundError, match=r"PHSA_DATA=.*no is not a folder"):
        data.gsm8k()
    monkeypatch.setenv("PHSA_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"jsonl is missing; docs/lm_eval\.md says"):
        data.gsm8k()


def test_programs_pass_only_if_their_tests_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_SECONDS", 2.0)
    test = "def check(f):\n    assert f(2) == 4\ncheck(double)"
    body = {
        "    return 2 * x\n": 1.0,
        "    return x\n": 0.0,
        "    while True: pass\n": 0.0,
        "    raise SystemExit(0)\n": 0.0,
        "    return [0] * (1 << 40)\n": 0.0,
        "    return (\n": 0.0,
    }
    docs = [{"prompt": "def double(x):\n"}] * len(body)
    for programs, share in zip(metrics.build_predictions([[b] for b in body], docs), body.values(), strict=True):
        assert metrics.pass_at_1([test], [programs]) == {"pass@1": share}, programs
    both = metrics.build_predictions([["    return 2 * x\n", "    return x\n"]], docs[:1])
    assert metrics.pass_at_1([test], both) == {"pass@1": 0.5}


@pytest.mark.usefixtures("local_data")
def test_humanevals_own_solutions_pass(manager: TaskManager) -> None:
    task = manager.load("phsa_local_humaneval")["tasks"]["phsa_local_humaneval"]
    for doc in list(task.eval_docs)[:4]:
        programs = metrics.build_predictions([[doc["canonical_solution"]]], [doc])
        assert metrics.pass_at_1([task.doc_to_target(doc)], programs) == {"pass@1": 1.0}


# --- the model, on an engine that is made up ---


class FakeLLM:
    """Letters are tokens. A text is as likely as its letters' numbers say; an answer counts up from the last letter."""

    context = 40
    model_context = 50
    vocab_size = 256
    eos_ids = (3,)
    bos_id = 2
    add_bos = False
    name = "org/fake"
    device = "cpu"
    chat_template = "chatml"
    attention: Mapping[str, Any] = {"policy": "dense"}

    def __init__(self, model: str, **keywords: Any) -> None:
        self.model, self.keywords = model, keywords
        self.scored: list[Sequence[tuple[list[int], list[int]]]] = []
        self.generated: list[tuple[Sequence[list[int]], dict[str, Any]]] = []

    def tokenize(self, text: str, *, special: bool = True) -> np.ndarray:
        return np.frombuffer(text.encode("latin-1"), np.uint8).astype(np.int32)

    def detokenize(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("latin-1")

    def apply_chat_template(self, messages: list[dict[str, str]], *, add_generation_prompt: bool = True) -> str:
        turns = "".join(f"[{turn['role']}]{turn['content']};" for turn in messages)
        return turns + "[assistant]" if add_generation_prompt else turns

    def loglikelihood(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[SimpleNamespace]:
        self.scored.append(pairs)
        for context, text in pairs:
            assert context and text and len(context) + len(text) <= self.context + 1
        return [SimpleNamespace(total=-self.value(*pair), greedy=pair[1][0] % 2 == 0) for pair in pairs]

    @staticmethod
    def value(context: Sequence[int], text: Sequence[int]) -> float:
        return sum(text) + sum(context) / 1000 + context[-1] / 7

    def generate(self, prompts: Sequence[list[int]], **options: Any) -> list[SimpleNamespace]:
        self.generated.append((prompts, options))
        for prompt in prompts:
            assert len(prompt) + options["max_tokens"] <= self.context
        return [SimpleNamespace(text=self.answer(prompt, **options)) for prompt in prompts]

    @staticmethod
    def answer(prompt: Sequence[int], max_tokens: int, stop: Sequence[str], **_: Any) -> str:
        text = "".join(chr(33 + (prompt[-1] + i) % 90) for i in range(max_tokens))
        return min((text.split(mark)[0] for mark in stop), key=len, default=text)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(phsa, "LLM", FakeLLM, raising=False)
    yield


def instance(kind: str, *args: Any) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=args, idx=0, metadata=("task", 0, 1))


@pytest.mark.usefixtures("fake")
def test_scores_come_in_the_order_of_the_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "_SCORED_TOGETHER", 4)
    model = PhsaLM("m")
    pairs = [("question b", " yes"), ("question a", " no"), ("question b", " no"), ("", "x"), ("question a", " yes")]
    got = model.loglikelihood([instance("loglikelihood", *pair) for pair in pairs], disable_tqdm=True)
    for (context, text), (total, greedy) in zip(pairs, got, strict=True):
        ids = [2] if context == "" else list(context.encode())
        assert (total, greedy) == (-FakeLLM.value(ids, list(text.encode())), text.encode()[0] % 2 == 0)
    # Contexts with a common beginning go to the engine one after another, in large parts.
    assert [bytes(context + text).decode("latin-1") for part in model.llm.scored for context, text in part] == sorted(
        "\x02x" if context == "" else context + text for context, text in pairs
    )
    assert [len(part) for part in model.llm.scored] == [4, 1]


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(("truncation", "kept"), [("left", "9" * 18 + "z" * 20), ("middle", "a" * 19 + "z" * 19)])
def test_a_long_context_is_cut_with_a_warning(caplog: pytest.LogCaptureFixture, truncation: str, kept: str) -> None:
    model = PhsaLM("m", truncation=truncation)
    context = "a" * 20 + "9" * 20 + "z" * 20
    with caplog.at_level(logging.WARNING):
        model.loglikelihood([instance("loglikelihood", context, "end")], disable_tqdm=True)
    # One token more than the context's 40: the last one is predicted, not read.
    assert model.llm.scored == [[(list(kept.encode()), list(b"end"))]]
    assert "1 of 1 contexts of texts to score are too long, the longest has 60 tokens where 38 have room" in caplog.text


@pytest.mark.usefixtures("fake")
def test_what_fits_is_not_cut(caplog: pytest.LogCaptureFixture) -> None:
    model = PhsaLM("m")
    with caplog.at_level(logging.WARNING):
        model.loglikelihood([instance("loglikelihood", "a" * 38, "end")], disable_tqdm=True)
        model.generate_until([instance("generate_until", "a" * 30, {"max_gen_toks": 10})], disable_tqdm=True)
    assert (len(model.llm.scored[0][0][0]), len(model.llm.generated[0][0][0])) == (38, 30)
    assert caplog.text == ""


@pytest.mark.usefixtures("fake")
def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ValueError, match="1 to 40"):
        PhsaLM("m").loglikelihood([instance("loglikelihood", "a", "b" * 41)], disable_tqdm=True)
    with pytest.raises(ValueError, match="60 tokens where 37 have room"):
        PhsaLM("m", truncation="error").loglikelihood([instance("loglikelihood", "a" * 60, "bbbb")], disable_tqdm=True)
    model = PhsaLM("m")
    asked = [instance("generate_until", "a", {"max_gen_toks": count}) for count in (3, 40)]
    with pytest.raises(ValueError, match="max_gen_toks=40 leaves no room"):
        model.generate_until(asked, disable_tqdm=True)
    assert model.llm.generated == []
    with pytest.raises(ValueError, match="truncation=right is not one of left, middle, error"):
        PhsaLM("m", truncation="right")


@pytest.mark.usefixtures("fake")
def test_rolling_predicts_every_token_once() -> None:
    model = PhsaLM("m")
    texts = ["b" * 100, "short", "c" * 40]
    got = model.loglikelihood_rolling([instance("loglikelihood_rolling", text) for text in texts], disable_tqdm=True)
    assert len(got) == len(texts)
    scored = [text for part in model.llm.scored for _, text in part]
    assert sorted(token for text in scored for token in text) == sorted("".join(texts).encode())
    # A short text is one window after the begin token.
    assert math.isclose(got[1], -FakeLLM.value([2], list(b"short")))


@pytest.mark.usefixtures("fake")
def test_answers_come_in_the_order_of_the_requests_and_end_where_they_should(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "_ANSWERED_TOGETHER", 2)
    model = PhsaLM("m", batch_size="4")
    short, stopped = {"max_gen_toks": 3}, {"until": ["~", "A"], "max_new_tokens": 12}
    asked = [("pd", short), ("pc", stopped), ("pa", short), ("pb", short), ("pe", stopped)]
    got = model.generate_until([instance("generate_until", *args) for args in asked], disable_tqdm=True)
    want = [FakeLLM.answer(list(b"pd"), 3, []), FakeLLM.answer(list(b"pc"), 12, ["~", "A"])]
    want += [FakeLLM.answer(list(text), 3, []) for text in (b"pa", b"pb")]
    assert got == [*want, FakeLLM.answer(list(b"pe"), 12, ["~", "A"])]
    assert [[bytes(prompt) for prompt in prompts] for prompts, _ in model.llm.generated] == [
        [b"pa", b"pb"],
        [b"pd"],
        [b"pc", b"pe"],
    ]
    assert all(options["temperature"] == 0 and options["max_batch"] == 4 for _, options in model.llm.generated)
    assert model.llm.generated[-1][1]["stop"] == ["~", "A"]


@pytest.mark.usefixtures("fake")
def test_sampling_follows_the_harness_options() -> None:
    model = PhsaLM("m", max_gen_toks=5)
    model.generate_until([instance("generate_until", "", {})], disable_tqdm=True)
    assert model.llm.generated[-1][0] == [[2]], "where there is no prompt, the begin token is one"

    def options(**given: Any) -> dict[str, Any]:
        model.generate_until([instance("generate_until", "p", given)], disable_tqdm=True)
        return model.llm.generated[-1][1]

    assert options()["max_tokens"] == 5
    drawn = options(do_sample=True, temperature=0.7, top_p=0.9, seed=3)
    assert (drawn["temperature"], drawn["top_p"], drawn["seed"]) == (0.7, 0.9, 3)
    greedy = options(do_sample=False, temperature=0.7, top_p=0.9, repetition_penalty=1.1)
    assert (greedy["temperature"], greedy["repetition_penalty"], "top_p" in greedy) == (0.0, 1.1, False)
    with pytest.raises(ValueError, match="unknown generation options num_beams; it knows until"):
        options(num_beams=4)


@pytest.mark.usefixtures("fake")
def test_what_a_model_thinks_is_no_answer() -> None:
    model = PhsaLM("m", think_end_token="+")
    text = FakeLLM.answer(list(b"p"), 20, [])
    got = model.generate_until([instance("generate_until", "p", {"max_gen_toks": 20})], disable_tqdm=True)
    assert "+" not in got[0] and got == [text.split("+")[-1]]


@pytest.mark.usefixtures("fake")
def test_a_chat_template_leaves_a_begun_answer_open() -> None:
    model = PhsaLM("m")
    asked = [{"role": "user", "content": "Why?"}]
    assert model.apply_chat_template(asked) == "[user]Why?;[assistant]"
    begun = [*asked, {"role": "assistant", "content": "Because"}]
    assert model.apply_chat_template(begun, add_generation_prompt=False) == "[user]Why?;[assistant]Because"
    assert (model.chat_template(True), model.tokenizer_name) == ("chatml", "org__fake-chatml")


@pytest.mark.usefixtures("fake")
def test_a_begin_token_is_added_where_the_tokenizer_wants_one() -> None:
    assert PhsaLM("m").tok_encode("ab") == [97, 98]
    model = PhsaLM("m", add_bos_token=True)
    assert model.tok_encode("ab") == model.tok_encode("\x02ab") == [2, 97, 98]
    assert model.tok_encode("ab", add_special_tokens=False) == [97, 98]


@pytest.mark.usefixtures("fake")
def test_model_args_reach_the_engine() -> None:
    model = lm_eval.api.registry.get_model("phsa").create_from_arg_obj(
        {"path": "p", "attention": "phsa", "top_k": 2, "lam": 0.9}, {"batch_size": 1, "device": "cuda:0"}
    )
    # cuda:0 is what the harness passes where nobody says anything.
    keywords = {"attention": "phsa", "top_k": 2, "lam": 0.9, "device": "auto"}
    assert (model.llm.model, model.llm.keywords) == ("p", keywords)
    devices = ((None, None), ("cpu", "cpu"), ("cuda:1", "cuda:1"), ("cuda", "auto"), ("mps", None))
    assert all(PhsaLM("p", device=asked).llm.keywords == {"device": got} for asked, got in devices)
    assert model.max_batch == 8 and PhsaLM("p", batch_size=3).max_batch == 3 and PhsaLM("p", max_batch=1).max_batch == 1
    assert model.get_model_info()["phsa_attention"] == {"policy": "dense"}
    with pytest.raises(ValueError, match="path=…"):
        PhsaLM()


def test_wrong_arguments_are_told_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phsa, "LLM", lambda *_, **__: pytest.fail("it was loaded"), raising=False)
    for wrong in ({"max_batch": -1}, {"max_gen_toks": 0}, {"max_batch": "x"}, {"truncation": "right"}):
        with pytest.raises(ValueError, match=f"phsa: {next(iter(wrong))}="):
            PhsaLM("p", **wrong)


TOY_TASK = """
task: toy
custom_dataset: !function toy_rows.rows
output_type: {kind}
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{target}"
{more}
metadata: {{version: 1.0}}
"""
TOY_ROWS = """
import datasets

def rows(**_):
    return {"test": datasets.Dataset.from_list([{"question": q, "answer": 0} for q in ("one", "two", "three")])}
"""


def toy(folder: Path, kind: str) -> Path:
    more = {
        "multiple_choice": 'doc_to_choice: ["yes", "no"]',
        "generate_until": "generation_kwargs: {until: ['~'], max_gen_toks: 4}",
    }[kind]
    target = "answer" if kind == "multiple_choice" else "{{answer}}"
    (folder / "toy.yaml").write_text(TOY_TASK.format(kind=kind, target=target, more=more))
    (folder / "toy_rows.py").write_text(TOY_ROWS)
    return folder


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("kind", ["multiple_choice", "generate_until"])
def test_the_harness_cache_answers_what_was_asked_before(tmp_path: Path, kind: str) -> None:
    manager = TaskManager(include_path=toy(tmp_path, kind), include_defaults=False)
    results = []
    for asks in (True, False):
        model = PhsaLM("m")
        results.append(
            lm_eval.simple_evaluate(
                model, tasks=["toy"], task_manager=manager, use_cache=str(tmp_path / "cache"), bootstrap_iters=0
            )
        )
        assert bool(model.llm.scored or model.llm.generated) == asks
    first, second = ([sample["filtered_resps"] for sample in result["samples"]["toy"]] for result in results)
    assert len(first) == 3 and json.dumps(first) == json.dumps(second)


@pytest.mark.usefixtures("fake")
def test_the_command_knows_the_model_and_the_tasks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from lm_eval._cli import HarnessCLI

    from phsa.lm_eval.__main__ import main

    include = ["--include_path", str(toy(tmp_path, "multiple_choice"))]
    monkeypatch.setattr(sys, "argv", ["lm_eval", "--model_args", "path=m,top_k=2", "--tasks", "toy", *include])
    main()
    assert "phsa ({'path': 'm', 'top_k': 2})" in capsys.readouterr().out
    seen = []
    monkeypatch.setattr(HarnessCLI, "execute", lambda self, args: seen.append(args))
    for words in (["--tasks", "phsa_local_general"], ["ls", "groups"]):
        monkeypatch.setattr(sys, "argv", ["lm_eval", *words])
        main()
    assert [args.include_path for args in seen] == [[str(subject.TASKS)]] * 2 and seen[0].model == "phsa"


def test_tasks_of_the_users_stand_beside_phsas(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from lm_eval._cli import HarnessCLI

    from phsa.lm_eval.__main__ import main

    theirs = toy(tmp_path, "multiple_choice")
    config = tmp_path / "config.yml"
    config.write_text(f"include_path: {theirs}\ntasks: [toy]\nmodel: hf\n")
    seen = []
    monkeypatch.setattr(HarnessCLI, "execute", lambda self, args: seen.append(args))
    for words in (["ls", "--include_path", str(theirs)], ["run", "--config", str(config)]):
        monkeypatch.setattr(sys, "argv", ["lm_eval", *words])
        main()
    for args in seen:
        tasks = TaskManager(include_path=args.include_path, include_defaults=False).all_tasks
        assert "toy" in tasks and "phsa_local_hellaswag" in tasks
    assert seen[1].model is None, "the configuration's"


@pytest.mark.parametrize(
    ("module", "missing", "words"),
    [
        ("phsa.lm_eval", "lm_eval", "pip install 'lm_eval"),
        ("phsa.lm_eval.__main__", "lm_eval", "pip install 'lm_eval"),
        ("phsa.train", "torch", "torch is not installed here: pip install torch"),
        ("phsa.train.__main__", "transformers", "transformers is not installed here: pip install torch transformers"),
    ],
)
def test_a_part_whose_packages_are_missing_names_them(module: str, missing: str, words: str) -> None:
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith(module.partition(".__")[0])}
    before = sys.modules.get(missing)
    sys.modules[missing] = None  # type: ignore[assignment]
    try:
        with pytest.raises(ImportError, match=words):
            __import__(module)
    finally:
        sys.modules.update(kept)
        if before is None:
            del sys.modules[missing]
        else:
            sys.modules[missing] = before


@pytest.mark.usefixtures("fake", "local_data")
def test_generated_code_is_not_run_without_consent(manager: TaskManager) -> None:
    model = PhsaLM("m")
    with pytest.raises(ValueError, match="phsa_local_humaneval which is marked as unsafe"):
        lm_eval.simple_evaluate(model, tasks=["phsa_local_humaneval"], task_manager=manager, limit=1)
    assert model.llm.generated == []


# --- the model, on the engine, against the harness's model of transformers ---


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny_model import write_model

    folder = tmp_path_factory.mktemp("tiny")
    write_model(folder, context=256)
    return folder


def of_transformers(folder: Path, dtype: str) -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(str(folder), dtype=dtype, device="cpu", batch_size=1)


@pytest.fixture(scope="module")
def both(tiny: Path) -> tuple[PhsaLM, Any]:
    ours = PhsaLM(str(tiny), weights="f32", kv_type="f32", threads=2)
    theirs = of_transformers(tiny, "float32")
    assert (ours.max_length, ours.prefix_token_id) == (theirs.max_length, theirs.prefix_token_id)
    return ours, theirs


WORDS = ["the", "quick", "brown", "fox.", "jumps,", "over", "12", "lazy", "dogs", "and", "老残游记;", "then", "sleeps!"]


def words(seed: int, count: int) -> str:
    return " ".join(np.random.default_rng(seed).choice(WORDS, count))


@pytest.fixture(scope="module")
def exact(tiny: Path) -> Any:
    return of_transformers(tiny, "float64")


def assert_as_exact(got: Sequence[float], theirs: Sequence[float], exact: Sequence[float]) -> None:
    """Rounding is as in the same computation by others, also in f32."""
    allowed = 4 * max(abs(a - b) for a, b in zip(theirs, exact, strict=True))
    assert max(abs(a - b) for a, b in zip(got, exact, strict=True)) <= allowed < 1e-2


def test_log_likelihoods_are_those_of_transformers(both: tuple[PhsaLM, Any], exact: Any) -> None:
    asked = [("", "a begin"), (words(0, 1) + " ", "space"), (words(1, 400), " cut from the left"), ("x", words(2, 30))]
    # The same context with several endings, and contexts with a common beginning.
    asked += [(words(3, 40) + words(4 + i // 3, 5), f" {words(20 + i, 1 + i % 4)}") for i in range(12)]
    requests = [instance("loglikelihood", *args) for args in asked]
    got, theirs, want = (model.loglikelihood(requests, disable_tqdm=True) for model in (*both, exact))
    assert [greedy for _, greedy in got] == [greedy for _, greedy in want]
    assert_as_exact(*([value for value, _ in values] for values in (got, theirs, want)))


def test_rolling_log_likelihoods_are_those_of_transformers(both: tuple[PhsaLM, Any], exact: Any) -> None:
    requests = [instance("loglikelihood_rolling", words(seed, count)) for seed, count in ((1, 300), (2, 5), (3, 120))]
    assert_as_exact(*(model.loglikelihood_rolling(requests, disable_tqdm=True) for model in (*both, exact)))


def test_greedy_answers_are_those_of_transformers(both: tuple[PhsaLM, Any]) -> None:
    options = {"do_sample": False, "max_gen_toks": 24}
    asked = [(words(seed, 3 + 9 * seed), options) for seed in range(6)] + [(words(9, 400), options)]
    plain = both[0].generate_until([instance("generate_until", *args) for args in asked], disable_tqdm=True)
    # Something to stop at, in the middle of an answer.
    mark = plain[0][len(plain[0]) // 2 :][:2]
    asked += [(words(seed, 3 + 9 * seed), {**options, "until": [mark, "\n"]}) for seed in range(6)]
    requests = [instance("generate_until", *args) for args in asked]
    got, want = (model.generate_until(requests, disable_tqdm=True) for model in both)
    assert got == want
    assert got[: len(plain)] == plain and got[len(plain)] != plain[0]


def test_chat_templates_are_rendered_as_transformers_does(both: tuple[PhsaLM, Any]) -> None:
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    begun = [*asked, {"role": "assistant", "content": "Because"}]
    for messages, prompt in ((asked, True), (begun, False)):
        got, want = (model.apply_chat_template(messages, add_generation_prompt=prompt) for model in both)
        assert got == want
        assert both[0].tok_encode(got) == both[1].tok_encode(want)


def test_sparse_attention_changes_what_it_should(tiny: Path, both: tuple[PhsaLM, Any]) -> None:
    sparse = PhsaLM(
        str(tiny), weights="f32", kv_type="f32", threads=2, attention="phsa", top_k=1, init=16, local=16, lam=0.9
    )
    requests = [instance("loglikelihood", words(1, count), " end") for count in (4, 80)]
    short, long = zip(*(model.loglikelihood(requests, disable_tqdm=True) for model in (both[0], sparse)), strict=True)
    assert short[0] == short[1]
    assert abs(long[0][0] - long[1][0]) > 1e-3
