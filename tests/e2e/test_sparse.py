"""Sparse attention in the program: where its settings come from, what the cache keeps, what is refused."""

import json
import subprocess

import pytest
from conftest import BIN, ROOT, run_phsa
from test_cli import refused, write_gguf

TEXT = ROOT / "bench/data/from_sand_hill_to_pine.txt"
SETTINGS = {"attention": "phsa", "init": 16, "local": 128, "top_k": 4}
# The tiny model's tokens are bytes.
LONG = TEXT.read_text()[:3000]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("model") / "plain.gguf", context=8192)


@pytest.fixture(scope="module")
def carrying(tmp_path_factory):
    """A model that says itself how it wants to be read."""
    return write_gguf(tmp_path_factory.mktemp("model") / "carrying.gguf", context=8192, phsa_settings=SETTINGS)


def ask(model, *args, text=LONG):
    flags = ("--raw", "-n", 4, "--temp", 0, "--ignore-eos", "--json")
    done = run_phsa("run", "-m", model, "-f", "-", *flags, *args, input=text)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_auto_is_dense_without_settings_and_says_how_to_ask(plain):
    answer, said = ask(plain)
    assert (answer["attention"], answer["read_share"]) == ("dense", 1)
    assert "--attention phsa" in said
    _, said = ask(plain, text=LONG[:500])
    assert "--attention" not in said, "a short text gains nothing"
    _, said = ask(plain, "--attention", "dense")
    assert "--attention" not in said, "it was asked for"


def test_auto_follows_the_models_own_settings(carrying):
    answer, said = ask(carrying)
    assert (answer["attention"], answer["top_k"]) == ("phsa", 4)
    assert "--attention" not in said
    asked, _ = ask(carrying, "--attention", "phsa")
    assert (asked["read_share"], asked["text"]) == (answer["read_share"], answer["text"]), "asked for by name: the same"
    assert answer["read_share"] < 1
    other, _ = ask(carrying, "--attention", "infllm2")
    assert (other["attention"], other["top_k"]) == ("infllm2", 4), "another policy takes the model's budget"
    later, _ = ask(carrying, "--dense-below", 1024)
    assert answer["read_share"] < later["read_share"] < 1
    dense, _ = ask(carrying, "--attention", "dense")
    assert dense["read_share"] == 1
    other, _ = ask(carrying, "-K", 2)
    assert other["top_k"] == 2, "a flag counts more than the model"


def test_a_file_of_settings_counts_and_flags_count_more(plain, tmp_path):
    config = tmp_path / "settings.json"
    config.write_text(json.dumps({**SETTINGS, "dense_below": 0, "layers": {"0": {"lambda": [0.8]}}}))
    answer, _ = ask(plain, "--phsa-config", config)
    assert (answer["attention"], answer["top_k"]) == ("phsa", 4)
    same, _ = ask(plain, "--attention", "phsa", "-K", 4, "--init", 16, "--local", 128)
    assert answer["read_share"] == pytest.approx(same["read_share"])
    answer, _ = ask(plain, "--phsa-config", config, "--attention", "dense")
    assert (answer["attention"], answer["read_share"]) == ("dense", 1)
    config.write_text(json.dumps({**SETTINGS, "layers": {"7": {"top_k": 1}}}))
    refused(run_phsa("run", "-m", plain, "-p", "x", "--phsa-config", config), "layer 7", "0 to 0")
    config.write_text(json.dumps({**SETTINGS, "layers": {"0": {"punctuation": "none"}}}))
    refused(run_phsa("run", "-m", plain, "-p", "x", "--phsa-config", config), "layer 0", "punctuation")
    config.write_text(json.dumps({"attention": "phsa", "topk": 3}))
    refused(run_phsa("run", "-m", plain, "-p", "x", "--phsa-config", config), "topk")
    config.write_text("{")
    refused(run_phsa("run", "-m", plain, "-p", "x", "--phsa-config", config))


@pytest.mark.parametrize("policy", ["phsa", "infllm2", "infllm2-64", "streaming", "quest"])
def test_every_policy_reads_and_writes(plain, policy):
    answer, _ = ask(plain, "--attention", policy, *(() if policy == "streaming" else ("-K", 2)))
    assert answer["attention"] == policy and answer["tokens"] == 4
    # 3,000 tokens: a quarter of what dense attention reads is far more than any of these needs.
    assert 0 < answer["read_share"] < 0.25


def test_wrong_policies_are_refused_with_the_right_ones(plain):
    refused(run_phsa("run", "-m", plain, "-p", "x", "--attention", "sparse"), "sparse", "phsa", "infllm2")
    refused(run_phsa("run", "-m", plain, "-p", "x", "--attention", "phsa", "--lambda", 2), "lambda")
    refused(run_phsa("run", "-m", plain, "-p", "x", "--attention", "dense,phsa"), "bench")
    refused(run_phsa("run", "-m", plain, "-p", "x", "--attention", "phsa", "--punctuation", "no-such"), "no-such")


def test_a_flag_without_effect_is_refused(plain):
    refused(run_phsa("run", "-m", plain, "-p", "x", "-K", 4), "-K has no effect", "--attention phsa")
    refused(run_phsa("run", "-m", plain, "-p", "x", "--attention", "dense", "--local", 64), "--local has no effect")
    refused(run_phsa("bench", "-m", plain, "--attention", "dense,infllm2", "--lambda", 0.5), "--lambda has no effect")
    refused(run_phsa("compare", "-m", plain, "--attention", "dense", "-K", 4), "-K has no effect")


def test_a_file_named_by_the_model_is_not_read(tmp_path):
    marks = tmp_path / "marks.txt"
    marks.write_text(",")
    model = write_gguf(tmp_path / "hostile.gguf", phsa_settings={**SETTINGS, "punctuation": str(marks)})
    refused(run_phsa("run", "-m", model, "-p", "x"), "carries name the punctuation", "en+zh", "--punctuation")
    assert run_phsa("run", "-m", model, "-p", "x", "-n", 1, "--punctuation", marks).returncode == 0, "the user may"
    model = write_gguf(tmp_path / "listing.gguf", phsa_settings={**SETTINGS, "punctuation": [11, 13]})
    assert run_phsa("run", "-m", model, "-p", "x", "-n", 1).returncode == 0


def test_a_text_beyond_what_was_tested_is_said_once(tmp_path):
    settings = {**SETTINGS, "tested_tokens": 100}
    model = write_gguf(tmp_path / "tested.gguf", context=512, phsa_settings=settings)
    done = run_phsa("chat", "-m", model, "-n", 2, input=f"{'a' * 20}\n{'b' * 200}\n{'c' * 20}\n")
    assert done.returncode == 0 and done.stderr.count("tested with texts of up to 100 tokens") == 1
    assert "tested" not in run_phsa("run", "-m", model, "-p", "short", "-n", 2).stderr
    assert "tested with    texts of up to 100 tokens" in run_phsa("info", model).stdout
    assert json.loads(run_phsa("info", model, "--json").stdout)["tested_tokens"] == 100


def test_enough_blocks_are_dense(plain):
    dense, _ = ask(plain, "--attention", "dense", "--weights", "f32")
    everything, _ = ask(plain, "--attention", "phsa", "-K", 1000, "--weights", "f32")
    assert everything["text"] == dense["text"] and everything["read_share"] == 1


def test_presets_follow_the_context(plain):
    def share(*context):
        return ask(plain, "--attention", "phsa", "-K", 4, *context)[0]["read_share"]

    small = share("-c", 4096)  # init 16, local 128
    assert share() == small, "the context of a run is what it needs"
    assert share("-c", 8192) > small  # init 128, local 512
    assert share("-c", 8192, "--init", 16, "--local", 128) == small


def test_a_prompt_cache_spares_the_reading(plain, tmp_path):
    cache = tmp_path / "cache"
    first, _ = ask(plain, "--prompt-cache", cache)
    assert first["reused_tokens"] == 0 and cache.exists()
    again, _ = ask(plain, "--prompt-cache", cache)
    assert again["text"] == first["text"]
    assert again["reused_tokens"] == first["prompt_tokens"] - 1, "the last token gives the logits"
    further, _ = ask(plain, "--prompt-cache", cache, "--prompt-cache-ro", text=LONG[:2000] + "#")
    assert 1900 < further["reused_tokens"] <= 2000
    fresh, _ = ask(plain, text=LONG[:2000] + "#")
    assert further["text"] == fresh["text"]
    assert ask(plain, "--prompt-cache", cache)[0]["reused_tokens"] == first["prompt_tokens"] - 1, "-ro wrote nothing"
    assert [p.name for p in tmp_path.iterdir()] == ["cache"], "no half file is left"


def test_a_prompt_cache_of_something_else_is_refused(plain, carrying, tmp_path):
    cache = tmp_path / "cache"
    ask(plain, "--prompt-cache", cache)
    run = ("run", "-m", plain, "-f", "-", "--raw", "-n", 4, "--prompt-cache", cache)

    def refuse(*args, words):
        done = run_phsa(*run, *args, input=LONG)
        assert done.returncode == 2 and done.stdout == "", done.stderr
        for word in words:
            assert word in done.stderr.splitlines()[-1]

    refuse("--attention", "phsa", words=["attention", "dense"])
    refuse("--weights", "f32", "--kv-type", "bf16", words=["weights"])
    refuse("--kv-type", "int8", words=["layout", "int8"])
    whole = cache.read_bytes()
    cache.write_bytes(whole[:-100])
    refuse(words=["cut"])
    cache.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    refuse(words=["damaged"])
    cache.write_text("something of the user's")
    refuse(words=["not a KV cache"])
    assert cache.read_text() == "something of the user's", "what is not ours is not overwritten"


def test_a_prompt_cache_that_cannot_be_written_is_an_error_after_the_answer(plain, tmp_path):
    done = run_phsa("run", "-m", plain, "-p", "x", "-n", 2, "--prompt-cache", tmp_path / "none" / "cache")
    assert done.returncode == 1 and "cannot be written" in done.stderr
    assert done.stdout != "", "the answer is not lost"


def test_chat_keeps_its_cache_too(plain, tmp_path):
    cache = tmp_path / "cache"
    chat = ("chat", "-m", plain, "-n", 4, "--temp", 0, "-c", 4096, "--prompt-cache", cache)
    done = run_phsa(*chat, "-f", TEXT.parent / "lighthouse.txt", input="hello\n")
    assert done.returncode == 0 and cache.exists(), done.stderr
    done = run_phsa(*chat, "-f", TEXT.parent / "lighthouse.txt", input="hullo\n")
    reused = int(done.stderr.split(" of them cached")[0].split()[-1])
    assert reused > len((TEXT.parent / "lighthouse.txt").read_text())


def test_punctuation_prints_the_set(plain, shared):
    qwen3 = shared / "tokenizers/qwen3/tokenizer.json"
    if not qwen3.exists():
        qwen3 = next((shared / "tokenizers").rglob("tokenizer.json"))
    ids = [int(i) for i in run_phsa("punctuation", qwen3, "--set", "en", "--ids").stdout.split()]
    assert len(ids) == 32 and ids == sorted(ids) and {11, 13} <= set(ids)


def test_punctuation_of_a_byte_vocabulary(plain, tmp_path):
    ids = run_phsa("punctuation", plain, "--ids").stdout.split()
    assert len(ids) == 32
    assert run_phsa("punctuation", plain, "--set", "none", "--ids").stdout == "\n"
    lines = run_phsa("punctuation", plain, "--json").stdout.splitlines()
    assert {json.loads(line)["text"] for line in lines} == set("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
    own = tmp_path / "set.txt"
    own.write_text(",\n.\n")
    assert len(run_phsa("punctuation", plain, "--set", own, "--ids").stdout.split()) == 2
    refused(run_phsa("punctuation", plain, "--set", "martian"), "martian", "en+zh")


def cache_check(model, ids, weights, kv_type, threads, tmp_path, settings=SETTINGS):
    done = subprocess.run(
        [BIN / "cache_check", model, weights, kv_type, str(threads), json.dumps(settings), tmp_path / "scratch"],
        input=" ".join(map(str, ids)).encode(),
        capture_output=True,
        check=True,
    )
    return {row["way"]: row for row in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("tokens", [304, pytest.param(400, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "weights, kv_type", [pytest.param("f32", "f32", marks=pytest.mark.long), ("auto", "bf16"), ("auto", "int8")]
)
def test_however_the_text_comes_the_choices_are_the_same(smollm2, weights, kv_type, tokens, tmp_path):
    out = run_phsa("tokenize", smollm2, "-f", TEXT, "--ids", "--no-special").stdout
    ids = [int(i) for i in out.split()][:tokens]
    one = cache_check(smollm2, ids, weights, kv_type, 1, tmp_path)
    assert list(one) == ["whole", "chunks of 1", "chunks of 7", "chunks of 512", "forked", "restored"]
    two = cache_check(smollm2, ids, weights, kv_type, 2, tmp_path)
    for row in [*one.values(), *two.values()]:
        assert row["choices"] == 30 * tokens * 3 * 4
        assert row["differ"] == 0 and row["loss_difference"] < 1e-4
        assert row["same_bits"] and row["hash"] == one["whole"]["hash"]
    other = cache_check(smollm2, ids, weights, kv_type, 2, tmp_path, {**SETTINGS, "lambda": 0.5})
    assert other["whole"]["hash"] != one["whole"]["hash"], "the settings reach the model"


def test_sparse_answers_a_question_about_what_is_near(smollm2):
    page = TEXT.read_text()[2000:18000]
    document = page + "\nThe secret word of the coach driver is 'walnut'.\n"
    question = "What is the secret word of the coach driver? Answer with the word only."
    flags = ("--temp", 0, "-n", 24, "--attention", "phsa", "--json")
    done = run_phsa("run", "-m", smollm2, "-f", "-", "-p", question, *flags, input=document)
    answer = json.loads(done.stdout)
    assert "walnut" in answer["text"].lower()
    assert answer["read_share"] < 0.6


@pytest.mark.parametrize("parts", [1, 4])
def test_representatives_take_a_sixteenth_of_the_keys_for_each_part(smollm2, parts):
    # In f32 the plan's two digits tell 12 MB from twice as much.
    sizes = ("-p", 16, "-n", 0, "-r", 1, "-c", 8192, "--kv-type", "f32")
    done = run_phsa("bench", "-m", smollm2, *sizes, "--attention", "phsa", "--parts", parts, "--json")
    assert done.returncode == 0
    words = done.stderr.replace(",", "").split()
    cache = float(words[words.index("cache") + 1])
    representatives = float(words[words.index("representatives") + 1])
    assert abs(representatives - parts * cache / 2 / 16) < 0.0055
