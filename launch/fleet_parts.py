"""The parts of a fleet: commands that are started, watched and started again."""

import dataclasses
import re
import time
from collections.abc import Sequence
from pathlib import Path

from . import progress_file
from .beats import Beats
from .exit_codes import Ending
from .logs import Logs, last_line
from .masking import masked_command
from .restarts import Restarts
from .target import Command
from .workers import Heir, Worker

COORDINATOR = "coordinator"  # its name, or with a number that of one of several
STATUS = re.compile(rb"meshloom serve: .* rounds/s, learners \d+/\d+ ")


class Part:
    """One command of a fleet.

    Args:
      beat: a file that it touches at least every few seconds, if it does.

    Attributes:
      status: how it last ended; None if it runs or was never started.
      due: when to start it (monotonic time); None if it runs or is over.
    """

    def __init__(
        self,
        number: int,
        command: Command,
        logs: Logs,
        heir: Heir,
        beat: Path | None = None,
    ):
        self.name = command.name
        self.status: int | None = None
        self.due: float | None = 0.0
        self.starts = 0
        self._number, self._command = number, command
        self._logs, self._heir = logs, heir
        self._beats = None if beat is None else Beats(beat)
        self._worker: Worker | None = None

    @property
    def is_running(self) -> bool:
        return self._worker is not None

    @property
    def log(self) -> Path:
        return self._logs.of(self.name)

    def start_if_due(self) -> None:
        if self.due is None or self.due > time.monotonic():
            return
        self.due, self.status = None, None
        self.starts += 1
        if self._beats is not None:
            self._beats.begin()
        self._logs.note(self.name, f"attempt {self.starts}")
        self._worker = Worker(self._number, self._command, self.log, self._heir)
        self._logs.event(
            "start",
            name=self.name,
            attempt=self.starts,
            pids=[self._worker.pid],
            command=masked_command(self._command.argv),
        )

    def poll(self) -> Ending | None:
        """Returns how it ended, once."""
        if self._worker is None or self._worker.poll() is None:
            return None
        worker, self._worker = self._worker, None
        self.status = worker.status
        assert self.status is not None
        ending = Ending(self._number, self.status, self.step, self.name)
        by_us = ", stopped by the launcher" * worker.was_told
        self._logs.note(self.name, f"attempt {self.starts}: {ending}{by_us}")
        return ending

    @property
    def step(self) -> int | None:
        """The last step that it reported, if it reports any."""
        return None

    def kill_if_silent(self, seconds: float) -> bool:
        """Kills it if it has not beaten for so long; `poll` returns its end later."""
        if self._worker is None or self._beats is None:
            return False
        if self._worker.was_told or self._beats.silence() <= seconds:
            return False
        self._worker.kill()
        return True

    def ask_to_end(self) -> None:
        """Asks it to save and exit; it is not started again."""
        self.due = None
        if self._worker is not None:
            self._worker.ask_to_end()

    def kill(self) -> None:
        """Returns once it is dead and reaped; it is not started again."""
        self.due = None
        if self._worker is not None:
            self._worker.kill()
        while self._worker is not None:
            self.poll()
            time.sleep(0.01)

    def last_line(self) -> str:
        """Returns its last line, or the last error."""
        return last_line(self.log)


class Learner(Part):
    """A learner: `meshloom launch` of one job, with a supervisor of its own.

    Attributes:
      is_over: whether it is done or was given up; it is not started again.
      highest: the highest step that it reported while this fleet ran.
    """

    def __init__(
        self,
        number: int,
        command: Command,
        logs: Logs,
        heir: Heir,
        *,
        folder: Path,
        restarts: Restarts,
    ):
        super().__init__(number, command, logs, heir)
        self.restarts = restarts
        self.is_over = False
        self.highest: int | None = None
        self._folder = folder / "logs"
        self._events = self._folder / "supervisor.jsonl"
        self._known = self._events.stat().st_size if self._events.exists() else 0
        # A report of an earlier fleet is not a step of this one.
        (self._folder / "progress-0.json").unlink(missing_ok=True)

    @property
    def step(self) -> int | None:
        try:
            report = progress_file.read(self._folder / "progress-0.json")
        except ValueError:
            return None  # its own supervisor reports a malformed file
        return report and report.step

    def look(self) -> None:
        """Records progress, after which restarts are counted anew."""
        step = self.step
        if step is not None and (self.highest is None or step > self.highest):
            self.highest = step
            self.restarts.progress()

    def num_restarts(self) -> int:
        """Returns how often it was restarted, by its own supervisor or by us."""
        ours = max(self.starts - 1, 0)
        if not self._events.exists():
            return ours
        with open(self._events, "rb") as events:
            events.seek(self._known)
            return ours + sum(b'"event": "restart"' in line for line in events)

    def last_line(self) -> str:
        """Returns the error of its supervisor, or else of one of its processes."""
        own = super().last_line()
        if own.startswith("meshloom: "):
            return own
        lines = [last_line(log) for log in sorted(self._folder.glob("worker-*.log"))]
        errors = [line for line in lines if line.startswith("meshloom: ")]
        return (errors or lines or [own])[0]


@dataclasses.dataclass(frozen=True)
class Commands:
    """What a fleet runs; none of them changes from one attempt to the next.

    Attributes:
      beat: a file that the coordinator touches while it works.
      standbys: coordinators that may lead in its place.
    """

    coordinator: Command
    servers: Sequence[Command]
    learners: Sequence[Command]
    beat: Path | None = None
    standbys: Sequence[Command] = ()


class FleetLogs(Logs):
    """The log folder of a fleet.

    Args:
      is_single: whether a learner is one process, whose index is then not shown.
    """

    def __init__(self, folder: Path, *, is_single: bool):
        super().__init__(folder)
        self._is_single = is_single

    def _new_lines(self, name: str) -> bytes:
        lines = super()._new_lines(name)
        if name.startswith(COORDINATOR):  # its status is in ours
            kept = (x for x in lines.splitlines(True) if not STATUS.search(x))
            return b"".join(kept)
        if self._is_single and name.startswith("learner "):
            mark = f"{name} | ".encode()
            lines = lines.replace(mark + b"0 | ", mark)
        return lines
