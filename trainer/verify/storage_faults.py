"""Faults of a job's storage that the user would have to repair.

The job exits with status 2 and the reason. Then the storage is repaired, and the same
command resumes the run. Where storage fails for all processes, it is a mount in a
namespace of the job's own.
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
from .drill_job import Failed, Job, JobSpec, recover, running

# $1 is the run folder, $2 the step whose checkpoint to wait for, $3 a file to create
# once the storage is repaired; the rest is the job's command. Each fault defines the
# functions.
SCRIPT = """
folder=$1 first=$2 repaired=$3; shift 3
disk="$folder/checkpoints"
prepare || exit 90
(
  while [ ! -e "$disk/$first/_CHECKPOINT_METADATA" ]; do sleep 0.02; done
  inject
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
inject() { cat /dev/zero > "$disk/filler" 2> /dev/null; }
repair() { ls "$disk" > "$folder/full"; rm "$disk/filler"; }
finish() { cp -a "$disk" "$folder/kept"; }
"""
# Files open for writing would prevent the remount, so they get mounts of their own.
READ_ONLY = """
again() { for i in $(seq 500); do "$@" 2> /dev/null && return; sleep 0.01; done; }
prepare() {
  mkdir -p "$folder/logs" && touch "$folder/.lock" && mount --bind "$folder" "$folder" \
    && mount --bind "$folder/logs" "$folder/logs" \
    && mount --bind "$folder/.lock" "$folder/.lock"
}
inject() {
  again mount -o remount,bind,ro "$folder"; sleep 10; mount -o remount,bind,rw "$folder"
}
repair() { mount -o remount,bind,rw "$folder"; }
finish() { :; }
"""


def full_disk(spec: JobSpec, folder: Path) -> float:
    """Fills the disk: the job must end cleanly and keep its last good checkpoint."""
    disk = folder / "checkpoints"
    disk.mkdir(parents=True)
    seconds = _run(spec, folder, FULL, "No space left on device")
    disk.rmdir()
    shutil.move(folder / "kept", disk)
    return seconds


def full_disk_of_one(spec: JobSpec, folder: Path) -> float:
    """Raises ENOSPC in one process when it is about to save."""
    hold = Hold("write", 2 * spec.save_every, 1, 1, str(folder / "held"))
    hold = dataclasses.replace(hold, errno=errno.ENOSPC)
    return _end_and_continue(spec, folder, os.strerror(errno.ENOSPC), hold)


def file_limit_of_one(spec: JobSpec, folder: Path) -> float:
    """Limits files of one process to 4 KiB: its save fails in the background."""

    def limit(job: Job) -> None:
        first = folder / "checkpoints" / str(spec.save_every)
        job.wait(f"checkpoint {spec.save_every}", first.exists)
        resource.prlimit(job.pids[1], resource.RLIMIT_FSIZE, (4096, 4096))

    return _end_and_continue(spec, folder, os.strerror(errno.EFBIG), inject=limit)


def _end_and_continue(
    spec: JobSpec,
    folder: Path,
    message: str,
    hold: Hold | None = None,
    inject: Callable[[Job], None] = lambda job: None,
) -> float:
    """Runs a job that must exit with status 2 and `message`, then resumes it."""
    with running(spec, folder, hold=hold) as job:
        inject(job)
        if (status := job.finish()) != BAD_INPUT:
            raise Failed(f"the job exited with status {status}, not 2; see {job.log}")
        _check_logged(job, message)
    with running(spec, folder) as job:
        return recover(job, time.monotonic())


def _check_logged(job: Job, message: str) -> None:
    if message not in job.log.read_text(errors="replace"):
        raise Failed(f"the job did not log {message!r}; see {job.log}")


def read_only(spec: JobSpec, folder: Path) -> float:
    """Makes the run folder read-only for 10 seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    return _run(spec, folder, READ_ONLY, "Read-only file system")


def can_mount() -> bool:
    """Returns whether this process may create mounts in a namespace of its own."""
    command = [*unshare(), "true"]
    try:
        return subprocess.run(command, capture_output=True, timeout=10).returncode == 0
    except FileNotFoundError:
        return False


def unshare() -> list[str]:
    """Returns the command that runs another one in a mount namespace of its own."""
    # Root needs no user namespace, and some machines do not support them.
    return ["unshare", "-m" if os.geteuid() == 0 else "-rm"]


def _run(spec: JobSpec, folder: Path, functions: str, message: str) -> float:
    """Runs a job whose storage fails and is repaired once the job has exited."""
    repaired = folder / "repaired"
    script = ["sh", "-c", functions + SCRIPT, "sh", str(folder), str(spec.save_every)]
    with running(spec, folder, around=[*unshare(), *script, str(repaired)]) as job:
        resumed = job.wait("exit and repaired storage", repaired.exists)
        _check_logged(job, message)
        return recover(job, resumed)
