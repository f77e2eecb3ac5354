"""Where a run goes on: from its newest checkpoint that is what was saved."""

import dataclasses

from rich.console import Console

from . import distributed, manifest
from .checkpoint import Checkpoints, committed_steps
from .ledger import Ledger
from .manifest import CorruptCheckpoint
from .setup import Setup
from .state import State


@dataclasses.dataclass(frozen=True)
class Position:
    """A state and what comes next.

    Attributes:
      step: updates done.
      state: in the order of the setup's layout.
      batches_ahead: batches of the data that were passed over by rewinding, so the
        next is number step + batches_ahead.
    """

    step: int
    state: State
    batches_ahead: int = 0


def restore_newest(
    checkpoints: Checkpoints,
    setup: Setup,
    ledger: Ledger,
    console: Console,
    *,
    before: int | None = None,
) -> Position | None:
    """The newest checkpoint, of a step before `before` if given; None with none.

    A checkpoint that is not what was saved is set aside, with a line that says so, and
    the one before it is taken. All processes of a job take the same.
    """
    while step := distributed.agree("step", _newest(checkpoints, before)):
        state, reason = None, ""
        try:
            state = checkpoints.restore(step, setup.layout, setup.mesh)
        except CorruptCheckpoint as error:
            reason = str(error)
        if not distributed.any_process(state is None):
            assert state is not None
            saved = manifest.read(checkpoints.folder, step)
            position = Position(
                step,
                setup.layout.arranged(state, setup.mesh),
                _batches_ahead(saved, step, setup.config.batch_size),
            )
            # Of the arrays that training goes on with, not of what the manifest says.
            canonical = setup.layout.canonical(position.state, setup.mesh)
            ledger.event(
                "restore",
                step=step,
                batch=step + position.batches_ahead,
                state=manifest.tree_digest(canonical._asdict()),
            )
            return position
        reason = reason or f"another process cannot read checkpoint {step}"
        aside = checkpoints.set_aside(step)
        console.print(f"{reason}. Set aside as {aside}.", markup=False)
        ledger.event("set_aside", step=step, reason=reason)
    return None


def _newest(checkpoints: Checkpoints, before: int | None) -> int:
    steps = committed_steps(checkpoints.folder)
    return max((s for s in steps if before is None or s < before), default=0)


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
