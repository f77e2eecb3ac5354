"""Runs a job once, to its end or a time limit, without restarts."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from .exit_codes import BAD_INPUT, DONE, Ending, cause
from .logs import last_line
from .target import Command
from .workers import Heir, Worker

# After one worker has failed, the others get this long to exit by themselves, so that
# the one that knows the reason can report it.
LEAVE_SECONDS = 15.0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How the job ended; `reason` is empty if all went well."""

    seconds: float
    reason: str = ""
    is_bad_input: bool = False


def run(
    command: Sequence[str],
    envs: Sequence[Mapping[str, str]],
    logs: Path,
    *,
    seconds: float,
) -> Outcome:
    """Runs `command` once for each of `envs`, all at the same time; leaves no process.

    Args:
      logs: a folder; worker N's output goes to `worker-N.log` in it.
      seconds: time limit, after which running workers are killed.
    """
    logs.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    workers: list[Worker] = []
    with Heir() as heir:
        try:
            for number, env in enumerate(envs):
                one = Command(f"worker {number}", command, env)
                workers.append(Worker(number, one, _log(logs, number), heir))
            in_time = _wait(workers, begin + seconds)
        finally:
            for worker in workers:
                worker.kill()
            while any(worker.poll() is None for worker in workers):
                time.sleep(0.01)
    took = time.monotonic() - begin
    endings = [Ending(w.number, w.status) for w in workers if w.status is not None]
    # The workers that we killed did not cause anything.
    own = [e for e, w in zip(endings, workers, strict=True) if not w.was_told]
    if (first := cause(own)) is not None:
        line = last_line(_log(logs, first.worker))
        message = line.removeprefix("meshloom: ")
        return Outcome(took, f"{first}: {message}", first.status == BAD_INPUT)
    if not in_time:
        line = last_line(_log(logs, 0))
        return Outcome(took, f"killed after {seconds:g} s; its last line: {line}")
    return Outcome(took)


def _log(logs: Path, number: int) -> Path:
    return logs / f"worker-{number}.log"


def _wait(workers: Sequence[Worker], deadline: float) -> bool:
    """Returns whether all workers ended; gives up early if one failed.

    jax processes may wait minutes for one that is gone.
    """
    failed_at = None
    while (now := time.monotonic()) < deadline:
        statuses = [worker.poll() for worker in workers]
        if None not in statuses:
            return True
        if failed_at is None and any(s not in (None, DONE) for s in statuses):
            failed_at = now
        if failed_at is not None and now > failed_at + LEAVE_SECONDS:
            return False
        time.sleep(0.05)
    return False
