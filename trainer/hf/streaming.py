"""Reads tensors into the shardings of a mesh, one at a time.

A process holds one tensor in host memory, and each device its shards of our arrays and
of that tensor.
"""

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ...sharding.logical_axes import path_name
from .files import Tensors
from .tensors import Piece


def read_params(tensors: Tensors, parts: Iterable[Piece], placed: Any) -> Any:
    """Returns our parameters, each array in its sharding.

    Args:
      placed: the parameters as ShapeDtypeStructs with shardings.
    """
    by_leaf: dict[str, list[Piece]] = {}
    for piece in parts:
        by_leaf.setdefault(piece.leaf, []).append(piece)
    leaves, form = jax.tree_util.tree_flatten_with_path(placed)
    expected = {path_name(path) for path, _ in leaves}
    assert expected == set(by_leaf), expected ^ set(by_leaf)
    return form.unflatten(
        [_leaf(tensors, by_leaf[path_name(path)], leaf) for path, leaf in leaves]
    )


def _leaf(tensors: Tensors, parts: list[Piece], placed: Any) -> jax.Array:
    if len(parts) == 1 and parts[0].layer is None:
        return _place(tensors, parts[0], placed.shape, placed.dtype, placed.sharding)
    zeros = jax.jit(
        functools.partial(jnp.zeros, placed.shape, placed.dtype),
        out_shardings=placed.sharding,
    )
    leaf = zeros()
    write = jax.jit(_write, donate_argnums=0, out_shardings=placed.sharding)
    for piece in parts:
        layer = () if piece.layer is None else (piece.layer,)
        size = piece.size if piece.layer is None else (1, *piece.size)
        spec = (*placed.sharding.spec, *(None for _ in size))[: len(size)]
        same = [n == whole for n, whole in zip(size, placed.shape, strict=True)]
        names = (x if fits else None for x, fits in zip(spec, same, strict=True))
        sharding = NamedSharding(placed.sharding.mesh, P(*names))
        part = _place(tensors, piece, size, placed.dtype, sharding)
        leaf = write(leaf, part, np.array((*layer, *piece.start), np.int32))
        # The next tensor is read once this one is no longer needed.
        jax.block_until_ready(leaf)
    return leaf


def _write(leaf: jax.Array, part: jax.Array, start: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice(leaf, part, tuple(start))


def _place(
    tensors: Tensors, piece: Piece, shape: Any, dtype: Any, sharding: Any
) -> jax.Array:
    """Reads a tensor; each device gets its shard, padded with zeros up to `shape`."""
    host = piece.ours(tensors.read(piece.name))
    host = host.reshape((1,) * (len(shape) - host.ndim) + host.shape)

    def shard(index: Any) -> np.ndarray:
        wanted = [i.indices(n) for i, n in zip(index, shape, strict=True)]
        found = host[index].astype(dtype, copy=False)
        pad = [
            (0, end - begin - n)
            for (begin, end, _), n in zip(wanted, found.shape, strict=True)
        ]
        return np.pad(found, pad) if any(n for _, n in pad) else found

    array = jax.make_array_from_callback(shape, sharding, shard)
    return jax.block_until_ready(array)


def misfits(tensors: Tensors, parts: Iterable[Piece]) -> Mapping[str, str]:
    """Returns {tensor: why} for those whose shape is not what config.json says."""
    shapes = {piece.name: (tensors.shape(piece.name), piece.shape) for piece in parts}
    return {
        name: f"has shape {list(found)}, but config.json says {list(expected)}"
        for name, (found, expected) in shapes.items()
        if found != expected
    }
