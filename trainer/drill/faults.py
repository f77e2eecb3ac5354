"""The faults of a drill. Each runs a job to its end, striking once on the way.

Each returns the seconds from the fault to the next step that had not been done before.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from ...launch.statuses import BAD_INPUT, DONE, PREEMPTED
from .. import faults
from ..checkpoint import committed_steps
from ..holds import Hold, Point
from .job import Failed, Job, Plan, running

Fault = Callable[[Plan, Path], float]


def kill_in_a_step(worker: int) -> Fault:
    def run(plan: Plan, folder: Path) -> float:
        with running(plan, folder) as job:
            job.wait_for_step(2 * plan.save_every + 2)
            return _recover(job, job.strike(worker))

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
            return _recover(job, job.strike(worker))

    return run


def sigterm(plan: Plan, folder: Path) -> float:
    """One worker is told to leave: all save at the same step, and come back."""
    with running(plan, folder) as job:
        job.wait_for_step(plan.save_every + 2)
        struck = job.strike(1 % plan.processes, signal.SIGTERM)
        job.wait("save of a job told to leave", lambda: bool(job.events("preempted")))
        return _recover(job, struck)


def sigstop(plan: Plan, folder: Path) -> float:
    """One worker stops, but does not die: the watchdogs of the others end the job."""
    with running(plan, folder) as job:
        job.wait_for_step(plan.save_every + 2)
        return _recover(job, job.strike(plan.processes - 1, signal.SIGSTOP))


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
            seconds = _recover(job, struck)
            aside = [row["step"] for row in job.events("set_aside")]
            if aside != [newest]:
                raise Failed(
                    f"checkpoint {newest} was damaged, but {aside} were set aside"
                )
            return seconds

    return run


def other_mesh(plan: Plan, folder: Path) -> float:
    """A worker is killed, and the job goes on with half the processes."""
    with running(plan, folder) as job:
        job.wait(f"checkpoint {plan.save_every}", lambda: _has(job, plan.save_every))
        size = folder / "logs" / "processes"
        size.write_text(f"{plan.processes // 2}\n")
        return _recover(job, job.strike(plan.processes - 1))


# In a mount namespace of its own, which ends with it.
FULL_DISK = """
disk=$1 first=$2 kept=$3; shift 3
mount -t tmpfs -o size=64m none "$disk" || exit 90
(
  while [ ! -e "$disk/$first/_CHECKPOINT_METADATA" ]; do sleep 0.02; done
  cat /dev/zero > "$disk/filler" 2> /dev/null
) &
"$@"; status=$?
kill $! 2> /dev/null
ls "$disk" > "$kept.full"
rm "$disk/filler" || exit 91
[ $status = 2 ] || exit 92
touch "$kept.freed"
"$@"; status=$?
cp -a "$disk" "$kept"
exit $status
"""


def full_disk(plan: Plan, folder: Path) -> float:
    """The disk is full: a clear end, with the last good checkpoint untouched."""
    disk, kept = folder / "checkpoints", folder / "kept"
    disk.mkdir(parents=True)
    # Root needs no user namespace, and some machines have none.
    unshare = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]
    script = ["sh", "-c", FULL_DISK, "sh", str(disk), str(plan.save_every), str(kept)]
    with running(plan, folder, around=[*unshare, *script]) as job:
        freed = job.wait("end with the disk full", Path(f"{kept}.freed").exists)
        said = "No space left on device"
        if said not in job.log.read_text(errors="replace"):
            raise Failed(f"the job ended without saying {said!r}; see {job.log}")
        seconds = _recover(job, freed)
    disk.rmdir()
    shutil.move(kept, disk)
    return seconds


def can_mount() -> bool:
    """Whether a small disk of our own can be made here."""
    command = ["unshare", "-m" if os.geteuid() == 0 else "-rm", "true"]
    try:
        return subprocess.run(command, capture_output=True, timeout=10).returncode == 0
    except FileNotFoundError:
        return False


def _recover(job: Job, struck: float) -> float:
    """Waits for a step that is new, then for the end of the job."""
    time.sleep(0.2)  # what was on its way to the ledger is there
    before = job.step
    seconds = job.wait_for_step(before + 1) - struck
    if (status := job.finish()) != DONE:
        words = " (bad input)" if status == BAD_INPUT else ""
        raise Failed(f"the job ended with status {status}{words}; see {job.log}")
    return seconds


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
    "torn-file": damage(faults.tear_a_file),
    "flipped-bit": damage(faults.flip_a_bit),
    "full-disk": full_disk,
    "other-mesh": other_mesh,
}
# Where the job ends on another mesh, its losses are the same only to rounding.
ON_ANOTHER_MESH = {"other-mesh"}
