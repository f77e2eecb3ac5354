"""Notices that a process is stopped: it touches a file, and then no longer does."""

import time
from collections.abc import Callable
from pathlib import Path


class Beats:
    """The beats of one process: changes of a file's time.

    A process that has not made its file yet is starting. How long ago a beat was is
    counted by our own clock, so it does not matter what time the file shows.
    """

    def __init__(self, file: Path, clock: Callable[[], float] = time.monotonic):
        self._file, self._clock = file, clock
        self._seen, self._since = 0, clock()

    def begin(self) -> None:
        """Forgets the file of an earlier process; to be called before a start."""
        self._file.unlink(missing_ok=True)
        self._seen = 0

    def silence(self) -> float:
        """Returns for how many seconds no beat has come."""
        try:
            seen = self._file.stat().st_mtime_ns
        except FileNotFoundError:
            seen = 0
        if seen == 0 or seen != self._seen:
            self._seen, self._since = seen, self._clock()
        return self._clock() - self._since
