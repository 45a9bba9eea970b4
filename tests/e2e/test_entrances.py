"""One exported model through every entrance: the same settings, and the same probabilities."""

import json

import numpy as np
import pytest
from conftest import ROOT, run_phsa
from families import write_tokenizer
from test_adapter import make_adapter
from test_models import make_model
from test_server import Server

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
phsa = pytest.importorskip("phsa")
pytest.importorskip("phsa.hf")

F32 = ("--weights", "f32", "--kv-type", "f32")
# Not complete: what is left out must become the same everywhere.
SETTINGS = {"attention": "phsa", "top_k": 1, "lambda": 0.6, "init": 16, "layers": {"1": {"top_k": 2}}}
TEXT = (ROOT / "bench/data/lighthouse.txt").read_text()
TOKENS = 480


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("entrances")
    model = make_model("llama", folder / "model")
    write_tokenizer(folder / "model")
    make_adapter(model, folder / "adapter", r=4, lora_alpha=12, target_modules="all-linear")
    (folder / "adapter/phsa.json").write_text(json.dumps(SETTINGS))
    out = folder / "out"
    done = run_phsa("export", "-m", folder / "model", "--adapter", folder / "adapter", "--out", out)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def settings(exported):
    return json.loads((exported / "config.json").read_text())["phsa"]


@pytest.fixture(scope="module")
def ids(exported, tmp_path_factory):
    done = run_phsa("tokenize", exported, "-p", TEXT, "--ids", "--no-special")
    return [int(one) for one in done.stdout.split()][:TOKENS]


@pytest.fixture(scope="module")
def llm(exported):
    return phsa.LLM(exported, device="cpu", weights="f32", kv_type="f32", threads=2)


def log_probabilities(logits, ids):
    """Of each token but the first."""
    rows = torch.as_tensor(np.array(logits)).double().log_softmax(-1)
    return rows[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()


@pytest.fixture(scope="module")
def expected(llm, ids):
    return log_probabilities(llm.logits(ids), ids)


def same(found, expected):
    return np.abs(np.asarray(found) - expected).max() < 2e-3


def test_what_is_exported_is_complete(settings):
    assert {**phsa.Settings.preset(512).to_json(), **SETTINGS} == settings


def test_the_settings_matter(llm, exported, ids, expected):
    """Else the tests below would prove nothing."""
    for change in ({"attention": "dense"}, {"dense_below": 256}, {"lam": 1.0}, {"settings": {"layers": {}}}):
        llm.set_attention(**change)
        assert not same(log_probabilities(llm.logits(ids), ids), expected), change
    llm.set_attention()


def test_by_name_it_is_the_same(llm, ids, expected, settings):
    for change in ({"attention": "phsa"}, {"settings": settings}, {"settings": {"attention": "phsa"}}):
        llm.set_attention(**change)
        assert llm.attention == settings
        assert same(log_probabilities(llm.logits(ids), ids), expected)


@pytest.mark.parametrize("attention", ["auto", "phsa"])
def test_the_program(exported, ids, expected, attention, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    flags = ("-c", TOKENS, *F32, "--attention", attention, "--json")
    done = run_phsa("perplexity", "-m", exported, "-f", tmp_path / "text.txt", *flags)
    assert json.loads(done.stdout)["loss"] == pytest.approx(-expected.mean(), abs=1e-4), done.stderr


def test_the_server(exported, ids, expected, settings):
    with Server(exported, *F32) as server:
        assert server.get("/v1/models")["data"][0]["phsa"]["settings"] == settings
        for asked in (None, {"attention": "auto"}, {"attention": "phsa"}):
            answer = server.complete(ids, echo=True, logprobs=0, max_tokens=1, phsa=asked)
            assert same(answer["choices"][0]["logprobs"]["token_logprobs"][1 : len(ids)], expected), asked


def test_hugging_face(exported, ids, expected, settings):
    import phsa.hf

    model = transformers.AutoModelForCausalLM.from_pretrained(exported, attn_implementation="phsa").eval()

    def read():
        with torch.no_grad():
            return log_probabilities(model(torch.tensor([ids])).logits[0].numpy(), ids)

    assert same(read(), expected)
    phsa.hf.enable(model)
    assert model.config.phsa == settings
    phsa.hf.enable(model, policy="phsa")
    assert model.config.phsa == settings
    assert same(read(), expected)


def test_the_trainer(exported, ids, expected, settings):
    pytest.importorskip("phsa.train.config")
    from phsa.hf.switch import set_attention
    from phsa.train.config import Attention

    config = json.loads((exported / "config.json").read_text())
    trained = Attention().settings(512, config["phsa"]).to_json()
    assert trained == {**settings, "tested_tokens": 512}
    model = transformers.AutoModelForCausalLM.from_pretrained(exported).eval()
    set_attention(model, trained, {trained["punctuation"]: config["phsa_punctuation_ids"]})
    with torch.no_grad():
        found = log_probabilities(model(torch.tensor([ids])).logits[0].numpy(), ids)
    assert same(found, expected)


def test_the_harness(exported, ids, expected):
    pytest.importorskip("lm_eval")
    from phsa.lm_eval.adapter import PhsaLM

    model = PhsaLM(str(exported), device="cpu", weights="f32", kv_type="f32", attention="phsa")
    ((total, _),) = model._loglikelihood_tokens([(None, ids[:1], ids[1:])], disable_tqdm=True)
    assert total == pytest.approx(expected.sum(), rel=1e-4)
