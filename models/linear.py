"""Matmul of activations with a weight that is sharded, gathered and cast by the rules.

The weight is an attribute `name` of an NNX module and names its logical axes. If the
module has an attribute `name_bias`, it is added, and so is an adapter (adapters.py).
"""

import math

import jax
from flax import nnx

from ..sharding import Sharder
from .adapters import DOWN, UP


def linear(
    x: jax.Array, module: nnx.Module, name: str, num_in: int, shard: Sharder
) -> jax.Array:
    """Contracts the last `num_in` dimensions of x with the first of the weight."""
    variable = getattr(module, name)
    w = shard.weight(variable[...], variable.get_metadata()["axes"], x.dtype)
    if shard.is_single and shard.platform == "cpu":
        # With plain matrices the weight's gradient is a plain matmul too; the batched
        # form makes a transposing copy, a quarter of the step time. On TPUs this form
        # copies instead. Flattening sharded dimensions would gather them.
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
    if hasattr(module, name + DOWN):
        low = linear(x, module, name + DOWN, num_in, shard)
        high = linear(low, module, name + UP, 1, shard)
        y = y + module.config.adapters.scale * high  # type: ignore
    return y
