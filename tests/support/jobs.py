"""Jobs of several real processes on this machine, for tests; none is ever left behind.

jax swallows SIGTERM, so processes are ended by SIGKILL, each with its whole group.
"""

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Completed:
    """How one process of a job ended; -9 as status means killed at the time limit."""

    status: int
    stdout: str
    stderr: str


def run_job(
    num_processes: int,
    devices_each: int,
    argv: Sequence[str],
    timeout: float,
    *,
    env: Mapping[str, str] | None = None,
) -> list[Completed]:
    """Runs `argv` as every process of one job; returns once all have ended.

    Args:
      timeout: seconds until the processes that still run are killed.
      env: variables of all processes beside the job's own.
    """
    job = job_env(num_processes)
    each = [
        {**job, "MESHLOOM_PROCESS_ID": str(number), **(env or {})}
        for number in range(num_processes)
    ]
    return run_processes(each, devices_each, argv, timeout)


def job_env(num_processes: int) -> dict[str, str]:
    """What all processes of a new job are told; the process number is still missing."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {
        "MESHLOOM_COORDINATOR": f"127.0.0.1:{port}",
        "MESHLOOM_NUM_PROCESSES": str(num_processes),
    }


def run_processes(
    envs: Sequence[Mapping[str, str]],
    devices_each: int,
    argv: Sequence[str],
    timeout: float,
) -> list[Completed]:
    """Runs `argv` once with each of `envs`, all at the same time."""
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / str(number) for number in range(len(envs))]
        with _started(envs, devices_each, argv, outputs) as processes:
            while time.monotonic() < deadline:
                if all(_has_ended(process) for process in processes):
                    break
                time.sleep(0.02)
        return [
            Completed(
                process.returncode,
                output.with_suffix(".out").read_text(errors="replace"),
                output.with_suffix(".err").read_text(errors="replace"),
            )
            for process, output in zip(processes, outputs, strict=True)
        ]


@contextlib.contextmanager
def _started(
    envs: Sequence[Mapping[str, str]],
    devices_each: int,
    argv: Sequence[str],
    outputs: Sequence[Path],
) -> Iterator[list[subprocess.Popen]]:
    """The processes, each leading a group of its own; killed and reaped at the end."""
    base = {k: v for k, v in os.environ.items() if not k.startswith("MESHLOOM_")}
    # Each device holds a thread of XLA's pool while it waits in a collective, and the
    # pool has as many as there are cores: too few, and the processes wait for ever.
    base["NPROC"] = str(max(4 * devices_each, os.cpu_count() or 1))
    processes: list[subprocess.Popen] = []
    try:
        for env, output in zip(envs, outputs, strict=True):
            with (
                open(output.with_suffix(".out"), "wb") as stdout,
                open(output.with_suffix(".err"), "wb") as stderr,
            ):
                process = subprocess.Popen(
                    list(argv),
                    env=base | dict(env),
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    start_new_session=True,
                )
            processes.append(process)
        yield processes
    finally:
        for process in processes:
            # Not reaped yet, so the group still is this one even if the leader ended.
            os.killpg(process.pid, signal.SIGKILL)
        for process in processes:
            process.wait()


def _has_ended(process: subprocess.Popen) -> bool:
    """Whether it has ended; leaves it to be reaped, which keeps its number taken."""
    flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, process.pid, flags) is not None
