"""Reports a failed save in one line: which step, why, what is left, what to do."""

import errno
import os
from collections.abc import Sequence

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
