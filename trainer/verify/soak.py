"""`meshloom drill --soak`: many kills at random moments, one long run.

Kills strike a random worker, process 0 included. Nobody helps: the supervisor brings
the job back, and in the end it must have computed what a run without kills computes.
"""

import dataclasses
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from ...sharding.text import align
from . import drill, recovery_timing
from .drill_job import Failed, Job, Plan, running


@dataclasses.dataclass
class Soak:
    """What a soak found.

    Attributes:
      seconds: of each recovery, from the kill to the next new step.
      spans: where the seconds of each went, see timing.
      span: seconds from the first step to the last recovery.
      result: what was computed, against a run without kills.
      problem: why it failed; "" if it did not.
    """

    kills: int
    seconds: list[float]
    spans: list[dict[str, float]] = dataclasses.field(default_factory=list)
    span: float = 0.0
    result: drill.Result | None = None
    problem: str = ""

    def __str__(self) -> str:
        times = sorted(self.seconds)
        rows = [("kills recovered from", f"{len(times)} of {self.kills}")]
        if times:
            late = times[min(len(times) - 1, int(0.95 * len(times)))]
            rows += [
                ("recovery, median", f"{statistics.median(times):.1f} s"),
                ("recovery, 95th percentile", f"{late:.1f} s"),
            ]
        if self.span:
            # Both in one run: the speed of a busy machine is not the same for long.
            share = 1 - sum(times) / self.span
            rows.append(("goodput", f"{100 * share:.0f} % of the time had new steps"))

        if self.result is not None:
            rows += [
                ("steps done again", str(self.result.recomputed)),
                ("state", self.result.state),
                ("data", self.result.data),
                ("losses", self.result.losses),
            ]
        verdict = f"FAILED: {self.problem}" if self.problem else "as without kills"
        parts = [recovery_timing.table(self.spans), align(rows), f"soak: {verdict}"]
        return "\n".join(filter(None, parts))

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")


def run(
    plan: Plan,
    workdir: Path,
    kills: int,
    every: float | None,
    seed: int,
    say: Callable[[str], None],
) -> Soak:
    """Runs a job without kills and one with them.

    Args:
      every: seconds from one kill to the next; None is a moment after each return.
    """
    whole, folder = workdir / "reference", workdir / "soak"
    say(f"without kills: {plan.num_steps} steps, {plan.processes} processes")
    plan = dataclasses.replace(
        plan, limit_seconds=600 + 60 * kills * max(1, every or 1)
    )
    _reference(plan, whole)
    found = Soak(kills, [])
    chance = random.Random(seed)
    with running(plan, folder) as job:
        try:
            _strike(job, found, every, chance, say)
            if status := job.finish():
                raise Failed(f"the job ended with status {status}; see {job.log}")
        except Failed as error:
            found.problem = str(error)
            return found
    found.result = drill.compare(folder, whole, same_mesh=True)
    found.problem = found.result.problem
    return found


def _reference(plan: Plan, folder: Path) -> None:
    with running(plan, folder) as job:
        if status := job.finish():
            raise ValueError(
                f"the run without kills ended with status {status}; see {job.log}. "
                "Fix that before a soak."
            )


def _strike(
    job: Job,
    found: Soak,
    every: float | None,
    chance: random.Random,
    say: Callable[[str], None],
) -> None:
    begin = job.wait_for_step(1)
    for number in range(1, found.kills + 1):
        pause = chance.uniform(0.0, 1.5)
        if every is not None:
            pause = max(0.0, begin + number * every - time.monotonic())
        time.sleep(pause)
        worker = chance.randrange(len(job.pids))
        wall, struck = time.time(), job.strike(worker)
        time.sleep(0.2)
        seconds = job.wait_for_step(job.step + 1) - struck
        found.seconds.append(seconds)
        found.spans.append(recovery_timing.spans(job, wall, wall + seconds))
        say(f"kill {number}, worker {worker}: back in {found.seconds[-1]:.1f} s")
    found.span = time.monotonic() - begin
