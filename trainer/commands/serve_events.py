"""What a process of `meshloom serve` tells: lines on stdout, and events in a file.

An event is one JSON object on one line, as in the supervisor's log:

    {"time": 1763526000.123, "role": "coordinator", "event": "left", "job": "run", ...}
"""

import contextlib
import errno
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

FILE = "events.jsonl"
FULL = (errno.ENOSPC, errno.EDQUOT)
STATUS_SECONDS = 15.0  # between two lines about a job


class Events:
    """The lines and events of one process; threads may share it.

    Args:
      role: "both", "coordinator", "server" or "merger".
      folder: of the file; None while it may be that of another coordinator.
    """

    def __init__(self, role: str, folder: Path | None = None):
        self._role = role
        self._path = None if folder is None else folder / FILE

    def write_to(self, folder: Path) -> None:
        """Writes events into a file from now on."""
        self._path = folder / FILE

    def say(self, text: str, event: str = "note", **fields: Any) -> None:
        """Writes a line to stdout, and an event to the file.

        Args:
          text: the line, which is part of the event; with "" there is only an event.
        """
        if text:
            with _passing_over_full_disks():
                os.write(1, f"meshloom serve: {text}\n".encode())
        if self._path is None:
            return
        row = {"time": round(time.time(), 3), "role": self._role, "event": event}
        row |= {**fields, **({"text": text} if text else {})}
        line = (json.dumps(row) + "\n").encode()
        with _passing_over_full_disks():
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                os.write(file, line)  # at once, also from several threads
            finally:
                os.close(file)


@contextlib.contextmanager
def _passing_over_full_disks() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:  # or a log on a full disk would end the service
            raise


_COUNTS = ("version", "learners", "num_learners", "waiting", "bytes")


class StatusLines:
    """One line about each job that moves, a few times a minute."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._shown: dict[str, tuple[float, dict[str, Any]]] = {}

    def lines(self, jobs: dict[str, dict[str, Any]]) -> list[str]:
        """Returns what is to be shown now."""
        now, found = self._clock(), []
        for name, status in jobs.items():
            if "version" not in status:
                continue  # it waits for servers
            figures = {"state": status["state"]}
            figures |= {count: status.get(count, 0) for count in _COUNTS}
            then, before = self._shown.get(name, (now, None))
            if before is None:
                self._shown[name] = now, figures
            elif now - then >= STATUS_SECONDS:
                self._shown[name] = now, figures
                if figures != before:
                    found.append(_status_line(name, before, figures, now - then))
        return found


def _status_line(name: str, before: dict, now: dict, seconds: float) -> str:
    rounds = (now["version"] - before["version"]) / seconds
    moved = (now["bytes"] - before["bytes"]) / seconds
    return (
        f"{name}: {now['state']}, version {now['version']}, {rounds:.2g} rounds/s, "
        f"learners {now['learners']}/{now['num_learners']} "
        f"({now['waiting']} waiting), {moved / 1e6:.3g} MB/s"
    )
