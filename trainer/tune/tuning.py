"""Runs a search: starts trials, follows them, stops bad ones early, records the ends.

Every decision is in the study before the next one is made, and every trial continues in
its run folder, so a search that was killed at any point goes on where it was.
"""

import contextlib
import dataclasses
import fcntl
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import optuna

from ...launch import gpus
from ...launch.atomic_file import replace_text
from ...launch.exit_codes import DONE, PREEMPTED
from ...launch.stop_signals import StopSignals
from ...launch.workers import Heir
from ...sharding.text import seconds_text, short_number
from ..record.run_folder import CONFIG_GIN
from .space import Space
from .study import (
    REASON,
    SETTINGS,
    Definition,
    best,
    next_trial,
    open_study,
    running,
)
from .trial import GRACE_SECONDS, End, Running, describe

DATABASE, BEST = "study.db", "best.gin"
# A search ends if so many trials fail before one succeeds.
MOST_FAILURES = 3
POLL_SECONDS = 0.2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """A search.

    Attributes:
      folder: holds the database, the run folders of the trials and the results.
      storage: the URL of another database than the one in the folder.
      trials: how many trials to have at the end, with those of earlier searches.
      parallel: how many run at the same time.
      command: returns the command that trains in a run folder with given settings.
      env: the environment of the trials, without their share of the GPUs.
      log: receives one line of progress at a time.
    """

    folder: Path
    definition: Definition
    space: Space
    trials: int
    parallel: int
    command: Callable[[Path, dict[str, str]], Sequence[str]]
    env: Mapping[str, str]
    storage: str | None = None
    log: Callable[[str], None] = print

    def __post_init__(self):
        for name in ("trials", "parallel"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be >= 1, got {getattr(self, name)}")

    def run(self) -> int:
        """Returns the exit code; leaves no process behind."""
        with self._locked():
            storage = self.storage or f"sqlite:///{(self.folder / DATABASE).absolute()}"
            study = open_study(storage, self.definition)
            with Heir() as heir, StopSignals(repeat_seconds=1.0) as signals:
                search = _Search(self, study, heir)
                try:
                    while search.step() and not signals.told:
                        time.sleep(POLL_SECONDS)
                    if signals.told:
                        search.stop(lambda: len(signals.told) > 1)
                        self.log("Stopped. Run the same command again to continue.")
                        return PREEMPTED
                finally:
                    search.kill()
            return DONE

    def study(self) -> optuna.Study:
        storage = self.storage or f"sqlite:///{(self.folder / DATABASE).absolute()}"
        return open_study(storage, self.definition)

    def env_of(self, slot: int) -> dict[str, str]:
        """Returns the environment of a trial that is one of several at a time."""
        share = gpus.share(self.env, gpus.num_installed(), slot, self.parallel)
        return {**self.env, **({} if share is None else {gpus.VARIABLE: share})}

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ValueError(
                f"--workdir {self.folder} cannot be written: {error.strerror}"
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"--workdir {self.folder} is in use by another search. Wait for it, "
                "stop it, or choose another folder"
            ) from None
        else:
            yield
        finally:
            os.close(lock)


class _Search:
    """The trials that run, and the study they report to."""

    def __init__(self, tuning: Tuning, study: optuna.Study, heir: Heir):
        self._tuning, self._study, self._heir = tuning, study, heir
        self._slots: dict[int, Running] = {}
        self._waiting = running(study, tuning.space, tuning.definition)
        if trials := study.get_trials(deepcopy=False):
            done = len(trials) - len(self._waiting)
            tuning.log(
                f"Continuing {tuning.folder}: {done} of {tuning.trials} trials done"
                + f", {len(self._waiting)} to continue" * bool(self._waiting)
            )

    def step(self) -> bool:
        """Starts and follows trials; returns False when all have ended."""
        for slot in range(self._tuning.parallel):
            if slot not in self._slots and (trial := self._next()) is not None:
                self._slots[slot] = self._start(trial, slot)
        for slot, trial in list(self._slots.items()):
            if (end := trial.poll()) is not None:
                del self._slots[slot]
                self._ended(trial, end)
        return bool(self._slots or self._waiting or self._is_more())

    def _is_more(self) -> bool:
        return len(self._study.get_trials(deepcopy=False)) < self._tuning.trials

    def _next(self) -> optuna.Trial | None:
        if self._waiting:
            return self._waiting.pop(0)
        if not self._is_more():
            return None
        return next_trial(self._study, self._tuning.space, self._tuning.definition)

    def _start(self, trial: optuna.Trial, slot: int) -> Running:
        tuning = self._tuning
        folder = trial_folder(tuning.folder, trial.number)
        folder.parent.mkdir(exist_ok=True)
        again = "again " if folder.exists() else ""
        tuning.log(f"trial {trial.number} {again}starts: {describe(trial)}")
        known = self._study.get_trials(deepcopy=False)[trial.number]
        return Running(
            trial,
            known.intermediate_values,
            folder,
            tuning.command(folder, trial.user_attrs[SETTINGS]),
            tuning.env_of(slot),
            metric=tuning.definition.metric,
            heir=self._heir,
        )

    def _ended(self, trial: Running, end: End) -> None:
        trial.tell(self._study, end)
        number, took = trial.trial.number, seconds_text(trial.seconds)
        result = end.reason
        if end.value is not None:
            result = f"{self._tuning.definition.metric} {short_number(end.value)}"
            leader = best(self._study)
            if leader is not None and leader.number == number:
                result += ", the best so far"
                self._write_best(trial.folder)
        self._tuning.log(f"trial {number} {end.state} in {took}: {result}")
        if end.state == "failed":
            self._check_failures()

    def _check_failures(self) -> None:
        """Raises if nothing but failures was seen: more of them would teach nothing."""
        trials = self._study.get_trials(deepcopy=False)
        failed = [t for t in trials if t.state == optuna.trial.TrialState.FAIL]
        ended = [t for t in trials if t.state.is_finished()]
        if len(failed) >= MOST_FAILURES and len(failed) == len(ended):
            reason = failed[-1].user_attrs.get(REASON, "unknown")
            folder = trial_folder(self._tuning.folder, failed[-1].number)
            raise ValueError(
                f"all of the first {len(failed)} trials failed; the last one, {folder}:"
                f" {reason}. Fix the config or the space, and choose another --workdir"
            )

    def _write_best(self, folder: Path) -> None:
        text = (folder / CONFIG_GIN).read_text(encoding="utf-8")
        head = f"# The best trial so far: {folder.name} of {self._tuning.folder.name}\n"
        replace_text(self._tuning.folder / BEST, head + text)

    def stop(self, hurry: Callable[[], bool]) -> None:
        """Lets the trials save; records those that end meanwhile."""
        for trial in self._slots.values():
            trial.ask_to_end()
        deadline = time.monotonic() + GRACE_SECONDS
        while self._slots and time.monotonic() < deadline and not hurry():
            for slot, trial in list(self._slots.items()):
                if (end := trial.poll()) is not None:
                    self._ended(trial, end)
                    del self._slots[slot]
                elif trial.has_ended:  # saved; the next search continues it
                    del self._slots[slot]
            time.sleep(POLL_SECONDS)

    def kill(self) -> None:
        for trial in self._slots.values():
            trial.kill()
        while not all(trial.has_ended for trial in self._slots.values()):
            time.sleep(0.01)


def trial_folder(folder: Path, number: int) -> Path:
    return folder / "trials" / f"{number:04d}"
