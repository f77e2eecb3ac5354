"""Table lookup whose gradient is summed in the sharding of the table.

Shape letters: N rows of the table, B batch, L length, D width.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from ..sharding import Sharder

LOOKED_UP = ("lookup_batch", "length", "embed")


def lookup(
    table_ND: jax.Array,
    axes: tuple[str, str],
    index_BL: jax.Array,
    shard: Sharder,
    dtype: Any,
    *,
    gather: bool = False,
) -> jax.Array:
    """Returns table[index] as [B, L, D] in `dtype`, from the stored table.

    The width of the table may be sharded over mesh axes that also shard the batch.
    There are two ways then, and the one that moves fewer bytes is taken. Either the
    table is gathered, or each device looks up all examples in its shard of the width,
    and an all-to-all reshards the result from width to examples.

    For the gradient, the compiler alone might gather the gradients of all examples on
    every device. Here they are first resharded to width, then summed in float32.

    Args:
      gather: always gather the table, because it is needed elsewhere too.
    """
    positions = math.prod(shard.shard_shape(index_BL.shape, ("batch", "length")))
    keep_sharded = not gather and positions < table_ND.shape[0]
    if keep_sharded:
        table_ND = table_ND.astype(dtype)
        index_BL = shard(index_BL, LOOKED_UP[:2], role="param")
    else:
        table_ND = shard.weight(table_ND, axes, dtype)
    return _lookup(shard, axes, keep_sharded, table_ND, index_BL)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _lookup(shard, axes, keep_sharded, table_ND, index_BL):
    x_BLD = table_ND[index_BL]
    return shard(x_BLD, LOOKED_UP, role="param") if keep_sharded else x_BLD


def _forward(shard, axes, keep_sharded, table_ND, index_BL):
    # An array of zero width carries the number of rows and the dtype of the table.
    x_BLD = _lookup(shard, axes, keep_sharded, table_ND, index_BL)
    return x_BLD, (index_BL, table_ND[:, :0])


def _backward(shard, axes, keep_sharded, saved, g_BLD):
    index_BL, table_N0 = saved
    g_BLD = shard(g_BLD, LOOKED_UP, role="optimizer")
    index_BL = shard(index_BL, LOOKED_UP[:2], role="optimizer")
    grad = jnp.zeros((table_N0.shape[0], g_BLD.shape[-1]), jnp.float32)
    grad = grad.at[index_BL].add(g_BLD.astype(jnp.float32))
    return shard(grad.astype(table_N0.dtype), axes, role="optimizer"), None


_lookup.defvjp(_forward, _backward)
