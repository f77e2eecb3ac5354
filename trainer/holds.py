"""Points of a run at which a drill may hold it, to strike just there.

A drill names a point, a step, a process and an attempt in MESHLOOM_HOLD, with a file
to make. The process that comes there makes the file and waits, for the drill to kill
it or another one. Without the variable, which only a drill sets, points cost nothing.
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

# "save": a step's arrays are handed over to be written. "commit": all is written, but
# the step does not count yet. "restore": arrays are read, but not yet verified.
Point = Literal["save", "commit", "restore"]


@dataclasses.dataclass(frozen=True)
class Hold:
    point: Point
    step: int
    process: int
    attempt: int
    marker: str

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def reached(point: Point, step: int, process: int) -> None:
    """Waits here, if a drill has asked for it."""
    text = os.environ.get(VARIABLE)
    if not text:
        return
    hold = Hold(**json.loads(text))
    attempt = int(os.environ.get("MESHLOOM_ATTEMPT", "1"))
    if (point, step, process, attempt) != dataclasses.astuple(hold)[:4]:
        return
    marker = Path(hold.marker)
    marker.touch()
    deadline = time.monotonic() + SECONDS
    while marker.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
