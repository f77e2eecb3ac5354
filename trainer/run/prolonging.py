"""Whether a run may be given another number of steps: where its learning rate goes on.

Schedules are shares of a run, so another length changes them. A run may go on with
another `num_steps` if the last update that was done has the same rate by both.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from ..config.tree import Change

if TYPE_CHECKING:
    from ..program.schedules import Schedule

FIELD = "num_steps"


def check(
    changes: Iterable[Change], schedule: "Schedule", done: int | None, *, insist: bool
) -> list[str]:
    """Returns what to say of a changed num_steps; raises where the rate would jump.

    Args:
      changes: of the config, since the run folder was started.
      done: updates of the newest checkpoint, None for no checkpoint.
      insist: to go on all the same.
    """
    found = {change.path: change for change in changes}
    if FIELD not in found or not done:
        return []
    old, new = found[FIELD].old, found[FIELD].new
    before, now = (_rates(schedule, num_steps, done + 1) for num_steps in (old, new))
    differs = ~np.isclose(before, now, rtol=1e-6, atol=0)
    num, last = int(differs[:done].sum()), done - 1
    if num == 0:
        return [
            f"num_steps {old} -> {new}: the {done} updates done are the same in both"
        ]
    facts = (
        f"of the {done} updates done, {num} would have had another learning rate in a "
        f"run of {new} steps"
    )
    if not differs[last]:
        rate = f"it goes on with {now[done]:.3g}"
        return [f"num_steps {old} -> {new}: {facts}; {rate}"]
    jump = f"the last had {before[last]:.3g}, the next would have {now[done]:.3g}"
    if insist:
        return [f"num_steps {old} -> {new}: {facts}; {jump}"]
    raise ValueError(
        f"num_steps {old} -> {new}: {type(schedule).__name__} spreads its learning "
        f"rate over the whole run, and {facts}: {jump}. To go on with that jump, pass "
        f"--insist; or keep num_steps={old}; or begin a new run with these weights "
        "(init_from). Schedules that can be prolonged: Constant, and WarmupStableDecay "
        "before its decay."
    )


def _rates(schedule: "Schedule", num_steps: int, count: int) -> np.ndarray:
    rate: Any = schedule.make(num_steps)
    each = jax.vmap(lambda step: jnp.asarray(rate(step), jnp.float32))
    return np.asarray(each(jnp.arange(count)))
