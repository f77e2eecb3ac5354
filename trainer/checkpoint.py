"""Checkpoints by orbax: asynchronous, each process writing its own shards.

On disk a checkpoint is the state as a tree of global arrays, stacked blocks as
[layer, ...], so it does not depend on the mesh that wrote it. Beside it lies a manifest
with a digest of every array, and a restore proves that it read what was saved.
"""

import errno
import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from . import distributed, manifest
from .state import Layout, State, placed

STATE = "state"  # the folder of a step that holds the arrays


class Checkpoints:
    """The checkpoints of a run folder. Close it, or lose what is still being written.

    Args:
      keep: how many of the newest to keep; None keeps all.
    """

    def __init__(self, folder: Path, *, keep: int | None = 3):
        # Orbax logs its every move; what a user must know is said by the trainer.
        logging.getLogger("absl").setLevel(logging.WARNING)
        for name in ("absl", "asyncio"):
            logging.getLogger(name).addFilter(_is_not_said_by_us)
        self.folder = Path(folder).absolute()
        self._manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep, create=True, enable_async_checkpointing=True
            ),
        )

    def save(
        self, step: int, state: State, about: Mapping[str, Any] | None = None
    ) -> None:
        """Starts a save of a step that is not there yet.

        Args:
          about: what the manifest says beside the arrays' digests.
        """
        if step in committed_steps(self.folder):
            raise ValueError(
                f"step {step} is already saved in {self.folder}; a committed step is "
                "never replaced. Choose another --workdir."
            )
        tree = state._asdict()
        items = {
            STATE: ocp.args.StandardSave(tree),
            manifest.ITEM: ocp.args.JsonSave(manifest.make(step, tree, about or {})),
        }
        if not self._manager.save(step, args=ocp.args.Composite(**items)):
            raise ValueError(f"orbax refused to save step {step} in {self.folder}")

    def restore(self, step: int, layout: Layout, mesh: Any) -> State:
        """The state of a step, straight into the layout of this mesh.

        Raises CorruptCheckpoint where it is not what was saved, and ValueError where
        it is the state of another model or optimizer.
        """
        target = layout.placed(mesh)._asdict()
        where = f"checkpoint {self.folder / str(step)}"
        saved = manifest.read(self.folder, step)
        if lines := manifest.misfits(saved, target):
            raise ValueError(
                f"{where} does not fit this config, in {len(lines)} arrays. Use the "
                "config that it was saved with, or another --workdir:\n"
                + "\n".join(lines)
            )
        items = {STATE: ocp.args.StandardRestore(target)}
        try:
            found = self._manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:  # of tensorstore and orbax, of many types
            reason = str(error).splitlines()[0]
            raise manifest.CorruptCheckpoint(
                f"{where} cannot be read: {reason}"
            ) from error
        tree = found[STATE]
        if paths := manifest.differences(saved, tree):
            raise manifest.CorruptCheckpoint(
                f"{where} is not what was saved: the digests of {len(paths)} arrays "
                f"differ, first {paths[0]}"
            )
        return State(**tree)

    def set_aside(self, step: int, why: str = "corrupt") -> Path:
        """Renames a committed step, so that it counts no longer; the new path.

        Of a job of several processes all must call it; the first renames.
        """
        path, aside = self.folder / str(step), self.folder / f"{why}-{step}"
        if jax.process_index() == 0:
            if aside.exists():
                shutil.rmtree(aside)
            path.rename(aside)
        distributed.wait_for_all(f"set aside {step}")
        self._manager.reload()
        return aside

    def wait(self) -> None:
        self._manager.wait_until_finished()

    def close(self) -> None:
        self._manager.close()


def _is_not_said_by_us(record: logging.LogRecord) -> bool:
    """Leaves out what is said by us, once: a full disk, being told to leave."""
    raised = record.exc_info[1] if record.exc_info else ""
    text = f"{record.getMessage()} {raised}"
    said = (os.strerror(errno.ENOSPC), "Reached preemption sync point")
    return not any(words in text for words in said)


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
            Path(folder).absolute() / str(step) / STATE,
            args=ocp.args.PyTreeRestore(
                item=target,
                restore_args=ocp.checkpoint_utils.construct_restore_args(target),
                partial_restore=True,
            ),
        )
    return tree["params"]
