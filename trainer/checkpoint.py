"""Checkpoints by orbax: asynchronous, each process writing its own shards.

On disk a checkpoint is the state as a tree of global arrays, stacked blocks as
[layer, ...], so it does not depend on the mesh that wrote it.
"""

import errno
import json
import logging
import os
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from .state import Layout, State, placed


class Checkpoints:
    """The checkpoints of a run folder. Close it, or lose what is still being written.

    Args:
      keep: how many of the newest to keep; None keeps all.
    """

    def __init__(self, folder: Path, *, keep: int | None = 3):
        # Orbax logs its every move; what a user must know is said by the trainer.
        logging.getLogger("absl").setLevel(logging.WARNING)
        for name in ("absl", "asyncio"):
            logging.getLogger(name).addFilter(_is_not_full_disk)
        self.folder = Path(folder).absolute()
        self._manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep, create=True, enable_async_checkpointing=True
            ),
        )

    def save(self, step: int, state: State) -> None:
        """Starts a save of a step that is not there yet."""
        if step in committed_steps(self.folder):
            raise ValueError(
                f"step {step} is already saved in {self.folder}; a committed step is "
                "never replaced. Choose another --workdir."
            )
        saved = self._manager.save(step, args=ocp.args.StandardSave(state._asdict()))
        if not saved:
            raise ValueError(f"orbax refused to save step {step} in {self.folder}")

    def restore(self, step: int, layout: Layout, mesh: Any) -> State:
        """The state of a step, straight into the layout of this mesh."""
        target = layout.placed(mesh)._asdict()
        tree = self._manager.restore(step, args=ocp.args.StandardRestore(target))
        return State(**tree)

    def wait(self) -> None:
        self._manager.wait_until_finished()

    def close(self) -> None:
        self._manager.close()


def _is_not_full_disk(record: logging.LogRecord) -> bool:
    """Each thread of orbax logs the traceback of a full disk, which it also raises."""
    raised = record.exc_info[1] if record.exc_info else ""
    return os.strerror(errno.ENOSPC) not in f"{record.getMessage()} {raised}"


def latest_step(folder: Path) -> int | None:
    """The newest committed step on disk, or None."""
    steps = committed_steps(folder)
    return steps[-1] if steps else None


def committed_steps(folder: Path) -> list[int]:
    """Steps that orbax finished writing, judged by the files alone."""
    folder = Path(folder)
    if not folder.is_dir():
        return []
    return sorted(
        int(path.name)
        for path in folder.iterdir()
        if path.name.isdigit() and _is_committed(path)
    )


def _is_committed(path: Path) -> bool:
    """Orbax takes any folder with a plain name for finished, even an empty one."""
    file = path / "_CHECKPOINT_METADATA"
    return (
        ocp.utils.is_checkpoint_finalized(path)
        and file.is_file()
        and json.loads(file.read_text()).get("commit_timestamp_nsecs") is not None
    )


def restore_params(folder: Path, step: int, params: Any, shardings: Any) -> Any:
    """The parameters alone, without the optimizer's state.

    Args:
      params: the parameters as ShapeDtypeStructs.
    """
    target = {"params": placed(params, shardings)}
    with ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.restore(
            Path(folder).absolute() / str(step) / "default",
            args=ocp.args.PyTreeRestore(
                item=target,
                restore_args=ocp.checkpoint_utils.construct_restore_args(target),
                partial_restore=True,
            ),
        )
    return tree["params"]
