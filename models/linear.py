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
    if shard.is_single:
        width = math.prod(w.shape[:num_in])
        y = flat_matmul(x.reshape(-1, width), w.reshape(width, -1))
        y = y.reshape(*x.shape[:-num_in], *w.shape[num_in:])
    else:
        contracted = (tuple(range(x.ndim - num_in, x.ndim)), tuple(range(num_in)))
        y = jax.lax.dot_general(x, w, (contracted, ((), ())))
    bias = getattr(module, f"{name}_bias", None)
    if bias is not None:
        b = shard.weight(bias[...], bias.get_metadata()["axes"], x.dtype)
        y = y + b.reshape((1,) * (y.ndim - b.ndim) + b.shape)
    return y


@jax.custom_vjp
def flat_matmul(x, w):
    """x @ w for matrices, with the weight's gradient as one plain matmul.

    Autodiff of the batched form makes a transposing copy for the weight's gradient,
    fused with the backward of the activation before it: a quarter of a step on CPU.
    Only on one device: flattening dimensions that are cut would gather them.
    """
    return x @ w


def _forward(x, w):
    return x @ w, (x, w)


def _backward(saved, g):
    x, w = saved
    return g @ w.T, x.T @ g


flat_matmul.defvjp(_forward, _backward)
