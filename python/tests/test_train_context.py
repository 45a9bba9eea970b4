"""Context parallelism: the processes that share a row choose the blocks, compute the outputs and learn the weights that
one process does, and a run of theirs goes on from any moment at which it was killed."""

import csv
import functools
import random
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import Processes, run
from tiny_model import write_model
from token_shards import write_config, write_documents
from torch import Tensor, nn
from transformers import LlamaConfig, MistralConfig, Qwen2Config

from phsa import ops
from phsa.hf import packed
from phsa.settings import ModelSettings, Settings
from phsa.train import checkpoints, context, loop
from phsa.train.batches import Batch
from phsa.train.config import ConfigError, read
from phsa.train.context import Chunk, Context, ContextAttention

CPU = torch.device("cpu")
HEADS = 4  # of queries

# The attention --------------------------------------------------------------------------------------------------------

CASES = {
    "phsa": {"policy": "phsa", "top_k": 3},
    "parts": {"policy": "phsa", "top_k": 2, "parts": 4},
    "survivors": {"policy": "phsa", "top_k": 2, "parts": 4, "survivors": 6},
    "lambdas": {"policy": "phsa", "top_k": 2, "lam": (0.3,)},
    "nothing chosen": {"policy": "phsa", "top_k": 0},
    "infllm2": {"policy": "infllm2", "top_k": 2},
    "each head": {"policy": "phsa", "top_k": 2, "group_reduce": "none"},
    "dense": {"policy": "dense"},
}
LENGTHS = {"one": [413], "packed": [150, 16, 200, 47], "short": [3, 5]}


def _inputs(lengths: list[int], kv: int, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """(1, heads, tokens, head_dim) each, flags, bounds. The gradient of the output is among them."""
    generator = torch.Generator().manual_seed(sum(lengths))
    tokens = sum(lengths)
    shapes = {"q": (HEADS, tokens), "k": (kv, tokens), "v": (kv, tokens), "d": (tokens, HEADS)}
    rows = {name: torch.randn(1, *shape, 64, generator=generator).to(dtype) for name, shape in shapes.items()}
    flags = (torch.rand(tokens, generator=generator) < 0.2).to(torch.uint8)
    return rows, flags, torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def _settings(case: str, kv: int) -> ModelSettings:
    values = dict(CASES[case])
    if isinstance(values.get("lam"), tuple):
        values["lam"] = (0.3, 0.9, 0.6, 0.8)[:kv]
    return ModelSettings(Settings(init=16, local=32, **values))


def _attend_in_share(rank: int, world: int, out: str, kv: int, dtype: torch.dtype, backend: str) -> None:
    """All cases of one number of KV heads; each process writes what it chose, gave and learned."""
    place = Context(world, kv, "cpu", world)
    chosen: list[Tensor] = []
    attention = ops.phsa_attention

    def watched(*args: Any, **options: Any) -> tuple[Tensor, ...]:
        found = attention(*args, **options, return_selection=True)
        chosen.append(found[2])
        return found

    ops.phsa_attention = watched
    results = {}
    for name, lengths in LENGTHS.items():
        for case in CASES:
            settings = _settings(case, kv)
            rows, flags, bounds = _inputs(lengths, kv, dtype)
            pieces = [
                np.arange(first, last) + 1 for first, last in zip(bounds.tolist(), bounds[1:].tolist(), strict=False)
            ]
            batch = place.share(Batch.of(pieces))
            real = batch.tokens[0] > 0  # a token's id is its place and one; padding has none
            mine = batch.tokens[0] - 1
            padded = len(batch.row) - len(flags)
            q, k, v = (rows[x][:, :, mine].clone().requires_grad_() for x in "qkv")
            full_flags = torch.cat((flags, flags.new_zeros(padded)))
            module = nn.Module()
            module.layer_idx = 0
            attention_of = ContextAttention.of(place, settings, backend, batch.bounds, full_flags)
            chosen.clear()
            given, _ = context.attention_function(module, q, k, v, None, phsa_context=attention_of)
            (given * rows["d"][:, mine] * real[None, :, None, None]).sum().backward()
            results[name, case] = {
                "tokens": mine,
                "real": real,
                "out": given[0].detach(),
                **{f"d_{n}": x.grad[0].transpose(0, 1) for n, x in (("q", q), ("k", k), ("v", v))},
                "chosen": chosen[0] if chosen else None,
                "queries": torch.cat([torch.arange(*chunk) for chunk in place.chunks(len(batch.row))]),
                "heads": place.rank % place.heads,
            }
    torch.save(results, f"{out}/{rank}.pt")


@pytest.mark.parametrize(
    "world, kv, dtype, backend",
    [
        (2, 2, torch.float32, "auto"),
        (2, 1, torch.float32, "auto"),
        (4, 4, torch.bfloat16, "auto"),
        (4, 2, torch.float64, "torch"),
    ],
    ids=["heads", "queries", "heads, bf16", "heads and queries, float64"],
)
def test_processes_that_share_a_row_choose_and_attend_as_one_does(tmp_path, world, kv, dtype, backend):
    run(tmp_path / "run", world, _attend_in_share, str(tmp_path), kv, dtype, backend)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(world)]
    tolerance = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 3e-2}[dtype]
    for name, lengths in LENGTHS.items():
        for case in CASES:
            rows, flags, bounds = _inputs(lengths, kv, dtype)
            settings = _settings(case, kv).base
            q, k, v = (rows[x].clone().requires_grad_() for x in "qkv")
            if settings.policy == "dense":
                out, selection = packed.attention_function(nn.Module(), q, k, v, None, cu_seq_lens_q=bounds)[0], None
            else:
                out, _, selection = ops.phsa_attention(
                    *(x[0].transpose(0, 1) for x in (q, k, v)),
                    flags,
                    policy=settings.policy,
                    top_k=settings.top_k,
                    lam=settings.lam,
                    init=16,
                    local=32,
                    group_reduce=settings.group_reduce,
                    parts=settings.parts,
                    survivors=settings.survivors,
                    cu_seqlens=bounds,
                    backend=backend,
                    return_selection=True,
                )
                out = out[None]
            (out * rows["d"]).sum().backward()
            want = {
                "out": out[0].detach(),
                **{f"d_{n}": x.grad[0].transpose(0, 1) for n, x in (("q", q), ("k", k), ("v", v))},
            }
            seen = torch.zeros(sum(lengths), dtype=torch.long)
            for one in (results[name, case] for results in found):
                tokens = one["tokens"][one["real"]]
                seen[tokens] += 1
                for what, value in want.items():
                    torch.testing.assert_close(
                        one[what][one["real"]],
                        value[tokens],
                        rtol=tolerance,
                        atol=tolerance,
                        msg=functools.partial("{0}, {1}, {2}: {3}".format, case, name, what),
                    )
                if selection is not None:
                    real = one["queries"] < sum(lengths)
                    per = one["chosen"].shape[1]
                    heads = slice(one["heads"] * per, (one["heads"] + 1) * per)
                    theirs = selection[one["queries"][real]][:, heads]
                    slots = min(theirs.shape[2], one["chosen"].shape[2])
                    assert torch.equal(one["chosen"][real][..., :slots], theirs[..., :slots]), (case, name)
                    assert (one["chosen"][real][..., slots:] == -1).all() and (theirs[..., slots:] == -1).all()
            assert (seen == 1).all(), "every token belongs to one process"


def test_the_chunks_of_a_row_are_all_of_it_and_as_much_work_for_each(monkeypatch):
    bounds = [0, 100, 164, 1024]
    places = []
    for rank in range(4):
        place = object.__new__(Context)
        place.queries, place.query_rank = 4, rank
        places.append([Chunk.of(*chunk, bounds) for chunk in place.chunks(1024)])
    queries = sorted((chunk.begin, chunk.end) for place in places for chunk in place)
    assert queries == [(begin, begin + 128) for begin in range(0, 1024, 128)]
    # The keys that dense attention reads, of one long sequence: no process more than a hundredth above the others.
    whole = [[Chunk.of(chunk.begin, chunk.end, [0, 1024]) for chunk in place] for place in places]
    work = [sum(sum(range(chunk.begin + 1, chunk.end + 1)) for chunk in place) for place in whole]
    assert max(work) < 1.01 * min(work)
    early = places[0][0]
    assert (early.first_key, early.q_lens, early.kv_lens) == (0, [100, 28], [100, 28])
    assert Chunk.of(128, 256, bounds) == Chunk(128, 256, 100, [36, 92], [64, 92])


# Training -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("context")
    write_model(folder / "model", hidden=256, kv_heads=2)
    generator = np.random.default_rng(0)
    for name, count in (("tokens", 40), ("held-out", 8)):
        documents = [np.minimum(generator.geometric(0.05, size), 400) for size in generator.integers(20, 500, count)]
        write_documents(folder / name, [documents], 400)
    return folder


def configure(folder: Path, out: Path) -> Path:
    return write_config(
        folder,
        out,
        250,
        """
[optimizer]
steps = 4
batch = 2
learning_rate = 0.003
[checkpoint]
every = 1
""",
    )


def _train(rank: int, world: int, path: str, *changes: str) -> None:
    loop.Run(read(path, changes), rank=rank, world=world, device=CPU, quiet=False).run()


def _table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def exact(out: Path) -> list[list[str]]:
    """The log but for the speed, and the evaluations."""
    rows = [{**row, "tokens_per_second": ""} for row in _table(out / "log.csv")]
    return [list(row.values()) for row in rows + _table(out / "evaluations.csv")]


WAYS = {
    "all weights": ["attention.parts=4"],
    "adapter, distilled": ["attention.method=infllm2", "lora.rank=4", "distill.weight=1.0"],
    "dense, distilled": ["attention.method=dense", "distill.weight=0.5", "model.gradient_checkpointing=true"],
    "by layer": ['attention.layers.1={ policy = "dense" }', "optimizer.micro_batch=2"],
}


@pytest.mark.parametrize("way, size_of_four", [*zip(WAYS, (4, 2, 4, 2), strict=True)])
def test_processes_that_share_rows_learn_what_one_does(folder, tmp_path, way, size_of_four):
    """One process; two that share each row; four of which two share one row and two another, or all four each row, with
    two KV heads: by heads and by queries. Products of fewer rows round differently, so blocks whose scores are all
    but equal may change places; without a choice the losses agree to six digits."""
    results = []
    for world, size in ((1, 1), (2, 2), (4, size_of_four)):
        out = tmp_path / f"{world}-{size}"
        changes = [*WAYS[way], f"context_parallel={size}", "optimizer.steps=2"]
        run(tmp_path / f"processes-{world}-{size}", world, _train, str(configure(folder, out)), *changes)
        results.append(out)
    first, *others = results
    for column in ("loss", "divergence", "gradient_norm"):
        want = [float(row[column]) for row in _table(first / "log.csv")]
        for out in others:
            got = [float(row[column]) for row in _table(out / "log.csv")]
            assert got == pytest.approx(want, rel=1e-3, abs=1e-6), (out.name, column)
    (want,) = _table(first / "evaluations.csv")
    for out in others:
        (got,) = _table(out / "evaluations.csv")
        for column in ("held_out_loss", "held_out_loss_dense"):
            close = 1e-5 if column.endswith("dense") else 1e-3
            assert float(got[column]) == pytest.approx(float(want[column]), rel=close), (out.name, column)


def _killed_and_resumed(folder: Path, tmp_path: Path, kills: int, steps: int) -> None:
    changes = ["context_parallel=2", f"optimizer.steps={steps}"]
    run(tmp_path / "processes", 4, _train, str(configure(folder, tmp_path / "whole")), *changes)
    path, out, moments = configure(folder, tmp_path / "killed"), tmp_path / "killed", random.Random(kills)

    def reached() -> str:
        found = checkpoints.complete(out / "checkpoints")
        return found[-1].name if found else ""

    killed = 0
    for number in range(3 * kills):
        before = reached()
        processes = Processes(tmp_path / f"try-{number}", 4, _train, str(path), *changes)
        while processes.running and reached() == before:
            time.sleep(0.002)
        time.sleep(moments.uniform(0, 0.2))  # somewhere in the steps and the checkpoints that follow
        killed += processes.kill() == 4
        if killed == kills or (out / "final").exists():
            break
    assert killed == kills and not (out / "final").exists()
    processes = Processes(tmp_path / "last", 4, _train, str(path), *changes)
    processes.finish()
    assert "going on from" in processes.said()
    assert exact(out) == exact(tmp_path / "whole")
    ours, theirs = ((tmp_path / name / "final/model.safetensors").read_bytes() for name in ("killed", "whole"))
    assert ours == theirs


def test_a_killed_run_of_four_processes_goes_on_with_the_same_bits(folder, tmp_path):
    """Two data parallel times two context parallel, all weights, sharded by FSDP2 over the four."""
    _killed_and_resumed(folder, tmp_path, kills=1, steps=6)


@pytest.mark.long
def test_a_run_killed_at_ten_random_moments_goes_on_with_the_same_bits(folder, tmp_path):
    _killed_and_resumed(folder, tmp_path, kills=10, steps=60)


def test_a_run_goes_on_with_another_number_of_processes_to_a_row(folder, tmp_path):
    path, out = str(configure(folder, tmp_path / "run")), tmp_path / "run"
    run(tmp_path / "whole", 2, _train, path, "context_parallel=2")
    whole = [float(row["loss"]) for row in _table(out / "log.csv")]
    shutil.rmtree(out / "final")
    shutil.rmtree(out / "checkpoints/step-00000004")  # the run of four goes on from the third
    processes = Processes(tmp_path / "last", 4, _train, path, "context_parallel=4")
    processes.finish()
    assert "going on from" in processes.said()
    assert [float(row["loss"]) for row in _table(out / "log.csv")] == pytest.approx(whole, rel=1e-5)


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, message",
    [
        (["context_parallel=0"], "context_parallel is 0; allowed: 1 and up"),
        (["context_parallel=3"], "context_parallel is 3; allowed with 4 processes: 1, 2, 4"),
        (
            ["context_parallel=2", "optimizer.batch=3"],
            "optimizer.batch is 3; allowed with 4 processes and .* = 2: mult",
        ),
    ],
)
def test_a_share_that_cannot_be_is_refused(folder, tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        loop.Run(read(configure(folder, tmp_path / "run"), changes), rank=0, world=4, device=CPU, quiet=True)


def test_models_with_windows_are_refused():
    context.check_config(LlamaConfig(), 2)
    context.check_config(Qwen2Config(sliding_window=4096, use_sliding_window=False), 2)
    with pytest.raises(ConfigError, match=r"context_parallel is 2; allowed for mistral models, .* windows: 1"):
        context.check_config(MistralConfig(sliding_window=64), 2)
    with pytest.raises(ValueError, match="allowed then: context_parallel = 1"):
        context.attention_function(nn.Module(), *[torch.zeros(1, 1, 4, 64)] * 3, None)
