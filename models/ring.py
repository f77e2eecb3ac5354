"""Attention of each device's queries to the keys of all devices, block by block.

Both forms go through the same blocks, one for each device, starting with the device's
own. In the ring they travel by permutes, while the device computes with the one before;
after a gather each device has them all. Causal attention expects the zig-zag order
(zigzag.py): the device with the chunks r and 2c - 1 - r then multiplies two pairs of
chunks in every step, none of which the mask would empty.

Runs inside a shard_map. Shape letters: B batch, N queries or keys of a device, H heads,
G key-value heads, R query heads of each, K head width.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from .online_softmax import (
    Keys,
    Queries,
    Result,
    Sums,
    attend,
    gradients,
    nothing_seen,
)

# The blocks on the diagonal are computed in up to so many stripes, each without the
# keys after its last query.
STRIPES = 8


@dataclasses.dataclass(frozen=True)
class Ring:
    """Blocks of keys travel from each device to the next.

    Attributes:
      axes: the mesh axes that shard the positions.
    """

    axes: tuple[str, ...]

    def start(self, own: Keys) -> Any:
        """Returns what to read the first block of another device from."""
        return self._send(own)

    def read(self, at: Any, step: Any) -> Keys:
        """Returns the block of the device `step` places before this one."""
        del step
        return at

    def move(self, at: Any) -> Any:
        """Returns what to read the next block from. It can run beside a step."""
        return self._send(at)

    def open(self, grads: Any) -> Any:
        """Returns the collected gradients of keys, given those of the own block."""
        return grads

    def collect(self, collected: Any, grads: Any, step: Any) -> Any:
        """Adds the gradients of the block that was read at `step`."""
        del step
        return jax.tree.map(jnp.add, self._send(collected), grads)

    def close(self, collected: Any) -> Any:
        """Returns the gradients of the own block, from all devices."""
        return self._send(collected)

    def _send(self, tree: Any) -> Any:
        num = lax.axis_size(self.axes)
        to_next = [(r, (r + 1) % num) for r in range(num)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axes, to_next), tree)


@dataclasses.dataclass(frozen=True)
class Gathered:
    """All blocks are gathered on every device; methods as those of Ring."""

    axes: tuple[str, ...]

    def start(self, own: Keys) -> Any:
        return jax.tree.map(lambda x: lax.all_gather(x, self.axes), own)

    def read(self, at: Any, step: Any) -> Keys:
        index = self._index(step)
        return jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, index, 0, keepdims=False), at
        )

    def move(self, at: Any) -> Any:
        return at

    def open(self, grads: Any) -> Any:
        num = lax.axis_size(self.axes)
        zeros = jax.tree.map(lambda x: jnp.zeros((num, *x.shape), x.dtype), grads)
        return self.collect(zeros, grads, 0)

    def collect(self, collected: Any, grads: Any, step: Any) -> Any:
        index = self._index(step)
        return jax.tree.map(
            lambda all, x: lax.dynamic_update_index_in_dim(all, x, index, 0),
            collected,
            grads,
        )

    def close(self, collected: Any) -> Any:
        return jax.tree.map(
            lambda x: lax.psum_scatter(x, self.axes, scatter_dimension=0), collected
        )

    def _index(self, step: Any) -> Any:
        return (lax.axis_index(self.axes) - step) % lax.axis_size(self.axes)


Blocks = Ring | Gathered


def attend_in_blocks(
    blocks: Blocks, causal: bool, q_BNHK, k_BNGK, v_BNGK, segments_BN=None
) -> jax.Array:
    """Returns attention [B, N, H, K] of this device's queries to all keys."""
    B, N, H, K = q_BNHK.shape
    G = k_BNGK.shape[2]
    scaled = (q_BNHK.astype(jnp.float32) * K**-0.5).astype(q_BNHK.dtype)
    q_BGRNK = jnp.moveaxis(scaled.reshape(B, N, G, H // G, K), 1, 3)
    k_BGNK, v_BGNK = (x.swapaxes(1, 2) for x in (k_BNGK, v_BNGK))
    out_BGRNK: Any = _attend(blocks, causal, q_BGRNK, k_BGNK, v_BGNK, segments_BN)
    return jnp.moveaxis(out_BGRNK, 3, 1).reshape(B, N, H, K)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(blocks, causal, q, k, v, segments):
    return _forward(blocks, causal, q, k, v, segments)[0]


def _forward(blocks, causal, q, k, v, segments):
    queries, own = _sides(q, k, v, segments)
    seen = (
        _own(nothing_seen(q), queries, own)
        if causal
        else attend(nothing_seen(q), queries, own)
    )

    def step(seen: Sums, keys: Keys, number) -> Sums:
        if not causal:
            return attend(seen, queries, keys)
        return _other(seen, queries, keys, _is_before(blocks, number))

    def body(carry, number):
        seen, at = carry
        following = blocks.move(at)
        return (step(seen, blocks.read(at, number), number), following), None

    num = lax.axis_size(blocks.axes)
    carry, _ = lax.scan(body, (seen, blocks.start(own)), jnp.arange(1, num - 1))
    seen = step(carry[0], blocks.read(carry[1], num - 1), num - 1)
    out = (seen.out_BGRNK / seen.total_BGRN1).astype(q.dtype)
    out = checkpoint_name(out, "attended")
    log = checkpoint_name(seen.top_BGRN1 + jnp.log(seen.total_BGRN1), "attended")
    return out, (q, k, v, segments, out, log)


def _backward(blocks, causal, saved, g):
    q, k, v, segments, out, log = saved
    queries, own = _sides(q, k, v, segments)
    delta = jnp.sum(
        out.astype(jnp.float32) * g.astype(jnp.float32), axis=-1, keepdims=True
    )
    result = Result(log, delta, g)
    dq, dkv = (_own_gradients if causal else gradients)(queries, own, result)

    def step(keys: Keys, number):
        if not causal:
            return gradients(queries, keys, result)
        return _other_gradients(queries, keys, result, _is_before(blocks, number))

    def body(carry, number):
        dq, dkv, at = carry
        following = blocks.move(at)
        more, of_keys = step(blocks.read(at, number), number)
        return (dq + more, blocks.collect(dkv, of_keys, number), following), None

    num = lax.axis_size(blocks.axes)
    carry = (dq, blocks.open(dkv), blocks.start(own))
    (dq, dkv, at), _ = lax.scan(body, carry, jnp.arange(1, num - 1))
    more, of_keys = step(blocks.read(at, num - 1), num - 1)
    dk, dv = blocks.close(blocks.collect(dkv, of_keys, num - 1))
    return (dq + more).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_attend.defvjp(_forward, _backward)


def _sides(q, k, v, segments) -> tuple[Queries, Keys]:
    if segments is None:
        return Queries(q, None), Keys(k, v, None)
    return (
        Queries(q, segments[:, None, None, :, None]),
        Keys(k, v, segments[:, None]),
    )


def _is_before(blocks: Blocks, step) -> jax.Array:
    """Returns whether the keys of a step are of a device before this one."""
    return lax.axis_index(blocks.axes) >= step


def _own(seen: Sums, queries: Queries, keys: Keys) -> Sums:
    """Attends to the device's own two chunks of keys."""
    (seen_early, early), (seen_late, late) = _halves((seen, queries), 3)
    keys_early, keys_late = _halves(keys, 2)
    first = _striped(seen_early, early, keys_early)
    second = attend(_striped(seen_late, late, keys_late), late, keys_early)
    return _join(first, second, 3)


def _striped(seen: Sums, queries: Queries, keys: Keys) -> Sums:
    """Attends to the keys of the same chunk: no query to a key after it."""
    parts = []
    for start, stop in _stripes(queries.q_BGRNK.shape[3]):
        before, rows = _cut((seen, queries), 3, start, stop)
        parts.append(attend(before, rows, _cut(keys, 2, 0, stop), diagonal=start))
    return jax.tree.map(lambda *xs: jnp.concatenate(xs, axis=3), *parts)


def _other(seen: Sums, queries: Queries, keys: Keys, is_before) -> Sums:
    """Attends to the two chunks of keys of another device.

    The late queries attend to its early keys. If that device is before this one, so do
    the early queries; if it is after, the late queries attend to its late keys too.
    """
    (seen_early, early), (seen_late, late) = _halves((seen, queries), 3)
    keys_early, keys_late = _halves(keys, 2)
    seen_late = attend(seen_late, late, keys_early)
    found = attend(
        _select(is_before, seen_early, seen_late),
        _select(is_before, early, late),
        _select(is_before, keys_early, keys_late),
    )
    return _join(
        _select(is_before, found, seen_early), _select(is_before, seen_late, found), 3
    )


def _own_gradients(queries: Queries, keys: Keys, result: Result):
    (early, result_early), (late, result_late) = _halves((queries, result), 3)
    keys_early, keys_late = _halves(keys, 2)
    dq_early, dkv_early = _striped_gradients(early, keys_early, result_early)
    dq_late, dkv_late = _striped_gradients(late, keys_late, result_late)
    dq, dkv = gradients(late, keys_early, result_late)
    dkv_early = jax.tree.map(jnp.add, dkv_early, dkv)
    return _join(dq_early, dq_late + dq, 3), _join(dkv_early, dkv_late, 2)


def _striped_gradients(queries: Queries, keys: Keys, result: Result):
    dqs = []
    dkv = jax.tree.map(lambda x: jnp.zeros_like(x, jnp.float32), tuple(keys[:2]))
    for start, stop in _stripes(queries.q_BGRNK.shape[3]):
        rows, of_rows = _cut((queries, result), 3, start, stop)
        dq, more = gradients(rows, _cut(keys, 2, 0, stop), of_rows, diagonal=start)
        dqs.append(dq)
        dkv = jax.tree.map(lambda all, x: all.at[:, :, : x.shape[2]].add(x), dkv, more)
    return jnp.concatenate(dqs, axis=3), dkv


def _other_gradients(queries: Queries, keys: Keys, result: Result, is_before):
    (early, result_early), (late, result_late) = _halves((queries, result), 3)
    keys_early, keys_late = _halves(keys, 2)
    dq_late, dkv_early = gradients(late, keys_early, result_late)
    dq, dkv = gradients(
        _select(is_before, early, late),
        _select(is_before, keys_early, keys_late),
        _select(is_before, result_early, result_late),
    )
    zero = jnp.zeros_like(dq)
    dq = _join(_select(is_before, dq, zero), dq_late + _select(is_before, zero, dq), 3)
    zeros = jax.tree.map(jnp.zeros_like, dkv)
    dkv_early = jax.tree.map(jnp.add, dkv_early, _select(is_before, dkv, zeros))
    return dq, _join(dkv_early, _select(is_before, zeros, dkv), 2)


def _stripes(count: int) -> list[tuple[int, int]]:
    num = next(num for num in range(STRIPES, 0, -1) if count % num == 0)
    size = count // num
    return [(start, start + size) for start in range(0, count, size)]


def _cut(tree: Any, dim: int, start: int, stop: int) -> Any:
    return jax.tree.map(lambda x: lax.slice_in_dim(x, start, stop, axis=dim), tree)


def _halves(tree: Any, dim: int) -> list[Any]:
    size = jax.tree.leaves(tree)[0].shape[dim]
    return [_cut(tree, dim, 0, size // 2), _cut(tree, dim, size // 2, size)]


def _join(early: Any, late: Any, dim: int) -> Any:
    return jax.tree.map(lambda *both: jnp.concatenate(both, axis=dim), early, late)


def _select(condition: jax.Array, yes: Any, no: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)
