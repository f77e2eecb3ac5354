"""Arrays as a mesh shards them, resolved once and remembered.

A search asks for the same arrays on the same mesh over and over, with other numbers of
microbatches and other remat. What does not depend on these is resolved once here.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

from ...sharding import Resolved, Rules, resolve
from ...sharding.resolve import resolve_dimensions
from ...sharding.rules import Role
from ..program.state import State

FLOAT32 = 4
# A TPU stores arrays in tiles of so many rows and lanes.
SUBLANES, LANES = 8, 128


class Sharded:
    """Arrays of any kind under one set of rules on one mesh.

    Attributes:
      trees: those of the state, each as sharded: params, opt_state, gradients, compute.
    """

    def __init__(
        self, rules: Rules, sizes: dict[str, int], tiled: bool, state: State, axes: Any
    ):
        self.rules, self.sizes, self.tiled = rules, sizes, tiled
        self._axes: dict[Any, tuple[tuple[str, ...], ...]] = {}
        self._bytes: dict[Any, int] = {}
        self._resident: dict[Any, dict[str, int]] = {}
        self.totals: dict[Any, float] = {}  # for arrays.py, of what it has summed
        trees: dict[str, tuple[Any, Any, Role]] = {
            "params": (state.params, axes.params, "param"),
            "opt_state": (state.opt_state, axes.opt_state, "optimizer"),
            "gradients": (state.params, axes.params, "optimizer"),
            "compute": (state.params, axes.params, "compute"),
        }
        self.trees: dict[str, Resolved] = {
            name: resolve(tree, rules, sizes, axes=tree_axes, role=role)
            for name, (tree, tree_axes, role) in trees.items()
        }

    def mesh_axes(
        self, axes: Any, shape: Sequence[int], role: Role, name: str = ""
    ) -> tuple[tuple[str, ...], ...]:
        """Returns the mesh axes that shard each dimension of an array."""
        key = axes, tuple(shape), role
        if key not in self._axes:
            dims = resolve_dimensions(
                axes,
                shape,
                self.rules,
                self.sizes,
                name=name or f"array {axes}",
                role=role,
            )
            self._axes[key] = tuple(d.mesh_axes for d in dims)
        return self._axes[key]

    def bytes(self, array: Any) -> int:
        """Returns what a device stores of one array of the model's costs."""
        key = array.axes, array.shape, array.itemsize, array.rows
        if key not in self._bytes:
            axes = self.mesh_axes(array.axes, array.shape, "compute", array.name)
            shape = self.local_shape(array.shape, axes)
            if array.rows and self.tiled:
                shape[-1] = math.ceil(shape[-1] / LANES) * LANES
            self._bytes[key] = self.stored(shape, array.itemsize)
        return self._bytes[key]

    def resident(self, tree: Resolved, itemsize: int | None = None) -> dict[str, int]:
        """Returns the bytes on a device of each array of one of the four trees."""
        key = id(tree), itemsize  # the trees live as long as this does
        if key not in self._resident:
            self._resident[key] = {
                array.path: self.stored(
                    self.local_shape(
                        array.shape, [d.mesh_axes for d in array.dimensions]
                    ),
                    itemsize or array.itemsize,
                )
                for array in tree.arrays
            }
        return self._resident[key]

    def local_shape(
        self, shape: Sequence[int], axes: Sequence[Sequence[str]]
    ) -> list[int]:
        return [
            size // math.prod(self.sizes[axis] for axis in each)
            for size, each in zip(shape, axes, strict=True)
        ]

    def stored(self, shape: Sequence[int], itemsize: int) -> int:
        if self.tiled:
            return tiled_bytes(tuple(shape), itemsize)
        return itemsize * math.prod(shape)


@functools.lru_cache(maxsize=4096)
def tiled_bytes(shape: tuple[int, ...], itemsize: int) -> int:
    """Returns bytes in tiles of 8 x 128 values; of 16 bits, 16 x 128.

    The compiler tiles the two dimensions that need the least padding.
    """
    sizes = [size for size in shape if size > 1] or [1]
    rows = SUBLANES * FLOAT32 // itemsize if itemsize < FLOAT32 else SUBLANES
    if len(sizes) == 1:
        return itemsize * math.ceil(sizes[0] / LANES) * LANES
    return itemsize * min(
        math.prod(
            math.ceil(n / LANES) * LANES
            if i == lanes
            else math.ceil(n / rows) * rows
            if i == sublanes
            else n
            for i, n in enumerate(sizes)
        )
        for lanes, sublanes in itertools.permutations(range(len(sizes)), 2)
    )
