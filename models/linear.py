"""A matmul of activations with a weight that may be cut, gathered and cast.

The weight is an attribute of an NNX module and names its logical axes; `name_bias`
beside it is added where there is one.
"""

import math

import jax
from flax import nnx

from ..sharding import Sharder


def linear(
    x: jax.Array, module: nnx.Module, name: str, num_in: int, shard: Sharder
) -> jax.Array:
    """Contracts the last `num_in` dimensions of x with the first of the weight."""
    variable = getattr(module, name)
    w = shard.weight(variable[...], variable.get_metadata()["axes"], x.dtype)
    if shard.is_single and shard.platform == "cpu":
        # As plain matrices, so that the weight's gradient is one plain matmul too: the
        # batched form makes a transposing copy, a quarter of a step. On TPUs this form
        # copies. Flattening dimensions that are cut over devices would gather them.
        width = math.prod(w.shape[:num_in])
        y = x.reshape(-1, width) @ w.reshape(width, -1)
        y = y.reshape(*x.shape[:-num_in], *w.shape[num_in:])
    else:
        contracted = (tuple(range(x.ndim - num_in, x.ndim)), tuple(range(num_in)))
        y = jax.lax.dot_general(x, w, (contracted, ((), ())))
    bias = getattr(module, f"{name}_bias", None)
    if bias is not None:
        b = shard.weight(bias[...], bias.get_metadata()["axes"], x.dtype)
        y = y + b.reshape((1,) * (y.ndim - b.ndim) + b.shape)
    return y
