"""Rows of a table by index, with a gradient that is summed where the table lives.

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
    """table[index] as [B, L, D] in `dtype`, of a table as it is stored.

    Where the width of the table is cut over devices that share the batch, it is
    gathered, or each device looks everybody's examples up in its part and an all-to-all
    turns the cut from width to examples: whichever moves less.

    Left alone, the compiler may gather every example's gradient on every device to sum
    it. Here it first turns the cut back to width, and sums in float32.

    Args:
      gather: always gather it, since it is needed whole for something else.
    """
    positions = math.prod(shard.part(index_BL.shape, ("batch", "length")))
    stays = not gather and positions < table_ND.shape[0]
    if stays:
        table_ND = table_ND.astype(dtype)
        index_BL = shard(index_BL, LOOKED_UP[:2], role="param")
    else:
        table_ND = shard.weight(table_ND, axes, dtype)
    return _lookup(shard, axes, stays, table_ND, index_BL)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _lookup(shard, axes, stays, table_ND, index_BL):
    found_BLD = table_ND[index_BL]
    return shard(found_BLD, LOOKED_UP, role="param") if stays else found_BLD


def _forward(shard, axes, stays, table_ND, index_BL):
    # An array of no width carries the table's rows and type; its values are not needed.
    found_BLD = _lookup(shard, axes, stays, table_ND, index_BL)
    return found_BLD, (index_BL, table_ND[:, :0])


def _backward(shard, axes, stays, saved, g_BLD):
    index_BL, table_N0 = saved
    g_BLD = shard(g_BLD, LOOKED_UP, role="optimizer")
    index_BL = shard(index_BL, LOOKED_UP[:2], role="optimizer")
    grad = jnp.zeros((table_N0.shape[0], g_BLD.shape[-1]), jnp.float32)
    grad = grad.at[index_BL].add(g_BLD.astype(jnp.float32))
    return shard(grad.astype(table_N0.dtype), axes, role="optimizer"), None


_lookup.defvjp(_forward, _backward)
