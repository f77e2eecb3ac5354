"""Where a run goes on: from its newest checkpoint that is what was saved."""

from rich.console import Console

from . import distributed
from .checkpoint import Checkpoints, latest_step
from .manifest import CorruptCheckpoint
from .setup import Setup
from .state import State


def restore_newest(
    checkpoints: Checkpoints, setup: Setup, console: Console
) -> tuple[int, State] | None:
    """(step, state) in the order of the setup's layout; None with no checkpoint.

    A checkpoint that is not what was saved is set aside, with a line that says so, and
    the one before it is taken. All processes of a job take the same.
    """
    while step := distributed.agree("step", latest_step(checkpoints.folder) or 0):
        state, reason = None, ""
        try:
            state = checkpoints.restore(step, setup.layout, setup.mesh)
        except CorruptCheckpoint as error:
            reason = str(error)
        if not distributed.any_process(state is None):
            assert state is not None
            return step, setup.layout.arranged(state, setup.mesh)
        reason = reason or f"another process cannot read checkpoint {step}"
        aside = checkpoints.set_aside(step)
        console.print(f"{reason}. Set aside as {aside}.", markup=False)
    return None
