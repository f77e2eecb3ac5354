"""Checks of a folder: whether a run can write, sync and lock files in it."""

import errno
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from .findings import Finding

GIB = 2**30
FEW_BYTES = GIB  # warns below this
SAMPLE = bytes(2**20)  # a full disk may still accept a few bytes
LOCK = ".lock"  # locked by a run while it uses its folder
SKEW_SECONDS = 10.0


def folder(subject: str, path: Path, mounts: Path | None = None) -> Iterator[Finding]:
    """Tries to use a folder, and removes whatever that created."""
    made: list[Path] = []
    try:
        _make(path, made)
        skew = _try(path)
    except OSError as error:
        reason = error.strerror or str(error)
        if isinstance(error, FileExistsError | NotADirectoryError):
            reason = "it, or a parent, is a file"
        found = f"{path} cannot be used: {reason}"
        yield Finding(subject, found, "problem", _fix(error))
        return
    finally:
        for new in reversed(made):
            new.rmdir()
    existing = next(p for p in (path, *path.absolute().parents) if p.exists())
    yield from _room(subject, path, existing, mounts or Path("/proc/mounts"))
    if abs(skew) > SKEW_SECONDS:
        found = f"the file system's clock is {skew:+.0f} s from this machine's"
        yield Finding(subject, found, "warning", "Set both clocks, ideally with NTP.")
    if _is_held(path / LOCK):
        remedy = "Wait for that run, or choose another --workdir."
        yield Finding(subject, f"{path} is in use by a run", "warning", remedy)


def _make(path: Path, made: list[Path]) -> None:
    """Creates the folder and its parents; appends new ones to `made`, top first."""
    missing = [p for p in (path, *path.parents) if not p.exists()]
    for new in reversed(missing):
        new.mkdir()
        made.append(new)
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))


def _try(path: Path) -> float:
    """Writes, syncs and locks a file; returns the skew of its timestamp."""
    with tempfile.NamedTemporaryFile(dir=path, prefix=".doctor-") as file:
        file.write(SAMPLE)
        file.flush()
        os.fsync(file.fileno())
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.fstat(file.fileno()).st_mtime - time.time()


def _is_held(lock: Path) -> bool:
    if not lock.exists():
        return False
    with open(lock, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _room(subject: str, path: Path, existing: Path, mounts: Path) -> Iterator[Finding]:
    free = shutil.disk_usage(existing).free
    kind = file_system(existing, mounts)
    summary = f"{path} is writable; {free / GIB:.1f} GiB free on {kind}"
    if free < FEW_BYTES:
        remedy = (
            "Free some space: a checkpoint is about three times the size of the model."
        )
        yield Finding(subject, summary, "warning", remedy)
    elif kind in ("tmpfs", "ramfs"):
        remedy = "This is memory, lost on reboot; use a disk to keep the run."
        yield Finding(subject, summary, "warning", remedy)
    else:
        yield Finding(subject, summary)


def file_system(path: Path, mounts: Path) -> str:
    """Returns the type of the file system of a path, if it is known."""
    if not mounts.exists():
        return "an unknown file system"
    resolved = path.resolve()
    best, kind = "", "an unknown file system"
    for line in mounts.read_text().splitlines():
        point, found = line.split()[1:3]
        point = point.replace("\\040", " ")
        if len(point) >= len(best) and resolved.is_relative_to(point):
            best, kind = point, found
    return kind


def _fix(error: OSError) -> str:
    if error.errno == errno.ENOSPC:
        return "Free some space, or choose another --workdir."
    if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
        return (
            "The file system has no locks: mount it with locks (NFS: without nolock)."
        )
    return "Choose another folder, or make this one writable."
