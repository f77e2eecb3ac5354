"""Where the layers of a stack stand, once it is cut into stages and chunks.

A stage stores its chunks one after the other, so the stack is cut over `pipe` in equal
parts like any other dimension. With one chunk a stage that is the stack's own order.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def layer_order(num_layers: int, num_stages: int, num_chunks: int) -> np.ndarray:
    """The layer that stands at each place of the stored stack."""
    ways = num_stages * num_chunks
    if num_layers % ways:
        below = num_layers // ways * ways
        near = [str(n) for n in (below, below + ways) if n]
        each = f" of {num_chunks} chunks each" if num_chunks > 1 else ""
        raise ValueError(
            f"{num_layers} layers cannot be cut into {num_stages} equal stages{each}. "
            f"Take {' or '.join(near)} layers, or other numbers of stages and chunks "
            f"whose product divides {num_layers}."
        )
    layers = np.arange(num_layers).reshape(num_chunks, num_stages, -1)
    return layers.swapaxes(0, 1).ravel()


def reorder(tree: Any, axes: Any, order: np.ndarray) -> Any:
    """The tree with its layers in another order: place i takes layer order[i].

    Args:
      axes: a tuple of logical names for each array; those that begin with "layer" are
        stacks of layers.
    """

    def one(x, names):
        return x[jnp.asarray(order)] if names[:1] == ("layer",) else x

    return jax.tree.map(one, tree, axes)
