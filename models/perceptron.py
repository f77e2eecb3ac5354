"""Dense layers with ReLUs between them, as recommenders use them."""

import itertools

import jax
from flax import nnx

from ..sharding import Sharder
from .convolution import bias, weight
from .linear import linear


class Perceptron(nnx.Module):
    """Layers from widths[0] to widths[-1].

    Hidden layers are alternately `embed` and `mlp`; input and output have no logical
    axis, because they may be as narrow as one number.
    """

    def __init__(self, widths: tuple[int, ...], rngs: nnx.Rngs):
        hidden = [("embed", "mlp")[i % 2] for i in range(len(widths) - 2)]
        self.names = (None, *hidden, None)
        sides = itertools.pairwise(zip(widths, self.names, strict=True))
        for i, ((num_in, before), (num_out, after)) in enumerate(sides):
            setattr(
                self, f"layer_{i}", weight(rngs, (num_in, num_out), (before,), after)
            )
            axis = "norm" if after == "embed" else after
            setattr(self, f"layer_{i}_bias", bias(num_out, axis))

    def __call__(self, x: jax.Array, shard: Sharder, rows: str = "batch") -> jax.Array:
        """Returns the output for x[rows, width].

        Args:
          rows: the logical axis of the rows.
        """
        last = len(self.names) - 2
        for i, after in enumerate(self.names[1:]):
            x = linear(x, self, f"layer_{i}", 1, shard)
            x = shard(x if i == last else jax.nn.relu(x), (rows, after))
        return x


def num_weights(widths: tuple[int, ...]) -> int:
    """Returns how many weights multiply one row, without biases."""
    return sum(a * b for a, b in itertools.pairwise(widths))
