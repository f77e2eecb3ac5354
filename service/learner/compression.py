"""Packs what a learner contributes on its devices, before it reaches the host.

Each shard is packed by one jitted program: the pieces of its blocks, one by one. With
top-k, what was not sent is a residual that is added to the next contribution (error
feedback): a float32 array like each leaf, sharded like it, which belongs to the state
of the learner. The bits follow from the arrays and their shards alone, so a replay on
the same mesh computes them again.
"""

import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..blocks.box import Box
from ..blocks.layout import Layout
from ..blocks.pieces import pieces
from ..wire.codecs import PLAIN, Codec
from ..wire.tensors import Packed
from . import shards
from .shards import Arrays, Host, Piece


class _Packing(NamedTuple):
    """What is compiled for one shard: its box, and the boxes that are packed."""

    codec: Codec
    box: Box
    parts: tuple[Box, ...]


class Compressor:
    """Makes the pieces of contributions.

    Args:
      codec: how they are packed.
    """

    def __init__(self, codec: Codec, layout: Layout):
        self._codec, self._layout = codec, layout

    @property
    def has_residual(self) -> bool:
        return self._codec.share is not None

    def contribution(
        self,
        arrays: Arrays,
        fragment: int | None = None,
        *,
        base: Host | None = None,
        residual: Arrays | None = None,
    ) -> tuple[list[Piece], dict[int, jax.Array]]:
        """Returns the pieces that this process sends, and the new residual.

        Args:
          arrays: gradients, or parameters if there is a base.
          fragment: only the blocks of this fragment; None for all.
          base: what the parameters were when they were merged last; base - arrays is
            what is sent.
          residual: of these leaves, with any sharding; none if it is empty.
        """
        if self._codec.is_plain:
            host = shards.to_host(arrays)
            if base is not None:
                host = {k: np.asarray(base[k] - array) for k, array in host.items()}
            return list(shards.to_pieces(self._layout, host, fragment)), {}
        residual = residual or {}
        made: list[tuple[int, int, Box, list[jax.Array]]] = []
        left: dict[int, jax.Array] = {}
        for leaf, array in arrays.items():
            old = None
            if leaf in residual:
                old = _by_device(placed_like(residual[leaf], array.sharding))
            rests = []
            for shard in array.addressable_shards:
                if shard.replica_id and old is None:
                    continue
                box = shards.box_of(shard.index, array.shape)
                found = self._pieces(leaf, box, fragment)
                plan = _Packing(self._codec, box, tuple(part for _, _, part in found))
                minus = None if base is None else base[leaf, box]
                packed, rest = _pack(
                    plan, shard.data, minus, None if old is None else old[shard.device]
                )
                rests.append(rest)
                if not shard.replica_id:
                    pairs = zip(found, packed, strict=True)
                    made += [(*place, parts) for place, parts in pairs]
            if old is not None:
                left[leaf] = jax.make_array_from_single_device_arrays(
                    array.shape, array.sharding, rests
                )
        return list(self._to_host(made)), left

    def _pieces(
        self, leaf: int, box: Box, fragment: int | None
    ) -> list[tuple[int, int, Box]]:
        return [
            (block, slab, part)
            for block, slab, part in pieces(self._layout, leaf, box)
            if fragment in (None, self._layout.fragment_of(block))
        ]

    def _to_host(
        self, made: list[tuple[int, int, Box, list[jax.Array]]]
    ) -> Iterator[Piece]:
        """All copies are started before the first is waited for."""
        for *_, parts in made:
            for part in parts:
                part.copy_to_host_async()
        for block, slab, box, parts in made:
            data = self._codec.to_bytes([np.asarray(part) for part in parts])
            packed = Packed(self._codec, box.shape, data)
            yield Piece(block, slab, box.start, packed)


def packed_share(layout: Layout, codec: Codec) -> float:
    """Returns the bytes of all blocks, each packed as one piece, relative to float32.

    So much a learner of one device sends, or receives of one change.
    """
    boxes = [slab.box for block in layout.blocks for slab in block.slabs]
    return sum(map(codec.nbytes, boxes)) / sum(map(PLAIN.nbytes, boxes))


def placed_like(array: jax.Array, sharding: Any) -> jax.Array:
    """Returns the array with this sharding; every process must call it."""
    if array.sharding.is_equivalent_to(sharding, array.ndim):
        return array
    return jax.jit(_same, out_shardings=sharding)(array)


def _same(array: jax.Array) -> jax.Array:
    return array


def _by_device(array: jax.Array) -> Mapping[Any, jax.Array]:
    return {shard.device: shard.data for shard in array.addressable_shards}


@functools.partial(jax.jit, static_argnums=0)
def _pack(
    plan: _Packing, array: jax.Array, base: Any, residual: jax.Array | None
) -> tuple[list[list[jax.Array]], jax.Array | None]:
    """Returns the packed parts of one shard, and what is left over."""
    x = array.astype(jnp.float32)
    if base is not None:
        x = base - x
    if residual is not None:
        x = x + residual
    made = []
    for part in plan.parts:
        index = (*part.slices(inside=plan.box), ...)
        piece = x[index]
        packed = plan.codec.pack(piece, part, jnp, _top)
        made.append(packed)
        if residual is not None:
            left = piece - plan.codec.unpack(packed, part, jnp)
            # What is not finite makes the servers skip the commit; it must not stay.
            left = jnp.where(jnp.isfinite(left), left, 0.0)
            residual = residual.at[index].set(left)
    return made, residual


def _top(rows: jax.Array, k: int) -> jax.Array:
    return jax.lax.top_k(rows, k)[1]
