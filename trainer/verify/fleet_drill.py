"""`meshloom drill --learners N`: faults in a training between learners.

Faults are injected one after the other into a training that runs; when it comes to its
end, the next training takes the rest. A fault is recovered from if the training goes on
by itself: there is a new version, and each learner that was hit contributes again. Then
the training must finish, its audit must be clean, and its replay bit-equal.
"""

import dataclasses
import json
import random
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...sharding.text import align
from ..record import metrics
from .drill_job import Failed
from .fleet_faults import FAULTS, SETTINGS
from .fleet_job import (
    ABANDONED,
    Ended,
    Fleet,
    environment,
    running,
)
from .fleet_spec import PROGRAM, FleetSpec
from .training_audit import TrainingAudit, audit_training

Log = Callable[[str], None]
QUIET_SECONDS = 1.5  # at most, between a recovery and the next fault


@dataclasses.dataclass
class Result:
    """The outcome of one fault.

    Attributes:
      fault: its name.
      training: the number of the training that it was injected into.
      target: the role of the process that was hit.
      next_commit: seconds from the fault to the next commit.
      seconds: to the first new version, with a contribution of each learner that was
        hit; None if it was not reached.
      taken_back: commits that were taken back, since the service went back to a
        checkpoint.
      problem: why the training did not recover; "" if it did.
    """

    fault: str
    training: int
    target: str = ""
    next_commit: float | None = None
    seconds: float | None = None
    taken_back: int = 0
    problem: str = ""


@dataclasses.dataclass
class Training:
    """One training of a drill, with all its faults.

    Attributes:
      number: from 0.
      results: of its faults.
      audit: in one line.
      replay: in one line.
      commits, taken_back: those of the final history, and those that restarts from a
        checkpoint have taken back.
      rounds, samples: in an update.
      clear_seconds, clear_rounds: while there was no fault: from a recovery to the
        next fault.
      seconds: from the first commit to the last.
      problem: why it failed; "" if it passed.
    """

    number: int
    results: list[Result] = dataclasses.field(default_factory=list)
    audit: str = ""
    replay: str = ""
    commits: int = 0
    taken_back: int = 0
    rounds: int = 0
    samples: int = 0
    clear_seconds: float = 0.0
    clear_rounds: int = 0
    seconds: float = 0.0
    problem: str = ""


def run(
    spec: FleetSpec,
    workdir: Path,
    names: Iterable[str],
    log: Log,
    *,
    every: float | None = None,
    seed: int = 0,
    keep: Callable[[list[Training]], None] = lambda trainings: None,
) -> list[Training]:
    """Injects faults one by one, into as many trainings as it takes.

    Args:
      workdir: a new folder for the trainings.
      every: seconds between faults; None: soon after each recovery.
      seed: of random targets and pauses.
      keep: called after each training with all so far.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    todo, rng, trainings = deque(names), random.Random(seed), []
    while todo:
        training = Training(len(trainings))
        trainings.append(training)
        folder = workdir / f"training-{training.number}"
        log(f"training {training.number}: {spec.name}, {spec.num_steps} steps each")
        try:
            with SETTINGS.get(todo[0], running)(spec, folder) as fleet:
                _inject_all(fleet, training, todo, rng, every, log)
                fleet.finish()
            _check(spec, folder, training)
        except Failed as error:
            training.problem = str(error)
        if not training.results:
            reason = training.problem or "it ended before its first fault"
            raise ValueError(
                f"training {training.number}: {reason}. Fix that, or pass more --steps"
            )
        log(f"training {training.number}: {verdict(training)}")
        keep(trainings)
    return trainings


def _inject_all(
    fleet: Fleet,
    training: Training,
    todo: deque[str],
    rng: random.Random,
    every: float | None,
    log: Log,
) -> None:
    """Injects faults while the next one needs the same setting and has time enough."""
    fleet.wait_for_commits(2)
    setting = SETTINGS.get(todo[0])
    while todo and SETTINGS.get(todo[0]) is setting and not fleet.is_ending():
        began, pause = time.time(), rng.uniform(0.0, QUIET_SECONDS)
        last = training.results[-1].seconds if training.results else None
        if every is not None and last is not None:
            pause = max(0.0, every - last)
        time.sleep(pause)
        training.clear_seconds += time.time() - began
        training.clear_rounds += _rounds(fleet, since=began)
        result = Result(todo.popleft(), training.number)
        training.results.append(result)
        before = fleet.taken_back()
        try:
            mark = FAULTS[result.fault](fleet, rng)
            result.target = mark.target
            result.next_commit, result.seconds = fleet.recover(mark)
            result.taken_back = fleet.taken_back() - before
        except Ended as error:
            log(f"{result.fault}: again in the next training: {error}")
            training.results.remove(result)
            todo.appendleft(result.fault)
            return
        except Failed as error:
            result.problem = str(error)
            log(f"{result.fault}: FAILED: {error}")
            raise
        log(f"{result.fault} ({result.target}): recovered in {result.seconds:.1f} s")


def _rounds(fleet: Fleet, since: float) -> int:
    rows = [row for row in fleet.commits() if row["time"] > since]
    return sum(len(row["contributions"]) for row in rows)


def _check(spec: FleetSpec, folder: Path, training: Training) -> None:
    """Audits a finished training, and computes it again."""
    audit = audit_training(folder)
    commits = metrics.read(folder / "commits.jsonl")
    abandoned = folder / ABANDONED
    training.commits = audit.num_commits
    training.taken_back = len(metrics.read(abandoned)) if abandoned.exists() else 0
    training.rounds = sum(len(row["contributions"]) for row in commits)
    training.samples = audit.consumed * audit.rows
    training.seconds = commits[-1]["time"] - commits[0]["time"]
    training.audit = _line(audit)
    try:
        done = subprocess.run(
            [*PROGRAM, "rounds", "replay", str(folder)],
            env=environment(folder.parent / "cache"),
            capture_output=True,
            text=True,
            timeout=10 * spec.limit_seconds,
        )
    except subprocess.TimeoutExpired as error:
        raise Failed(f"the replay of {folder} took over {error.timeout:g} s") from None
    lines = (done.stdout + done.stderr).splitlines() or [""]
    training.replay = lines[-1] if done.returncode == 0 else "FAILED"
    problems = [f"audit: {fault}" for fault in audit.faults]
    if done.returncode:
        problems.append(f"replay: {'; '.join(lines[-3:])}")
    training.problem = "; ".join(problems)


def _line(audit: TrainingAudit) -> str:
    if audit.faults:
        return "FAILED"
    rest = len(audit.unfinished) + len(audit.set_aside)
    listed = f", {rest * audit.rows:,} listed" if rest else ""
    return f"{audit.consumed * audit.rows:,} samples in one update each{listed}"


def verdict(training: Training) -> str:
    if training.problem:
        return f"FAILED: {training.problem}"
    return (
        f"{training.commits} commits, {training.taken_back} taken back; "
        f"{training.audit}; replay: {training.replay}"
    )


def has_failed(trainings: Sequence[Training]) -> bool:
    return any(training.problem for training in trainings)


def table(trainings: Sequence[Training]) -> str:
    """Formats the outcome of each fault, and of each training."""
    times = ("next commit", "seconds", "taken back")
    rows: list[tuple[str, ...]] = [("fault", "hit", "recovered", *times, "training")]
    for training in trainings:
        for r in training.results:
            fine = "NO" if r.problem else "yes"
            times = (_seconds(r.next_commit), _seconds(r.seconds))
            counts = (str(r.taken_back), str(r.training))
            rows.append((r.fault, r.target, fine, *times, *counts))
    lines = [f"training {t.number}: {verdict(t)}" for t in trainings]
    return "\n".join([align(rows, right=(3, 4, 5, 6)), *lines])


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def write(
    path: Path, trainings: Sequence[Training], summary: Mapping[str, Any] | None = None
) -> None:
    """Writes the trainings as JSON, and the summary of a soak."""
    rows = [dataclasses.asdict(training) for training in trainings]
    about = {} if summary is None else {"summary": dict(summary)}
    path.write_text(json.dumps({**about, "trainings": rows}, indent=1) + "\n")
