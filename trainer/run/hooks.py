"""What happens between steps: recording, evaluation, checkpoints."""

import collections
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ..checkpoint.manager import Checkpoints
from ..data import Order
from ..data.batches import Shardings, device_batches
from ..program.state import State
from ..record.ledger import Ledger
from ..record.metrics import Writer
from ..record.progress import Progress
from .failed_steps import FailedSteps
from .held_out import WORDS, HeldOut
from .loop import Row
from .prepare import Prepared


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
    bad: FailedSteps
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


# Evaluation steps that the devices may have before them.
IN_FLIGHT = 4


@dataclasses.dataclass
class Evaluate:
    """The mean loss, and all else that the model sums, over a held-out split in order.

    Attributes:
      latest: the newest step, and its loss.
    """

    every: int
    eval_fn: Callable[[Any, Any], dict[str, jax.Array]]
    split: HeldOut
    batch_size: int
    shardings: Shardings
    progress: Progress
    writers: Sequence[Writer]
    latest: tuple[int, float] | None = None

    def __call__(self, step: int, state: State) -> None:
        sums = self._sums(state)
        weight = sums.pop("weight")
        penalty = sums.pop("penalty", 0.0)
        loss = (sums.pop("loss") - penalty) / weight
        self.latest = (step, loss)
        units = self.split.data.loss_units(loss)
        others = {name: total / weight for name, total in sums.items()}
        row = {"step": step, "loss": loss, **units, **others}
        for writer in self.writers:
            writer.write(self.split.name, [row])
        figures = [(k.replace("_", " "), v) for k, v in row.items() if k != "step"]
        words = "  ".join(f"{name} {value:.4f}" for name, value in figures)
        self.progress.message(f"step {step}  {WORDS[self.split.name]} {words}")
        self.progress.rate.restart()

    def _sums(self, state: State) -> dict[str, float]:
        """Added up in double precision, so that the number of batches does not show."""
        running: collections.deque[dict[str, jax.Array]] = collections.deque()
        found: list[dict[str, float]] = []

        def fetch(most: int) -> None:
            while len(running) > most:
                found.append(jax.device_get(running.popleft()))

        data = self.split.data
        with device_batches(
            data,
            Order(len(data), shuffle=False),
            batch_size=self.batch_size,
            shardings=self.shardings,
            start=0,
            stop=self.split.num_batches,
            training=False,
            num_examples=len(data),
        ) as batches:
            for batch in batches:
                running.append(self.eval_fn(state, batch))
                fetch(IN_FLIGHT)
        fetch(0)
        return {name: math.fsum(float(x[name]) for x in found) for name in found[0]}


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
    prepared: Prepared
    progress: Progress
    bad: FailedSteps
    batches_ahead: int = 0
    evaluate: Evaluate | None = None
    last_step: int | None = None
    said: bool = False

    def __call__(self, step: int, state: State) -> None:
        if self.bad.in_a_row and step < self.prepared.config.num_steps:
            self.progress.message(f"step {step} failed, so no checkpoint of it is made")
            return
        self.now(step, state)

    def now(self, step: int, state: State) -> None:
        """Saves whatever the steps before were: a failed one has changed nothing."""
        since = time.perf_counter()
        measured = self.evaluate.latest if self.evaluate else None
        stall = self.checkpoints.save(
            step,
            self.prepared.layout.canonical(state, self.prepared.mesh),
            self.prepared.about(step, self.batches_ahead),
            loss=measured[1] if measured and measured[0] == step else None,
            since=since,
        )
        self.last_step = step
        # A save that the next had to wait for is said the first time, however short.
        first = stall.waited_for is not None and not self.said
        if first or stall.stall_s > LONG:
            self.said = self.said or first
            self.progress.message(f"step {step}  {stall.describe()}")
        self.progress.rate.restart()
