"""Convolutions with weights that are sharded and gathered by the rules.

Shape letters: B batch, H height, W width, C channels.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..sharding import Sharder


def weight(rngs: nnx.Rngs, shape, inputs, output: str | None) -> nnx.Param:
    """Returns a weight whose outputs have about the variance of its inputs."""
    scale = math.sqrt(2 / math.prod(shape[:-1]))
    value = scale * jax.random.normal(rngs.params(), shape)
    return nnx.Param(value, axes=(*inputs, output))


def bias(width: int, axis: str | None) -> nnx.Param:
    return nnx.Param(jnp.zeros(width), axes=(axis,))


def gathered(
    module: nnx.Module, name: str, shard: Sharder, dtype: Any = None
) -> jax.Array:
    """Returns a weight of a module, cast and gathered by the rules to compute with."""
    variable = getattr(module, name)
    return shard.weight(variable[...], variable.get_metadata()["axes"], dtype)


def convolve(
    x_BHWC: jax.Array, module: nnx.Module, name: str, shard: Sharder, *, stride: int = 1
) -> jax.Array:
    """Convolves x with a weight [height, width, input, output] of a module.

    The result has 1 / stride of the pixels on each side. If the module has an attribute
    `name_bias`, it is added.
    """
    y_BHWC = jax.lax.conv_general_dilated(
        x_BHWC,
        gathered(module, name, shard),
        window_strides=(stride, stride),
        padding="SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    if hasattr(module, f"{name}_bias"):
        y_BHWC += gathered(module, f"{name}_bias", shard)[None, None, None]
    return y_BHWC
