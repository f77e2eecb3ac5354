"""Reports a failed save in one line: which step, why, what is left, what to do."""

import errno
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from . import failures

# System error messages, and what the user can do about them. Orbax and tensorstore
# quote these messages in errors of other types.
REMEDIES = {
    os.strerror(errno.ENOSPC): "Free some space",
    os.strerror(errno.EDQUOT): "Free some space",
    os.strerror(errno.EROFS): "Make the folder writable",
    os.strerror(errno.EACCES): "Make the folder writable",
    os.strerror(errno.ENOENT): "Make sure that nothing else changes the folder",
}
GONE = "the folder is gone or has been replaced since the start"


class SaveFailed(OSError):
    """A checkpoint that could not be written."""


def save_failed(
    step: int, folder: object, error: Exception | str, committed: Sequence[int] | None
) -> SaveFailed:
    """Returns the error to raise.

    Args:
      error: the exception, or the reason as text.
      committed: steps that are committed in the folder; None if it cannot be listed.
    """
    text = str(error)
    reason = next((message for message in REMEDIES if message in text), None)
    remedy = REMEDIES.get(reason or "", "Fix the cause")
    if reason is None:
        reason = (text.splitlines() or [type(error).__name__])[0]
    if reason == GONE:
        remedy = "Restore it, or choose another --workdir"
        left = "The checkpoints saved there are gone with it"
    elif committed:
        left = f"The newest complete checkpoint there is of step {committed[-1]}"
    elif committed is None:
        left = "The complete checkpoints there cannot be listed"
    else:
        left = "There is no complete checkpoint there"
    failed = SaveFailed(
        f"the checkpoint of step {step} was not written to {folder}: {reason}. {left}. "
        f"{remedy}, then run the same command again to continue."
    )
    failed.errno = failures.errno_of(error) if reason != GONE else errno.ENOENT
    return failed


def quiet_logs() -> None:
    """Filters log records that duplicate the trainer's own messages.

    Orbax logs every operation, and each of its threads logs the traceback of an error
    that it also raises. The trainer reports these in one line.
    """
    logging.getLogger("absl").setLevel(logging.WARNING)
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_is_not_duplicate)
    if not isinstance(sys.unraisablehook, _WithoutClosedLoops):
        sys.unraisablehook = _WithoutClosedLoops(sys.unraisablehook)


class _WithoutClosedLoops:
    """An unraisable hook that ignores errors of closed event loops.

    Orbax closes its loop at the first write that fails, and tensorstore then prints a
    traceback for every other write (seen with orbax 0.12.8 and tensorstore 0.1.86).
    """

    def __init__(self, hook: Callable[[Any], Any]):
        self._hook = hook

    def __call__(self, unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            self._hook(unraisable)


def _is_not_duplicate(record: logging.LogRecord) -> bool:
    raised = record.exc_info and record.exc_info[1]
    duplicates = (
        "raised an exception",
        "Reached preemption sync point",
        "Metadata file does not exist",
        "Task was destroyed but it is pending",
    )
    return not raised and not any(text in record.getMessage() for text in duplicates)
