"""Reports progress to the supervisor, and ends a process that makes none.

A run makes progress as long as something completes: a step, an evaluation, a save. A
thread checks which of the dispatched steps are done, so the loop never waits for it. If
nothing completes within the limit, the stacks of all threads of all processes are
written to the run folder, and this process exits with a code of its own, on which the
supervisor restarts the job.
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
# How long anything but a step may take, such as an evaluation that has to compile.
ALLOW_SECONDS = 600.0
POLL_SECONDS = 0.2
# How long the others have to write their stacks before our exit takes them down.
REQUEST_SECONDS = 3.0


class Watchdog:
    """Ends this process if no progress is reported; a context manager.

    Args:
      folder: the run folder, where stacks are written.
      group: the processes of the run; by default this one alone.
      stall_seconds: the limit after the first step; None for 60, or ten times the
        median between two reports if that is more; 0 never ends the process.
      start_seconds: the limit until the first step is done.
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
        self._started: int | None = None  # the newest step dispatched
        self._allow = 0.0
        self._allowed_at: int | None = None  # the newest step dispatched at that time
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
        """Records that a step was dispatched; it is done once `figure` is ready."""
        self._running.append((step, figure))
        self._started = step

    def beat(self, *, allow: float = 0.0) -> None:
        """Records that something completed; what follows may take `allow` seconds.

        The allowance holds until the next beat, or until a step is done that was
        dispatched after this call.
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
            self._poll()
            if self._is_watched and self._watch.has_stalled:
                self._end(self._watch.message())
                return
            if not self._has_dumped and self._is_requested():
                self._dump("requested by another process")

    def _poll(self) -> None:
        done = None
        while self._running and self._running[0][1].is_ready():
            done, _ = self._running.popleft()
        if done is not None:
            self._step = done
            if self._allowed_at is None or done > self._allowed_at:
                self._allow = 0.0
            self._report()

    def _is_requested(self) -> bool:
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

    def _without_stacks(self, since: float) -> list[int]:
        """Returns the other processes that have written no stacks since then."""
        silent = []
        for number in range(self._group.size):
            file = self._folder / f"process-{number}.txt"
            if not file.exists() or file.stat().st_mtime < since - 1:
                silent.append(number)
        return [number for number in silent if number != self._group.index]

    def _end(self, reason: str) -> None:
        try:
            self._dump(reason)
            request = f"process {self._group.index}: {reason}\n"
            (self._folder / REQUEST).write_text(request)
            requested = time.time()
            time.sleep(REQUEST_SECONDS)
            outcome = f"stacks are in {self._folder}"
            if silent := self._without_stacks(requested):
                # Stopped, or on a machine that is down: not even its threads run.
                outcome += f"; process {', '.join(map(str, silent))} wrote none"
        except OSError as error:  # a full or failing disk must not keep us from exiting
            outcome = f"no stacks could be written: {error}"
        text = f"meshloom: process {self._group.index}: {reason}; {outcome}\n"
        os.write(sys.__stderr__.fileno(), text.encode())  # type: ignore
        if self._end_process is not None:
            self._end_process(WATCHDOG)
