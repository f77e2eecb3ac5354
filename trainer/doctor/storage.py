"""What the doctor finds of a folder: can a run write, lock and keep something there?"""

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
FEW_BYTES = GIB  # a warning below
SAMPLE = bytes(2**20)  # a full disk may still take a few bytes
LOCK = ".lock"  # the file by which a run holds its folder
SKEW_SECONDS = 10.0


def folder(subject: str, path: Path, mounts: Path | None = None) -> Iterator[Finding]:
    """Tries it out; removes again whatever it has made."""
    made: list[Path] = []
    try:
        _make(path, made)
        skew = _try(path)
    except OSError as error:
        reason = error.strerror or str(error)
        if isinstance(error, FileExistsError | NotADirectoryError):
            reason = "it is a file, or below one"
        found = f"{path} cannot be used: {reason}"
        yield Finding(subject, found, "problem", _mend(error))
        return
    finally:
        for new in reversed(made):
            new.rmdir()
    existing = next(p for p in (path, *path.absolute().parents) if p.exists())
    yield from _room(subject, path, existing, mounts or Path("/proc/mounts"))
    if abs(skew) > SKEW_SECONDS:
        found = f"the file system's clock is {skew:+.0f} s from this machine's"
        yield Finding(subject, found, "warning", "Set both clocks, best by NTP.")
    if _is_held(path / LOCK):
        remedy = "Wait for that run, or choose another --workdir."
        yield Finding(subject, f"{path} is held by a run", "warning", remedy)


def _make(path: Path, made: list[Path]) -> None:
    """Makes the folder and those above it; `made` gets the new ones, top first."""
    missing = [p for p in (path, *path.parents) if not p.exists()]
    for new in reversed(missing):
        new.mkdir()
        made.append(new)
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))


def _try(path: Path) -> float:
    """Writes, syncs and locks a file; returns by how much its time is off."""
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
    words = f"{path} can be written and locked; {free / GIB:.1f} GiB free on {kind}"
    if free < FEW_BYTES:
        remedy = "Free some space: a checkpoint is about three times the model."
        yield Finding(subject, words, "warning", remedy)
    elif kind in ("tmpfs", "ramfs"):
        remedy = "It is kept in memory and gone after a restart; use a disk to keep it."
        yield Finding(subject, words, "warning", remedy)
    else:
        yield Finding(subject, words)


def file_system(path: Path, mounts: Path) -> str:
    """The type of the file system that a path is on, as far as the system says."""
    if not mounts.exists():
        return "an unknown file system"
    whole = path.resolve()
    best, kind = "", "an unknown file system"
    for line in mounts.read_text().splitlines():
        point, found = line.split()[1:3]
        point = point.replace("\\040", " ")
        if len(point) >= len(best) and whole.is_relative_to(point):
            best, kind = point, found
    return kind


def _mend(error: OSError) -> str:
    if error.errno == errno.ENOSPC:
        return "Free some space, or choose another --workdir."
    if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
        return "The file system has no locks: mount it with them (NFS: without nolock)."
    return "Choose another folder, or make this one a folder that you may write to."
