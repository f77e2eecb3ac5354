"""Rows of a table by index, with a gradient that is summed where the table lives.

Shape letters: N rows of the table, B batch, L length, D width.
"""

import functools

import jax
import jax.numpy as jnp

from ..sharding import Sharder


def lookup(table_ND: jax.Array, index_BL: jax.Array, shard: Sharder) -> jax.Array:
    """table[index] as [B, L, D].

    Left alone, the compiler may gather every example's gradient on every device to sum
    a table cut over the devices that share the batch. Here it first turns the cut from
    examples to width (an all-to-all), and sums in float32.
    """
    return _lookup(shard, table_ND.shape[0], table_ND, index_BL)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _lookup(shard, num_rows, table_ND, index_BL):
    return table_ND[index_BL]


def _forward(shard, num_rows, table_ND, index_BL):
    # An empty array carries the table's type; its values are not needed.
    return table_ND[index_BL], (index_BL, table_ND[:0])


def _backward(shard, num_rows, saved, g_BLD):
    index_BL, table_0D = saved
    g_BLD = shard(g_BLD, ("lookup_batch", "length", "embed"), role="optimizer")
    index_BL = shard(index_BL, ("lookup_batch", "length"), role="optimizer")
    grad = jnp.zeros((num_rows, g_BLD.shape[-1]), jnp.float32)
    grad = grad.at[index_BL].add(g_BLD.astype(jnp.float32))
    return grad.astype(table_0D.dtype), None


_lookup.defvjp(_forward, _backward)
