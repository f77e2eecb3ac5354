"""Points of a run where a drill can stop a process to inject a fault exactly there.

A drill names a point, a step, a process, an attempt and a marker file in MESHLOOM_HOLD.
The process that reaches the point creates the file and waits until the drill removes it
or kills a process; or it raises an OSError, as if storage had failed.

For a training of several learners it names a folder in MESHLOOM_TRAPS instead, and
makes a file there when it wants the next process that reaches a point, see Traps.

Only drills set these variables; without them the points cost nothing.
"""

import dataclasses
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

VARIABLE = "MESHLOOM_HOLD"
TRAPS = "MESHLOOM_TRAPS"
# The run continues after this long if the drill does not respond.
SECONDS = 60.0

# "write": before the arrays of a step are handed to orbax; "save": after; "commit":
# everything is written, but the step is not committed yet. "read": before arrays are
# read; "restore": after, but before they are verified. Of a learner, "compute": before
# a local step; "push": before its contribution is sent to one of the servers, while it
# is sent to the others. Of a coordinator, "log": before a commit is written to the log;
# "logged": after, but before any server applies it. Of a server, "apply": before that.
# fmt: off
Point = Literal[
    "write", "save", "commit", "read", "restore",
    "compute", "push", "log", "logged", "apply",
]
# fmt: on


@dataclasses.dataclass(frozen=True)
class Hold:
    """Where to hold a process, and for how long.

    Attributes:
      step: the step to hold at; 0 for any.
      marker: the file to create.
      seconds: how long to wait at most for the file to be removed.
      errno: the code of an OSError to raise instead of waiting; 0 for none.
    """

    point: Point
    step: int
    process: int
    attempt: int
    marker: str
    seconds: float = SECONDS
    errno: int = 0

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def of_environment(cls, environ: Mapping[str, str]) -> "Hold | None":
        """Returns the hold that a drill has set for this attempt of the job, if any."""
        if not (text := environ.get(VARIABLE)):
            return None
        hold = cls(**json.loads(text))
        attempt = int(environ.get("MESHLOOM_ATTEMPT", "1"))
        return hold if hold.attempt == attempt else None

    def reached(self, point: Point, step: int, process: int) -> None:
        """Waits or fails if point, step and process match."""
        if (point, process) != (self.point, self.process):
            return
        if self.step and step != self.step:
            return
        marker = Path(self.marker)
        marker.touch()
        if self.errno:
            raise OSError(self.errno, os.strerror(self.errno))
        deadline = time.monotonic() + self.seconds
        while marker.exists() and time.monotonic() < deadline:
            time.sleep(0.01)


@dataclasses.dataclass(frozen=True)
class Traps:
    """Holds whichever process reaches a point first, each time a drill asks for one.

    The drill makes the file POINT in the folder. The process that renames it to
    POINT.PID waits there until that file is gone, and is usually killed instead.
    """

    folder: Path

    def reached(self, point: str, step: int = 0, process: int = 0) -> None:
        del step, process
        held = self.folder / f"{point}.{os.getpid()}"
        try:
            (self.folder / point).rename(held)
        except FileNotFoundError:
            return
        deadline = time.monotonic() + SECONDS
        while held.exists() and time.monotonic() < deadline:
            time.sleep(0.01)


def of_environment(environ: Mapping[str, str]) -> Hold | Traps | None:
    """Returns what a drill has set for this process, if anything."""
    if folder := environ.get(TRAPS):
        return Traps(Path(folder))
    return Hold.of_environment(environ)


def reached_of(environ: Mapping[str, str]) -> Callable[[str], None]:
    """Returns what a process of a service calls at its points."""
    if folder := environ.get(TRAPS):
        return Traps(Path(folder)).reached
    return lambda point: None
