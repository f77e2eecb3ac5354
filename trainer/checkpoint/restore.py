"""Where a run goes on: from its newest checkpoint that is what was saved."""

import dataclasses
import itertools

from rich.console import Console

from ...launch.exit_codes import Unreachable
from ..job import joining
from ..program.build import Program
from ..program.state import State
from ..record.failures import CorruptCheckpoint, Unreadable
from ..record.ledger import Ledger
from . import manifest
from .manager import Checkpoints, committed_steps


@dataclasses.dataclass(frozen=True)
class Position:
    """A state and what comes next.

    Attributes:
      step: updates done.
      state: in the order of the layout.
      batches_ahead: batches of the data that were passed over by rewinding, so the
        next is number step + batches_ahead.
    """

    step: int
    state: State
    batches_ahead: int = 0


def restore_newest(
    checkpoints: Checkpoints,
    program: Program,
    ledger: Ledger,
    console: Console,
    *,
    before: int | None = None,
) -> Position | None:
    """The newest checkpoint, of a step before `before` if given; None with none.

    All processes of a job take the same, whatever one of them meets. A checkpoint that
    is not what was saved is set aside, with a line that says so, and the one before it
    is taken. One that storage does not give may still be whole: the attempt ends, to be
    made again. Where the next attempt cannot read it either, the one before it is
    tried, and only when that could be read is the newer one set aside.
    """
    unreadable: list[tuple[int, str]] = []
    while step := _newest(checkpoints, before):
        try:
            state = checkpoints.restore(step, program.layout, program.mesh)
        except CorruptCheckpoint as error:
            _set_aside(checkpoints, step, str(error), "corrupt", ledger, console)
            continue
        except Unreadable as error:
            if not _was_unreadable(step, ledger):
                ledger.event_now("unreadable", step=step, reason=str(error))
                raise Unreachable(
                    f"{error}. Nothing was changed. Run the same command again to "
                    "continue; if it cannot be read then either, an older checkpoint "
                    "is taken."
                ) from error
            unreadable.append((step, str(error)))
            before = step
            continue
        for later, reason in unreadable:
            _set_aside(checkpoints, later, reason, "unreadable", ledger, console)
        return _position(checkpoints, step, state, program, ledger)
    if unreadable:
        step, reason = unreadable[0]
        raise Unreachable(
            f"{reason}. No older checkpoint can be read either. Nothing was changed. "
            "Run the same command again when the storage answers."
        )
    return None


def _position(
    checkpoints: Checkpoints,
    step: int,
    state: State,
    program: Program,
    ledger: Ledger,
) -> Position:
    saved = manifest.read(checkpoints.folder, step)
    position = Position(
        step,
        program.layout.arranged(state, program.mesh),
        _batches_ahead(saved, step, program.batch_size),
    )
    # Of the arrays that training goes on with, not of what the manifest says.
    canonical = program.layout.canonical(position.state, program.mesh)
    ledger.event(
        "restore",
        step=step,
        batch=step + position.batches_ahead,
        state=manifest.tree_digest(canonical.to_tree()),
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


def _newest(checkpoints: Checkpoints, before: int | None) -> int:
    """The newest step as process 0 sees it; 0 for none.

    Others may see a shared folder as it was a second ago.
    """

    def judge(_) -> dict[str, int]:
        steps = committed_steps(checkpoints.folder)
        return {"step": max((s for s in steps if not before or s < before), default=0)}

    return joining.consult("newest checkpoint", {}, judge)["step"]


def _was_unreadable(step: int, ledger: Ledger) -> bool:
    """Whether an attempt since the last restore has tried this step in vain."""

    def judge(_) -> dict[str, bool]:
        rows = reversed(ledger.read())
        since = itertools.takewhile(lambda row: row["event"] != "restore", rows)
        tried = (row["step"] for row in since if row["event"] == "unreadable")
        return {"tried": step in tried}

    return joining.consult("unreadable checkpoint", {}, judge)["tried"]


def _batches_ahead(saved: dict, step: int, batch_size: int) -> int:
    """From the position in the data, which counts examples."""
    number, rest = divmod(saved["data"]["next_example"], batch_size)
    if rest:
        raise ValueError(
            f"checkpoint {step} was saved before example "
            f"{saved['data']['next_example']} of the data, which does not begin a "
            f"batch of {batch_size}. Choose a batch_size that divides it."
        )
    return number - step
