"""Exact attention to keys that arrive in blocks, and its gradients.

A running maximum and a running sum for each query make the softmax exact whatever the
blocks are. Scores exist for one tile at a time, forward and backward.

Shape letters: B batch, G key-value heads, R query heads of each, N queries, S keys,
K head width. A last dimension of 1 is written 1.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# Scores that a mask removes. Finite, so that a query without any key so far has no NaN;
# the first block that a query meets must have one that it attends to.
REMOVED = -1e30
# Most scores of a head that exist at once.
TILE = 512 * 1024


class Keys(NamedTuple):
    """A block of keys; `segments` [B, 1, S] or None."""

    k_BGSK: jax.Array
    v_BGSK: jax.Array
    segments: jax.Array | None


class Queries(NamedTuple):
    """Queries, scaled; `segments` [B, 1, 1, N, 1] or None."""

    q_BGRNK: jax.Array
    segments: jax.Array | None


class Sums(NamedTuple):
    """What queries have seen so far: weighted values, largest score, sum of shares."""

    out_BGRNK: jax.Array
    top_BGRN1: jax.Array
    total_BGRN1: jax.Array


class Result(NamedTuple):
    """What the gradients need of a finished forward pass.

    Attributes:
      log_BGRN1: logarithm of the sum of exponentials of each query's scores.
      delta_BGRN1: sum of the output times its gradient.
    """

    log_BGRN1: jax.Array
    delta_BGRN1: jax.Array
    g_BGRNK: jax.Array


def nothing_seen(q_BGRNK: jax.Array) -> Sums:
    one = q_BGRNK[..., :1].astype(jnp.float32)
    return Sums(
        jnp.zeros_like(q_BGRNK, jnp.float32),
        jnp.full_like(one, REMOVED),
        jnp.zeros_like(one),
    )


def attend(
    seen: Sums, queries: Queries, keys: Keys, diagonal: int | None = None
) -> Sums:
    """Returns the sums after these queries have attended to these keys too.

    Args:
      diagonal: query i attends to keys 0 to i + diagonal; None attends to all of them.
    """

    def tile(carry, part, start):
        seen, queries = part
        scores = _scores(queries, keys, diagonal, start)
        top = jnp.maximum(seen.top_BGRN1, scores.max(axis=-1, keepdims=True))
        shares = jnp.exp(scores - top)
        before = jnp.exp(seen.top_BGRN1 - top)
        total = seen.total_BGRN1 * before + shares.sum(axis=-1, keepdims=True)
        values = _product("bgrns,bgsk->bgrnk", shares, keys.v_BGSK)
        return carry, Sums(seen.out_BGRNK * before + values, top, total)

    return _over_tiles(tile, (), (seen, queries), keys)[1]


def gradients(
    queries: Queries, keys: Keys, result: Result, diagonal: int | None = None
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Returns the gradients of queries, and of keys and values, in float32."""

    def tile(carry, part, start):
        queries, result = part
        shares = jnp.exp(_scores(queries, keys, diagonal, start) - result.log_BGRN1)
        g, q, k = result.g_BGRNK, queries.q_BGRNK, keys.k_BGSK
        dv = _product("bgrns,bgrnk->bgsk", shares, g)
        dshares = _product("bgrnk,bgsk->bgrns", g, keys.v_BGSK)
        dscores = shares * (dshares - result.delta_BGRN1)
        dk = _product("bgrns,bgrnk->bgsk", dscores, q)
        dq = _product("bgrns,bgsk->bgrnk", dscores, k)
        return (carry[0] + dk, carry[1] + dv), dq

    zeros = (
        jnp.zeros_like(keys.k_BGSK, jnp.float32),
        jnp.zeros_like(keys.v_BGSK, jnp.float32),
    )
    dkv, dq = _over_tiles(tile, zeros, (queries, result), keys)
    return dq, dkv


def _scores(queries: Queries, keys: Keys, diagonal: int | None, start) -> jax.Array:
    scores = jnp.einsum(
        "bgrnk,bgsk->bgrns",
        queries.q_BGRNK,
        keys.k_BGSK,
        preferred_element_type=jnp.float32,
    )
    if diagonal is not None:
        row = lax.broadcasted_iota(jnp.int32, (1, 1, 1, *scores.shape[3:]), 3)
        column = lax.broadcasted_iota(jnp.int32, (1, 1, 1, *scores.shape[3:]), 4)
        scores = jnp.where(column <= row + (start + diagonal), scores, REMOVED)
    if keys.segments is not None:
        same = queries.segments == keys.segments[:, :, None, None]
        scores = jnp.where(same, scores, REMOVED)
    return scores


def _product(dims: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns a product in the dtype of y, added up in float32."""
    return jnp.einsum(dims, x.astype(y.dtype), y, preferred_element_type=jnp.float32)


def _over_tiles(tile: Callable, carry: Any, parts: Any, keys: Keys):
    """Runs tile(carry, part, index of its first query) over tiles of the queries."""
    count = jax.tree.leaves(parts)[0].shape[3]
    size = _tile_size(count, keys.k_BGSK.shape[2])
    if size == count:
        return tile(carry, parts, 0)

    def split(x):
        x = x.reshape(*x.shape[:3], count // size, size, x.shape[4])
        return jnp.moveaxis(x, 3, 0)

    def join(x):
        x = jnp.moveaxis(x, 0, 3)
        return x.reshape(*x.shape[:3], count, x.shape[5])

    starts = jnp.arange(0, count, size)
    carry, out = lax.scan(
        lambda carry, xs: tile(carry, *xs), carry, (jax.tree.map(split, parts), starts)
    )
    return carry, jax.tree.map(join, out)


def _tile_size(num_queries: int, num_keys: int) -> int:
    """Returns the largest divisor of the queries whose scores fit into a tile."""
    most = max(1, TILE // num_keys)
    parts = range(1, num_queries + 1)
    return next(
        num_queries // num
        for num in parts
        if num_queries % num == 0 and num_queries // num <= most
    )
