"""Puts batches of host arrays on a mesh, which may span several processes."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from .logical_axes import is_named
from .resolve import Indivisible


def rows_first(tree: Any) -> Any:
    """Returns logical axes that name the first dimension of each array `batch`.

    Returns None for a tree that carries its own names.
    """
    if any(map(is_named, jax.tree.leaves(tree, is_leaf=is_named))):
        return None
    return jax.tree.map(
        lambda x: ("batch", *(None,) * (np.ndim(x) - 1)) if np.ndim(x) else (), tree
    )


def place_global(x: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Returns the array, sharded. Every process passes the full array."""
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def place_local(
    name: str, x: np.ndarray, sharding_of: Callable[[tuple[int, ...]], NamedSharding]
) -> jax.Array:
    """Returns a global array. Each process passes only the rows its devices hold.

    Args:
      sharding_of: returns the sharding for a global shape.
    """
    if not x.ndim:
        return place_global(x, sharding_of(()))
    shape, sharding = _global_shape(name, x, sharding_of)
    starts = _starts(sharding, shape)

    def shard(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        start, stop, _ = index[0].indices(shape[0])
        return x[starts[start] : starts[start] + stop - start][:, *index[1:]]

    return jax.make_array_from_callback(shape, sharding, shard)


def _global_shape(
    name: str, x: np.ndarray, sharding_of: Callable[[tuple[int, ...]], NamedSharding]
) -> tuple[tuple[int, ...], NamedSharding]:
    """Returns the global shape and sharding that put len(x) rows on this process."""
    refused: Indivisible | None = None
    for num_parts in range(jax.process_count(), 0, -1):
        shape = (len(x) * num_parts, *x.shape[1:])
        try:
            sharding = sharding_of(shape)
        except Indivisible as error:
            refused = error
            continue
        if sum(stop - start for start, stop in _rows(sharding, shape)) == len(x):
            return shape, sharding
    if refused is not None:
        raise refused
    raise ValueError(
        f"{name}: this process passes {len(x)} rows, but its devices hold that many "
        "rows of no global batch. Pass the global batch with local=False."
    )


def _rows(sharding: NamedSharding, shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Returns the (start, stop) of every block of rows on this process's devices."""
    indices = sharding.addressable_devices_indices_map(shape).values()
    return sorted({i[0].indices(shape[0])[:2] for i in indices if i is not None})


def _starts(sharding: NamedSharding, shape: tuple[int, ...]) -> dict[int, int]:
    """Maps the global start of each block to its start in this process's rows."""
    starts, total = {}, 0
    for start, stop in _rows(sharding, shape):
        starts[start] = total
        total += stop - start
    return starts
