"""One trial: an ordinary `meshloom train` process in an ordinary run folder."""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import optuna

from ...launch.exit_codes import BAD_INPUT, DONE, GAVE_UP, Ending
from ...launch.logs import last_line
from ...launch.target import Command
from ...launch.workers import Heir, Worker
from ..record import metrics
from .study import REASON, SECONDS, SETTINGS

# Starts of one trial after deaths that may be transient, such as a killed process.
ATTEMPTS = 3
# How long a trial may take to save when it is stopped.
GRACE_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class End:
    """How a trial ended: "complete", "pruned" or "failed"; `reason` of the last two."""

    state: str
    value: float | None = None
    reason: str = ""


class Running:
    """A trial whose process runs; `poll` follows it to its end.

    Args:
      trial: Optuna's record of it.
      reported: the evaluations that are recorded already, {step: value}.
      folder: its run folder.
      argv: the command that trains it, and continues it after a restart.
      env: the environment of its processes.
      metric: the held-out metric that is optimized.
      heir: ends the process if this one is killed.
    """

    def __init__(
        self,
        trial: optuna.Trial,
        reported: Mapping[int, float],
        folder: Path,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        metric: str,
        heir: Heir,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.trial, self.folder = trial, folder
        self._metric, self._heir, self._clock = metric, heir, clock
        self._command = Command(f"trial {trial.number}", argv, env)
        self._reported = dict(reported)
        self._before = float(trial.user_attrs.get(SECONDS, 0.0))
        self._begin = clock()
        self._attempt = 0
        self._pruned_at: int | None = None
        self._told_at: float | None = None
        self._start()

    @property
    def log(self) -> Path:
        return self.folder.with_suffix(".log")

    @property
    def latest(self) -> tuple[int, float] | None:
        """The newest evaluation: step and value."""
        return max(self._reported.items(), default=None)

    @property
    def seconds(self) -> float:
        return self._before + self._clock() - self._begin

    def _start(self) -> None:
        self._attempt += 1
        self._worker = Worker(0, self._command, self.log, self._heir)

    def poll(self) -> End | None:
        """Reports new evaluations to the study; returns how the trial ended, if so."""
        status = self._worker.poll()  # first, so that the last evaluations count
        if (end := self._follow()) is not None:
            self.kill()
            return end
        if status is None:
            if self._told_at and self._clock() > self._told_at + GRACE_SECONDS:
                self.kill()
            return None
        if self._pruned_at is not None:
            return End("pruned", reason=f"stopped early at step {self._pruned_at}")
        if status == DONE:
            return self._done()
        ending = Ending(0, status, name="its process")
        if status in (BAD_INPUT, GAVE_UP) or self._attempt == ATTEMPTS:
            line = last_line(self.log).removeprefix("meshloom: ")
            return End("failed", reason=f"{ending}: {line}")
        if self._told_at is None:  # otherwise it is continued by the next search
            self._start()
        return None

    def _follow(self) -> End | None:
        """Reports new evaluations; returns an end if one of them is not finite."""
        for step, value in self._new_values():
            self._reported[step] = value
            if not math.isfinite(value):
                reason = f"held-out {self._metric} is {value} at step {step}"
                return End("failed", reason=reason)
            self.trial.report(value, step)
            if self._pruned_at is None and self.trial.should_prune():
                self._pruned_at = step
                self.ask_to_end()
        return None

    def _new_values(self) -> list[tuple[int, float]]:
        path = self.folder / metrics.FILES["eval"]
        rows = metrics.read(path) if path.exists() else []
        for row in rows:
            if self._metric not in row:
                known = ", ".join(k for k in row if k not in ("step", "time"))
                raise ValueError(
                    f"{path} has no metric {self._metric!r}; choose another --workdir, "
                    f"and --metric from: {known}"
                )
        values = [(int(row["step"]), float(row[self._metric])) for row in rows]
        return [(s, value) for s, value in values if s not in self._reported]

    def _done(self) -> End:
        if not self._reported:
            raise ValueError(
                f"{self.folder} has finished without an evaluation, so there is nothing"
                " to optimize; set eval_every <= num_steps and keep eval_batches"
            )
        return End("complete", self._reported[max(self._reported)])

    def ask_to_end(self) -> None:
        """Lets the process save and exit."""
        self._told_at = self._clock()
        self._worker.ask_to_end()

    def kill(self) -> None:
        self._worker.kill()

    @property
    def has_ended(self) -> bool:
        return self._worker.poll() is not None

    def tell(self, study: optuna.Study, end: End) -> None:
        """Records the end of the trial; from then on it is never started again."""
        self.trial.set_user_attr(SECONDS, round(self.seconds, 1))
        if end.reason:
            self.trial.set_user_attr(REASON, end.reason)
        states = optuna.trial.TrialState
        if end.state == "complete":
            study.tell(self.trial, end.value)
        else:
            state = states.PRUNED if end.state == "pruned" else states.FAIL
            study.tell(self.trial, state=state)


def describe(trial: optuna.Trial) -> str:
    settings = trial.user_attrs[SETTINGS]
    return ", ".join(f"{name}={text}" for name, text in settings.items())
