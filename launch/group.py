"""The worker processes of one attempt: started together, ended together.

Each leads a session of its own, so that Ctrl-C reaches the supervisor alone, and what
a worker has started can be killed with it.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from .logs import Logs
from .statuses import Ending
from .target import GUARD, Command


class Heir:
    """A process that kills the groups it was told of when this one is gone."""

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
        # If somebody killed it, the kernel still ends the workers with us.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._process.stdin.fileno(), f"{change}\n".encode())  # type: ignore


class Worker:
    """One process of the job; `status` is None while it runs."""

    def __init__(self, number: int, command: Command, log: Path, heir: Heir):
        self.number, self.name, self.host = number, command.name, command.host
        self._stop_signal = command.stop_signal
        self.status: int | None = None
        self.was_told = False  # that it should end, by us
        self._heir = heir
        with open(log, "ab") as output:
            self._process = subprocess.Popen(
                [*GUARD, "worker", str(os.getpid()), *command.argv],
                env=command.env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        heir.tell(f"+{self.pid}")

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        if self.status is None:
            self.status = self._process.poll()
            if self.status is not None:
                self._kill_group()  # what it has left behind
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
        # macOS answers EPERM where nobody but the dead is left.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


class Group:
    """All workers of one attempt."""

    def __init__(self, heir: Heir, logs: Logs):
        self.workers: list[Worker] = []
        self._heir, self._logs = heir, logs

    def start(self, commands: Sequence[Command]) -> None:
        for number, command in enumerate(commands):
            log = self._logs.of(command.name)
            self.workers.append(Worker(number, command, log, self._heir))

    def poll(self) -> bool:
        """Looks who has ended; whether all have."""
        for worker in self.workers:
            worker.poll()
        return self.has_ended

    @property
    def has_ended(self) -> bool:
        return all(worker.status is not None for worker in self.workers)

    def endings(self, steps: Mapping[int, int | None]) -> list[Ending]:
        """Of those that have ended; `steps` are the last by worker."""
        return [
            Ending(w.number, w.status, self._step(w, steps), w.name, w.host)
            for w in self.workers
            if w.status is not None
        ]

    def _step(self, worker: Worker, steps: Mapping[int, int | None]) -> int | None:
        """The last step of a worker, or of all that a lone one has started."""
        if len(self.workers) > 1:
            return steps.get(worker.number)
        return max((s for s in steps.values() if s is not None), default=None)

    def kill(self) -> None:
        """Returns once every worker is dead and reaped."""
        for worker in self.workers:
            worker.kill()
        while not self.poll():
            time.sleep(0.01)
