"""Tables that are sharded by rows, and a lookup that never gathers them.

Each shard of the table looks up all indices and keeps the rows that it has; their sum
over the shards is the result. What moves are indices, rows that were looked up, and
their gradients: no collective grows with the table.

Shape letters: N rows of the table, S shards of them with R rows each, B batch, K width.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..sharding import Sharder
from .classifier import check_counts

AXIS = "rows"


class Table(nnx.Module):
    """An embedding table, whose rows have the logical axis `rows`.

    Attributes:
      num_rows: without those that only make shards equal.
    """

    def __init__(self, num_rows: int, width: int, pad_to: int, rngs: nnx.Rngs):
        self.num_rows = num_rows
        shape = (-(-num_rows // pad_to) * pad_to, width)
        value = jax.random.normal(rngs.params(), shape) * width**-0.5
        self.embedding = nnx.Param(value, axes=(AXIS, None))

    def __call__(self, index_B: jax.Array, shard: Sharder) -> jax.Array:
        """Returns the rows with these numbers; NaN for a number that is none."""
        known_B = jnp.where(index_B < self.num_rows, index_B, -1)
        return look_up_rows(self.embedding[...], AXIS, known_B, shard)


def check_tables(config: Any, *names: str) -> None:
    """Raises ValueError if a field is no tuple of sizes, or pad_rows_to is not one."""
    for name in names:
        if not getattr(config, name):
            raise ValueError(f"{name} must have at least one number, got ()")
    check_counts(config, *names, "pad_rows_to")


def look_up_rows(
    table_NK: jax.Array, axis: str, index_B: jax.Array, shard: Sharder
) -> jax.Array:
    """Returns table[index] as [B, K].

    A row that the table does not have is NaN, so that the step is not applied.

    Args:
      axis: the logical axis of the rows. The width has none: it is never sharded.
    """
    return _look_up(shard, axis, table_NK, index_B)


def by_shard(table_NK: jax.Array, axis: str, shard: Sharder) -> jax.Array:
    """Returns the table as [S, R, K], one shard of its rows after the other."""
    N, K = table_NK.shape
    R, _ = shard.shard_shape((N, K), (axis, None))
    return shard(table_NK.reshape(N // R, R, K), (axis, None, None))


def _places(axis, index_B, S, R, shard, batch):
    """Returns [S, B]: where each shard has each index, and R where it has it not."""
    local_SB = index_B[None] - R * jnp.arange(S, dtype=index_B.dtype)[:, None]
    local_SB = jnp.where((local_SB >= 0) & (local_SB < R), local_SB, R)
    return shard(local_SB, (axis, batch))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _look_up(shard, axis, table_NK, index_B):
    table_SRK = by_shard(table_NK, axis, shard)
    S, R, _ = table_SRK.shape
    place_SB = _places(axis, index_B, S, R, shard, "batch")
    take = functools.partial(jnp.take, axis=0, mode="fill", fill_value=0)
    part_SBK = shard(jax.vmap(take)(table_SRK, place_SB), (axis, "batch", None))
    x_BK = shard(part_SBK.sum(0), ("batch", None))
    is_known_B = (index_B >= 0) & (index_B < table_NK.shape[0])
    return jnp.where(is_known_B[:, None], x_BK, jnp.nan)


def _forward(shard, axis, table_NK, index_B):
    # An array of zero width carries the number of rows and the dtype of the table.
    return _look_up(shard, axis, table_NK, index_B), (index_B, table_NK[:, :0])


def _backward(shard, axis, saved, g_BK):
    index_B, table_N0 = saved
    N, K = table_N0.shape[0], g_BK.shape[-1]
    R, _ = shard.shard_shape((N, K), (axis, None))
    # Where the batch is sharded over mesh axes that do not shard the table, either the
    # gradients of all rows are gathered, or sums of the size of a shard are added up.
    batch = None if len(index_B) < 2 * R else "batch"
    # First where it was computed: the compiler would rather gather what it is made of.
    g_BK = shard(shard(g_BK, ("batch", None)), (batch, None))
    index_B = shard(index_B, (batch,))
    place_SB = _places(axis, index_B, N // R, R, shard, batch)

    def add(place_B):
        grad_RK = jnp.zeros((R, K), jnp.float32)
        return grad_RK.at[place_B].add(g_BK.astype(jnp.float32), mode="drop")

    grad_SRK = shard(jax.vmap(add)(place_SB), (axis, None, None))
    grad_NK = grad_SRK.reshape(N, K).astype(table_N0.dtype)
    return shard(grad_NK, (axis, None), role="optimizer"), None


_look_up.defvjp(_forward, _backward)
