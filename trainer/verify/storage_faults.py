"""Faults of the storage that a job saves to, which somebody must repair.

The job ends with status 2 and says why. Then the storage is repaired, and the same
command continues. Where storage fails all processes, it is a mount of the job's own,
in a namespace that ends with it.
"""

import dataclasses
import errno
import os
import resource
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from ...launch.exit_codes import BAD_INPUT
from ..job.fault_points import Hold
from .drill_job import Failed, Job, Plan, recover, running

# $1 is the run folder, $2 the step whose checkpoint is waited for, $3 a file to make
# when the storage is repaired; the rest is the job. The functions are the fault's.
SCRIPT = """
folder=$1 first=$2 repaired=$3; shift 3
disk="$folder/checkpoints"
prepare || exit 90
(
  while [ ! -e "$disk/$first/_CHECKPOINT_METADATA" ]; do sleep 0.02; done
  strike
) &
"$@"; status=$?
kill $! 2> /dev/null; wait $! 2> /dev/null
repair || exit 91
[ $status = 2 ] || exit 92
touch "$repaired"
"$@"; status=$?
finish
exit $status
"""
FULL = """
prepare() { mount -t tmpfs -o size=64m none "$disk"; }
strike() { cat /dev/zero > "$disk/filler" 2> /dev/null; }
repair() { ls "$disk" > "$folder/full"; rm "$disk/filler"; }
finish() { cp -a "$disk" "$folder/kept"; }
"""
# Files that are open for writing would keep the folder writable: mounts of their own.
READ_ONLY = """
again() { for i in $(seq 500); do "$@" 2> /dev/null && return; sleep 0.01; done; }
prepare() {
  mkdir -p "$folder/logs" && touch "$folder/.lock" && mount --bind "$folder" "$folder" \
    && mount --bind "$folder/logs" "$folder/logs" \
    && mount --bind "$folder/.lock" "$folder/.lock"
}
strike() {
  again mount -o remount,bind,ro "$folder"; sleep 10; mount -o remount,bind,rw "$folder"
}
repair() { mount -o remount,bind,rw "$folder"; }
finish() { :; }
"""


def full_disk(plan: Plan, folder: Path) -> float:
    """The disk is full: a clear end, with the last good checkpoint untouched."""
    disk = folder / "checkpoints"
    disk.mkdir(parents=True)
    seconds = _run(plan, folder, FULL, "No space left on device")
    disk.rmdir()
    shutil.move(folder / "kept", disk)
    return seconds


def full_disk_of_one(plan: Plan, folder: Path) -> float:
    """One process is told that the disk is full, when it is about to save."""
    hold = Hold("write", 2 * plan.save_every, 1, 1, str(folder / "held"))
    hold = dataclasses.replace(hold, errno=errno.ENOSPC)
    return _end_and_continue(plan, folder, os.strerror(errno.ENOSPC), hold)


def file_limit_of_one(plan: Plan, folder: Path) -> float:
    """One process can write no file of more than 4 KiB: it fails in the background."""

    def strike(job: Job) -> None:
        first = folder / "checkpoints" / str(plan.save_every)
        job.wait(f"checkpoint {plan.save_every}", first.exists)
        resource.prlimit(job.pids[1], resource.RLIMIT_FSIZE, (4096, 4096))

    return _end_and_continue(plan, folder, os.strerror(errno.EFBIG), strike=strike)


def _end_and_continue(
    plan: Plan,
    folder: Path,
    message: str,
    hold: Hold | None = None,
    strike: Callable[[Job], None] = lambda job: None,
) -> float:
    """Runs a job that must end with status 2 and `message`, and then another one."""
    with running(plan, folder, hold=hold) as job:
        strike(job)
        if (status := job.finish()) != BAD_INPUT:
            raise Failed(f"the job ended with status {status}, not 2; see {job.log}")
        _check_said(job, message)
    with running(plan, folder) as job:
        return recover(job, time.monotonic())


def _check_said(job: Job, message: str) -> None:
    if message not in job.log.read_text(errors="replace"):
        raise Failed(f"the job ended without saying {message!r}; see {job.log}")


def read_only(plan: Plan, folder: Path) -> float:
    """The run folder cannot be written to for 10 seconds."""
    folder.mkdir(parents=True)
    return _run(plan, folder, READ_ONLY, "Read-only file system")


def can_mount() -> bool:
    """Whether mounts of our own can be made here."""
    command = [*_unshare(), "true"]
    try:
        return subprocess.run(command, capture_output=True, timeout=10).returncode == 0
    except FileNotFoundError:
        return False


def _unshare() -> list[str]:
    # Root needs no user namespace, and some machines have none.
    return ["unshare", "-m" if os.geteuid() == 0 else "-rm"]


def _run(plan: Plan, folder: Path, functions: str, message: str) -> float:
    """Runs a job around which storage fails, and is repaired once the job has ended."""
    repaired = folder / "repaired"
    script = ["sh", "-c", functions + SCRIPT, "sh", str(folder), str(plan.save_every)]
    with running(plan, folder, around=[*_unshare(), *script, str(repaired)]) as job:
        again = job.wait("an end, and storage that is repaired", repaired.exists)
        _check_said(job, message)
        return recover(job, again)
