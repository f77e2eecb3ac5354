"""The loop: dispatches steps, fetches metrics late, calls hooks when they are due."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import jax

from ..program.state import State

StepMetrics = dict[str, float]  # with the number of the step
StepFn = Callable[[State, Any], tuple[State, dict[str, jax.Array]]]


class StopRequested(Exception):
    """The loop was asked to stop after `step`."""

    def __init__(self, step: int, state: State):
        super().__init__(f"asked to stop after step {step}")
        self.step, self.state = step, state


class Hook(Protocol):
    """Something to do between steps: evaluate, save, profile."""

    every: int  # steps; 0 for only at the end

    def __call__(self, step: int, state: State) -> None: ...


def run(
    step_fn: StepFn,
    state: State,
    batches: Iterator[Any],
    *,
    start: int,
    num_steps: int,
    record: Callable[[list[StepMetrics]], None],
    record_every: int = 10,
    hooks: Iterable[Hook] = (),
    started: Callable[[int, dict[str, jax.Array]], None] | None = None,
    should_stop: Callable[[int], bool] | None = None,
    is_over: Callable[[], bool] = lambda: False,
) -> State:
    """Runs steps start+1 .. num_steps; hooks get the number of the step just done.

    The host runs ahead of the devices. Every `record_every` steps it fetches the
    metrics of all steps but the newest, which may still be running; it waits for the
    newest only before a hook, and at the end. `record` gets each step once, in order,
    and may raise to end the run.

    Args:
      started: called with each step as it is dispatched.
      should_stop: called after each step; if true, all metrics are recorded and
        StopRequested is raised with the state.
      is_over: whether the step just done is the last one; a hook may decide it, for
        itself and for the hooks after it.
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
        is_last, is_hooked = step == num_steps or is_over(), False
        for hook in hooks:
            if is_last or (hook.every and step % hook.every == 0):
                if not is_hooked:
                    record(_fetch(pending))
                    pending, is_hooked = [], True
                hook(step, state)
                is_last = is_last or is_over()
        if not is_hooked and step % record_every == 0 and len(pending) > 1:
            record(_fetch(pending[:-1]))
            pending = pending[-1:]
        if should_stop is not None and should_stop(step) and not is_last:
            record(_fetch(pending))
            raise StopRequested(step, state)
        if is_last:
            break
    if pending:
        record(_fetch(pending))
    return state


def _fetch(pending: list[tuple[int, dict[str, jax.Array]]]) -> list[StepMetrics]:
    values = jax.device_get([metrics for _, metrics in pending])
    return [
        {"step": step} | {name: float(value) for name, value in row.items()}
        for (step, _), row in zip(pending, values, strict=True)
    ]
