"""Batch norm by the statistics of the global batch, and its running averages.

Shape letters: B batch, H height, W width, C channels.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..sharding import Sharder
from .convolution import gathered

Sums = dict[str, Any]


class BatchNorm(nnx.Module):
    """Normalizes each channel of x[B, H, W, C].

    Training normalizes by the batch, evaluation by the running averages. A sum over
    the rows of a sharded array is a sum over the global batch, so nothing here depends
    on the mesh. Each microbatch is normalized separately.

    The sums are of the distance to the running mean, not of the values: the variance
    is then no small difference of large numbers.

    Attributes:
      axis: the logical axis of the channels.
    """

    def __init__(self, width: int, axis: str, epsilon: float = 1e-5):
        self.axis, self.epsilon = axis, epsilon
        self.scale = nnx.Param(jnp.ones(width), axes=(axis,))
        self.bias = nnx.Param(jnp.zeros(width), axes=(axis,))
        self.mean = nnx.BatchStat(jnp.zeros(width), axes=(axis,))
        self.variance = nnx.BatchStat(jnp.ones(width), axes=(axis,))

    def __call__(
        self, x_BHWC: jax.Array, shard: Sharder, *, train: bool
    ) -> tuple[jax.Array, Sums]:
        """Returns the result, and the sums that update the running averages."""
        mean_C = gathered(self, "mean", shard)
        difference_BHWC = x_BHWC - mean_C[None, None, None]
        count = jnp.float32(x_BHWC.size // x_BHWC.shape[-1])
        sums: Sums = {"count": count}
        for power, name in ((1, "sum"), (2, "square")):
            total_C = jnp.sum(difference_BHWC**power, axis=(0, 1, 2))
            sums[name] = shard(total_C, (self.axis,))
        if train:
            shift_C = sums["sum"] / count
            variance_C = sums["square"] / count - jnp.square(shift_C)
            difference_BHWC -= shift_C[None, None, None]
        else:
            variance_C = gathered(self, "variance", shard)
        scale_C = gathered(self, "scale", shard) * jax.lax.rsqrt(
            variance_C + self.epsilon
        )
        y_BHWC = difference_BHWC * scale_C[None, None, None]
        return y_BHWC + gathered(self, "bias", shard)[None, None, None], sums


def update(averages: Any, sums: Any, momentum: float) -> Any:
    """Returns the running averages after a step.

    Args:
      averages: a tree of {"mean", "variance"}.
      sums: the same tree with the sums of the step instead.
    """
    if "count" not in sums:
        return {name: update(averages[name], sums[name], momentum) for name in averages}
    shift = sums["sum"] / sums["count"]
    variance = sums["square"] / sums["count"] - jnp.square(shift)
    return {
        "mean": averages["mean"] + (1 - momentum) * shift,
        "variance": momentum * averages["variance"] + (1 - momentum) * variance,
    }
