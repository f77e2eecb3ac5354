"""The faults of a drill. Each runs a job to its end, striking once on the way.

Each returns the seconds from the fault to the next step that had not been done before.
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
from .drill_job import Failed, Job, Plan, recover, running
from .storage_faults import file_limit_of_one, full_disk, full_disk_of_one, read_only

Fault = Callable[[Plan, Path], float]


def kill_in_a_step(worker: int) -> Fault:
    def run(plan: Plan, folder: Path) -> float:
        with running(plan, folder) as job:
            job.wait_for_step(2 * plan.save_every + 2)
            return recover(job, job.strike(worker))

    return run


def kill_at(point: Point, worker: int) -> Fault:
    """Kills a worker while process 0, or the worker itself, is held at a point."""

    def run(plan: Plan, folder: Path) -> float:
        step, attempt = 2 * plan.save_every, 2 if point == "restore" else 1
        held = 0 if point == "commit" else worker  # process 0 alone commits
        marker = folder / "held"
        hold = Hold(point, step, held, attempt, str(marker))
        with running(plan, folder, hold=hold) as job:
            if point == "restore":  # which there is after a death only
                job.wait(f"checkpoint {step}", lambda: _has(job, step))
                job.strike(worker)
            job.wait(f"{point} of step {step}", marker.exists)
            return recover(job, job.strike(worker))

    return run


def sigterm(plan: Plan, folder: Path) -> float:
    """One worker is told to leave: all save at the same step, and come back."""
    with running(plan, folder) as job:
        job.wait_for_step(plan.save_every + 2)
        struck = job.strike(1 % plan.processes, signal.SIGTERM)
        job.wait("save of a job told to leave", lambda: bool(job.events("preempted")))
        return recover(job, struck)


def sigstop(plan: Plan, folder: Path) -> float:
    """One worker stops, but does not die: the watchdogs of the others end the job."""
    with running(plan, folder) as job:
        job.wait_for_step(plan.save_every + 2)
        return recover(job, job.strike(plan.processes - 1, signal.SIGSTOP))


def damage(make: Callable[[Path], Path]) -> Fault:
    """The newest checkpoint is damaged between two runs: the one before is taken."""

    def run(plan: Plan, folder: Path) -> float:
        with running(plan, folder) as job:
            job.wait(
                f"checkpoint {plan.save_every}", lambda: _has(job, plan.save_every)
            )
            job.wait_for_step(2 * plan.save_every + 2)
            if (status := job.stop()) != PREEMPTED:
                raise Failed(f"told to stop, the job ended with status {status}")
            newest = committed_steps(folder / "checkpoints")[-1]
            make(folder / "checkpoints" / str(newest))
            struck = time.monotonic()
        with running(plan, folder) as job:
            seconds = recover(job, struck)
            aside = [row["step"] for row in job.events("set_aside")]
            if aside != [newest]:
                raise Failed(
                    f"checkpoint {newest} was damaged, but {aside} were set aside"
                )
            return seconds

    return run


def slow_read(plan: Plan, folder: Path) -> float:
    """A worker is killed, and one process takes 5 s longer to read its part."""
    hold = Hold("read", 0, plan.processes - 1, 2, str(folder / "held"), seconds=5.0)
    with running(plan, folder, hold=hold) as job:
        job.wait(f"checkpoint {plan.save_every}", lambda: _has(job, plan.save_every))
        seconds = recover(job, job.strike(0))
        if not Path(hold.marker).exists():
            raise Failed(f"no process met the fault; see {job.log}")
        _nothing_set_aside(job)
        return seconds


def connection_reset(plan: Plan, folder: Path) -> float:
    """A worker is killed, and storage fails one process once while it reads."""
    worker = plan.processes - 1
    marker = folder / "held"
    hold = Hold("read", 0, worker, 2, str(marker), errno=errno.ECONNRESET)
    with running(plan, folder, hold=hold) as job:
        job.wait(f"checkpoint {plan.save_every}", lambda: _has(job, plan.save_every))
        seconds = recover(job, job.strike(worker))
        if not job.events("unreadable"):
            raise Failed(f"no process met the fault; see {job.log}")
        _nothing_set_aside(job)
        return seconds


def _nothing_set_aside(job: Job) -> None:
    if aside := [row["step"] for row in job.events("set_aside")]:
        raise Failed(f"checkpoints {aside} were good, but were set aside")


def other_mesh(plan: Plan, folder: Path) -> float:
    """A worker is killed, and the job goes on with half the processes.

    Where the mesh does not follow the number of devices, by another command.
    """
    half = plan.processes // 2
    with running(plan, folder) as job:
        job.wait(f"checkpoint {plan.save_every}", lambda: _has(job, plan.save_every))
        if plan.is_elastic:
            (folder / "logs" / "processes").write_text(f"{half}\n")
            return recover(job, job.strike(plan.processes - 1))
        struck = job.strike(plan.processes - 1)
    with running(
        dataclasses.replace(plan, processes=half, mesh="data=-1"), folder
    ) as job:
        return recover(job, struck)


def _has(job: Job, step: int) -> bool:
    return step in committed_steps(job.folder / "checkpoints")


# What `meshloom drill` runs, in order.
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
# Where the job ends on another mesh, its losses are the same only to rounding.
ON_ANOTHER_MESH = {"other-mesh"}
NEEDS_MOUNTS = {"full-disk", "read-only"}
