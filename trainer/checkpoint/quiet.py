"""Filters what orbax and tensorstore print beside the errors that they raise.

Orbax logs every operation, and each of its threads logs the traceback of an error that
it also raises. It gives up at the first read or write that fails and closes its event
loop; tensorstore then prints a traceback for every other one, and Python prints every
read that is never awaited (seen with orbax 0.12.8 and tensorstore 0.1.86). That may
happen long after the call that failed, so the filters stay, once in a process. All else
is passed on.
"""

import logging
import sys
from collections.abc import Callable
from typing import Any

CLOSED = "Event loop is closed"  # the message of asyncio
DUPLICATES = (
    "raised an exception",
    "Reached preemption sync point",
    "Metadata file does not exist",
    "Task was destroyed but it is pending",
)


def filter_output() -> None:
    """Installs the filters that are not installed yet."""
    logging.getLogger("absl").setLevel(logging.WARNING)
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_is_not_duplicate)
    if not isinstance(sys.unraisablehook, _Filtered):
        sys.unraisablehook = _Filtered(sys.unraisablehook, _is_abandoned)
    if not isinstance(sys.excepthook, _Filtered):
        sys.excepthook = _Filtered(sys.excepthook, _is_closed)


class _Filtered:
    """A hook that ignores what `is_noise`, and passes all else to the one before."""

    def __init__(self, hook: Callable[..., Any], is_noise: Callable[..., bool]):
        self._hook, self._is_noise = hook, is_noise

    def __call__(self, *args: Any) -> None:
        if not self._is_noise(*args):
            self._hook(*args)


def _is_abandoned(unraisable: Any) -> bool:
    is_read = "_read_array_index" in repr(unraisable.object)
    return is_read or str(unraisable.exc_value) == CLOSED


def _is_closed(kind: Any, error: BaseException, trace: Any) -> bool:
    del kind, trace
    return str(error) == CLOSED


def _is_not_duplicate(record: logging.LogRecord) -> bool:
    raised = record.exc_info and record.exc_info[1]
    return not raised and not any(text in record.getMessage() for text in DUPLICATES)
