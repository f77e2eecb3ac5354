"""Checkpoints with orbax: asynchronous, each process writing its own shards.

On disk a checkpoint is the state as a tree of global arrays, with stacked blocks as
[layer, ...], so it does not depend on the mesh that wrote it. A manifest next to it has
a digest of every array, by which a restore verifies that it read what was saved.
"""

import concurrent.futures
import contextlib
import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from ..job.group import Group
from ..program.state import Layout, State
from ..record.failures import CorruptCheckpoint, Unreadable
from ..record.save_errors import GONE, SaveFailed, save_failed
from ..record.storage import location
from . import manifest, quiet, reading, retention
from .save_barrier import SaveBarrier
from .save_stall import Stall

STATE = "state"  # the folder within a step that holds the arrays
# How long the first process that has read its shards waits for the last one.
READ_SECONDS = 1200.0


def no_event(kind: str, **facts: Any) -> None:
    """Ignores an event."""


class Checkpoints:
    """The checkpoints of a run folder. Close it, or a save in progress may be lost.

    A save continues in the background. If it fails there, the next call raises, and
    names its step.

    Args:
      group: the processes that save together; by default this one alone.
      keep: how many of the newest to keep; None keeps all.
      keep_every: steps that are multiples of it are kept too; 0 for none.
      keep_best: how many with the lowest loss are kept too.
      event: called with "save" (step, stall_s, waited_s, digests_s, copy_s) when
        training continues, and from another thread with "commit" (step) once the step
        is committed, or "commit_failed" (step, reason). With keep_best, also
        "loss_unknown" (step, reason) for a step that is not ranked since its manifest
        is damaged.
    """

    def __init__(
        self,
        folder: epath.PathLike,
        group: Group | None = None,
        *,
        keep: int | None = 3,
        keep_every: int = 0,
        keep_best: int = 0,
        event: Callable[..., None] = no_event,
    ):
        quiet.filter_output()
        self.folder = location(folder)
        self._group = group = group or Group()
        self._event = event
        self._losses: dict[int, float | None] = {}
        self._barrier = SaveBarrier(
            group, lambda error: self._failed(self._saving, error)
        )
        self._manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=retention.policy(
                    last=keep,
                    every=keep_every,
                    best=keep_best,
                    loss_of=self._loss_of,
                ),
                create=True,
                enable_async_checkpointing=True,
                # If creating folders in the background failed, orbax's other threads
                # would wait for them for 20 minutes and keep the process alive.
                async_options=ocp.AsyncOptions(
                    create_directories_asynchronously=False,
                    barrier_sync_fn=self._barrier,
                    # Called before the step is committed, despite its name.
                    post_finalization_callback=self._before_commit,
                ),
            ),
        )
        self._inode = _inode(self.folder)
        self._saving = 0  # the newest step whose save was started
        self._background = concurrent.futures.ThreadPoolExecutor(1, "commit")
        self._running: tuple[int, concurrent.futures.Future[None]] | None = None

    def save(
        self,
        step: int,
        state: State,
        metadata: Mapping[str, Any] | None = None,
        *,
        loss: float | None = None,
        since: float | None = None,
    ) -> Stall:
        """Starts saving a step; waits first for a save that is still running.

        Args:
          metadata: entries of the manifest besides the arrays and their digests.
          loss: the held-out loss, by which the best are kept; None if not measured.
          since: time.perf_counter() when training paused for the save; None for now.

        Raises:
          ValueError: the step is already committed.
          SaveFailed: this save cannot be started, or the one before has failed.
        """
        begin = time.perf_counter()
        if since is None:
            since = begin
        if step in committed_steps(self.folder):
            raise ValueError(
                f"step {step} is already saved in {self.folder}; a committed step is "
                "never replaced. Choose another --workdir."
            )
        if loss is not None and math.isfinite(loss):
            metadata = {**(metadata or {}), manifest.LOSS: loss}
            self._losses[step] = loss
        tree = state.to_tree()
        document = manifest.make(step, tree, metadata or {})
        digested = time.perf_counter()
        waited_for = self.wait()
        waited = time.perf_counter()
        items = {
            STATE: ocp.args.StandardSave(tree),
            manifest.ITEM: ocp.args.JsonSave(document),
        }
        self._saving = step
        self._group.reached("write", step)
        self._barrier.begin()
        try:
            self._check_folder()
            started = self._manager.save(step, args=ocp.args.Composite(**items))
        except (OSError, ValueError) as error:
            raise self._failed(step, error) from error
        if not started:
            raise ValueError(f"orbax refused to save step {step} in {self.folder}")
        self._group.reached("save", step)
        end = time.perf_counter()
        stall = Stall(
            end - since, digested - begin, waited - digested, end - waited, waited_for
        )
        self._event("save", step=step, **stall.seconds())
        self._running = (step, self._background.submit(self._commit, step))
        return stall

    def _before_commit(self) -> None:
        self._group.reached("commit", self._saving)

    def _commit(self, step: int) -> None:
        """Waits until a step is committed; runs in the background."""
        try:
            self._manager.wait_until_finished()
            self._check_folder()
            if self._group.is_first and not _is_committed(self.folder / str(step)):
                raise FileNotFoundError("it is missing after it was written")
        except Exception as error:  # tensorstore and orbax raise many types
            failed = self._failed(step, error)
            # On a full disk the event cannot be written either; the failure is raised.
            with contextlib.suppress(OSError):
                self._event("commit_failed", step=step, reason=str(failed))
            raise failed from error
        self._event("commit", step=step)

    def _failed(self, step: int, error: Exception) -> SaveFailed:
        """Returns the error to raise, and reports it to the processes that wait."""
        if isinstance(error, SaveFailed):
            return error
        try:
            self._check_folder()
            committed = committed_steps(self.folder)
        except FileNotFoundError as gone:
            error, committed = gone, []
        except OSError:  # the storage fails, which proves nothing about the folder
            committed = None
        failed = save_failed(step, self.folder, error, committed)
        self._barrier.fail(failed)
        return failed

    def _check_folder(self) -> None:
        """Raises FileNotFoundError if the folder is no longer that of the start."""
        if _inode(self.folder) != self._inode:
            raise FileNotFoundError(GONE)

    def _loss_of(self, step: int) -> float | None:
        """Returns the held-out loss of a step, read from its manifest if necessary."""
        if step not in self._losses and (self.folder / str(step)).exists():
            try:
                saved = manifest.read(self.folder, step)
            except ValueError as error:  # corrupt, or written by another version
                saved = {}
                self._event("loss_unknown", step=step, reason=str(error))
            self._losses[step] = saved.get(manifest.LOSS)
        return self._losses.get(step)

    def restore(
        self, step: int, layout: Layout, mesh: Any
    ) -> tuple[State, dict[str, Any]]:
        """Restores a step directly into the shardings of this mesh, and verifies it.

        Every process must call this. All of them succeed, or all raise the same error.

        Returns:
          The state, with layers in their canonical order, and the manifest.

        Raises:
          CorruptCheckpoint: it is not what was saved.
          Unreadable: it could not be read from storage.
          ValueError: it is the state of another model or optimizer.
        """
        target = layout.placed(mesh).to_tree()
        where = f"checkpoint {self.folder / str(step)}"
        with self._group.all_or_none(f"restore {step}", READ_SECONDS):
            saved, tree = self._read(step, target)
        self._group.reached("restore", step)
        if paths := manifest.differences(saved, tree):
            raise CorruptCheckpoint(
                f"{where} is not what was saved: the digests of {len(paths)} arrays "
                f"differ, first {paths[0]}"
            )
        return State(**tree), saved

    def _read(self, step: int, target: Any) -> tuple[dict[str, Any], Any]:
        """Returns the manifest, and the arrays with the shards of this process."""
        path = self.folder / str(step)
        reading.commit_record(path)
        saved = manifest.read(self.folder, step)
        if lines := manifest.mismatches(saved, target):
            raise ValueError(
                f"checkpoint {path} does not fit this config, in {len(lines)} arrays. "
                "Use the config that it was saved with, or another --workdir:\n"
                + "\n".join(lines)
            )
        return saved, reading.read_tree(path / STATE, target, self._group)

    def set_aside(self, step: int, why: str = "corrupt") -> epath.Path:
        """Renames a committed step so that it no longer counts; returns the new path.

        Every process must call this.
        """
        path, aside = self.folder / str(step), self.folder / f"{why}-{step}"
        with self._group.all_or_none(f"set aside {step}"):
            if self._group.is_first:
                if aside.exists():
                    aside.rmtree()
                path.rename(aside)
        self._manager.reload()
        return aside

    def wait(self) -> int | None:
        """Waits for the save that is running; returns its step, or None if none was.

        Raises SaveFailed if it failed, once.
        """
        if self._running is None:
            return None
        (step, commit), self._running = self._running, None
        was_running = not commit.done()
        commit.result()
        return step if was_running else None

    def raise_if_failed(self) -> None:
        """Raises SaveFailed if a save has failed in the background; never waits."""
        if self._running is not None and self._running[1].done():
            self.wait()

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._background.shutdown()
            try:
                self._manager.close()
            except Exception:
                # Orbax raises the error of a save again, which `wait` has already
                # raised. The second call closes what the first one did not.
                self._manager.close()


def _inode(folder: epath.Path) -> tuple[int, int] | None:
    """Returns what identifies a folder until it is moved, removed or recreated.

    None if it does not exist, and for a bucket, which has no folders. Raises OSError if
    the storage does not say.
    """
    try:
        status = os.stat(folder)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_dev, status.st_ino


def latest_step(folder: epath.PathLike) -> int | None:
    """Returns the newest committed step on disk, or None."""
    steps = committed_steps(folder)
    return steps[-1] if steps else None


def committed_steps(folder: epath.PathLike) -> list[int]:
    """Returns the steps that orbax has committed, judging by the files alone."""
    folder = location(folder)
    if not folder.is_dir():
        return []
    return sorted(
        int(path.name)
        for path in folder.iterdir()
        if path.name.isdigit() and _is_committed(path)
    )


def _is_committed(path: epath.Path) -> bool:
    """Returns whether a step is complete; orbax would accept even an empty folder.

    A step whose commit record is damaged counts: it was complete before, and `restore`
    raises for it, so that it is set aside with a message.
    """
    if not ocp.utils.is_checkpoint_finalized(path):
        return False
    try:
        return reading.commit_record(path).get("commit_timestamp_nsecs") is not None
    except FileNotFoundError:
        return False
    except (CorruptCheckpoint, Unreadable):
        return True


def restore_part(
    folder: epath.PathLike, step: int, target: dict[str, Any], group: Group
) -> dict[str, Any]:
    """Restores some parts of a state by name.

    Args:
      target: the parts as ShapeDtypeStructs with shardings.
    """
    return reading.read_tree(location(folder) / str(step) / STATE, target, group)
