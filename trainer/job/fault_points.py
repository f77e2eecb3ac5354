"""Points of a run at which a drill may hold it, to strike just there.

A drill names a point, a step, a process and an attempt in MESHLOOM_HOLD, with a file
to make. The process that comes there makes the file and waits, for the drill to remove
it or to kill a process; or it gets an error of the system, as if storage had failed it.
Without the variable, which only a drill sets, points cost nothing.
"""

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Literal

VARIABLE = "MESHLOOM_HOLD"
# If no drill comes, the run goes on.
SECONDS = 60.0

# "write": before the arrays of a step are handed over to be written; "save": after;
# "commit": all is written, but the step does not count yet. "read": before arrays are
# read; "restore": after, but before they are verified.
Point = Literal["write", "save", "commit", "read", "restore"]


@dataclasses.dataclass(frozen=True)
class Hold:
    """What shall happen where.

    Attributes:
      step: 0 for any.
      marker: the file to make.
      seconds: to wait, if the file is not removed before.
      errno: of an OSError to raise instead; 0 for none.
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


def reached(point: Point, step: int, process: int) -> None:
    """Waits or fails here, if a drill has asked for it."""
    text = os.environ.get(VARIABLE)
    if not text:
        return
    hold = Hold(**json.loads(text))
    attempt = int(os.environ.get("MESHLOOM_ATTEMPT", "1"))
    here = (point, hold.step and step, process, attempt)
    if here != dataclasses.astuple(hold)[:4]:
        return
    marker = Path(hold.marker)
    marker.touch()
    if hold.errno:
        raise OSError(hold.errno, os.strerror(hold.errno))
    deadline = time.monotonic() + hold.seconds
    while marker.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
