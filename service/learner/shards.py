"""Moves the shards of jax arrays to and from servers, in canonical coordinates.

Each process sends and receives only what its own devices hold. An element that several
devices hold is sent once, by the device with replica 0, and received once per process.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ..blocks.box import Box
from ..blocks.layout import Layout
from ..blocks.pieces import pieces
from ..wire.tensors import Sent

Arrays = Mapping[int, jax.Array]  # by the number of their leaf in the layout
Host = dict[tuple[int, Box], np.ndarray]  # what this process holds, by leaf and box


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a block, as it is sent: `array` has the shape of the part."""

    block: int
    slab: int
    start: tuple[int, ...]
    array: Sent

    def unpacked(self) -> np.ndarray:
        """Returns the numbers that whoever receives it finds."""
        if isinstance(self.array, np.ndarray):
            return self.array
        box = Box.at(self.start, self.array.shape)
        return self.array.codec.from_bytes(self.array.data, box)


def box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """Returns the box of a shard, given its index into the global array."""
    bounds = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
    return Box(tuple(b[0] for b in bounds), tuple(b[1] for b in bounds))


def to_host(arrays: Arrays, *, replicas: bool = False) -> Host:
    """Copies the shards that this process sends to the host, as float32.

    All copies are started before the first is waited for.

    Args:
      replicas: copies everything that this process holds, in arrays that may be
        changed, and not only what it sends.
    """
    own = [
        (leaf, shard)
        for leaf, array in arrays.items()
        for shard in array.addressable_shards
        if replicas or shard.replica_id == 0
    ]
    for _, shard in own:
        shard.data.copy_to_host_async()
    return {
        (leaf, box_of(shard.index, arrays[leaf].shape)): np.array(
            shard.data, np.float32, copy=True if replicas else None
        )
        for leaf, shard in own
    }


def to_pieces(layout: Layout, host: Host, fragment: int | None) -> Iterator[Piece]:
    """Cuts what this process holds along the blocks of the layout.

    Args:
      fragment: only the blocks of this fragment; None for all.
    """
    for (leaf, box), array in host.items():
        for block, slab, part in pieces(layout, leaf, box):
            if fragment is not None and layout.fragment_of(block) != fragment:
                continue
            # The dots keep an array without dimensions an array.
            yield Piece(block, slab, part.start, array[(*part.slices(box), ...)])


def wanted(shapes: Mapping[int, tuple[int, ...]], shardings: Mapping[int, Any]) -> Host:
    """Returns buffers for everything that the devices of this process need."""
    buffers: Host = {}
    for leaf, shape in shapes.items():
        for index in shardings[leaf].addressable_devices_indices_map(shape).values():
            box = box_of(index, shape)
            if (leaf, box) not in buffers:
                buffers[leaf, box] = np.empty(box.shape, np.float32)
    return buffers


def to_devices(
    buffers: Host, like: Mapping[int, jax.ShapeDtypeStruct]
) -> dict[int, jax.Array]:
    """Returns global arrays with the shapes, dtypes and shardings of `like`."""
    arrays = {}
    for leaf, x in like.items():
        sharding: Any = x.sharding
        placed = [
            jax.device_put(
                buffers[leaf, box_of(index, x.shape)].astype(x.dtype), device
            )
            for device, index in sharding.addressable_devices_indices_map(
                x.shape
            ).items()
        ]
        arrays[leaf] = jax.make_array_from_single_device_arrays(
            x.shape, sharding, placed
        )
    return arrays
