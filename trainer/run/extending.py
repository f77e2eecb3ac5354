"""Whether the number of steps of a run may change: if its learning rate does not jump.

Schedules are defined by shares of a run, so another length changes them. A run may
continue with another `num_steps` if its last update has the same learning rate in both.
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..config.tree import Change
from ..program.schedules import Schedule, make_rate

FIELD = "num_steps"


def check(
    changes: Iterable[Change], schedule: Schedule, done: int | None, *, insist: bool
) -> list[str]:
    """Returns lines about a changed num_steps; raises if the learning rate would jump.

    Args:
      changes: of the config, since the run folder was started.
      done: the step of the newest checkpoint; None if there is none.
      insist: accept the jump.
    """
    change = next((change for change in changes if change.path == FIELD), None)
    if change is None or not done:
        return []
    old, new = change.old, change.new
    before, now = (_rates(schedule, num_steps, done + 1) for num_steps in (old, new))
    differs = ~np.isclose(before, now, rtol=1e-6, atol=0)
    num, last = int(differs[:done].sum()), done - 1
    if num == 0:
        return [
            f"num_steps {old} -> {new}: the {done} updates so far are the same in both"
        ]
    facts = (
        f"{num} of the {done} updates so far would have had another learning rate in a "
        f"run of {new} steps"
    )
    if not differs[last]:
        rate = f"training continues with {now[done]:.3g}"
        return [f"num_steps {old} -> {new}: {facts}; {rate}"]
    jump = f"the last had {before[last]:.3g}, the next would have {now[done]:.3g}"
    if insist:
        return [f"num_steps {old} -> {new}: {facts}; {jump}"]
    raise ValueError(
        f"num_steps {old} -> {new}: {type(schedule).__name__} spreads its learning "
        f"rate over the whole run, and {facts}: {jump}. To accept the jump, pass "
        f"--insist; or keep num_steps={old}; or start a new run from these weights "
        "(init_from). Schedules that can be extended: Constant, and WarmupStableDecay "
        "before its decay."
    )


def _rates(schedule: Schedule, num_steps: int, count: int) -> np.ndarray:
    rate: Any = make_rate(schedule, num_steps)
    each = jax.vmap(lambda step: jnp.asarray(rate(step), jnp.float32))
    return np.asarray(each(jnp.arange(count)))
