"""The trainer on a tiny model: what it computes, that it can be stopped at any moment, and what it says when it cannot
go on."""

import csv
import importlib.machinery
import importlib.util
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tiny_model import write_model
from token_shards import write_config, write_documents
from transformers import AutoConfig, AutoModelForCausalLM

from phsa.hf import load, niah, packed, settings_of
from phsa.settings import Settings
from phsa.train import checkpoints, loop, lora, loss
from phsa.train.batches import Batch, Batches, repeat_passages
from phsa.train.config import Attention, Config, ConfigError, Data, Lora, read
from phsa.train.shards import Sequences, Shards
from phsa.train.texts import open_texts
from phsa.train.trainee import fuse_norms

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and tokens for it of which some are far more frequent than others: that can be learned."""
    folder = tmp_path_factory.mktemp("train")
    model = write_model(folder / "model", context=512)
    generator = np.random.default_rng(0)
    for name, count in (("tokens", 60), ("held-out", 12)):
        documents = [np.minimum(generator.geometric(0.05, size), 400) for size in generator.integers(20, 500, count)]
        write_documents(folder / name, [documents], model.config.vocab_size)
    return folder


def configure(folder: Path, out: Path) -> Path:
    """A file for a short run."""
    return write_config(
        folder,
        out,
        128,
        """
[lora]
rank = 4
[optimizer]
steps = 6
batch = 4
micro_batch = 2
learning_rate = 0.01
warmup = 2
[checkpoint]
every = 2
""",
        start="threads = 1",
    )


def train(path: Path, *changes: str) -> loop.Run:
    run = loop.Run(read(path, changes), device=CPU, quiet=True)
    run.run()
    return run


def command(path: Path, *changes: str, processes: int = 1) -> list[str]:
    start = [sys.executable, "-m"]
    if processes > 1:
        start += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
    return [*start, "phsa.train", str(path), *(part for change in changes for part in ("--set", change))]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1]), "OMP_NUM_THREADS": "1"}


def run_command(path: Path, *changes: str, processes: int = 1, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(path, *changes, processes=processes),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        **options,
    )


def losses(out: Path) -> list[float]:
    with (out / "log.csv").open(newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def exact_log(out: Path) -> list[list[str]]:
    """All but the speed."""
    with (out / "log.csv").open(newline="") as file:
        return [row[:-1] for row in csv.reader(file)]


# The loss -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slice_rows", [1, 7, 1000])
@pytest.mark.parametrize("next_token, distill", [(1.0, 0.0), (1.0, 0.5), (0.0, 1.0)])
def test_the_sliced_loss_and_its_gradients_are_those_of_all_logits(monkeypatch, slice_rows, next_token, distill):
    tokens, width, words = 23, 8, 31
    monkeypatch.setattr(loss, "_SLICE_BYTES", slice_rows * 4 * words)
    hidden, teacher = torch.randn(2, tokens, width)
    weight, teacher_weight = torch.randn(2, words, width)
    labels = torch.randint(words, (tokens,))
    labels[[3, 22]] = loss.IGNORED
    grads = []
    for sliced in (True, False):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if sliced:
            value, nll, divergence = loss.sliced_loss(
                h,
                w,
                labels,
                teacher=teacher,
                teacher_weight=teacher_weight,
                next_token=next_token,
                distill=distill,
                factor=0.1,
            )
        else:
            log_p = F.log_softmax(h @ w.t(), -1)
            theirs = F.log_softmax(teacher @ teacher_weight.t(), -1)
            keep = labels != loss.IGNORED
            all_nll = F.nll_loss(log_p, labels, ignore_index=loss.IGNORED, reduction="sum")
            all_divergence = F.kl_div(log_p[keep], theirs[keep], log_target=True, reduction="sum")
            value = 0.1 * (next_token * all_nll + distill * all_divergence)
            assert nll.item() == pytest.approx(all_nll.item(), rel=1e-5)
            if distill:
                assert divergence.item() == pytest.approx(all_divergence.item(), rel=1e-5)
        value.backward()
        grads.append((value.item(), h.grad, w.grad))
    assert grads[0][0] == pytest.approx(grads[1][0], rel=1e-5)
    for ours, plain in zip(grads[0][1:], grads[1][1:], strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


# Dense attention ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [[9], [5, 5, 5], [4, 1, 10]])
def test_packed_dense_attention_is_that_of_each_sequence_alone(lengths):
    q, k, v = torch.randn(1, 4, sum(lengths), 8), torch.randn(1, 2, sum(lengths), 8), torch.randn(1, 2, sum(lengths), 8)
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    out, _ = packed.attention_function(torch.nn.Module(), q, k, v, None, scaling=0.3, cu_seq_lens_q=bounds)
    assert out.shape == (1, sum(lengths), 4, 8)
    for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        alone = F.scaled_dot_product_attention(
            q[:, :, begin:end], k[:, :, begin:end], v[:, :, begin:end], is_causal=True, scale=0.3, enable_gqa=True
        )
        torch.testing.assert_close(out[:, begin:end], alone.transpose(1, 2))


def test_fused_norms_compute_what_the_model_s_own_do(folder):
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    tokens = torch.randint(300, (1, 50))
    before = model(tokens).logits
    for layer in model.model.layers:
        layer.input_layernorm.weight.data += 0.1 * torch.randn(128)
    changed = model(tokens).logits
    assert fuse_norms(model) == 5
    torch.testing.assert_close(model(tokens).logits, changed, rtol=1e-4, atol=1e-4)
    assert (changed - before).abs().max() > 0.01


def test_a_norm_that_is_written_differently_is_left_alone():
    class OnePlus(torch.nn.Module):  # as in Gemma
        def __init__(self):
            super().__init__()
            self.weight, self.variance_epsilon = torch.nn.Parameter(torch.zeros(8)), 1e-6

        def forward(self, x):
            return F.rms_norm(x, (8,), 1 + self.weight, self.variance_epsilon)

    assert fuse_norms(OnePlus()) == 0


# Data -----------------------------------------------------------------------------------------------------------------


def test_a_batch_predicts_each_token_of_a_piece_from_those_before_it():
    batch = Batch.of([np.array([5, 6, 7]), np.array([8, 9])])
    assert batch.tokens.tolist() == [[5, 6, 7, 8, 9]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1]]
    assert batch.labels.tolist() == [6, 7, loss.IGNORED, 9, loss.IGNORED]
    assert batch.bounds.tolist() == [0, 3, 5] and batch.predicted == 3


def test_repeated_passages_come_from_the_part_before_them():
    data = Data(repeat_part=0.4, repeat_min=5, repeat_max=9)
    tokens = np.arange(1000, dtype=np.uint16)
    (out,) = repeat_passages([tokens[:300], tokens[300:]], data, np.random.default_rng(3))
    assert len(out) == 1000 and (out[:600] == tokens[:600]).all() and (out[600:] < 600).all()
    breaks = 601 + np.flatnonzero(np.diff(out[600:].astype(int)) != 1)
    passages = np.diff([600, *breaks])
    assert (passages >= 5).all() and passages.max() <= 18  # two that happen to follow each other look like one


def test_the_sequences_of_a_step_do_not_depend_on_the_number_of_processes(folder):
    data = Data(length=128, repeat_share=0.5)
    shards = Batches(Sequences(Shards(folder / "tokens"), 128, 1), data, 1)

    def read_by(world: int, micro_batch: int) -> list[list[int]]:
        parts = [shards.of_step(3, 4, micro_batch, rank, world) for rank in range(world)]
        return sorted(
            row.tolist() for part in parts for one in part for row in one.tokens[0].split(one.bounds.diff().tolist())
        )

    assert read_by(1, 4) == read_by(2, 1) == read_by(4, 1)


# Adapters -------------------------------------------------------------------------------------------------------------


def test_peft_reads_a_trained_adapter_and_computes_the_same(folder, tmp_path):
    peft = pytest.importorskip("peft")
    run = train(configure(folder, tmp_path / "run"), "attention.method=dense")
    tokens = torch.arange(1, 40)[None]
    run.trainee.model.eval()
    ours = run.trainee.model(tokens, use_cache=False).logits
    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    untrained = base(tokens).logits
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "run/final")(tokens).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert (ours - untrained).abs().max() > 0.01
    # and so do we
    again = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    lora.load_adapter(tmp_path / "run/final", again)
    torch.testing.assert_close(again(tokens).logits, ours, rtol=1e-4, atol=1e-4)


def test_an_adapter_of_a_model_with_tied_embeddings_holds_nothing_else(folder, tmp_path):
    path = configure(folder, tmp_path / "run")
    config = AutoConfig.from_pretrained(folder / "model", tie_word_embeddings=True)
    tied = AutoModelForCausalLM.from_config(config)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    tied.save_pretrained(tmp_path / "tied")
    train(path, f"model.path={tmp_path / 'tied'}", "optimizer.steps=1", "attention.method=dense")
    names = set(load_file(tmp_path / "run/final/adapter_model.safetensors"))
    assert len(names) == 2 * 7 * 2 and all(name.endswith((".lora_A.weight", ".lora_B.weight")) for name in names)


def test_an_adapter_that_needs_peft_is_refused(folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "use_dora": True}))
    with pytest.raises(ValueError, match="use_dora is True; allowed here: False"):
        lora.load_adapter(tmp_path, model)


def test_a_target_that_the_model_lacks_is_refused(folder):
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    with pytest.raises(ConfigError, match=r"lora.targets has 'wq'; this model has down_proj, gate_proj"):
        lora.add_adapter(model, Lora(targets=("q_proj", "wq")), seed=1)


# Runs -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method, top_k", [("dense", 2), ("infllm2", 2), ("phsa", 0), ("phsa", 16)])
def test_every_method_learns(folder, tmp_path, method, top_k):
    path = configure(folder, tmp_path / "run")
    run = train(
        path,
        f"attention.method={method}",
        f"attention.top_k={top_k}",
        "optimizer.steps=12",
    )
    assert losses(tmp_path / "run")[-1] < losses(tmp_path / "run")[0] - 0.05
    with (tmp_path / "run/evaluations.csv").open(newline="") as file:
        (last,) = csv.DictReader(file)
    assert last["step"] == "12" and 0 < float(last["held_out_loss"]) < 20
    if method == "dense":
        assert last["held_out_loss"] == last["held_out_loss_dense"]
    saved = json.loads((tmp_path / "run/final/phsa.json").read_text())
    assert saved == run.trainee.settings.to_json() and saved["dense_below"] == 0
    assert saved["tested_tokens"] == run.config.data.length
    assert saved["attention"] == method and saved["top_k"] == top_k


def test_a_wholly_trained_model_is_a_hugging_face_folder_with_its_settings(folder, tmp_path):
    path = configure(folder, tmp_path / "run")
    text = path.read_text().replace("[lora]\nrank = 4\n", "")
    path.write_text(text)
    run = train(path, "attention.punctuation=en+zh", "optimizer.learning_rate=0.001")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "run/final", dtype=torch.float32, attn_implementation="phsa"
    )
    settings = settings_of(model)
    assert (settings.base.policy, settings.base.top_k, settings.base.punctuation) == ("phsa", 2, "en+zh")
    tokens = torch.randint(100, (1, 200))
    run.trainee.model.eval()
    torch.testing.assert_close(model(tokens).logits, run.trainee.model(tokens, use_cache=False).logits)
    assert (tmp_path / "run/final/tokenizer.json").exists()


def test_distillation_from_itself_costs_nothing_and_from_dense_attention_it_pulls_towards_it(folder, tmp_path):
    path = configure(folder, tmp_path / "dense")
    train(path, "attention.method=dense", "distill.weight=1.0", "optimizer.steps=1")
    # Four sequences, the same ones in each step.
    write_documents(tmp_path / "tokens", [[np.random.default_rng(2).integers(0, 400, 4 * 128)]], 2000)
    path = configure(folder, tmp_path / "phsa")
    distill = ("distill.weight=1.0", "distill.next_token=0.0", "optimizer.steps=20")
    train(path, "attention.top_k=0", *distill, f"data.train={tmp_path / 'tokens'}")

    def divergences(name: str) -> list[float]:
        with (tmp_path / name / "log.csv").open(newline="") as file:
            return [float(row["divergence"]) for row in csv.DictReader(file)]

    assert divergences("dense")[0] == pytest.approx(0, abs=1e-5)
    first, *_, last = divergences("phsa")
    assert first > 0.01 and last < 0.8 * first


def test_gradient_checkpointing_and_micro_batches_change_no_loss(folder, tmp_path):
    train(configure(folder, tmp_path / "a"), "optimizer.steps=3")
    train(configure(folder, tmp_path / "b"), "optimizer.steps=3", "model.gradient_checkpointing=true")
    train(configure(folder, tmp_path / "c"), "optimizer.steps=3", "optimizer.micro_batch=4")
    assert losses(tmp_path / "a") == pytest.approx(losses(tmp_path / "b"), rel=1e-6)
    assert losses(tmp_path / "a") == pytest.approx(losses(tmp_path / "c"), rel=1e-6)


def test_parts_and_presets_are_settings_of_training():
    settings = Attention(parts=4, survivors=96).settings(4096).base
    assert (settings.parts, settings.survivors, settings.top_k, settings.init) == (4, 96, 2, 16)
    assert Attention(preset="paper-32k").settings(4096).base.local == 512
    assert Attention(preset="paper-32k", local=256).settings(4096, {"parts": 8}).base == Settings(
        top_k=2, init=128, local=256
    )
    with pytest.raises(ValueError, match="preset is 'paper'; allowed: paper-4k, paper-32k"):
        Attention(preset="paper").settings(4096)


def test_needles_are_looked_for_during_training(folder, tmp_path):
    settings = {"block": 16, "init": 16, "local": 32, "lambda": 0.9, "group_reduce": "sum"}
    settings |= {"dense_below": 0, "punctuation": "en"}
    header = {"format": niah.SAMPLES_FORMAT, "seed": 1, "vocabulary": 400, "punctuation": {"en": [11, 13]}}
    lines = [header]
    for sample in range(3):
        records = [
            {
                "task": "single_2",
                "length": 100,
                "sample": sample,
                "attention": {"attention": name, "top_k": 2, **settings},
            }
            for name in ("dense", "phsa")
        ]
        tokens = list(range(1, 101))
        lines.append({"tokens": tokens, "answer_tokens": [5, 6], "free_tokens": 0, "records": records})
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    path = configure(folder, tmp_path / "run")
    train(path, f"evaluate.niah={tmp_path / 'samples.jsonl'}", "evaluate.every=3", "evaluate.niah_samples=2")
    with (tmp_path / "run/evaluations.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["0", "3", "6"]
    answers = [json.loads(line) for line in (tmp_path / "run/niah-00000003.jsonl").read_text().splitlines()[1:]]
    assert len(answers) == 4
    for name in ("dense", "phsa"):
        scores = [one["score"] for one in answers if one["attention"]["attention"] == name]
        column = "niah_dense" if name == "dense" else "niah_phsa_k2"
        assert float(rows[1][column]) == 100 * sum(scores) / 2


def test_answers_read_together_are_those_read_alone(folder):
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    attention = {"attention": "phsa", "top_k": 1, "init": 16, "local": 16, "punctuation": "en"}
    samples = []
    for sample, length in enumerate((90, 120, 70)):
        record = {"task": "x", "length": length, "sample": sample, "attention": attention}
        tokens = torch.randint(300, (length,)).tolist()
        samples.append({"tokens": tokens, "answer_tokens": [1, 2, 3], "free_tokens": 0, "records": [record]})
    header = {"vocabulary": 300, "punctuation": {"en": [11, 13]}}
    alone = [one["answer"] for one in niah.answers(model, header, samples, set())]
    together = [one["answer"] for one in niah.answers(model, header, samples, set(), batch_tokens=1000)]
    assert alone == together and len(set(alone)) > 1


# Texts ----------------------------------------------------------------------------------------------------------------


def test_of_a_chat_the_answers_are_learned_and_the_rest_is_read(folder, tmp_path):
    tokenizer = load.load_tokenizer(str(folder / "model"))
    talk = [
        {"role": "user", "content": "How many legs?"},
        {"role": "assistant", "content": "Six."},
        {"role": "user", "content": "And wings?"},
        {"role": "assistant", "content": "Four, mostly."},
    ]
    records = [
        {"messages": talk},
        {"prompt": talk[:3], "completion": talk[3:]},
        {"prompt": "Bees are", "completion": " insects"},
        {"text": "All of it."},
    ]
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    texts = open_texts(str(path), lambda: tokenizer, True)
    learned = []
    for number in range(texts.documents):
        begin, end = texts.offsets[number : number + 2].tolist()
        batch = Batch.of([texts.piece(begin, end - begin)])
        assert (batch.tokens >= 0).all() and batch.predicted == int((batch.labels != loss.IGNORED).sum())
        learned.append(tokenizer.decode(batch.labels[batch.labels != loss.IGNORED]))
        if number == 0:
            assert batch.tokens[0].tolist() == tokenizer.apply_chat_template(talk, return_dict=False)
    end = "<|im_end|>"
    assert learned == [f"Six.{end}\nFour, mostly.{end}\n", f"Four, mostly.{end}\n", f" insects{end}", f"ll of it.{end}"]
    for line, message in (("[1]", "not an object"), ('{"x": 1}', "it has x; allowed: input_ids"), ("{", "not JSON")):
        path.write_text(line + "\n")
        with pytest.raises(ValueError, match=rf"chat.jsonl, (line|record) 1: {message}"):
            open_texts(str(path), lambda: tokenizer, True)


def test_datasets_that_were_tokenized_or_packed_are_taken(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = {"input_ids": [[1, 2, 3, 4, 5], [6, 7]], "completion_mask": [[0, 0, 1, 1, 1], [0, 1]]}
    datasets.Dataset.from_dict({**rows, "seq_lengths": [[2, 3], [2]]}).save_to_disk(tmp_path / "rows")
    texts = open_texts(str(tmp_path / "rows"), lambda: None, True)
    assert texts.offsets.tolist() == [0, 2, 5, 7] and texts.vocab_size == 8
    assert texts.piece(0, 7).tolist() == [~1, ~2, 3, 4, 5, ~6, 7]
    datasets.Dataset.from_dict({"input_ids": [[1, 2]], "labels": [[-100, -100]]}).save_to_disk(tmp_path / "none")
    with pytest.raises(ValueError, match="nothing to learn"):
        open_texts(str(tmp_path / "none"), lambda: None, True)


def test_a_chat_is_trained_with_settings_by_layer_and_reported(folder, tmp_path, monkeypatch):
    talk = [{"role": "user", "content": "One, two; three?"}, {"role": "assistant", "content": "Four. " * 40}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    said = []
    run = types.SimpleNamespace(log=lambda values, step: said.append((step, values)), finish=lambda: said.append("end"))
    wandb = types.ModuleType("wandb")
    wandb.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    wandb.init = lambda **options: said.append(options["name"]) or run
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    path = configure(folder, tmp_path / "run")
    data = (f"data.train={tmp_path / 'chat.jsonl'}", f"data.held_out={tmp_path / 'chat.jsonl'}", "optimizer.batch=1")
    more = ("attention.top_k=3", "attention.punctuation=sentence", 'attention.layers.1={ policy = "dense" }')
    train(path, *data, *more, "optimizer.steps=2", "evaluate.sequences=1", 'report_to=["wandb"]')
    saved = json.loads((tmp_path / "run/final/phsa.json").read_text())
    assert (saved["top_k"], saved["punctuation"], saved["layers"]) == (3, "sentence", {"1": {"attention": "dense"}})
    assert said[0] == "run" and said[-1] == "end"
    assert said[1][0] == 1 and said[1][1]["train/loss"] == pytest.approx(losses(tmp_path / "run")[0])
    assert said[3][0] == 2 and said[3][1]["eval/held_out_loss"] > 0
    with pytest.raises(ConfigError, match="report_to has 'tensorboard', which is not installed here: pip install"):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        train(path, 'report_to=["tensorboard"]')


def test_tensorboard_has_the_numbers_of_the_tables_also_after_a_stop(folder, tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: its files are not read back")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = tmp_path / "run"
    changes = ('report_to=["tensorboard"]', "evaluate.every=2")
    run = loop.Run(read(configure(folder, out), changes), device=CPU, quiet=True)
    step = run._one_step
    run._one_step = lambda: step() if run.step < 3 else 1 / 0  # past the checkpoint of step 2
    with pytest.raises(ZeroDivisionError):
        run.run()
    train(configure(folder, out), *changes)
    written = EventAccumulator(str(out / "tensorboard"))
    written.Reload()
    for name, table, column in (
        ("train/loss", "log.csv", "loss"),
        ("train/learning_rate", "log.csv", "learning_rate"),
        ("eval/held_out_loss", "evaluations.csv", "held_out_loss"),
    ):
        with (out / table).open(newline="") as file:
            want = {int(row["step"]): float(row[column]) for row in csv.DictReader(file)}
        events = written.Scalars(name)
        assert [event.step for event in events] == list(want)
        assert [event.value for event in events] == pytest.approx(list(want.values()), rel=1e-4)


# Stopping and going on ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole_run(folder, tmp_path_factory) -> Path:
    """A run that was never stopped."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train(configure(folder, out))
    return out


def test_a_run_killed_at_any_moment_goes_on_with_the_same_losses(folder, tmp_path, whole_run):
    path = configure(folder, tmp_path / "run")
    kills = 0
    for delay in (0.0, 0.03):  # once a checkpoint is there: at once, and while the next ones are written
        process = subprocess.Popen(command(path), env=environment(), stderr=subprocess.PIPE, text=True)
        done = len(checkpoints.complete(tmp_path / "run/checkpoints"))
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            found = checkpoints.complete(tmp_path / "run/checkpoints")
            if len(found) > done or (found and found[-1].name == "step-00000006"):
                break
            time.sleep(0.005)
        time.sleep(delay)
        process.kill()
        kills += process.wait() == -signal.SIGKILL
    assert kills > 0
    # A torn leftover of a kill must not be taken for a checkpoint.
    torn = tmp_path / "run/checkpoints/step-00000099"
    torn.mkdir()
    (torn / "__0_0.distcp").write_bytes(b"torn")
    done = run_command(path)
    assert done.returncode == 0, done.stderr
    assert "going on from" in done.stderr
    assert exact_log(tmp_path / "run") == exact_log(whole_run)
    ours, theirs = ((out / "final/adapter_model.safetensors").read_bytes() for out in (tmp_path / "run", whole_run))
    assert ours == theirs


def test_two_processes_reproduce_one_and_take_over_from_it(folder, tmp_path, whole_run):
    path = configure(folder, tmp_path / "two")
    done = run_command(path, processes=2)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "two") == pytest.approx(losses(whole_run), rel=1e-5)
    # The first half by one process, the second by two.
    path = configure(folder, tmp_path / "half")
    run = loop.Run(read(path), device=CPU, quiet=True)
    for _ in range(2):
        values = run._one_step()
        run.log.add({"step": run.step, **values})
    run.save_checkpoint()
    run.close()
    done = run_command(path, processes=2)
    assert done.returncode == 0, done.stderr
    assert "going on from" in done.stderr
    assert losses(tmp_path / "half") == pytest.approx(losses(whole_run), rel=1e-5)


def test_two_processes_train_a_whole_model_in_bf16_as_one_does(folder, tmp_path):
    results = []
    for processes in (1, 2):
        path = configure(folder, tmp_path / str(processes))
        path.write_text(path.read_text().replace("[lora]\nrank = 4\n", "").replace("float32", "bfloat16"))
        changes = ("optimizer.steps=3", "optimizer.learning_rate=0.001", "distill.weight=0.5")
        done = run_command(path, *changes, processes=processes)
        assert done.returncode == 0, done.stderr
        results.append(losses(tmp_path / str(processes)))
    assert results[0] == pytest.approx(results[1], rel=2e-3)


def test_sigterm_ends_a_run_with_a_checkpoint(folder, tmp_path):
    path = configure(folder, tmp_path / "run")
    process = subprocess.Popen(
        command(path, "optimizer.steps=100000", "checkpoint.every=0"),
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not (tmp_path / "run/log.csv").exists() or not losses(tmp_path / "run"):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.terminate()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "stopped; the same command goes on from here" in said
    (last,) = checkpoints.complete(tmp_path / "run/checkpoints")
    assert checkpoints.read_run(last)["step"] == len(losses(tmp_path / "run"))


# Failures -------------------------------------------------------------------------------------------------------------


def test_a_loss_that_is_no_number_stops_the_run_and_keeps_the_checkpoint(folder, tmp_path):
    path = configure(folder, tmp_path / "run")
    done = run_command(
        path, "optimizer.learning_rate=1e30", "optimizer.clip=0.0", "optimizer.warmup=0", "checkpoint.every=1"
    )
    assert done.returncode == 1
    assert re.search(r"phsa: step \d+: the .* is (nan|inf)\. The weights of this step were not taken", done.stderr)
    assert f'init_from = "{tmp_path / "run"}"' in done.stderr
    assert len(checkpoints.complete(tmp_path / "run/checkpoints")) >= 1
    assert not (tmp_path / "run/final").exists()


def test_a_full_disk_is_said_and_earlier_checkpoints_stay(folder, tmp_path):
    path = configure(folder, tmp_path / "run")
    run = loop.Run(read(path), device=CPU, quiet=True)
    run._one_step()
    run.save_checkpoint()
    # Writes fail from a size on, as they do on a full disk; the kernel would also send a signal, which Python ignores.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        run._one_step()
        with pytest.raises(
            checkpoints.CheckpointError, match=r"step-00000002 cannot be written \(.*too large.*step-00000001"
        ):
            run.save_checkpoint()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [one.name for one in (tmp_path / "run/checkpoints").iterdir()] == ["step-00000001"]
    run.save_checkpoint()
    assert checkpoints.complete(tmp_path / "run/checkpoints")[-1].name == "step-00000002"


def test_a_checkpoint_that_was_cut_is_refused_by_name(folder, tmp_path):
    path = configure(folder, tmp_path / "run")
    run = loop.Run(read(path), device=CPU, quiet=True)
    run._one_step()
    run.save_checkpoint()
    (file,) = (tmp_path / "run/checkpoints/step-00000001").glob("*.distcp")
    file.write_bytes(file.read_bytes()[:1000])
    run.close()
    with pytest.raises(checkpoints.CheckpointError, match=r"step-00000001 cannot be read .* remove this folder"):
        loop.Run(read(path), device=CPU, quiet=True)


def test_a_missing_shard_is_named(folder, tmp_path):
    write_documents(tmp_path / "tokens", [[np.arange(100)], [np.arange(100)]], 400)
    (tmp_path / "tokens/shard-00001.tokens").unlink()
    done = run_command(configure(folder, tmp_path / "run"), f"data.train={tmp_path / 'tokens'}")
    assert done.returncode == 2 and "shard-00001" in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_another_configuration_does_not_continue_a_run(folder, whole_run):
    path = configure(folder, whole_run)
    with pytest.raises(ConfigError, match=r"holds a run with another attention.top_k"):
        loop.Run(read(path, ["attention.top_k=4"]), device=CPU, quiet=True)


def test_another_model_or_other_tokens_do_not_continue_a_run(folder, tmp_path, whole_run):
    path = configure(folder, whole_run)
    documents = [np.arange(1, 200), np.arange(50, 300)]
    write_documents(tmp_path / "tokens", [documents], 400)
    with pytest.raises(ConfigError, match=r"another data.train \(data.train was '\w+' and is '\w+'\).*init_from"):
        loop.Run(read(path, [f"data.train={tmp_path / 'tokens'}"]), device=CPU, quiet=True)
    with pytest.raises(ConfigError, match=r"another data.held_out"):
        loop.Run(read(path, [f"data.held_out={tmp_path / 'tokens'}"]), device=CPU, quiet=True)
    # The same shape, one value in another place.
    shutil.copytree(folder / "model", tmp_path / "model")
    loop.Run(read(path, [f"model.path={tmp_path / 'model'}"]), device=CPU, quiet=True).close()
    tensors = load_file(tmp_path / "model/model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] *= 1.01
    save_file(tensors, tmp_path / "model/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"another model.weights"):
        loop.Run(read(path, [f"model.path={tmp_path / 'model'}"]), device=CPU, quiet=True)


def test_two_trainers_do_not_write_into_one_folder(folder, tmp_path):
    path = configure(folder, tmp_path / "run")
    first = loop.Run(read(path), device=CPU, quiet=True)
    with pytest.raises(ConfigError, match="another trainer is at work in"):
        loop.Run(read(path), device=CPU, quiet=True)
    first.close()
    loop.Run(read(path), device=CPU, quiet=True).close()


@pytest.mark.parametrize("whole", [False, True], ids=["adapter", "all weights"])
def test_a_run_begins_with_the_weights_of_another(folder, tmp_path, whole, whole_run):
    first = whole_run
    if whole:
        first = tmp_path / "first"
        path = configure(folder, first)
        path.write_text(path.read_text().replace("[lora]\nrank = 4\n", ""))
        train(path, "optimizer.steps=2", "checkpoint.every=2")
    with (first / "evaluations.csv").open(newline="") as file:
        (reached,) = [row["held_out_loss"] for row in csv.DictReader(file)]
    for number, source in enumerate((first, first / "final")):
        path = configure(folder, tmp_path / f"next{number}")
        if whole:
            path.write_text(path.read_text().replace("[lora]\nrank = 4\n", ""))
        run = loop.Run(read(path, [f"init_from={source}", "optimizer.learning_rate=0.003"]), device=CPU, quiet=True)
        assert run.step == 0 and run.evaluate()["held_out_loss"] == pytest.approx(float(reached), rel=1e-5)
        run._one_step()
        run.save_checkpoint()
        run.close()
        # From here on its own checkpoint counts, and the other run is not read again.
        again = loop.Run(read(path, [f"init_from={source}", "optimizer.learning_rate=0.003"]), device=CPU, quiet=True)
        assert again.step == 1
        again.close()
    with pytest.raises(ConfigError, match=r"init_from was .* and is None"):
        loop.Run(read(path, ["optimizer.learning_rate=0.003"]), device=CPU, quiet=True)
    path = configure(folder, tmp_path / "other")
    with pytest.raises(ConfigError, match=r"which trained .*; this run trains an adapter of rank 8"):
        train(path, f"init_from={first}", "lora.rank=8")
    with pytest.raises(ConfigError, match=r"init_from is .*; allowed: the folder of a run"):
        train(path, f"init_from={tmp_path}")


def test_a_tied_output_is_saved_once(folder, tmp_path):
    path = configure(folder, tmp_path / "run")
    path.write_text(path.read_text().replace("[lora]\nrank = 4\n", "").replace("float32", "bfloat16"))
    model = write_model(tmp_path / "model", layers=1, tied=True)
    count = sum(parameter.numel() for parameter in model.parameters())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        train(path, "optimizer.steps=1", f"model.path={tmp_path / 'model'}")
    finally:
        dist.destroy_process_group()
    saved = load_file(tmp_path / "run/final/model.safetensors")
    assert "lm_head.weight" not in saved and sum(tensor.numel() for tensor in saved.values()) == count
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "run/final")
    assert again.lm_head.weight is again.model.embed_tokens.weight


def test_a_longer_sequence_than_the_context_is_refused(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"data.length is 1024; the model's context is 512 tokens"):
        train(configure(folder, tmp_path / "run"), "data.length=1024")


@pytest.mark.parametrize(
    "change, message",
    [
        ("attention.topk=2", r"\[attention\] has the key 'topk'; allowed: method, top_k, lambda"),
        ("attention.top_k=-1", "top_k is -1; allowed: 0 to 65536"),
        ("attention.layers=3", "attention.layers is 3; allowed: tables by layer"),
        ("attention.layers.0.topk=3", "a setting is 'topk'; allowed: policy"),
        ('report_to=["mlflow"]', "report_to is 'mlflow'; allowed: tensorboard, wandb"),
        ("attention.top_k=true", "attention.top_k is True; allowed: a whole number"),
        ("attention.method=sparse", "attention.method is 'sparse'; allowed: dense, infllm2, phsa"),
        ("attention.lambda=2.0", "lam is 2.0; allowed: a number from 0 to 1"),
        ("optimizer.steps=0", "optimizer.steps is 0; allowed: 1 and up"),
        ("lora=16", r"lora is 16; allowed: a table \[lora\]"),
        ("model.path=", "model.path is missing"),
        ("distill.next_token=0.0", "both 0: there is nothing to learn"),
        ("steps", "allowed: KEY=VALUE"),
    ],
)
def test_a_wrong_configuration_is_refused_by_key(folder, tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        read(configure(folder, tmp_path / "run"), [change])


def test_what_is_no_toml_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[model\n")
    with pytest.raises(ConfigError, match=r"bad.toml: not TOML"):
        read(tmp_path / "bad.toml")


def test_the_learning_rate_warms_up_and_falls_as_a_cosine():
    config = Config()
    config.optimizer.steps, config.optimizer.warmup, config.optimizer.learning_rate = 110, 10, 1.0
    rates = [loop.learning_rate(config, step) for step in range(110)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[60] == pytest.approx(0.55) and rates[10] == 1.0
    assert rates[-1] == pytest.approx(0.1, abs=1e-3) and sorted(rates[10:], reverse=True) == rates[10:]


def test_a_plot_is_drawn_where_there_is_matplotlib(folder, tmp_path, whole_run):
    pytest.importorskip("matplotlib")
    assert (whole_run / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_name_of_phsa_models_is_a_model(monkeypatch, tmp_path):
    monkeypatch.setenv("PHSA_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match="run `phsa models fetch smollm2-135m`"):
        load._where("smollm2-135m")
    monkeypatch.setattr(load, "_packaged", {"smollm2-135m": str(tmp_path / "smollm2.gguf"), "gpt2": None}.get)
    (tmp_path / "smollm2.gguf").touch()
    assert load._where("smollm2-135m") == (str(tmp_path), {"gguf_file": "smollm2.gguf"})
    assert load._where("gpt2") == ("gpt2", {}) and load._where("org/name") == ("org/name", {})
