"""A save that failed, in one line: which step, why, what is left, what to do."""

import errno
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from . import failures

# What the system says, and what a person can do about it. Orbax and tensorstore quote
# these words in errors of other types.
REMEDIES = {
    os.strerror(errno.ENOSPC): "Free some space",
    os.strerror(errno.EDQUOT): "Free some space",
    os.strerror(errno.EROFS): "Make the folder writable",
    os.strerror(errno.EACCES): "Make the folder writable",
    os.strerror(errno.ENOENT): "Let nothing else change the folder",
}
GONE = "the folder is gone, or is another one than at the start"


class SaveFailed(OSError):
    """A checkpoint that could not be written."""


def save_failed(
    step: int, folder: object, error: Exception | str, whole: Sequence[int] | None
) -> SaveFailed:
    """The error to raise.

    Args:
      error: what was raised, or the reason in words.
      whole: steps that are committed in the folder; None if that cannot be seen.
    """
    text = str(error)
    reason = next((words for words in REMEDIES if words in text), None)
    remedy = REMEDIES.get(reason or "", "Fix that")
    if reason is None:
        reason = (text.splitlines() or [type(error).__name__])[0]
    if reason == GONE:
        remedy = "Bring it back, or choose another --workdir"
        left = "What was saved there before went with it"
    elif whole:
        left = f"The newest that is whole there is of step {whole[-1]}"
    elif whole is None:
        left = "What is whole there cannot be seen"
    else:
        left = "None is whole there"
    failed = SaveFailed(
        f"the checkpoint of step {step} was not written to {folder}: {reason}. {left}. "
        f"{remedy}, then run the same command again to continue."
    )
    failed.errno = failures.errno_of(error) if reason != GONE else errno.ENOENT
    return failed


def quiet_logs() -> None:
    """Leaves out of the logs what is said elsewhere.

    Orbax logs its every move, and each of its threads the traceback of an error that it
    also raises; the trainer says these in one line.
    """
    logging.getLogger("absl").setLevel(logging.WARNING)
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_is_said_only_here)
    if not isinstance(sys.unraisablehook, _WithoutClosedLoops):
        sys.unraisablehook = _WithoutClosedLoops(sys.unraisablehook)


class _WithoutClosedLoops:
    """Leaves out writes that tensorstore reports to an event loop that is closed.

    Orbax leaves its loop at the first write that fails, and tensorstore then prints a
    traceback for every other write (seen with orbax 0.12.8 and tensorstore 0.1.86).
    """

    def __init__(self, hook: Callable[[Any], Any]):
        self._hook = hook

    def __call__(self, unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            self._hook(unraisable)


def _is_said_only_here(record: logging.LogRecord) -> bool:
    raised = record.exc_info and record.exc_info[1]
    said = (
        "raised an exception",
        "Reached preemption sync point",
        "Metadata file does not exist",
        "Task was destroyed but it is pending",
    )
    return not raised and not any(words in record.getMessage() for words in said)
