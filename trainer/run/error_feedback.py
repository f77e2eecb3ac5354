"""What a learner has not sent yet, as a part of its optimizer state.

There it is saved, restored and sharded like everything else of the state. Steps leave
it alone; what is sent changes it, see service/learner/compression.py. Parameters that
stay with the learner have none: in the tree, a MaskedNode is in their place.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ...sharding.logical_axes import path_name
from ..program.state import State


class Residual(NamedTuple):
    residual: Any  # a tree like the exchanged parameters, in float32


class ErrorFeedback:
    """An optimizer whose state also has the residual: (state, Residual).

    Args:
      optimizer: a config node, or an optax transformation.
      is_exchanged: of the path of a parameter; the others have no residual.
    """

    def __init__(self, optimizer: Any, is_exchanged: Callable[[str], bool]):
        self._optimizer, self._is_exchanged = optimizer, is_exchanged
        for name in ("state_axes", "granularity"):
            if hasattr(optimizer, name):
                setattr(self, name, getattr(optimizer, name))

    def make(self, learning_rate: optax.Schedule, axes: Any) -> Any:
        inner = self._optimizer
        if not isinstance(inner, optax.GradientTransformation):
            inner = inner.make(learning_rate, axes)

        def zeros(path: Any, param: Any) -> Any:
            if not self._is_exchanged(path_name(path)):
                return optax.MaskedNode()
            return jnp.zeros(param.shape, jnp.float32)

        def init(params: Any) -> Residual:
            return Residual(jax.tree_util.tree_map_with_path(zeros, params))

        def update(updates: Any, state: Any, params: Any = None) -> Any:
            del params
            return updates, state

        return optax.chain(inner, optax.GradientTransformation(init, update))


def residual_of(state: State) -> Any:
    """Returns the residual of a state, or None if it has none."""
    found = state.opt_state
    has_one = isinstance(found, tuple) and found and isinstance(found[-1], Residual)
    return found[-1].residual if has_one else None


def filled(residual: Any, params: Any) -> Any:
    """Returns the residual with parameters where it has none."""
    return jax.tree.map(
        lambda own, param: param if _is_masked(own) else own,
        *(residual, params),
        is_leaf=_is_masked,
    )


def masked_like(residual: Any, tree: Any) -> Any:
    """Returns the tree without what the residual does not have."""
    return jax.tree.map(
        lambda own, x: own if _is_masked(own) else x,
        *(residual, tree),
        is_leaf=_is_masked,
    )


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


def with_residual(state: State, residual: Any) -> State:
    *others, _ = state.opt_state
    return state._replace(opt_state=(*others, Residual(residual)))
