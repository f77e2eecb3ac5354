"""The file in which a worker reports progress: a contract between two programs.

A worker finds the file's path in MESHLOOM_PROGRESS, and replaces the file atomically
(writes another one beside it and renames it) with one JSON object:

    {"step": 37, "time": 1767225600.0}

- `step`: updates done, as in the logs. null until this process has done an update of
  its own: a restored step is not progress.
- `time`: Unix time of the report.
- `allow` (optional): seconds until the next report, where they are known to be many, as
  before a compilation. It raises the limit, never lowers it.
- `status` (optional): the process is about to exit with this code. mpirun and srun give
  one exit code for all processes, and not always the right one: MPICH may lose the
  codes of processes that exit together, and Slurm kills the others when the first
  exits.

A report that differs from the last one is progress, so write one when something has
finished (a step, an evaluation, a save) and never from a timer: the heartbeat of a
stuck process would make everyone wait. Write the first report, with step null, as soon
as the process starts. For a worker that never reports, only its death is noticed.
"""

import dataclasses
import json
import math
import os
import time
from pathlib import Path

from .atomic_file import replace_text

VARIABLE = "MESHLOOM_PROGRESS"


@dataclasses.dataclass(frozen=True)
class Report:
    step: int | None
    time: float
    allow: float = 0.0
    status: int | None = None


def read(path: Path) -> Report | None:
    """Returns the newest report; None if there is none yet.

    An empty file is being written in place, and does not count as malformed.
    """
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    if not text:
        return None
    try:
        found = json.loads(text)
        step, when, allow = found["step"], found["time"], found.get("allow", 0)
        status = found.get("status")
    except (ValueError, TypeError, KeyError, AttributeError):
        raise _malformed(path, text) from None
    numbers = all(x is None or type(x) is int for x in (step, status))
    if not numbers or not all(map(_is_time, (when, allow))):
        raise _malformed(path, text)
    return Report(step, when, allow, status)


def write(
    path: Path, step: int | None, *, allow: float = 0.0, status: int | None = None
) -> None:
    document = {"step": step, "time": time.time()}
    if allow:
        document["allow"] = allow
    if status is not None:
        document["status"] = status
    # A report is of no use once the machine has crashed, and a slow disk must hold up
    # neither training nor the watchdog.
    replace_text(path, json.dumps(document), durable=False)


def leave(status: int) -> int:
    """Reports the code that this process is about to exit with, if it is watched.

    Returns:
      `status`, to exit with.
    """
    if path := os.environ.get(VARIABLE):
        last = read(Path(path))
        write(Path(path), last and last.step, status=status)
    return status


def _is_time(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= 0  # type: ignore


def _malformed(path: Path, text: str) -> ValueError:
    return ValueError(
        f"progress file {path} holds {text[:80]!r}; expected "
        '{"step": a whole number or null, "time": seconds}. Write it under '
        "another name and rename it."
    )
