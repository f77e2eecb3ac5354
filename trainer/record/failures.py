"""Tells errors that the user must fix from errors that a restart may cure.

This determines the exit status: a supervisor never restarts a job that ended with
status 2, so 2 must mean that the next attempt would fail in the same way.
"""

import errno
import os
import re

# Errors that persist until the user changes the machine, the command or the files.
USER_ERRNOS = frozenset(
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
    """A committed checkpoint whose contents are not what was saved."""


class Unreadable(OSError):
    """A checkpoint that storage failed to return; it may be intact."""


def errno_of(error: BaseException | str) -> int | None:
    """Returns the errno, even if a library only quotes the system's message."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    text = str(error)
    if found := re.search(r"OS error (\d+)", text):
        return int(found[1])
    quoted = (code for code in errno.errorcode if os.strerror(code) in text)
    return next(quoted, None)


def is_user_error(error: BaseException) -> bool:
    """Returns whether a restart is pointless until the user has fixed something.

    A ValueError raised inside another library is a bug of ours, not a user error.
    """
    if isinstance(error, OSError):
        return errno_of(error) in USER_ERRNOS
    return isinstance(error, ValueError | FloatingPointError) and is_ours(error)


def is_ours(error: BaseException) -> bool:
    """Returns whether our own code raised it, with a message meant for the user."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = trace.tb_frame.f_globals.get("__name__", "") if trace else ""
    return module.startswith("meshloom.")
