"""The layers of one stage: forward of a chunk, its backward, and its gradients."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..sharder import Sharder
from .stack import Batch, Stack

Kept = Any  # what a forward leaves for its backward


class Chunks:
    """A stage's chunks of layers, stored one after the other.

    Args:
      params: the stage's blocks, each array [layers of the stage, ...].
      plans: a Weight for each array.
    """

    def __init__(self, stack: Stack, params: Any, plans: Any, num: int, shard: Sharder):
        self._stack, self._shard, self._plans = stack, shard, plans
        self._params = params
        self._keeps = stack.remat == "none"  # residuals, from forward to backward
        self._length = jax.tree.leaves(params)[0].shape[0] // num
        # The chunk is computed again from its input; of one layer under "full" that is
        # all there is to recompute, and a checkpoint would do it a second time.
        self._is_recomputed_once = stack.remat == "full" and self._length == 1
        self._num = num
        self._form: Any = None  # of a backward, once a forward was traced
        self._held: list[int | None] = []  # residuals that are weights, which

    def forward(self, chunk, x: jax.Array, batch: Batch) -> tuple[jax.Array, Kept]:
        """(output of the chunk, what its backward needs: its input, or residuals)."""
        params = self._chunk(chunk)
        if not self._keeps:
            return self._apply(params, x, batch), x
        y, pull = jax.vjp(lambda p, x: self._apply(p, x, batch), params, x)
        leaves, self._form = jax.tree.flatten(pull)
        # Weights are among the residuals; they are here anyway and need not be kept.
        weights = jax.tree.leaves(params)
        self._held = [_position(leaf, weights) for leaf in leaves]
        both = zip(leaves, self._held, strict=True)
        return y, (y, [leaf for leaf, held in both if held is None])

    def backward(self, chunk, kept: Kept, batch: Batch):
        """(output of the chunk, function from its gradient to (params', input's))."""
        params = self._chunk(chunk)
        if not self._keeps:
            return jax.vjp(lambda p, x: self._apply(p, x, batch), params, kept)
        y, residuals = kept
        rest, weights = iter(residuals), jax.tree.leaves(params)
        leaves = [next(rest) if i is None else weights[i] for i in self._held]
        return y, jax.tree.unflatten(self._form, leaves)

    def _apply(self, params: Any, x: jax.Array, batch: Batch) -> jax.Array:
        """The layers of `params`, one after the other."""

        def layer(x, params):
            params = jax.tree.map(
                lambda plan, w: plan.gather(w, late=True, skip=1), self._plans, params
            )
            return self._stack.block(params, x, batch, self._shard), None

        if self._keeps:
            layer = jax.checkpoint(layer, policy=_is_computed, prevent_cse=False)
        elif not self._is_recomputed_once:
            layer = self._stack.rematerialize(layer)
        return lax.scan(layer, x, params)[0]

    def zeros(self) -> Any:
        return jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), self._params)

    def add(self, grads: Any, chunk, grad: Any, is_real) -> Any:
        """Adds the gradient of a chunk, unless it is of no microbatch."""

        def one(total, g):
            g = jnp.where(is_real, g.astype(jnp.float32), 0.0)
            if self._num == 1:
                return total + g
            start = chunk * self._length
            old = lax.dynamic_slice_in_dim(total, start, self._length)
            return lax.dynamic_update_slice_in_dim(total, old + g, start, 0)

        return jax.tree.map(one, grads, grad)

    def _chunk(self, chunk) -> Any:
        if self._num == 1:
            return self._params
        return jax.tree.map(
            lambda w: lax.dynamic_slice_in_dim(w, chunk * self._length, self._length),
            self._params,
        )


def _position(leaf: Any, among: list[Any]) -> int | None:
    return next((i for i, other in enumerate(among) if other is leaf), None)


# What only casts or moves an array. Before a weight meets an activation nothing else
# is done to it, so a residual that is kept is never a copy of a weight.
MOVES = frozenset(
    """all_gather broadcast_in_dim convert_element_type copy expand_dims name pvary
    reshape sharding_constraint slice squeeze transpose""".split()
)


def _is_computed(primitive: Any, *_, **__) -> bool:
    return primitive.name not in MOVES
