"""The worker processes of one attempt: started together, ended together.

Each leads a session of its own, so that Ctrl-C reaches the supervisor alone, and what
a worker has started can be killed with it.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from . import progress_file
from .logs import Logs
from .statuses import Ending

GUARD = (sys.executable, "-I", "-S", str(Path(__file__).with_name("guard.py")))


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

    def __init__(
        self,
        number: int,
        command: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        heir: Heir,
    ):
        self.number = number
        self.status: int | None = None
        self.was_told = False  # that it should end, by us
        self._heir = heir
        with open(log, "ab") as output:
            self._process = subprocess.Popen(
                [*GUARD, "worker", str(os.getpid()), *command],
                env=env,
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
            self._process.terminate()

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

    def start(
        self, command: Sequence[str], envs: Sequence[Mapping[str, str]], header: str
    ) -> None:
        """Starts a worker for each of `envs`."""
        for number, env in enumerate(envs):
            progress = self._logs.progress(number)
            progress.unlink(missing_ok=True)  # of an earlier attempt
            self._logs.note(number, header)
            env = {**env, progress_file.VARIABLE: str(progress)}
            log = self._logs.worker(number)
            self.workers.append(Worker(number, command, env, log, self._heir))

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
            Ending(worker.number, worker.status, steps.get(worker.number))
            for worker in self.workers
            if worker.status is not None
        ]

    def kill(self) -> None:
        """Returns once every worker is dead and reaped."""
        for worker in self.workers:
            worker.kill()
        while not self.poll():
            time.sleep(0.01)


def environment(
    num_processes: int,
    *,
    port: int,
    attempt: int,
    cpu_devices: int | None,
    full_size: int | None = None,
    reason: str = "",
) -> list[dict[str, str]]:
    """What each worker of a new attempt is told, beside our own environment.

    Args:
      full_size: processes of the job when it is whole; None for as many as now.
      reason: why the attempt before ended; "" for the first.
    """
    job = {
        "PYTHONUNBUFFERED": "1",  # a killed worker's last words are in its log
        **os.environ,
        "MESHLOOM_COORDINATOR": f"127.0.0.1:{port}",
        "MESHLOOM_NUM_PROCESSES": str(num_processes),
        "MESHLOOM_ATTEMPT": str(attempt),
        "MESHLOOM_FULL_PROCESSES": str(full_size or num_processes),
        "MESHLOOM_RESTART_REASON": reason,
    }
    if cpu_devices is not None:
        job["JAX_PLATFORMS"] = "cpu"
        job["JAX_NUM_CPU_DEVICES"] = str(cpu_devices)
        # Each device holds a thread of XLA's pool while it waits in a collective, and
        # the pool has as many as cores: too few, and the workers wait for ever.
        job["NPROC"] = str(max(4 * cpu_devices, os.cpu_count() or 1))
    return [{**job, "MESHLOOM_PROCESS_ID": str(n)} for n in range(num_processes)]


def free_port(used: set[int]) -> int:
    """A port that is free now and was given to no attempt before; added to `used`.

    A late packet of an earlier attempt must not reach the new coordinator.
    """
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        if port not in used:
            used.add(port)
            return port
