"""Checkpoints by orbax: asynchronous, each process writing its own shards.

On disk a checkpoint is the state as a tree of global arrays, stacked blocks as
[layer, ...], so it does not depend on the mesh that wrote it. Beside it lies a manifest
with a digest of every array, and a restore proves that it read what was saved.
"""

import concurrent.futures
import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from ..job.group import Group
from ..program.state import Layout, State, placed
from ..record.failures import CorruptCheckpoint
from ..record.save_errors import GONE, SaveFailed, quiet_logs, save_failed
from ..record.storage import location
from . import manifest, reading, retention
from .save_barrier import SaveBarrier
from .save_stall import Stall

STATE = "state"  # the folder of a step that holds the arrays
# For all processes to read their parts: from the first that has its own, to the last.
READ_SECONDS = 1200.0


def no_event(kind: str, **facts: Any) -> None:
    """Takes an event and does nothing."""


class Checkpoints:
    """The checkpoints of a run folder. Close it, or lose what is still being written.

    A save goes on in the background. Where it fails there, the next call says so, with
    the step it belongs to.

    Args:
      group: the processes that save together; by default this one alone.
      keep: how many of the newest to keep; None keeps all.
      keep_every: steps that are multiples of it are kept too; 0 for none.
      keep_best: how many of those with the lowest loss are kept too.
      event: called with "save" (step, stall_s, waited_s, digests_s, copy_s) when
        training goes on, and from another thread with "commit" (step) when the step is
        whole on disk, or "commit_failed" (step, reason).
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
        quiet_logs()
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
                # Where folders cannot be made in the background, orbax's other threads
                # wait for them for 20 minutes, and the process does not end.
                async_options=ocp.AsyncOptions(
                    create_directories_asynchronously=False,
                    barrier_sync_fn=self._barrier,
                    # Called before the step counts, whatever its name says.
                    post_finalization_callback=self._before_commit,
                ),
            ),
        )
        self._place = _place(self.folder)
        self._saving = 0  # the newest step that a save was started of
        self._background = concurrent.futures.ThreadPoolExecutor(1, "commit")
        self._running: tuple[int, concurrent.futures.Future[None]] | None = None

    def save(
        self,
        step: int,
        state: State,
        about: Mapping[str, Any] | None = None,
        *,
        loss: float | None = None,
        since: float | None = None,
    ) -> Stall:
        """Starts a save of a step that is not there yet.

        A save that is still running is waited for.

        Args:
          about: what the manifest says beside the arrays' digests.
          loss: held-out, by which the best are kept; None does not count.
          since: time.perf_counter() when training stopped for it; None for now.
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
            about = {**(about or {}), manifest.LOSS: loss}
            self._losses[step] = loss
        tree = state.to_tree()
        made = manifest.make(step, tree, about or {})
        digested = time.perf_counter()
        waited_for = self.wait()
        waited = time.perf_counter()
        if _place(self.folder) != self._place:
            raise save_failed(step, self.folder, GONE, [])
        items = {
            STATE: ocp.args.StandardSave(tree),
            manifest.ITEM: ocp.args.JsonSave(made),
        }
        self._saving = step
        self._group.reached("write", step)
        try:
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
        """Waits until a step is whole on disk; runs in the background."""
        try:
            self._manager.wait_until_finished()
            if _place(self.folder) != self._place:
                raise FileNotFoundError(GONE)
            if self._group.is_first and not _is_committed(self.folder / str(step)):
                raise FileNotFoundError("it is not there after it was written")
        except Exception as error:  # of tensorstore and orbax, of many types
            failed = self._failed(step, error)
            # A full disk may take no event either; the failure itself is raised.
            with contextlib.suppress(OSError):
                self._event("commit_failed", step=step, reason=str(failed))
            raise failed from error
        self._event("commit", step=step)

    def _failed(self, step: int, error: Exception) -> SaveFailed:
        """The error to raise, here and in the processes that wait for this one."""
        if isinstance(error, SaveFailed):
            return error
        if _place(self.folder) != self._place:
            failed = save_failed(step, self.folder, GONE, [])
        else:
            try:
                whole = committed_steps(self.folder)
            except OSError:
                whole = None
            failed = save_failed(step, self.folder, error, whole)
        self._barrier.fail(failed)
        return failed

    def _loss_of(self, step: int) -> float | None:
        """The held-out loss of a step, from its manifest if it was saved before."""
        if step not in self._losses and (self.folder / str(step)).exists():
            try:
                found = manifest.read(self.folder, step)
            except ValueError:  # damaged, or of another version
                found = {}
            self._losses[step] = found.get(manifest.LOSS)
        return self._losses.get(step)

    def restore(
        self, step: int, layout: Layout, mesh: Any
    ) -> tuple[State, dict[str, Any]]:
        """Restores a step straight into the shardings of this mesh, and verifies it.

        Every process must call this, and all end alike, whatever one of them meets:
        CorruptCheckpoint if it is not what was saved, Unreadable if storage did not
        deliver it, ValueError if it is the state of another model or optimizer.

        Returns:
          The state, with layers in their own order, and the manifest.
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
        """The manifest, and this process's part of the arrays."""
        saved = manifest.read(self.folder, step)
        path = self.folder / str(step)
        if lines := manifest.misfits(saved, target):
            raise ValueError(
                f"checkpoint {path} does not fit this config, in {len(lines)} arrays. "
                "Use the config that it was saved with, or another --workdir:\n"
                + "\n".join(lines)
            )
        return saved, reading.read_tree(path / STATE, target, self._group)

    def set_aside(self, step: int, why: str = "corrupt") -> epath.Path:
        """Renames a committed step, so that it counts no longer; the new path.

        Every process must call this; the first renames.
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
        """Waits for a running save; its step, or None where none was running.

        Raises SaveFailed where it failed, once.
        """
        if self._running is None:
            return None
        (step, commit), self._running = self._running, None
        was_running = not commit.done()
        commit.result()
        return step if was_running else None

    def raise_if_failed(self) -> None:
        """Raises SaveFailed where a save has failed in the background; never waits."""
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
                # Orbax raises the error of a save once more in each thread; `wait` has
                # said it. What it has left to close, it closes the second time.
                self._manager.close()


def _place(folder: epath.Path) -> tuple[int, int] | None:
    """What stays the same of a folder until it is moved, removed or made anew.

    None for what is not there, and in a bucket, which has no folders.
    """
    try:
        found = os.stat(folder)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def latest_step(folder: epath.PathLike) -> int | None:
    """The newest committed step on disk, or None."""
    steps = committed_steps(folder)
    return steps[-1] if steps else None


def committed_steps(folder: epath.PathLike) -> list[int]:
    """Steps that orbax finished writing, judged by the files alone."""
    folder = location(folder)
    if not folder.is_dir():
        return []
    return sorted(
        int(path.name)
        for path in folder.iterdir()
        if path.name.isdigit() and _is_committed(path)
    )


def _is_committed(path: epath.Path) -> bool:
    """Orbax takes any folder with a plain name for finished, even an empty one."""
    file = path / "_CHECKPOINT_METADATA"
    return (
        ocp.utils.is_checkpoint_finalized(path)
        and file.is_file()
        and json.loads(file.read_text()).get("commit_timestamp_nsecs") is not None
    )


def restore_params(
    folder: epath.PathLike, step: int, params: Any, shardings: Any
) -> Any:
    """Restores the parameters without the optimizer's state, in this process alone.

    Args:
      params: the parameters as ShapeDtypeStructs.
    """
    target = {"params": placed(params, shardings)}
    return restore_part(folder, step, target, Group())["params"]


def restore_part(
    folder: epath.PathLike, step: int, target: dict[str, Any], group: Group
) -> dict[str, Any]:
    """Restores some parts of a state by name, without the rest of it.

    Args:
      target: the parts as ShapeDtypeStructs with shardings.
    """
    return reading.read_tree(location(folder) / str(step) / STATE, target, group)
