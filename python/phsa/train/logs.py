"""What a run writes down: two CSV files, a plot of them, and a line on the terminal."""

from __future__ import annotations

import csv
import hashlib
import importlib
import importlib.util
import io
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .config import ConfigError
from .files import write_text


class Table:
    """A CSV file that grows by rows. Continued from a step, it forgets what a stopped run wrote after it."""

    def __init__(self, path: Path, columns: Sequence[str], step: int) -> None:
        self.path = path
        self.columns = list(columns)
        rows = [row for row in read_table(path) if int(row["step"]) <= step] if step else []
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, extrasaction="ignore", restval="")
        writer.writeheader()
        writer.writerows(rows)
        write_text(path, text.getvalue())

    def add(self, row: Mapping[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, self.columns, restval="").writerow(row)


def read_table(path: Path) -> list[dict[str, str]]:
    """The whole rows of a table; a last one that was cut is left out."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    text = text[: text.rfind("\n") + 1]
    return list(csv.DictReader(io.StringIO(text)))


class Progress:
    """One line that is written over on a terminal, and a line every few seconds elsewhere."""

    def __init__(self, steps: int, quiet: bool) -> None:
        self._steps = steps
        self._quiet = quiet
        self._terminal = sys.stderr.isatty()
        self._start = time.monotonic()
        self._first: int | None = None
        self._said = float("-inf")

    def show(self, step: int, text: str) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first, self._start = step, now
        if self._quiet or (not self._terminal and now - self._said < 5 and step < self._steps):
            return
        self._said = now
        done = step - self._first
        left = (now - self._start) / done * (self._steps - step) if done else 0.0
        line = f"step {step}/{self._steps}  {text}  {int(left // 60)}:{int(left % 60):02d} left"
        print(
            f"\r{line}\x1b[K" if self._terminal else line,
            end="" if self._terminal else "\n",
            file=sys.stderr,
            flush=True,
        )

    def say(self, text: str) -> None:
        if not self._quiet:
            print(("\r\x1b[K" if self._terminal else "") + text, file=sys.stderr, flush=True)


_MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}


def check_reports(names: Sequence[str]) -> None:
    """Before anything is loaded: whether what report_to names is there."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"report_to has {name!r}, which is not installed here: pip install {name}")
        try:
            importlib.import_module(_MODULES[name])
        except ImportError as error:
            raise ConfigError(f"report_to has {name!r}, which cannot be loaded here: {error}") from error


class Reports:
    """The numbers of the log for TensorBoard and Weights & Biases, under the names that transformers' trainer uses."""

    def __init__(self, names: Sequence[str], out: Path, config: dict[str, Any], step: int) -> None:
        self._writer: Any = None
        self._run: Any = None
        if "tensorboard" in names:
            from torch.utils.tensorboard import SummaryWriter

            # What a stopped run wrote after its last checkpoint is forgotten, as in the tables.
            self._writer = SummaryWriter(str(out / "tensorboard"), purge_step=step + 1 if step else None)
        if "wandb" in names:
            import wandb

            # The same folder is the same run, also after a stop.
            name = hashlib.sha256(str(out.resolve()).encode()).hexdigest()[:16]
            project = os.environ.get("WANDB_PROJECT", "phsa")
            self._run = wandb.init(project=project, name=out.name, id=name, resume="allow", dir=str(out), config=config)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
        if self._run is not None:
            self._run.log(dict(values), step=step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        if self._run is not None:
            self._run.finish()
        self._writer = self._run = None


def plot(folder: Path) -> None:
    """loss.png, where matplotlib is installed."""
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = read_table(folder / "log.csv")
    if not rows:
        return
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    steps, losses = [int(row["step"]) for row in rows], [float(row["loss"]) for row in rows]
    axes.plot(steps, losses, color="#9ca3af", linewidth=0.8, label="training")
    window = max(1, len(losses) // 50)
    if window > 1:
        means = [
            sum(losses[max(0, i - window) : i + 1]) / len(losses[max(0, i - window) : i + 1])
            for i in range(len(losses))
        ]
        axes.plot(steps, means, color="#374151", linewidth=1.5, label=f"training, mean of {window} steps")
    evaluations = read_table(folder / "evaluations.csv")
    for column, color, label in (
        ("held_out_loss", "#2563eb", "held-out, as trained"),
        ("held_out_loss_dense", "#d97706", "held-out, dense"),
    ):
        points = [(int(row["step"]), float(row[column])) for row in evaluations if row.get(column)]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, color=color, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel("loss per token")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    new = folder / "loss.new.png"
    figure.savefig(new, dpi=120)
    pyplot.close(figure)
    new.replace(folder / "loss.png")
