"""The order in which the layers of a stack are stored, given stages and chunks.

A stage stores its chunks one after the other, so the stack is sharded over `pipe` like
any other dimension. With one chunk per stage, the layers keep their natural order.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def layer_order(num_layers: int, num_stages: int, num_chunks: int) -> np.ndarray:
    """Returns the index of the layer at each position of the stored stack."""
    ways = num_stages * num_chunks
    if num_layers % ways:
        below = num_layers // ways * ways
        near = [str(n) for n in (below, below + ways) if n]
        each = f" of {num_chunks} chunks each" if num_chunks > 1 else ""
        raise ValueError(
            f"{num_layers} layers cannot be divided into {num_stages} equal "
            f"stages{each}. Use {' or '.join(near)} layers, or numbers of stages and "
            f"chunks whose product divides {num_layers}."
        )
    layers = np.arange(num_layers).reshape(num_chunks, num_stages, -1)
    return layers.swapaxes(0, 1).ravel()


def reorder(tree: Any, axes: Any, order: np.ndarray) -> Any:
    """Returns the tree with its layers reordered: position i holds layer order[i].

    Args:
      axes: the logical axes of each array; arrays whose first axis is "layer" are
        stacks of layers.
    """

    def one(x, names):
        return x[jnp.asarray(order)] if names[:1] == ("layer",) else x

    return jax.tree.map(one, tree, axes)
