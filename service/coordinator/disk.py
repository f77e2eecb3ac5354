"""Errors of a disk, which the user must fix before the service can go on."""

import errno
import os
import sqlite3
from pathlib import Path

_FREE, _WRITABLE = "Free some space", "Make the folder writable"
# What the system and SQLite say. Servers pass the message on when they cannot save.
_REMEDIES = {
    os.strerror(errno.ENOSPC): _FREE,
    os.strerror(errno.EDQUOT): _FREE,
    os.strerror(errno.EFBIG): "Raise the limit on the size of files",
    os.strerror(errno.EROFS): _WRITABLE,
    os.strerror(errno.EACCES): _WRITABLE,
    "database or disk is full": _FREE,
    "attempt to write a readonly database": _WRITABLE,
    "disk I/O error": "Check the disk",
}


def remedy_of(error: BaseException) -> str | None:
    """Returns what the user must do; None if it is not an error of a disk."""
    text = str(error)
    return next((remedy for said, remedy in _REMEDIES.items() if said in text), None)


def describe(error: BaseException, log: str, folder: Path) -> str:
    """Returns one line that names the file, or the folder of the job."""
    if isinstance(error, sqlite3.Error):
        return f"{log}: {error}"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or folder}: {error.strerror}"
    return str(error)
