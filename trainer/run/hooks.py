"""The built-in hooks: recording, evaluation, checkpoints."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from ..checkpoint.manager import Checkpoints
from ..data.batches import Shardings
from ..job.watchdog import ALLOW_SECONDS, Watchdog
from ..program.state import State
from ..program.step import WEIGHT
from ..record.ledger import BLOCK, Ledger
from ..record.metrics import Writer
from ..record.progress import Progress
from . import evaluating
from .early_stop import NEVER, EarlyStop
from .failed_steps import FailedSteps
from .held_out import TITLES, HeldOut
from .loop import Hook, StepMetrics
from .prepare import Prepared


@dataclasses.dataclass
class Recorder:
    """Shows and writes the metrics of every step, and counts those that failed.

    Attributes:
      unit: what throughput is counted in, such as tokens.
      units_per_step: how many of them a step processes.
      batches_ahead: see checkpoint.restore.Position.
      facts: metrics of the host's own, given the number of a batch.
      bubble: the simulated bubble of a pipeline as a share of the step; None without
        a pipeline.
    """

    progress: Progress
    writers: Sequence[Writer]
    unit: str
    units_per_step: float
    failed_steps: FailedSteps
    ledger: Ledger
    batches_ahead: int = 0
    bubble: float | None = None
    facts: Callable[[int], Mapping[str, float]] | None = None

    def __call__(self, rows: list[StepMetrics]) -> None:
        if not rows:
            return
        for row in rows if self.facts is not None else ():
            ahead = int(row["step"]) - 1 + self.batches_ahead
            row |= self.facts(int(row.get(BLOCK, ahead)))  # type: ignore
        self.ledger.steps(rows, self.batches_ahead)
        for row in rows:
            row.pop(WEIGHT, None)  # for learners; of no use to readers of the files
        self.progress.update(int(rows[-1]["step"]), rows[-1])
        rate = self.progress.rate.steps_per_s
        if rate is not None:
            rows[-1][f"{self.unit}_per_s"] = rate * self.units_per_step
            rows[-1]["step_s"] = 1 / rate
            if self.bubble is not None:
                rows[-1]["bubble"] = self.bubble
        written = [
            {k: v for k, v in row.items() if v or k != "skipped"} for row in rows
        ]
        for writer in self.writers:
            writer.write("train", written)
        for row in rows:
            self.failed_steps.update(row)


@dataclasses.dataclass
class Evaluate:
    """Computes the mean loss and the model's other metrics over a held-out split.

    Attributes:
      on_loss: called with the step and the loss.
      latest: the newest step that was evaluated, and its loss.
    """

    every: int
    eval_fn: Callable[[Any, Any], dict[str, jax.Array]]
    split: HeldOut
    batch_size: int
    shardings: Shardings
    progress: Progress
    writers: Sequence[Writer]
    on_loss: Callable[[int, float], None] | None = None
    latest: tuple[int, float] | None = None

    def __call__(self, step: int, state: State) -> None:
        rows = evaluating.batch_sums(
            self.eval_fn,
            state,
            self.split.data,
            batch_size=self.batch_size,
            shardings=self.shardings,
            num_batches=self.split.num_batches,
        )
        means = evaluating.means(evaluating.totals(rows), self.split.data)
        loss = means["loss"]
        self.latest = (step, loss)
        row = {"step": step, **means}
        for writer in self.writers:
            writer.write(self.split.name, [row])
        figures = [(k.replace("_", " "), v) for k, v in row.items() if k != "step"]
        text = "  ".join(f"{name} {value:.4f}" for name, value in figures)
        self.progress.message(f"step {step}  {TITLES[self.split.name]} {text}")
        if self.on_loss is not None:
            self.on_loss(step, loss)
        self.progress.rate.restart()


LONG_STALL_SECONDS = 1.0  # longer stalls are printed


@dataclasses.dataclass
class Save:
    """Starts saving a checkpoint; not after a failed step, unless it is the last one.

    Attributes:
      evaluate: runs before this hook when both are due; its loss goes into the
        manifest.
      early_stop: says whether this step is the last one, although it is not num_steps;
        what it has seen goes into the manifest.
      stop: the last step for now, which may come before num_steps.
      last_step: the newest step that was saved.
      has_reported_wait: whether waiting for the previous save was printed once.
    """

    every: int
    checkpoints: Checkpoints
    prepared: Prepared
    progress: Progress
    failed_steps: FailedSteps
    batches_ahead: int = 0
    evaluate: Evaluate | None = None
    early_stop: EarlyStop = NEVER
    stop: int | None = None
    last_step: int | None = None
    has_reported_wait: bool = False

    def __call__(self, step: int, state: State) -> None:
        stop = self.prepared.config.num_steps if self.stop is None else self.stop
        is_last = step >= stop or self.early_stop.is_over()
        if self.failed_steps.consecutive and not is_last:
            self.progress.message(f"step {step} failed: no checkpoint is saved")
            return
        self.now(step, state)

    def now(self, step: int, state: State) -> None:
        """Saves even after a failed step, which has not changed the state."""
        since = time.perf_counter()
        measured = self.evaluate.latest if self.evaluate else None
        stall = self.checkpoints.save(
            step,
            self.prepared.layout.canonical(state, self.prepared.mesh),
            self.prepared.metadata(step, self.batches_ahead)
            | self.early_stop.metadata(),
            loss=measured[1] if measured and measured[0] == step else None,
            since=since,
        )
        self.last_step = step
        # Waiting for the previous save is printed the first time, however short.
        is_first_wait = stall.waited_for is not None and not self.has_reported_wait
        if is_first_wait or stall.stall_s > LONG_STALL_SECONDS:
            self.has_reported_wait = self.has_reported_wait or is_first_wait
            self.progress.message(f"step {step}  {stall.describe()}")
        self.progress.rate.restart()


class Watched:
    """A hook that the watchdog allows to take longer than a step."""

    def __init__(self, hook: Hook, watchdog: Watchdog):
        self.every, self._hook, self._watchdog = hook.every, hook, watchdog

    def __call__(self, step: int, state: State) -> None:
        self._watchdog.beat(allow=ALLOW_SECONDS)
        self._hook(step, state)
        self._watchdog.beat()
