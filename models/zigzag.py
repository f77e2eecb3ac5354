"""The zig-zag order of positions, which balances causal attention over devices.

A sequence is split into 2c chunks for c devices, and device r has the chunks r and
2c - 1 - r: an early one, which attends to few keys, and a late one, which attends to
many. Any two devices then have the same work.

Shape letters: B batch, L length, N length of a chunk.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

from ..sharding import Sharder

POSITIONS = ("batch", "length")


def axes_of(shard: Sharder, length: int) -> tuple[str, ...]:
    """Returns the mesh axes that shard the positions of a sequence."""
    entry = (*shard.spec((length,), ("length",)), None)[0]
    return (entry,) if isinstance(entry, str) else entry or ()


def chunks_of(rank: jax.Array | int, num: int) -> tuple[jax.Array | int, ...]:
    """Returns the two chunks of a device, of `num` devices."""
    return rank, 2 * num - 1 - rank


def zigzag(batch: Mapping[str, jax.Array], shard: Sharder) -> dict[str, jax.Array]:
    """Returns arrays [B, L] with their positions in zig-zag order.

    Each device sends two chunks and receives two; nothing is gathered.
    """
    length = next(iter(batch.values())).shape[1]
    axes = axes_of(shard, length)

    def local(x_BL: jax.Array) -> jax.Array:
        return _reorder(x_BL, axes)

    def one(x_BL: jax.Array) -> jax.Array:
        spec = shard.spec(x_BL.shape, POSITIONS)
        return shard.local(local, (spec,), spec)(x_BL)

    return {name: one(x) for name, x in batch.items()}


def _reorder(x_BL: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Exchanges the two chunks of each device for those of the zig-zag order.

    In natural order device r has the chunks 2r and 2r + 1. All even chunks go to
    different devices, and so do all odd ones: each kind is one permute.
    """
    num = lax.axis_size(axes)
    halves = jnp.split(x_BL, 2, axis=1)

    def home(chunk: int) -> int:
        return min(chunk, 2 * num - 1 - chunk)

    even, odd = (
        lax.ppermute(half, axes, [(r, home(2 * r + kind)) for r in range(num)])
        for kind, half in enumerate(halves)
    )
    # Device r's early chunk is r, even if r is; the late one is of the other kind.
    is_even = lax.axis_index(axes) % 2 == 0
    early, late = jnp.where(is_even, even, odd), jnp.where(is_even, odd, even)
    return jnp.concatenate([early, late], axis=1)
