"""What happens between steps: recording, evaluation, checkpoints."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .bad_steps import BadSteps
from .checkpoint import Checkpoints
from .data import Dataset, Order, Shardings, device_batches
from .ledger import Ledger
from .loop import Row
from .metrics import Writer
from .progress import Progress
from .setup import Setup
from .state import State


@dataclasses.dataclass
class Recorder:
    """Shows and writes the figures of every step, and counts those that failed.

    Attributes:
      batches_ahead: of the data, see resume.Position.
      units_per_step: how many of the data's `unit` a step takes.
      bubble: simulated share of a pipeline's step; None without one.
    """

    progress: Progress
    writers: Sequence[Writer]
    unit: str
    units_per_step: float
    bad: BadSteps
    ledger: Ledger
    batches_ahead: int = 0
    bubble: float | None = None

    def __call__(self, rows: list[Row]) -> None:
        if not rows:
            return
        self.ledger.steps(rows, self.batches_ahead)
        self.progress.update(int(rows[-1]["step"]), rows[-1])
        rate = self.progress.rate.steps_per_s
        if rate is not None:
            rows[-1][f"{self.unit}_per_s"] = rate * self.units_per_step
            rows[-1]["step_s"] = 1 / rate
            if self.bubble is not None:
                rows[-1]["bubble"] = self.bubble
        figures = [
            {k: v for k, v in row.items() if v or k != "skipped"} for row in rows
        ]
        for writer in self.writers:
            writer.write("train", figures)
        for row in rows:
            self.bad.see(row)


@dataclasses.dataclass
class Evaluate:
    """The mean loss over the first batches of the held-out split, in order."""

    every: int
    eval_fn: Callable[[Any, Any], dict[str, jax.Array]]
    dataset: Dataset
    batch_size: int
    num_batches: int
    shardings: Shardings
    progress: Progress
    writers: Sequence[Writer]
    latest: tuple[int, float] | None = None  # the newest step, and its loss

    def __call__(self, step: int, state: State) -> None:
        total: dict[str, jax.Array] | None = None
        with device_batches(
            self.dataset,
            Order(len(self.dataset), shuffle=False),
            batch_size=self.batch_size,
            shardings=self.shardings,
            start=0,
            stop=self.num_batches,
            training=False,
        ) as batches:
            for batch in batches:
                sums = self.eval_fn(state, batch)
                total = sums if total is None else jax.tree.map(jnp.add, total, sums)
        assert total is not None
        sums = {name: float(value) for name, value in jax.device_get(total).items()}
        loss = (sums["loss"] - sums.get("penalty", 0.0)) / sums["weight"]
        self.latest = (step, loss)
        row = {"step": step, "loss": loss, **self.dataset.loss_units(loss)}
        for writer in self.writers:
            writer.write("eval", [row])
        units = "  ".join(f"{k} {v:.4f}" for k, v in row.items() if k != "step")
        self.progress.message(f"step {step}  held-out {units}")
        self.progress.rate.restart()


LONG = 1.0  # seconds of a stall that a person is told of


@dataclasses.dataclass
class Save:
    """Starts a checkpoint, but none in a row of failed steps, unless it is the last.

    Attributes:
      evaluate: ran before this hook where it was due; the checkpoint gets its loss.
      last_step: that was saved.
    """

    every: int
    checkpoints: Checkpoints
    setup: Setup
    progress: Progress
    bad: BadSteps
    batches_ahead: int = 0
    evaluate: Evaluate | None = None
    last_step: int | None = None
    said: bool = False

    def __call__(self, step: int, state: State) -> None:
        if self.bad.in_a_row and step < self.setup.config.num_steps:
            self.progress.message(f"step {step} failed, so no checkpoint of it is made")
            return
        self.now(step, state)

    def now(self, step: int, state: State) -> None:
        """Saves whatever the steps before were: a failed one has changed nothing."""
        since = time.perf_counter()
        measured = self.evaluate.latest if self.evaluate else None
        stall = self.checkpoints.save(
            step,
            self.setup.layout.canonical(state, self.setup.mesh),
            self.setup.about(step, self.batches_ahead),
            loss=measured[1] if measured and measured[0] == step else None,
            since=since,
        )
        self.last_step = step
        # A save that the next had to wait for is said the first time, however short.
        first = stall.waited_for is not None and not self.said
        if first or stall.stall_s > LONG:
            self.said = self.said or first
            self.progress.message(f"step {step}  {stall.words()}")
        self.progress.rate.restart()
