"""Where a job runs: the interface of the modules in targets/.

Every target answers the same five questions. For one that is supervised (`Target`; this
machine, mpirun, srun, ssh) it is `hosts`, `environment` and `start`; the supervisor
follows what was started and stops it by SIGTERM, so nothing of that is written twice.
One that hands the job to a scheduler and leaves it there (`Submitted`; sbatch, kubectl)
has `follow` and `stop` of its own.
"""

import abc
import dataclasses
import os
import random
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import progress_file
from .logs import Logs
from .schedulers import PORTS

GUARD = (sys.executable, "-I", "-S", str(Path(__file__).with_name("guard.py")))
# Variables that processes on other hosts are given too, where they are set here.
CARRIED = ("MESHLOOM_", "JAX_", "XLA_", "LIBTPU_", "NCCL_", "TPU_", "GLOO_")
CARRIED_WHOLE = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "NPROC", "PYTHONUNBUFFERED")


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One start of all processes of a job.

    Attributes:
      full_size: processes of the job when it is whole; None for as many as now.
      reason: why the attempt before ended; "" for the first.
    """

    number: int
    processes: int
    full_size: int | None = None
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Command:
    """What the supervisor runs on this machine.

    Attributes:
      name: what messages call it, and its log.
      stop_signal: makes its processes save and leave.
      host: where its process runs, if that is elsewhere.
    """

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    stop_signal: signal.Signals = signal.SIGTERM
    host: str = ""


class Target(abc.ABC):
    """Runs `command` as every process of a job.

    Args:
      cpu_devices: run on the CPU, with this many devices in each process.

    Attributes:
      most: processes that the hosts have room for; None for any number.
      warm: the command line of a process that has imported what the command needs, and
        from which processes on this machine are forked; None starts each by itself.
    """

    most: int | None = None
    warm: Sequence[str] | None = None

    def __init__(self, command: Sequence[str], *, cpu_devices: int | None = None):
        self.command, self.cpu_devices = tuple(command), cpu_devices
        self._ports: set[int] = set()

    @abc.abstractmethod
    def hosts(self, processes: int) -> list[str]:
        """The host of each process, by its number; the first is the coordinator's."""

    @abc.abstractmethod
    def start(self, attempt: Attempt, logs: Logs) -> list[Command]:
        """The commands that start the processes of an attempt."""

    def environment(self, attempt: Attempt) -> dict[str, str]:
        """What every process is told, beside what is there already."""
        hosts = self.hosts(attempt.processes)
        if set(hosts) == {local_host()}:
            coordinator = f"127.0.0.1:{free_port(self._ports)}"
        else:
            coordinator = f"{hosts[0]}:{any_port(self._ports)}"
        return job_environment(
            attempt, coordinator, hosts, cpu_devices=self.cpu_devices
        )


class Submitted(abc.ABC):
    """A job that a scheduler keeps."""

    @abc.abstractmethod
    def hosts(self) -> list[str]:
        """The host of each process, as far as that is known before the start."""

    @abc.abstractmethod
    def environment(self) -> Any:
        """What the processes are told, as this scheduler wants to have it."""

    @abc.abstractmethod
    def start(self) -> None:
        """Submits the job."""

    @abc.abstractmethod
    def follow(self) -> int:
        """Shows the log of process 0 until the job has ended; its exit status."""

    @abc.abstractmethod
    def stop(self) -> None:
        """Lets the processes save, and ends the job."""


def job_environment(
    attempt: Attempt,
    coordinator: str,
    hosts: Sequence[str] = (),
    *,
    cpu_devices: int | None = None,
) -> dict[str, str]:
    """The variables of a job; who is which process is still missing."""
    job = {
        "MESHLOOM_COORDINATOR": coordinator,
        "MESHLOOM_NUM_PROCESSES": str(attempt.processes),
        "MESHLOOM_ATTEMPT": str(attempt.number),
        "MESHLOOM_FULL_PROCESSES": str(attempt.full_size or attempt.processes),
        "MESHLOOM_RESTART_REASON": attempt.reason,
    }
    if hosts:
        job["MESHLOOM_HOSTS"] = ",".join(hosts)
    if "PYTHONUNBUFFERED" not in os.environ:
        job["PYTHONUNBUFFERED"] = "1"  # a killed worker's last words are in its log
    if cpu_devices is not None:
        job["JAX_PLATFORMS"] = "cpu"
        job["JAX_NUM_CPU_DEVICES"] = str(cpu_devices)
        # Each device holds a thread of XLA's pool while it waits in a collective, and
        # the pool has as many as cores: too few, and the workers wait for ever.
        job["NPROC"] = str(max(4 * cpu_devices, os.cpu_count() or 1))
    return job


def own_variables(number: int, logs: Logs) -> dict[str, str]:
    """What process `number` alone is told."""
    return {
        "MESHLOOM_PROCESS_ID": str(number),
        progress_file.VARIABLE: str(logs.progress(number).absolute()),
    }


def carried(env: Mapping[str, str], also: Sequence[str] = ()) -> list[str]:
    """The names of the variables that processes on other hosts must have.

    Args:
      also: names that the user asks for.
    """
    if missing := [name for name in also if name not in env]:
        raise ValueError(
            f"--env {missing[0]}: this variable is not set here. Set it before the "
            "launch; its value is not given on a command line, where others see it."
        )
    return sorted(
        name
        for name in env
        if name.startswith(CARRIED) or name in CARRIED_WHOLE or name in also
    )


def rank_command(command: Sequence[str], logs: Logs) -> list[str]:
    """What another program starts in the place of each process of a job."""
    return [*GUARD, "rank", str(logs.folder.absolute()), *command]


def local_host() -> str:
    return socket.gethostname()


def free_port(used: set[int]) -> int:
    """A port that is free here and was given to no attempt before; added to `used`.

    A late packet of an earlier attempt must not reach the new coordinator.
    """
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        if port not in used:
            used.add(port)
            return port


def any_port(used: set[int]) -> int:
    """For a coordinator elsewhere: not tried, as if it is taken there, process 0 says
    so, and the next attempt has another."""
    port = random.SystemRandom().choice([p for p in PORTS if p not in used])
    used.add(port)
    return port
