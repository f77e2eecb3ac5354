"""Reads the arrays of a checkpoint, in this process alone.

Nothing here waits for another process, so whatever goes wrong (a truncated or missing
file, storage that does not answer), this process can report it to the others instead of
leaving them in a barrier. There are two errors: `CorruptCheckpoint` if what was read is
no longer a valid checkpoint, and `Unreadable` if it could not be read, which proves
nothing about the checkpoint.
"""

import json
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from ..job.group import Group
from ..record import failures
from ..record.failures import CorruptCheckpoint, Unreadable
from . import quiet

# The status that a tensorstore error starts with. These are about the bytes that were
# read; all others (UNKNOWN, UNAVAILABLE, PERMISSION_DENIED, ...) about the storage.
WRONG_BYTES = ("OUT_OF_RANGE", "FAILED_PRECONDITION", "DATA_LOSS")
COMMIT_RECORD = "_CHECKPOINT_METADATA"  # the file of a step that orbax writes last
NOT_FOUND = "NOT_FOUND"
# What orbax raises if its JSON files are not JSON, or lack something.
WRONG_TEXT = (json.JSONDecodeError, UnicodeDecodeError, KeyError)


def read_tree(path: epath.Path, target: Any, group: Group) -> Any:
    """Reads this process's shards of a tree that orbax has saved.

    Args:
      path: the folder of the tree.
      target: ShapeDtypeStructs with shardings, of the tree or of parts of it.
    """
    me = group.index
    alone = ocp.options.MultiprocessingOptions(primary_host=me, active_processes={me})
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    args = ocp.args.PyTreeRestore(
        item=target,
        restore_args=ocp.checkpoint_utils.construct_restore_args(target),
        partial_restore=True,
    )
    quiet.filter_output()
    with ocp.Checkpointer(handler, multiprocessing_options=alone) as reader:
        try:
            group.reached("read", int(path.parent.name))
            return reader.restore(path, args=args)
        except Exception as error:  # tensorstore and orbax raise many types
            raise classify(error, path, group.describe(me)) from error


def commit_record(step: epath.Path) -> dict[str, Any]:
    """Returns what orbax has written about the commit of a step.

    Raises:
      FileNotFoundError: it has written nothing.
      CorruptCheckpoint, Unreadable: see the module.
    """
    file = step / COMMIT_RECORD
    try:
        found = json.loads(file.read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"{file} does not exist") from None
    except Exception as error:  # clients of buckets raise many types
        raise classify(error, file) from error
    if not isinstance(found, dict):
        raise CorruptCheckpoint(
            f"checkpoint {step} cannot be read: {COMMIT_RECORD} is not a JSON object"
        )
    return found


def classify(
    error: Exception, path: epath.Path, reader: str = "this process"
) -> CorruptCheckpoint | Unreadable:
    """Returns the error to raise: the checkpoint is corrupt, or could not be read."""
    reason = _reason(error)
    where = f"checkpoint {path.parent}"
    status = reason.partition(":")[0]
    is_missing = status == NOT_FOUND or isinstance(error, FileNotFoundError)
    if is_missing and not path.parent.exists():
        # All have agreed that it is committed; this process does not see it (yet).
        return Unreadable(f"{where} is not visible to {reader}")
    if is_missing or status in WRONG_BYTES or isinstance(error, WRONG_TEXT):
        return CorruptCheckpoint(f"{where} cannot be read: {reason}")
    unreadable = Unreadable(f"{where} could not be read by {reader}: {reason}")
    unreadable.errno = failures.errno_of(error) or failures.errno_of(reason)
    return unreadable


def _reason(error: Exception) -> str:
    """Returns the first line of a tensorstore error, without its spec."""
    cause = error.__cause__ if type(error) is Exception else None
    lines = str(cause or error).partition(" [tensorstore_spec=")[0].splitlines()
    return lines[0] if lines else type(error).__name__
