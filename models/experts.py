"""Sends tokens to their experts and adds up the results: one device's program.

Experts may be sharded over mesh axes that also shard the batch. Every device then sends
each of its tokens to the devices that have the token's experts, and gets the results
back: two all-to-alls. All functions work on the shards of one device.

  dropless       every token is computed. Rows are sorted by expert and multiplied by
                 grouped products (jax.lax.ragged_dot).
  with capacity  each expert takes a fixed number of tokens of each example, which does
                 not depend on the mesh; the rest are dropped.

Shape letters: T tokens, N = T * K rows to send, K experts of a token, E experts, X
experts of this device, P devices that share the experts, S rows of one pair of devices,
R rows received, D width, F hidden width, B examples, L length, C capacity.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# (rows [R, D], rows of each expert [X]) -> [R, D]
Grouped = Callable[[jax.Array, jax.Array], jax.Array]
# Platforms whose compiler has an all-to-all that sends only the rows there are. On
# others, each pair of devices exchanges as many rows as there could be.
RAGGED_PLATFORMS = ("tpu",)


class Ways(NamedTuple):
    """How experts are sharded: over which manual mesh axes, and how many ways.

    Attributes:
      ragged: whether only the rows there are travel.
      replicated: whether the devices have the same tokens, so that none travel and the
        results of all are to be summed.
    """

    axes: tuple[str, ...]
    size: int
    ragged: bool
    replicated: bool = False


def dropless(
    x_TD: jax.Array, experts_TK: jax.Array, num_experts: int, ways: Ways, ffn: Grouped
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns each expert's result [T, K, D], what was kept [T, K], and rows received.

    Args:
      ffn: computes rows that are sorted by expert.
    """
    T, K = experts_TK.shape
    experts_N = experts_TK.reshape(-1)
    order_N = jnp.argsort(experts_N, stable=True)
    rows_ND = x_TD[order_N // K]
    counts_E = jnp.zeros(num_experts, jnp.int32).at[experts_N].add(1)
    kept_N = jnp.ones(experts_N.shape, bool)
    if ways.size == 1:
        y_ND, received = ffn(rows_ND, counts_E), jnp.sum(counts_E)
    elif ways.replicated:
        y_ND, received = _own(rows_ND, counts_E, ways, ffn)
    else:
        # A token has at most min(K, X) experts on one device.
        most = T * min(K, num_experts // ways.size)
        exchange = _ragged if ways.ragged else _padded
        y_ND, kept_N, received = exchange(rows_ND, counts_E, most, ways, ffn)
    back_N = jnp.argsort(order_N)
    return y_ND[back_N].reshape(T, K, -1), kept_N[back_N].reshape(T, K), received


def _own(rows_ND, counts_E, ways: Ways, ffn: Grouped):
    """Computes the rows of this device's experts; the others are zero."""
    me, counts_PX = lax.axis_index(ways.axes), counts_E.reshape(ways.size, -1)
    starts_P = _starts(jnp.sum(counts_PX, axis=1))
    # Its rows are moved to the front.
    y_ND = ffn(jnp.roll(rows_ND, -starts_P[me], axis=0), counts_PX[me])
    return jnp.roll(y_ND, starts_P[me], axis=0), jnp.sum(counts_PX[me])


def _padded(rows_ND, counts_E, most: int, ways: Ways, ffn: Grouped):
    """Exchanges `most` rows between each pair of devices, as many as there could be."""
    P, (N, D) = ways.size, rows_ND.shape
    counts_PX = counts_E.reshape(P, -1)
    sizes_P = jnp.sum(counts_PX, axis=1)
    starts_P = _starts(sizes_P)
    slots_S = jnp.arange(most)
    index_PS = starts_P[:, None] + slots_S[None]
    is_row_PS = slots_S[None] < sizes_P[:, None]
    sent_PSD = jnp.where(is_row_PS[..., None], rows_ND[jnp.minimum(index_PS, N - 1)], 0)
    got_PSD, got_PX = _all_to_all(sent_PSD, ways), _all_to_all(counts_PX, ways)
    ends_PX = jnp.cumsum(got_PX, axis=1)
    # Rows come sorted by expert from each device; those after the last are no rows.
    expert_PS = jnp.sum(slots_S[None, :, None] >= ends_PX[:, None], axis=2)
    y_RD = _by_expert(got_PSD.reshape(-1, D), expert_PS.reshape(-1), got_PX, ffn)
    back_PSD = _all_to_all(y_RD.reshape(got_PSD.shape), ways)
    to_N = jnp.repeat(jnp.arange(P), sizes_P, total_repeat_length=N)
    slot_N = jnp.arange(N) - starts_P[to_N]
    kept_N = slot_N < most
    y_ND = back_PSD[to_N, jnp.minimum(slot_N, most - 1)]
    return jnp.where(kept_N[:, None], y_ND, 0), kept_N, jnp.sum(got_PX)


def _ragged(rows_ND, counts_E, most: int, ways: Ways, ffn: Grouped):
    """Exchanges only the rows there are, into a buffer for as many as could be."""
    P, (N, D) = ways.size, rows_ND.shape
    me = lax.axis_index(ways.axes)
    counts_PE = lax.all_gather(counts_E, ways.axes)  # of every device
    counts_PPX = counts_PE.reshape(P, P, -1)  # source, destination, expert
    sizes_PP = jnp.sum(counts_PPX, axis=2)
    sent_P, got_P, got_PX = sizes_PP[me], sizes_PP[:, me], counts_PPX[:, me]
    before_PP = jnp.cumsum(sizes_PP, axis=0) - sizes_PP  # where a source's rows begin
    within_PP = jnp.cumsum(sizes_PP, axis=1) - sizes_PP  # and a destination's
    empty_RD = jnp.zeros((P * most, D), rows_ND.dtype)
    got_RD = lax.ragged_all_to_all(
        rows_ND,
        _typed(empty_RD, rows_ND),
        _starts(sent_P),
        sent_P,
        before_PP[me],
        got_P,
        axis_name=ways.axes,
    )
    ends = jnp.cumsum(got_PX.reshape(-1))
    segment_R = jnp.searchsorted(ends, jnp.arange(P * most), side="right")
    is_row_R = segment_R < len(ends)
    num_here = got_PX.shape[1]
    expert_R = jnp.where(is_row_R, segment_R % num_here, num_here)
    y_RD = _by_expert(got_RD, expert_R, got_PX, ffn)
    y_ND = lax.ragged_all_to_all(
        y_RD,
        _typed(jnp.zeros_like(rows_ND), rows_ND),
        _starts(got_P),
        got_P,
        within_PP[:, me],
        sent_P,
        axis_name=ways.axes,
    )
    return y_ND, _typed(jnp.ones(N, bool), counts_E), jnp.sum(got_PX)


def _by_expert(rows_RD, expert_R, counts_PX, ffn: Grouped) -> jax.Array:
    """Returns ffn of rows in any order; rows without an expert are zero."""
    order_R = jnp.argsort(expert_R, stable=True)
    y_RD = ffn(rows_RD[order_R], jnp.sum(counts_PX, axis=0))
    return y_RD[jnp.argsort(order_R)]


def grouped(
    rows_RD: jax.Array,
    counts_X: jax.Array,
    hidden: Callable[[jax.Array, Callable], jax.Array],
) -> jax.Array:
    """Returns rows, sorted by expert, times the weights of their experts.

    Rows after the last group hold anything: a product of garbage and zero may be NaN,
    so these rows are selected away, before and after.

    Args:
      hidden: (rows, product of rows with [X, ., .]) -> rows.
    """
    is_row_R1 = (jnp.arange(rows_RD.shape[0]) < jnp.sum(counts_X))[:, None]

    def product(rows, w_XDF):
        return lax.ragged_dot(rows, w_XDF, counts_X)

    y_RD = hidden(jnp.where(is_row_R1, rows_RD, 0), product)
    return jnp.where(is_row_R1, y_RD, 0)


def with_capacity(
    x_BLD: jax.Array,
    experts_BLK: jax.Array,
    num_experts: int,
    capacity: int,
    ways: Ways,
    ffn: Callable[[jax.Array], jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns each expert's result [B, L, K, D], what was kept, and rows received.

    First choices come before second ones, then tokens by position.

    Args:
      ffn: computes [X, R, D], with R rows for each expert of this device.
    """
    (B, L, K), E, C = experts_BLK.shape, num_experts, capacity
    experts_BN = experts_BLK.swapaxes(1, 2).reshape(B, K * L)
    chosen_BNE = jax.nn.one_hot(experts_BN, E, dtype=jnp.int32)
    places_BNE = jnp.cumsum(chosen_BNE, axis=1)
    place_BN = jnp.take_along_axis(places_BNE, experts_BN[..., None], 2)[..., 0] - 1
    kept_BN = place_BN < C
    slot_BN = jnp.where(kept_BN, experts_BN * C + place_BN, E * C)
    rows_B1 = jnp.arange(B)[:, None]
    # The token in each slot; L where there is none.
    token_BS = jnp.full((B, E * C + 1), L, jnp.int32)
    positions_BN = jnp.broadcast_to(jnp.arange(K * L, dtype=jnp.int32) % L, (B, K * L))
    token_BS = (
        _typed(token_BS, experts_BLK).at[rows_B1, slot_BN].set(positions_BN)[:, :-1]
    )
    sent_BSD = x_BLD[rows_B1, jnp.minimum(token_BS, L - 1)]
    sent_BSD = jnp.where((token_BS < L)[..., None], sent_BSD, 0)
    sent = sent_BSD.reshape(B, E, C, -1).swapaxes(0, 1).reshape(E, B * C, -1)
    here = _all_to_all(sent, ways, concat=1)  # [X, P * B * C, D]
    back = _all_to_all(ffn(here), ways, split=1, concat=0)
    y_BSD = back.reshape(E, B, C, -1).swapaxes(0, 1).reshape(B, E * C, -1)
    y_BND = y_BSD[rows_B1, jnp.minimum(slot_BN, E * C - 1)]
    y_BND = jnp.where(kept_BN[..., None], y_BND, 0)
    filled = jnp.sum((token_BS < L).reshape(B, ways.size, -1), axis=(0, 2))
    received = jnp.sum(_all_to_all(filled, ways))
    return (
        y_BND.reshape(B, K, L, -1).swapaxes(1, 2),
        kept_BN.reshape(B, K, L).swapaxes(1, 2),
        received,
    )


def _all_to_all(x: jax.Array, ways: Ways, split: int = 0, concat: int = 0):
    if ways.size == 1:
        return x
    return lax.all_to_all(x, ways.axes, split, concat, tiled=True)


def _starts(sizes_P: jax.Array) -> jax.Array:
    return jnp.cumsum(sizes_P) - sizes_P


def _typed(x: jax.Array, like: jax.Array) -> jax.Array:
    """Returns x typed as varying over the manual axes that `like` varies over."""
    missing = jax.typeof(like).mat.varying - jax.typeof(x).mat.varying
    return lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x
