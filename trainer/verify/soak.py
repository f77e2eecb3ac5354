"""`meshloom drill --soak`: many kills at random times in one long run.

Each kill hits a random worker, including process 0. The supervisor alone restarts the
job, which must end up with what a run without kills computes.
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
from .drill_job import Failed, Job, JobSpec, running


@dataclasses.dataclass
class Soak:
    """The outcome of a soak.

    Attributes:
      kills: the number of kills.
      seconds: the time of each recovery, from the kill to the next new step.
      spans: the spans of each recovery, see recovery_timing.
      span: the seconds from the first step to the last recovery.
      result: how the run compares with one without kills.
      problem: why the soak failed; "" if it passed.
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
            # Both from one run, because the speed of a busy machine varies.
            share = 1 - sum(times) / self.span
            rows.append(("goodput", f"{100 * share:.0f} % of the time on new steps"))
        if self.result is not None:
            rows += [
                ("steps redone", str(self.result.recomputed)),
                ("state", self.result.state),
                ("data", self.result.data),
                ("losses", self.result.losses),
            ]
        verdict = f"FAILED: {self.problem}" if self.problem else "same as without kills"
        parts = [recovery_timing.table(self.spans), align(rows), f"soak: {verdict}"]
        return "\n".join(filter(None, parts))

    def write(self, path: Path) -> None:
        """Writes the outcome as JSON."""
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")


def run(
    spec: JobSpec,
    workdir: Path,
    kills: int,
    every: float | None,
    seed: int,
    log: Callable[[str], None],
) -> Soak:
    """Runs a job without kills and one with kills, and compares them.

    Args:
      spec: how to run the jobs.
      workdir: a new folder for the runs.
      kills: the number of kills.
      every: the seconds between kills; None kills shortly after each recovery.
      seed: the seed of the random times and workers.
      log: receives one line of progress at a time.
    """
    reference, folder = workdir / "reference", workdir / "soak"
    log(f"without kills: {spec.num_steps} steps, {spec.processes} processes")
    spec = dataclasses.replace(
        spec, limit_seconds=600 + 60 * kills * max(1, every or 1)
    )
    drill.train_reference(spec, reference, before="a soak")
    found = Soak(kills, [])
    rng = random.Random(seed)
    with running(spec, folder) as job:
        try:
            _kill_repeatedly(job, found, every, rng, log)
            if status := job.finish():
                raise Failed(f"the job exited with status {status}; see {job.log}")
        except Failed as error:
            found.problem = str(error)
            return found
    found.result = drill.compare(folder, reference, same_mesh=True)
    found.problem = found.result.problem
    return found


def _kill_repeatedly(
    job: Job,
    found: Soak,
    every: float | None,
    rng: random.Random,
    log: Callable[[str], None],
) -> None:
    begin = job.wait_for_step(1)
    for number in range(1, found.kills + 1):
        pause = rng.uniform(0.0, 1.5)
        if every is not None:
            pause = max(0.0, begin + number * every - time.monotonic())
        time.sleep(pause)
        worker = rng.randrange(len(job.pids))
        wall, killed = time.time(), job.kill(worker)
        time.sleep(0.2)
        seconds = job.wait_for_step(job.step + 1) - killed
        found.seconds.append(seconds)
        found.spans.append(recovery_timing.spans(job, wall, wall + seconds))
        log(f"kill {number}, worker {worker}: recovered in {found.seconds[-1]:.1f} s")
    found.span = time.monotonic() - begin
