"""The exchanged parameters of a state, in canonical order, by leaf of the layout."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from ...service.learner.compression import placed_like
from ..program.state import State
from . import exchange as exchange_lib
from .error_feedback import filled, masked_like, residual_of, with_residual
from .prepare import Prepared


class Exchanged:
    """The exchanged parameters of a state, in canonical order, by leaf."""

    def __init__(self, prepared: Prepared, config: exchange_lib.Config):
        self._layout, self._mesh = prepared.layout, prepared.mesh
        shapes = prepared.layout.abstract.params
        found = exchange_lib.exchanged(config, shapes, prepared.layout.axes.params)
        self._positions = [position for position, _ in found]
        placed = jax.tree.leaves(prepared.program.abstract_state.params)
        self.like: Mapping[int, Any] = {
            leaf: placed[position] for leaf, position in enumerate(self._positions)
        }
        self._step = prepared.program.shardings.step

    def of(self, tree: Any) -> dict[int, jax.Array]:
        """Returns the exchanged arrays of a tree like the parameters."""
        tree = self._reordered(tree, self._layout.canonical)
        leaves = jax.tree.leaves(tree)
        return {leaf: leaves[p] for leaf, p in enumerate(self._positions)}

    def put(self, state: State, arrays: Mapping[int, jax.Array]) -> State:
        """Returns the state with these arrays instead of its own."""
        return state._replace(params=self._with(state.params, arrays))

    def residual(self, state: State) -> dict[int, jax.Array]:
        """Returns what was not sent yet; {} if everything is sent."""
        tree = residual_of(state)
        return {} if tree is None else self.of(filled(tree, state.params))

    def put_residual(self, state: State, arrays: Mapping[int, jax.Array]) -> State:
        """Returns the state with this residual, in the shardings of its own."""
        if not arrays:
            return state
        old = residual_of(state)
        new = masked_like(old, self._with(filled(old, state.params), arrays))
        return with_residual(
            state, jax.tree.map(lambda x, like: placed_like(x, like.sharding), new, old)
        )

    def _with(self, params: Any, arrays: Mapping[int, jax.Array]) -> Any:
        """Returns a tree like the parameters with these arrays in it."""
        leaves, structure = jax.tree.flatten(params)
        if self._layout.order is not None:
            leaves = jax.tree.leaves(self._reordered(params, self._layout.canonical))
        for leaf, position in enumerate(self._positions):
            leaves[position] = arrays[leaf]
        params = jax.tree.unflatten(structure, leaves)
        return self._reordered(params, self._layout.arranged)

    def at_step(self, state: State, step: int) -> State:
        """Returns the state with another step number."""
        number = jax.make_array_from_callback((), self._step, lambda _: np.int32(step))
        return state._replace(step=number)

    def _reordered(self, params: Any, reorder: Callable) -> Any:
        if self._layout.order is None:
            return params
        empty = State(np.int32(0), params, {}, {})
        return reorder(empty, self._mesh).params
