"""Errors that the user must fix, and errors that may pass if the job is started again.

The exit status follows from it: a supervisor never restarts a job that ended with
status 2, so 2 must mean that the next attempt would fail in the same way.
"""

import errno
import os
import re

# What stays wrong until somebody changes the machine, the command or the files.
FOR_THE_USER = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EFBIG,
        errno.EROFS,
        errno.EACCES,
        errno.EPERM,
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.EEXIST,
        errno.ENOTEMPTY,
        errno.ENAMETOOLONG,
    }
)


class CorruptCheckpoint(ValueError):
    """A committed checkpoint that is not what was saved."""


class Unreadable(OSError):
    """A checkpoint that storage did not give; it may be whole."""


def errno_of(error: BaseException | str) -> int | None:
    """The system's error number, also where a library only quotes its message."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    text = str(error)
    if found := re.search(r"OS error (\d+)", text):
        return int(found[1])
    quoted = (code for code in errno.errorcode if os.strerror(code) in text)
    return next(quoted, None)


def is_for_the_user(error: BaseException) -> bool:
    """Whether starting again is of no use before the user has fixed something.

    A ValueError from inside a library is a defect of ours: it is not for the user.
    """
    if isinstance(error, OSError):
        return errno_of(error) in FOR_THE_USER
    return isinstance(error, ValueError | FloatingPointError) and is_ours(error)


def is_ours(error: BaseException) -> bool:
    """Whether our own code raised it, with a message that was written for the user."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = trace.tb_frame.f_globals.get("__name__", "") if trace else ""
    return module.startswith("meshloom.")
