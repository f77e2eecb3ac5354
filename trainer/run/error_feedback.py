"""What a learner has not sent yet, as a part of its optimizer state.

There it is saved, restored and sharded like everything else of the state. Steps leave
it alone; what is sent changes it, see service/learner/compression.py.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..program.state import State


class Residual(NamedTuple):
    residual: Any  # a tree like the parameters, in float32


class ErrorFeedback:
    """An optimizer whose state also has the residual: (state, Residual).

    Args:
      optimizer: a config node, or an optax transformation.
    """

    def __init__(self, optimizer: Any):
        self._optimizer = optimizer
        for name in ("state_axes", "granularity"):
            if hasattr(optimizer, name):
                setattr(self, name, getattr(optimizer, name))

    def make(self, learning_rate: optax.Schedule, axes: Any) -> Any:
        inner = self._optimizer
        if not isinstance(inner, optax.GradientTransformation):
            inner = inner.make(learning_rate, axes)

        def init(params: Any) -> Residual:
            return Residual(
                jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
            )

        def update(updates: Any, state: Any, params: Any = None) -> Any:
            del params
            return updates, state

        return optax.chain(inner, optax.GradientTransformation(init, update))


def residual_of(state: State) -> Any:
    """Returns the residual of a state, or None if it has none."""
    found = state.opt_state
    has_one = isinstance(found, tuple) and found and isinstance(found[-1], Residual)
    return found[-1].residual if has_one else None


def with_residual(state: State, residual: Any) -> State:
    *others, _ = state.opt_state
    return state._replace(opt_state=(*others, Residual(residual)))
