"""Reports progress to the supervisor, and notices when there is none.

A run makes progress as long as something gets finished: a step, an evaluation, a save.
A thread checks which of the steps that were handed to the devices are done, so the loop
never waits for it. If nothing is finished within the limit, the stacks of all threads
of all processes are written to the run folder, and this process ends with an exit code
of its own, which the supervisor answers with a restart.
"""

import collections
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...launch import progress_file
from ...launch.exit_codes import WATCHDOG
from ...launch.progress_file import Report
from ...launch.progress_watch import Watch
from .group import Group

FOLDER, REQUEST = "stacks", "request"
# Anything but a step, such as an evaluation with its compilation, may take this long.
ALLOW_SECONDS = 600.0
POLL_SECONDS = 0.2
# For the other processes to write their stacks, before our end brings them down.
REQUEST_SECONDS = 3.0


class Watchdog:
    """A context manager that must be told of progress while it is open.

    Args:
      folder: the run folder, where stacks are written.
      group: the processes of the run; by default this one alone.
      stall_seconds: the limit after the first step; None is 60, or ten times the median
        between two reports if that is more; 0 never ends the process.
      start_seconds: the limit before the first step is done.
      report_to: the file that the supervisor watches, if there is one.
      end: ends this process with an exit code; None only writes the stacks.
    """

    def __init__(
        self,
        folder: Path,
        group: Group | None = None,
        *,
        stall_seconds: float | None = None,
        start_seconds: float = ALLOW_SECONDS,
        report_to: Path | None = None,
        end: Callable[[int], object] | None = None,
    ):
        self._folder, self._group = Path(folder) / FOLDER, group or Group()
        self._is_watched, self._end_process = stall_seconds != 0, end
        self._watch = Watch(
            stall_seconds=stall_seconds or None, start_seconds=start_seconds
        )
        self._report_to = report_to
        self._lock = threading.Lock()
        self._running: collections.deque[tuple[int, Any]] = collections.deque()
        self._step: int | None = None
        self._started: int | None = None  # the newest step
        self._allow = 0.0
        self._allowed_at: int | None = None  # the newest step when that was said
        self._began = time.time()
        self._has_dumped = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self.beat()
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._closed.set()
        self._thread.join()

    def started(self, step: int, figure: Any) -> None:
        """Notes a step that was handed to the devices; done once `figure` is ready."""
        self._running.append((step, figure))
        self._started = step

    def beat(self, *, allow: float = 0.0) -> None:
        """Notes that something was finished; what comes next may take `allow` seconds.

        The allowance holds until the next beat, or until a step is done that has not
        been started yet.
        """
        self._allow, self._allowed_at = allow, self._started
        self._report()

    def _report(self) -> None:
        with self._lock:
            report = Report(self._step, time.time(), self._allow)
            self._watch.see(0, report)
            if self._report_to is not None:
                progress_file.write(self._report_to, report.step, allow=report.allow)

    def _run(self) -> None:
        while not self._closed.wait(POLL_SECONDS):
            self._look()
            if self._is_watched and self._watch.has_stalled:
                self._end(self._watch.message())
                return
            if not self._has_dumped and self._is_asked():
                self._dump("asked by another process")

    def _look(self) -> None:
        done = None
        while self._running and self._running[0][1].is_ready():
            done, _ = self._running.popleft()
        if done is not None:
            self._step = done
            if self._allowed_at is None or done > self._allowed_at:
                self._allow = 0.0
            self._report()

    def _is_asked(self) -> bool:
        try:
            return (self._folder / REQUEST).stat().st_mtime > self._began
        except FileNotFoundError:
            return False

    def _dump(self, reason: str) -> None:
        self._has_dumped = True
        self._folder.mkdir(parents=True, exist_ok=True)
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        with open(self._folder / f"process-{self._group.index}.txt", "a") as file:
            file.write(f"== {now} process {self._group.index} (pid {os.getpid()}): ")
            file.write(f"{reason} ==\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)

    def _without_stacks(self, asked: float) -> list[int]:
        """Returns the other processes that wrote nothing since they were asked."""
        silent = []
        for number in range(self._group.size):
            file = self._folder / f"process-{number}.txt"
            if not file.exists() or file.stat().st_mtime < asked - 1:
                silent.append(number)
        return [number for number in silent if number != self._group.index]

    def _end(self, reason: str) -> None:
        try:
            self._dump(reason)
            request = f"process {self._group.index}: {reason}\n"
            (self._folder / REQUEST).write_text(request)
            asked = time.time()
            time.sleep(REQUEST_SECONDS)
            words = f"stacks are in {self._folder}"
            if silent := self._without_stacks(asked):
                # Stopped, or on a machine that is gone: not even its threads run.
                words += f"; process {', '.join(map(str, silent))} wrote none"
        except OSError as error:  # a disk that hangs or is full must not keep us here
            words = f"no stacks could be written: {error}"
        text = f"meshloom: process {self._group.index}: {reason}; {words}\n"
        os.write(sys.__stderr__.fileno(), text.encode())  # type: ignore
        if self._end_process is not None:
            self._end_process(WATCHDOG)
