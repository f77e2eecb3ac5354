"""Where a job runs: the interface of the modules in targets/.

A supervised target (`Launcher`: this machine, mpirun, srun, ssh) has `hosts`,
`environment` and `start`; the supervisor follows what was started and stops it. A
target that hands the job over to a scheduler (`Submitted`: sbatch, kubectl) also has
its own `follow` and `stop`.
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
# Variables that are passed on to other hosts, if they are set here.
CARRIED = ("MESHLOOM_", "JAX_", "XLA_", "LIBTPU_", "NCCL_", "TPU_", "GLOO_")
CARRIED_WHOLE = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "NPROC", "PYTHONUNBUFFERED")


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One start of all processes of a job.

    Attributes:
      full_size: processes of the job before it shrank; None for as many as now.
      reason: why the previous attempt ended; "" for the first.
    """

    number: int
    processes: int
    full_size: int | None = None
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Command:
    """What the supervisor runs on this machine.

    Attributes:
      name: its name in messages, and of its log.
      stop_signal: makes its processes save and exit.
      host: where its process runs, if not on this host.
    """

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    stop_signal: signal.Signals = signal.SIGTERM
    host: str = ""


class Launcher(abc.ABC):
    """Runs `command` as every process of a job.

    Args:
      cpu_devices: run on the CPU, with this many devices in each process.

    Attributes:
      most: processes that the hosts have room for; None for any number.
      warm: the command line of a warm process, from which workers on this machine are
        forked; None starts each one afresh.
    """

    most: int | None = None
    warm: Sequence[str] | None = None

    def __init__(self, command: Sequence[str], *, cpu_devices: int | None = None):
        self.command, self.cpu_devices = tuple(command), cpu_devices
        self._ports: set[int] = set()

    @abc.abstractmethod
    def hosts(self, processes: int) -> list[str]:
        """Returns the host of each process, by index; the first is the coordinator."""

    @abc.abstractmethod
    def start(self, attempt: Attempt, logs: Logs) -> list[Command]:
        """Returns the commands that start the processes of an attempt."""

    def environment(self, attempt: Attempt) -> dict[str, str]:
        """Returns the variables that are added for every process."""
        hosts = self.hosts(attempt.processes)
        if set(hosts) == {local_host()}:
            coordinator = f"127.0.0.1:{free_port(self._ports)}"
        else:
            coordinator = f"{hosts[0]}:{any_port(self._ports)}"
        return job_environment(
            attempt, coordinator, hosts, cpu_devices=self.cpu_devices
        )


class Submitted(abc.ABC):
    """A job that is handed over to a scheduler."""

    @abc.abstractmethod
    def hosts(self) -> list[str]:
        """Returns the host of each process, as far as known before the start."""

    @abc.abstractmethod
    def environment(self) -> Any:
        """Returns the variables of the processes, in the scheduler's own form."""

    @abc.abstractmethod
    def start(self) -> None:
        """Submits the job."""

    @abc.abstractmethod
    def follow(self) -> int:
        """Shows the log of process 0 until the job ends; returns its exit code."""

    @abc.abstractmethod
    def stop(self) -> None:
        """Lets the processes save, then ends the job."""


def job_environment(
    attempt: Attempt,
    coordinator: str,
    hosts: Sequence[str] = (),
    *,
    cpu_devices: int | None = None,
) -> dict[str, str]:
    """Returns the variables of a job, all but those that differ between processes."""
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
        job["PYTHONUNBUFFERED"] = "1"  # or a killed worker's last lines are lost
    if cpu_devices is not None:
        job["JAX_PLATFORMS"] = "cpu"
        job["JAX_NUM_CPU_DEVICES"] = str(cpu_devices)
        # A device holds a thread of XLA's pool while it waits in a collective, and the
        # pool has one per core: with too few, the workers deadlock.
        job["NPROC"] = str(max(4 * cpu_devices, os.cpu_count() or 1))
    return job


def own_variables(number: int, logs: Logs) -> dict[str, str]:
    """Returns the variables of process `number` alone."""
    return {
        "MESHLOOM_PROCESS_ID": str(number),
        progress_file.VARIABLE: str(logs.progress(number).absolute()),
    }


def carried(env: Mapping[str, str], also: Sequence[str] = ()) -> list[str]:
    """Returns the names of the variables to pass on to other hosts.

    Args:
      also: further names, from the user.
    """
    if missing := [name for name in also if name not in env]:
        raise ValueError(
            f"--env {missing[0]}: this variable is not set. Set it before the launch; "
            "values are not given on command lines, where others can see them."
        )
    return sorted(
        name
        for name in env
        if name.startswith(CARRIED) or name in CARRIED_WHOLE or name in also
    )


def rank_command(command: Sequence[str], logs: Logs) -> list[str]:
    """Returns the command line that mpirun or srun starts as each process."""
    return [*GUARD, "rank", str(logs.folder.absolute()), *command]


def local_host() -> str:
    return socket.gethostname()


def free_port(used: set[int]) -> int:
    """Returns a port that is free here and not in `used`, and adds it there.

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
    """Returns a port for a coordinator on another host, untested.

    If it is in use there, process 0 says so, and the next attempt gets another one.
    """
    port = random.SystemRandom().choice([p for p in PORTS if p not in used])
    used.add(port)
    return port
