"""Restores the newest valid checkpoint of a run."""

import dataclasses
import itertools
from typing import Any

from rich.console import Console

from ...launch.exit_codes import Unreachable
from ..job.group import Group
from ..program.build import Program
from ..program.state import State
from ..record.failures import CorruptCheckpoint, Unreadable
from ..record.ledger import Ledger
from . import manifest
from .manager import Checkpoints, committed_steps
from .manifest import EVALUATED


@dataclasses.dataclass(frozen=True)
class Position:
    """Where a run continues: a state, and the position in the data.

    Attributes:
      step: the number of updates done.
      state: with layers in the order of the layout.
      batches_ahead: batches of data that were skipped by rewinding; the next batch is
        number step + batches_ahead.
      evaluated: what the evaluations so far amount to, for stopping early, as it was
        saved; None if it was not.
    """

    step: int
    state: State
    batches_ahead: int = 0
    evaluated: dict[str, Any] | None = None


def restore_newest(
    checkpoints: Checkpoints,
    program: Program,
    group: Group,
    ledger: Ledger,
    console: Console,
    *,
    before: int | None = None,
) -> Position | None:
    """Restores the newest checkpoint, older than step `before` if given.

    Every process must call this, and all restore the same one. A corrupt checkpoint is
    set aside with a message, and the one before it is restored. One that cannot be read
    from storage may still be intact: this attempt ends, so that the next one tries it
    again. If that fails too, the checkpoint before it is restored, and only then is the
    newer one set aside.

    Returns:
      The position to continue from; None if there is no checkpoint.
    """
    unreadable: list[tuple[int, str]] = []
    while step := _newest(checkpoints, group, before):
        try:
            state, saved = checkpoints.restore(step, program.layout, program.mesh)
        except CorruptCheckpoint as error:
            _set_aside(checkpoints, step, str(error), "corrupt", ledger, console)
            continue
        except Unreadable as error:
            if not _was_unreadable(step, group, ledger):
                ledger.event_now("unreadable", step=step, reason=str(error))
                raise Unreachable(
                    f"{error}. Nothing was changed. Run the same command again to "
                    "continue; if it still cannot be read, an older checkpoint is "
                    "restored."
                ) from error
            unreadable.append((step, str(error)))
            before = step
            continue
        for later, reason in unreadable:
            _set_aside(checkpoints, later, reason, "unreadable", ledger, console)
        return _position(step, state, saved, program, ledger)
    if unreadable:
        step, reason = unreadable[0]
        raise Unreachable(
            f"{reason}. No older checkpoint can be read either. Nothing was changed. "
            "Run the same command again once the storage is available."
        )
    return None


def _position(
    step: int, state: State, saved: dict, program: Program, ledger: Ledger
) -> Position:
    layout, mesh = program.layout, program.mesh
    position = Position(
        step,
        layout.arranged(state, mesh),
        _batches_ahead(saved, step, program.batch_size),
        saved.get(EVALUATED),
    )
    # The digest of the arrays that training continues with: those that `restore` has
    # compared with the manifest, unless their layers were reordered since.
    digest = manifest.state_digest(saved)
    if position.state is not state:
        reordered = layout.canonical(position.state, mesh)
        digest = manifest.tree_digest(reordered.to_tree())
    ledger.event(
        "restore", step=step, batch=step + position.batches_ahead, state=digest
    )
    return position


def _set_aside(
    checkpoints: Checkpoints,
    step: int,
    reason: str,
    why: str,
    ledger: Ledger,
    console: Console,
) -> None:
    aside = checkpoints.set_aside(step, why)
    console.print(f"{reason}. Set aside as {aside}.", markup=False)
    ledger.event_now("set_aside", step=step, reason=reason)


def _newest(checkpoints: Checkpoints, group: Group, before: int | None) -> int:
    """Returns the newest step that process 0 sees; 0 if there is none.

    The others may see an older state of a shared folder.
    """

    def judge(_) -> dict[str, int]:
        steps = committed_steps(checkpoints.folder)
        return {"step": max((s for s in steps if not before or s < before), default=0)}

    return group.consult("newest checkpoint", {}, judge)["step"]


def _was_unreadable(step: int, group: Group, ledger: Ledger) -> bool:
    """Returns whether an attempt since the last restore failed to read this step."""

    def judge(_) -> dict[str, bool]:
        rows = reversed(ledger.read())
        since = itertools.takewhile(lambda row: row["event"] != "restore", rows)
        tried = (row["step"] for row in since if row["event"] == "unreadable")
        return {"tried": step in tried}

    return group.consult("unreadable checkpoint", {}, judge)["tried"]


def _batches_ahead(saved: dict, step: int, batch_size: int) -> int:
    """Returns how many batches the position in the data is ahead of the step."""
    number, rest = divmod(saved["data"]["next_example"], batch_size)
    if rest:
        raise ValueError(
            f"checkpoint {step} continues at example {saved['data']['next_example']} "
            f"of the data, which is not the start of a batch of {batch_size}. Choose a "
            "batch_size that divides it."
        )
    return number - step
