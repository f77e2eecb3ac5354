"""The faults of a drill. Each runs a job to completion and injects one fault.

Each returns the seconds from the fault to the next step that was not done before.
"""

import dataclasses
import errno
import signal
import time
from collections.abc import Callable
from pathlib import Path

from ...launch.exit_codes import PREEMPTED
from ..checkpoint.manager import committed_steps
from ..job.fault_points import Hold, Point
from . import checkpoint_faults
from .drill_job import Failed, Job, JobSpec, recover, running
from .storage_faults import file_limit_of_one, full_disk, full_disk_of_one, read_only

Fault = Callable[[JobSpec, Path], float]


def kill_in_a_step(worker: int) -> Fault:
    """Kills a worker during a step."""

    def run(spec: JobSpec, folder: Path) -> float:
        with running(spec, folder) as job:
            job.wait_for_step(2 * spec.save_every + 2)
            return recover(job, job.kill(worker))

    return run


def kill_at(point: Point, worker: int) -> Fault:
    """Kills a worker while process 0, or the worker itself, waits at a fault point."""

    def run(spec: JobSpec, folder: Path) -> float:
        step, attempt = 2 * spec.save_every, 2 if point == "restore" else 1
        held = 0 if point == "commit" else worker  # process 0 alone commits
        marker = folder / "held"
        hold = Hold(point, step, held, attempt, str(marker))
        with running(spec, folder, hold=hold) as job:
            if point == "restore":  # only reached after an earlier death
                job.wait(f"checkpoint {step}", lambda: _has(job, step))
                job.kill(worker)
            job.wait(f"{point} of step {step}", marker.exists)
            return recover(job, job.kill(worker))

    return run


def sigterm(spec: JobSpec, folder: Path) -> float:
    """Preempts one worker: all save at the same step, exit and are restarted."""
    with running(spec, folder) as job:
        job.wait_for_step(spec.save_every + 2)
        signalled = job.kill(1 % spec.processes, signal.SIGTERM)
        job.wait("save of the preempted job", lambda: bool(job.events("preempted")))
        return recover(job, signalled)


def sigstop(spec: JobSpec, folder: Path) -> float:
    """Freezes one worker without killing it: the other watchdogs end the job."""
    with running(spec, folder) as job:
        job.wait_for_step(spec.save_every + 2)
        return recover(job, job.kill(spec.processes - 1, signal.SIGSTOP))


def damage(make: Callable[[Path], Path]) -> Fault:
    """Damages the newest checkpoint between two runs: the previous one is restored."""

    def run(spec: JobSpec, folder: Path) -> float:
        with running(spec, folder) as job:
            job.wait(
                f"checkpoint {spec.save_every}", lambda: _has(job, spec.save_every)
            )
            job.wait_for_step(2 * spec.save_every + 2)
            if (status := job.stop()) != PREEMPTED:
                raise Failed(f"the job exited with status {status} on SIGTERM")
            newest = committed_steps(folder / "checkpoints")[-1]
            make(folder / "checkpoints" / str(newest))
            damaged = time.monotonic()
        with running(spec, folder) as job:
            seconds = recover(job, damaged)
            aside = [row["step"] for row in job.events("set_aside")]
            if aside != [newest]:
                raise Failed(
                    f"checkpoint {newest} was damaged, but {aside} were set aside"
                )
            return seconds

    return run


def slow_read(spec: JobSpec, folder: Path) -> float:
    """Kills a worker, then delays one process by 5 s while it reads its shards."""
    hold = Hold("read", 0, spec.processes - 1, 2, str(folder / "held"), seconds=5.0)
    with running(spec, folder, hold=hold) as job:
        job.wait(f"checkpoint {spec.save_every}", lambda: _has(job, spec.save_every))
        seconds = recover(job, job.kill(0))
        if not Path(hold.marker).exists():
            raise Failed(f"the fault was never triggered; see {job.log}")
        _nothing_set_aside(job)
        return seconds


def connection_reset(spec: JobSpec, folder: Path) -> float:
    """Kills a worker, then fails one read of one process with a connection reset."""
    worker = spec.processes - 1
    marker = folder / "held"
    hold = Hold("read", 0, worker, 2, str(marker), errno=errno.ECONNRESET)
    with running(spec, folder, hold=hold) as job:
        job.wait(f"checkpoint {spec.save_every}", lambda: _has(job, spec.save_every))
        seconds = recover(job, job.kill(worker))
        if not job.events("unreadable"):
            raise Failed(f"the fault was never triggered; see {job.log}")
        _nothing_set_aside(job)
        return seconds


def _nothing_set_aside(job: Job) -> None:
    if aside := [row["step"] for row in job.events("set_aside")]:
        raise Failed(f"checkpoints {aside} were intact, but were set aside")


def other_mesh(spec: JobSpec, folder: Path) -> float:
    """Kills a worker, then continues with half the processes.

    If the mesh is not elastic, this takes another command with another mesh.
    """
    half = spec.processes // 2
    with running(spec, folder) as job:
        job.wait(f"checkpoint {spec.save_every}", lambda: _has(job, spec.save_every))
        if spec.is_elastic:
            (folder / "logs" / "processes").write_text(f"{half}\n")
            return recover(job, job.kill(spec.processes - 1))
        killed = job.kill(spec.processes - 1)
    with running(
        dataclasses.replace(spec, processes=half, mesh="data=-1"), folder
    ) as job:
        return recover(job, killed)


def _has(job: Job, step: int) -> bool:
    return step in committed_steps(job.folder / "checkpoints")


# All faults, in the order in which `meshloom drill` injects them.
FAULTS: dict[str, Fault] = {
    "kill-worker-in-step": kill_in_a_step(1),
    "kill-first-in-step": kill_in_a_step(0),
    "kill-worker-in-save": kill_at("save", 1),
    "kill-first-in-save": kill_at("save", 0),
    "kill-worker-before-commit": kill_at("commit", 1),
    "kill-first-before-commit": kill_at("commit", 0),
    "kill-worker-in-restore": kill_at("restore", 1),
    "kill-first-in-restore": kill_at("restore", 0),
    "sigterm": sigterm,
    "sigstop": sigstop,
    "torn-file": damage(checkpoint_faults.tear_a_file),
    "torn-commit": damage(checkpoint_faults.tear_the_commit_record),
    "flipped-bit": damage(checkpoint_faults.flip_a_bit),
    "unreadable-file": damage(checkpoint_faults.make_unreadable),
    "slow-read": slow_read,
    "connection-reset": connection_reset,
    "full-disk": full_disk,
    "full-disk-of-one": full_disk_of_one,
    "file-limit-of-one": file_limit_of_one,
    "read-only": read_only,
    "other-mesh": other_mesh,
}
# The job finishes on another mesh, so its losses only agree up to rounding.
ON_ANOTHER_MESH = {"other-mesh"}
NEEDS_MOUNTS = {"full-disk", "read-only"}
