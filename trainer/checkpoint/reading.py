"""Reads the arrays of a checkpoint, in this process alone.

Nothing here waits for another process, so whatever this one meets (a torn file, a
missing one, storage that does not answer), it can tell the others instead of leaving
them in a barrier. What is wrong has one of two names: `CorruptCheckpoint` for what was
read and is not a checkpoint any more, `Unreadable` for what could not be read, which
proves nothing about the checkpoint.
"""

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from ..job.group import Group
from ..record import failures
from ..record.failures import CorruptCheckpoint, Unreadable

# How tensorstore begins its errors. These speak of the bytes that were read; all others
# (UNKNOWN, UNAVAILABLE, PERMISSION_DENIED, ...) of storage that gave none.
WRONG_BYTES = ("OUT_OF_RANGE", "FAILED_PRECONDITION", "DATA_LOSS")
NOT_FOUND = "NOT_FOUND"
CLOSED = "Event loop is closed"  # what asyncio says
# Of orbax, where what it reads as JSON is not.
WRONG_TEXT = (json.JSONDecodeError, UnicodeDecodeError, KeyError)


def read_tree(path: epath.Path, target: Any, group: Group) -> Any:
    """Reads this process's shards of a tree that orbax has saved.

    Args:
      path: the folder of the tree.
      target: ShapeDtypeStructs with shardings; a part of the tree is enough.
    """
    me = group.index
    alone = ocp.options.MultiprocessingOptions(primary_host=me, active_processes={me})
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    args = ocp.args.PyTreeRestore(
        item=target,
        restore_args=ocp.checkpoint_utils.construct_restore_args(target),
        partial_restore=True,
    )
    with (
        _without_noise(),
        ocp.Checkpointer(handler, multiprocessing_options=alone) as reader,
    ):
        try:
            group.reached("read", int(path.parent.name))
            return reader.restore(path, args=args)
        except Exception as error:  # of tensorstore and orbax, of many types
            raise judged(error, path, group.describe(me)) from error


def judged(
    error: Exception, path: epath.Path, reader: str = "this process"
) -> CorruptCheckpoint | Unreadable:
    """Returns the error to raise: is the checkpoint corrupt, or storage unavailable?"""
    reason = _reason(error)
    where = f"checkpoint {path.parent}"
    status = reason.partition(":")[0]
    is_missing = status == NOT_FOUND or isinstance(error, FileNotFoundError)
    if is_missing and not path.parent.exists():
        # Committed, as all have agreed; this process does not see it (yet, or again).
        return Unreadable(f"{where} is not visible to {reader}")
    if is_missing or status in WRONG_BYTES or isinstance(error, WRONG_TEXT):
        return CorruptCheckpoint(f"{where} cannot be read: {reason}")
    found = Unreadable(f"{where} could not be read by {reader}: {reason}")
    found.errno = failures.errno_of(error) or failures.errno_of(reason)
    return found


def _reason(error: Exception) -> str:
    """The first line of what tensorstore says, without its specification."""
    cause = error.__cause__ if type(error) is Exception else None
    lines = str(cause or error).partition(" [tensorstore_spec=")[0].splitlines()
    return lines[0] if lines else type(error).__name__


@contextlib.contextmanager
def _without_noise() -> Iterator[None]:
    """Keeps off the terminal what is left over where a read fails.

    Orbax gives up at the first error. Its other reads then find their event loop
    closed, which tensorstore prints, and Python prints every one that nobody waits for.
    They may end after this block: what hides them stays where a read has failed.
    """
    before = sys.unraisablehook, sys.excepthook

    def unraisable(found: Any) -> None:
        is_left_over = "_read_array_index" in repr(found.object)
        if not is_left_over and str(found.exc_value) != CLOSED:
            before[0](found)

    def uncaught(kind: Any, error: BaseException, trace: Any) -> None:
        if str(error) != CLOSED:
            before[1](kind, error, trace)

    sys.unraisablehook, sys.excepthook = unraisable, uncaught
    yield
    sys.unraisablehook, sys.excepthook = before
