"""The training run: steps, evaluations, checkpoints, and the trained model at the end."""

from __future__ import annotations

import functools
import math
import os
import shutil
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from ..hf import niah
from ..hf.load import load_tokenizer
from ..settings import is_dense
from . import checkpoints, identity
from .batches import Batch, Batches
from .config import Config, ConfigError
from .files import sync_tree, write_json
from .identity import Lock, Start
from .logs import Progress, Reports, Table, check_reports, plot
from .lora import save_adapter
from .shards import Sequences, Shards
from .texts import Documents, open_texts
from .trainee import Trainee

LOG = ("step", "tokens", "loss", "divergence", "learning_rate", "gradient_norm", "tokens_per_second")


class TrainingError(RuntimeError):
    """A run that cannot go on."""


class Stopped(Exception):
    """A signal asked the run to end; it has, with a checkpoint."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def learning_rate(config: Config, step: int) -> float:
    """A linear warm-up, then a cosine down to final_learning_rate of it."""
    o = config.optimizer
    if step < o.warmup:
        return o.learning_rate * (step + 1) / o.warmup
    done = (step - o.warmup) / max(1, o.steps - o.warmup)
    low = o.final_learning_rate
    return o.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


class Run:
    """One training run on this process, one of `world`."""

    def __init__(
        self, config: Config, *, rank: int = 0, world: int = 1, device: torch.device, quiet: bool = False
    ) -> None:
        self.config, self.rank, self.world, self.device = config, rank, world, device
        o = config.optimizer
        if world % config.context_parallel:
            shares = ", ".join(str(one) for one in range(1, world + 1) if world % one == 0)
            raise ConfigError(
                f"context_parallel is {config.context_parallel}; allowed with {world} "
                f"{'process' if world == 1 else 'processes'}: {shares}"
            )
        # Processes that share rows read the same ones.
        self.rows_rank, self.rows_world = rank // config.context_parallel, world // config.context_parallel
        if o.batch % self.rows_world:
            raise ConfigError(
                f"optimizer.batch is {o.batch}; allowed with {world} processes and context_parallel = "
                f"{config.context_parallel}: multiples of {self.rows_world}"
            )
        self.out = Path(config.out)
        self.checkpoints = self.out / "checkpoints"
        self.progress = Progress(o.steps, quiet or rank != 0)
        check_reports(config.report_to)
        self.identity = config.identity()
        start = None
        if self._find_checkpoint() is None and config.init_from is not None:
            start = identity.find_start(config.init_from, config.lora)

        # One process reads all tokens once to compare them with their digests.
        data = config.data
        tokenizer = functools.cache(lambda: load_tokenizer(config.model.path))
        shards = open_texts(data.train, tokenizer, verify=rank == 0)
        self.identity["data"]["train"] = identity.of_tokens(shards)
        self.batches = Batches(Sequences(shards, data.length, config.seed), data, config.seed)
        self.held_out: list[Batch] = []
        if data.held_out is not None:
            held_out_shards = open_texts(data.held_out, tokenizer, verify=rank == 0)
            self.identity["data"]["held_out"] = identity.of_tokens(held_out_shards)
            held_out = Sequences(held_out_shards, data.length, 0)
            self.held_out = [Batch.of(held_out[index]) for index in range(config.evaluate.sequences)]
        columns = ["step", "held_out_loss", "held_out_loss_dense"]
        if config.evaluate.niah is not None:
            _, samples = niah.read_samples(config.evaluate.niah)
            columns += sorted({_needle_name(record["attention"]) for one in samples for record in one["records"]})

        self._lock = Lock(self.out) if rank == 0 else None
        try:
            self._set_up(shards, columns, start)
        except BaseException:
            self.close(failed=True)
            raise

    def _set_up(self, shards: Shards | Documents, columns: list[str], start: Start | None) -> None:
        config, o, data, rank = self.config, self.config.optimizer, self.config.data, self.rank
        resume = self._find_checkpoint()
        self.trainee = Trainee(config, shards.punctuation, self.device, self.world, start if resume is None else None)
        self.identity["model"]["weights"] = self.trainee.digest
        self._find_checkpoint()
        if self.trainee.context is not None:
            self.held_out = [self.trainee.context.share(batch) for batch in self.held_out]
        vocabulary = self.trainee.model.config.vocab_size
        if shards.vocab_size > vocabulary:
            raise ConfigError(
                f"{data.train} was made with a tokenizer of {shards.vocab_size} words; the model has {vocabulary}"
            )
        parameters = self.trainee.parameters()
        groups = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": o.weight_decay},
            {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=o.learning_rate,
            betas=(o.beta1, o.beta2),
            fused=True,  # of 310 weights on the CPU, 2 ms and not 30
        )
        self.step = 0
        self.tokens = 0
        if resume is not None:
            run = checkpoints.read_run(resume)
            checkpoints.load(resume, self.trainee.model, self.optimizer)
            self.step, self.tokens = run["step"], run["tokens"]
            self.progress.say(f"going on from {resume}")
        elif start is not None:
            self.progress.say(f"beginning with the weights of {start.folder}")
        if rank == 0:
            self.out.mkdir(parents=True, exist_ok=True)
            write_json(self.out / "config.json", config.to_json())
            self.log = Table(self.out / "log.csv", LOG, self.step)
            self.reports = Reports(config.report_to, self.out, config.to_json(), self.step)
            self.evaluations = Table(self.out / "evaluations.csv", columns, self.step)
        trained = sum(p.numel() for p in parameters)
        all_parameters = sum(p.numel() for p in self.trainee.model.parameters())
        self.progress.say(
            f"{config.attention.method} K={config.attention.top_k}: {trained:,} of {all_parameters:,} weights are "
            f"trained, {o.batch * data.length:,} tokens a step, {shards.tokens:,} tokens in {data.train}"
        )

    def _find_checkpoint(self) -> Path | None:
        """The last complete checkpoint, if this configuration may go on from it."""
        found = checkpoints.complete(self.checkpoints)
        if not found:
            if (self.out / "final").exists():
                raise ConfigError(f"{self.out} holds a finished run; give another folder as out")
            return None
        identity.check(self.out, found[-1], self.identity)
        return found[-1]

    def close(self, failed: bool = False) -> None:
        """Gives the folder free."""
        if hasattr(self, "reports"):
            self.reports.close()
        if self._lock is not None:
            self._lock.release(failed)

    def _sum(self, values: Iterable[float]) -> list[float]:
        """Over all processes."""
        if self.world == 1:
            return list(values)
        tensor = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return tensor.tolist()

    def _one_step(self) -> dict[str, float]:
        o = self.config.optimizer
        rate = learning_rate(self.config, self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        batches = self.batches.of_step(self.step, o.batch, o.micro_batch, self.rows_rank, self.rows_world)
        if self.trainee.context is not None:
            batches = [self.trainee.context.share(batch) for batch in batches]
        (predicted,) = self._sum([sum(batch.predicted for batch in batches)])
        predicted = max(1.0, predicted)  # a step may have questions only
        nll = torch.zeros((), dtype=torch.float64, device=self.device)
        divergence = torch.zeros_like(nll)
        for index, batch in enumerate(batches):
            self.trainee.gather_gradients(index + 1 == len(batches))
            # FSDP takes the mean of the processes' gradients; a step wants their sum over all predicted tokens.
            loss, one_nll, one_divergence = self.trainee.loss(batch.to(self.device), self.world / predicted)
            loss.backward()
            nll += one_nll
            divergence += one_divergence
        norm = torch.nn.utils.clip_grad_norm_(self.trainee.parameters(), o.clip or math.inf)
        norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        mean_nll, mean_divergence = (value / predicted for value in self._sum([float(nll), float(divergence)]))
        for name, value in (("loss", mean_nll), ("divergence", mean_divergence), ("gradient's norm", norm)):
            if not math.isfinite(value):
                raise TrainingError(
                    f"step {self.step + 1}: the {name} is {value}. The weights of this step were not taken. Begin with "
                    f'those of the last checkpoint (init_from = "{self.out}") in another folder, with a lower '
                    "optimizer.learning_rate"
                )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += int(predicted)
        return {"loss": mean_nll, "divergence": mean_divergence, "learning_rate": rate, "gradient_norm": norm}

    def evaluate(self) -> dict[str, float]:
        """Held-out loss, sparse and dense, and the needles."""
        trainee, config, out = self.trainee, self.config.evaluate, {}
        if self.held_out:
            out["held_out_loss"] = trainee.held_out_loss(self.held_out, trainee.settings)
            out["held_out_loss_dense"] = trainee.held_out_loss(self.held_out, trainee.dense)
        if config.niah is not None:
            # Every process answers, because the weights are gathered for all; one writes it down.
            name = f"niah-{self.step:08d}.jsonl" if self.rank == 0 else os.devnull
            if self.rank == 0:
                (self.out / name).unlink(missing_ok=True)
            options = {"limit": config.niah_samples, "batch_tokens": config.niah_batch_tokens, "quiet": True}
            trainee.model.eval()
            try:
                right: dict[str, list[float]] = {}
                for record in niah.run(trainee.model, self.config.model.path, config.niah, self.out / name, **options):
                    right.setdefault(_needle_name(record["attention"]), []).append(record["score"])
            finally:
                trainee.model.train()
                trainee.attend(trainee.settings)
            out |= {name: 100 * sum(scores) / len(scores) for name, scores in right.items()}
        if out and self.rank == 0:
            self.evaluations.add({"step": self.step, **{name: f"{value:.6g}" for name, value in out.items()}})
            self.reports.add(self.step, {f"eval/{name}": value for name, value in out.items()})
            text = "  ".join(f"{name} {value:.4g}" for name, value in out.items())
            self.progress.say(f"step {self.step}: {text}")
        return out

    def save_checkpoint(self) -> None:
        run = {"tokens": self.tokens, "identity": self.identity}
        keep = self.config.checkpoint.keep
        checkpoints.save(self.checkpoints, self.step, run, self.trainee.model, self.optimizer, keep, self.rank)

    def save_final(self) -> None:
        """`final/`: an adapter, or a whole model with its tokenizer."""
        config, trainee = self.config, self.trainee
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        if config.lora is not None:
            state = checkpoints.trained_weights(trainee.model, options)
        else:
            state = get_model_state_dict(trainee.model, options=options)
        if self.rank == 0:
            final, partial = self.out / "final", self.out / "final.partial"
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            if config.lora is not None:
                save_adapter(partial, state, config.lora, config.model.path, trainee.settings)
            else:
                dtype = getattr(torch, config.model.dtype)
                tied = _tied_names(trainee.model)
                state = {name: value.to(dtype) for name, value in state.items() if name not in tied}
                trainee.model.save_pretrained(partial, state_dict=state)
                try:
                    load_tokenizer(config.model.path).save_pretrained(partial)
                except (OSError, ValueError) as error:
                    self.progress.say(f"the tokenizer was not saved with the model: {error}")
            sync_tree(partial)
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)

    def run(self) -> None:
        """To the end, or to the next signal."""
        try:
            self._run()
        finally:
            self.close()

    def _run(self) -> None:
        config = self.config
        stop = _Signals()
        with stop:
            if self.step == 0 and config.evaluate.every:
                self.evaluate()
            saved = evaluated = self.step
            while self.step < config.optimizer.steps:
                start = time.perf_counter()
                values = self._one_step()
                speed = config.optimizer.batch * config.data.length / (time.perf_counter() - start)
                if self.rank == 0:
                    row = {"step": self.step, "tokens": self.tokens}
                    row |= {name: f"{value:.8g}" for name, value in values.items()}
                    self.log.add({**row, "tokens_per_second": f"{speed:.4g}"})
                    self.reports.add(
                        self.step,
                        {f"train/{name}": one for name, one in {**values, "tokens_per_second": speed}.items()},
                    )
                self.progress.show(
                    self.step,
                    f"loss {values['loss']:.4f}  lr {values['learning_rate']:.2e}  "
                    f"grad {values['gradient_norm']:.2f}  {speed:,.0f} tokens/s",
                )
                if config.evaluate.every and self.step % config.evaluate.every == 0:
                    self.evaluate()
                    evaluated = self.step
                (number,) = self._sum([stop.number])
                if number or (config.checkpoint.every and self.step % config.checkpoint.every == 0):
                    self.save_checkpoint()
                    saved = self.step
                if number:
                    raise Stopped(stop.number or signal.SIGTERM)
            if saved != self.step or not checkpoints.complete(self.checkpoints):
                self.save_checkpoint()
            if evaluated != self.step or not config.evaluate.every:
                self.evaluate()
            self.save_final()
            if self.rank == 0:
                plot(self.out)
                self.progress.say(
                    f"done: {self.tokens:,} tokens; the trained {'adapter' if config.lora else 'model'} "
                    f"is in {self.out / 'final'}"
                )


def _needle_name(attention: dict[str, Any]) -> str:
    if is_dense(attention["attention"]):
        return "niah_dense"
    return f"niah_{attention['attention']}_k{attention['top_k']}"


def _tied_names(model: nn.Module) -> set[str]:
    """Other names of weights that have one already: the output's, where it is the embeddings'."""
    once = {name for name, _ in model.named_parameters()}
    return {name for name, _ in model.named_parameters(remove_duplicate=False)} - once


class _Signals:
    """Ctrl-C and SIGTERM end the run after the step, with a checkpoint; a second one ends it at once."""

    def __init__(self) -> None:
        self.number = 0
        self._before: dict[int, Any] = {}

    def _catch(self, number: int, frame: Any) -> None:
        if self.number:
            os._exit(128 + number)
        self.number = number

    def __enter__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._catch)

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
