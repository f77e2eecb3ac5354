"""The loop: dispatch steps, fetch figures late, call hooks when they are due."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import jax

from ..program.state import State

Row = dict[str, float]
StepFn = Callable[[State, Any], tuple[State, dict[str, jax.Array]]]


class Leave(Exception):
    """The loop was asked to end after `step`."""

    def __init__(self, step: int, state: State):
        super().__init__(f"asked to leave after step {step}")
        self.step, self.state = step, state


class Hook(Protocol):
    """Something done between steps: evaluate, checkpoint, profile."""

    every: int  # steps; 0 means at the end only

    def __call__(self, step: int, state: State) -> None: ...


def run(
    step_fn: StepFn,
    state: State,
    batches: Iterator[Any],
    *,
    start: int,
    num_steps: int,
    record: Callable[[list[Row]], None],
    record_every: int = 10,
    hooks: Iterable[Hook] = (),
    started: Callable[[int, dict[str, jax.Array]], None] | None = None,
    should_leave: Callable[[int], bool] | None = None,
) -> State:
    """Runs steps start+1 .. num_steps; hooks see the step count just reached.

    The host runs ahead of the devices. Every `record_every` steps it fetches the
    figures of the steps that are surely done, that is all but the newest; it waits for
    the newest only before a hook, and at the end. `record` sees each step once, in
    order, and may raise to end the run.

    Args:
      started: told of each step as it is handed to the devices.
      should_leave: asked after each; where it says so, all figures are recorded, and
        Leave is raised with the state.
    """
    hooks = tuple(hooks)
    pending: list[tuple[int, dict[str, jax.Array]]] = []
    for step in range(start + 1, num_steps + 1):
        batch = next(batches, None)
        if batch is None:
            raise ValueError(f"the data ended at step {step - 1} of {num_steps}")
        state, metrics = step_fn(state, batch)
        pending.append((step, metrics))
        if started is not None:
            started(step, metrics)
        last = step == num_steps
        due = [h for h in hooks if last or (h.every and step % h.every == 0)]
        if due:
            record(_fetch(pending))
            pending = []
            for hook in due:
                hook(step, state)
        elif step % record_every == 0 and len(pending) > 1:
            record(_fetch(pending[:-1]))
            pending = pending[-1:]
        if should_leave is not None and should_leave(step) and not last:
            record(_fetch(pending))
            raise Leave(step, state)
    if pending:
        record(_fetch(pending))
    return state


def _fetch(pending: list[tuple[int, dict[str, jax.Array]]]) -> list[Row]:
    values = jax.device_get([metrics for _, metrics in pending])
    return [
        {"step": step} | {name: float(value) for name, value in row.items()}
        for (step, _), row in zip(pending, values, strict=True)
    ]
