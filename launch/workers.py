"""The worker processes of one attempt: started together, ended together.

Each leads its own session, so that Ctrl-C reaches only the supervisor, and a worker's
children can be killed with it.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from .exit_codes import DONE, GAVE_UP, Ending
from .logs import Logs
from .progress_file import Report
from .progress_watch import furthest
from .target import GUARD, Command
from .warm import Warm


class Heir:
    """A process that kills the worker groups it knows when this process is gone."""

    def __enter__(self):
        self._process = subprocess.Popen(
            [*GUARD, "heir"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        return self

    def __exit__(self, *_):
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def tell(self, change: str) -> None:
        # If it was killed, the kernel still ends the workers with us.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._process.stdin.fileno(), f"{change}\n".encode())  # type: ignore


class Worker:
    """One process of the job; `status` is None while it runs."""

    def __init__(
        self,
        number: int,
        command: Command,
        log: Path,
        heir: Heir,
        warm: Warm | None = None,
    ):
        self.number, self.name, self.host = number, command.name, command.host
        self._stop_signal = command.stop_signal
        self.status: int | None = None
        self.was_told = False  # to end, by us
        self._heir = heir
        self._process = (warm and warm.fork(command, log)) or _start(command, log)
        heir.tell(f"+{self.pid}")

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        if self.status is None:
            self.status = self._process.poll()
            if self.status is not None:
                self._kill_group()  # children that it left behind
                self._heir.tell(f"-{self.pid}")
        return self.status

    def ask_to_end(self) -> None:
        if self.poll() is None:
            self.was_told = True
            self._process.send_signal(self._stop_signal)

    def kill(self) -> None:
        if self.poll() is None:
            self.was_told = True
            self._kill_group()

    def _kill_group(self) -> None:
        # macOS returns EPERM if only zombies are left.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def _start(command: Command, log: Path) -> subprocess.Popen[bytes]:
    with open(log, "ab") as output:
        return subprocess.Popen(
            [*GUARD, "worker", str(os.getpid()), *command.argv],
            env=command.env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


class Group:
    """All workers of one attempt."""

    def __init__(self, heir: Heir, warm: Warm, logs: Logs, processes: int):
        self.workers: list[Worker] = []
        self._heir, self._warm = heir, warm
        self._logs, self._processes = logs, processes

    def start(self, commands: Sequence[Command]) -> None:
        for number, command in enumerate(commands):
            log = self._logs.of(command.name)
            self.workers.append(Worker(number, command, log, self._heir, self._warm))

    def poll(self) -> bool:
        """Checks which workers have ended; returns whether all have."""
        for worker in self.workers:
            worker.poll()
        return self.has_ended

    @property
    def has_ended(self) -> bool:
        return all(worker.status is not None for worker in self.workers)

    def endings(self, reports: Mapping[int, Report]) -> list[Ending]:
        """Returns how workers ended, given the last report of each process."""
        return [self._ending(w, reports) for w in self.workers if w.status is not None]

    def _ending(self, worker: Worker, reports: Mapping[int, Report]) -> Ending:
        assert worker.status is not None
        status, number = worker.status, worker.number
        if len(self.workers) > 1:
            step = reports[number].step if number in reports else None
        else:  # it may have started many processes
            step = furthest(reports.values())
            status = _status(status, reports, self._processes)
        return Ending(number, status, step, worker.name, worker.host)

    def kill(self) -> None:
        """Returns once every worker is dead and reaped."""
        for worker in self.workers:
            worker.kill()
        while not self.poll():
            time.sleep(0.01)


def _status(own: int, reports: Mapping[int, Report], processes: int) -> int:
    """Returns the exit code of a command that started all processes.

    Their own reports are more reliable than its code.
    """
    said = [r.status for r in reports.values() if r.status is not None]
    if len(said) == processes:
        return max(said)
    # Some could report how they ended, and the others could not.
    return GAVE_UP if said and own == DONE else own
