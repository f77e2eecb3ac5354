"""The layers of one stage: forward and backward of a chunk, and its gradients."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..sharder import Sharder
from .stack import Batch, Stack, Sums

Kept = Any  # what a forward saves for its backward


class Chunks:
    """The chunks of layers of one stage, stored one after the other.

    Args:
      params: the stage's blocks, each array [layers of the stage, ...].
      layouts: a WeightLayout for each array.
      num: the number of chunks.
    """

    def __init__(
        self, stack: Stack, params: Any, layouts: Any, num: int, shard: Sharder
    ):
        self._stack, self._shard, self._layouts = stack, shard, layouts
        self._params = params
        self._keeps_residuals = stack.remat == "none"
        self._length = jax.tree.leaves(params)[0].shape[0] // num
        # A chunk is recomputed from its input. For a chunk of one layer under "full",
        # a checkpoint inside would recompute the layer a second time.
        self._is_recomputed_once = stack.remat == "full" and self._length == 1
        self._num = num
        # Set when a forward is traced: the tree structure of its vjp, and for each
        # residual the index of the weight it is, or None.
        self._vjp_treedef: Any = None
        self._weight_index: list[int | None] = []

    def forward(
        self, chunk, x: jax.Array, batch: Batch
    ) -> tuple[jax.Array, Sums, Kept]:
        """Returns the output of the chunk, its sums, and what its backward needs.

        The backward needs the input of the chunk, or its residuals under "none".
        """
        params = self._chunk(chunk)
        if not self._keeps_residuals:
            return *self._apply(params, x, batch), x
        (y, sums), pull = jax.vjp(lambda p, x: self._apply(p, x, batch), params, x)
        leaves, self._vjp_treedef = jax.tree.flatten(pull)
        # Residuals that are weights need not be saved.
        weights = jax.tree.leaves(params)
        self._weight_index = [_position(leaf, weights) for leaf in leaves]
        both = zip(leaves, self._weight_index, strict=True)
        return y, sums, ((y, sums), [leaf for leaf, index in both if index is None])

    def backward(self, chunk, kept: Kept, batch: Batch):
        """Returns the output of the chunk and its vjp, to (params, input) gradients."""
        params = self._chunk(chunk)
        if not self._keeps_residuals:
            found, pull = jax.vjp(lambda p, x: self._apply(p, x, batch), params, kept)
            return found[0], _of_output(pull, found[1])
        (y, sums), residuals = kept
        rest, weights = iter(residuals), jax.tree.leaves(params)
        leaves = [next(rest) if i is None else weights[i] for i in self._weight_index]
        return y, _of_output(jax.tree.unflatten(self._vjp_treedef, leaves), sums)

    def _apply(self, params: Any, x: jax.Array, batch: Batch) -> tuple[jax.Array, Sums]:
        """Applies the layers of `params` one by one, and adds up their sums."""

        def layer(x, params):
            params = jax.tree.map(
                lambda layout, w: layout.gather(w, late=True, skip=1),
                self._layouts,
                params,
            )
            found = self._stack.block(params, x, batch, self._shard)
            return found if isinstance(found, tuple) else (found, {})

        if self._keeps_residuals:
            layer = jax.checkpoint(layer, policy=_is_computed, prevent_cse=False)
        elif not self._is_recomputed_once:
            layer = self._stack.rematerialize(layer)
        y, sums = lax.scan(layer, x, params)
        return y, jax.tree.map(lambda each: jnp.sum(each, axis=0), sums)

    def zeros(self) -> Any:
        return jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), self._params)

    def add(self, grads: Any, chunk, grad: Any, is_real) -> Any:
        """Returns `grads` plus the gradient of a chunk, if it has a microbatch."""

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


def _of_output(pull: Any, sums: Sums) -> Any:
    """Returns the vjp of a chunk's output; its sum "loss" is a part of the loss."""
    seeds = {
        name: jnp.ones_like(x) if name == "loss" else jnp.zeros_like(x)
        for name, x in sums.items()
    }
    return lambda gradient: pull((gradient, seeds))


def _position(leaf: Any, among: list[Any]) -> int | None:
    return next((i for i, other in enumerate(among) if other is leaf), None)


# Primitives that only cast or move an array. Nothing else is applied to a weight before
# it meets an activation, so a saved residual is never a copy of a weight.
MOVES = frozenset(
    """all_gather broadcast_in_dim convert_element_type copy expand_dims name pvary
    reshape sharding_constraint slice squeeze transpose""".split()
)


def _is_computed(primitive: Any, *_, **__) -> bool:
    return primitive.name not in MOVES
