"""Arrays as a mesh shards them, resolved once and remembered.

A search asks for the same arrays on the same mesh over and over, with other numbers of
microbatches and other remat. What does not depend on these is resolved once here.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from ...sharding import Resolved, Rules, resolve
from ...sharding.resolve import resolve_dimensions
from ...sharding.rules import Role
from ...sharding.tree import ResolvedArray
from ..program.state import State

FLOAT32 = 4
# A TPU stores arrays in tiles of so many rows and lanes.
SUBLANES, LANES = 8, 128


class Weight(NamedTuple):
    """A parameter: as stored, its gradient, and as a device computes with it."""

    stored: ResolvedArray
    gradient: ResolvedArray
    whole: ResolvedArray

    @property
    def elements(self) -> int:
        """How many a device computes with."""
        return self.whole.bytes_per_device // self.whole.itemsize

    @property
    def used(self) -> tuple[str, ...]:
        """The mesh axes that shard it in computation too."""
        return tuple(a for d in self.whole.dimensions for a in d.mesh_axes)

    @property
    def gathered(self) -> tuple[str, ...]:
        """The mesh axes over which it is gathered to compute with it."""
        return _only_in(self.stored, self.whole)

    @property
    def scattered(self) -> tuple[str, ...]:
        """The mesh axes over which its gradient is scattered."""
        return _only_in(self.gradient, self.whole)


class Sharded:
    """Arrays of any kind under one set of rules on one mesh.

    Attributes:
      trees: those of the state, each as sharded: params, opt_state, variables,
        gradients, compute.
      weights: the parameters by their paths.
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
            "variables": (state.variables, axes.variables, "param"),
            "gradients": (state.params, axes.params, "optimizer"),
            "compute": (state.params, axes.params, "compute"),
        }
        self.trees: dict[str, Resolved] = {
            name: resolve(tree, rules, sizes, axes=tree_axes, role=role)
            for name, (tree, tree_axes, role) in trees.items()
        }
        each = (self.trees[n].arrays for n in ("params", "gradients", "compute"))
        weights = map(Weight, *each)
        self.weights = {weight.stored.path: weight for weight in weights}

    def mesh_axes(
        self, axes: Any, shape: Sequence[int], name: str = ""
    ) -> tuple[tuple[str, ...], ...]:
        """Returns the mesh axes that shard each dimension, as it is computed with."""
        key, name = (axes, tuple(shape)), name or f"array {axes}"
        if key not in self._axes:
            dims = resolve_dimensions(
                axes, shape, self.rules, self.sizes, name=name, role="compute"
            )
            self._axes[key] = tuple(d.mesh_axes for d in dims)
        return self._axes[key]

    def bytes(self, array: Any) -> int:
        """Returns what a device stores of an array of the model's costs."""
        if array not in self._bytes:
            axes = self.mesh_axes(array.axes, array.shape, array.name)
            shape = self.local_shape(array.shape, axes)
            if array.rows and self.tiled:
                shape[-1] = math.ceil(shape[-1] / LANES) * LANES
            size = array.count * self.stored(shape, array.itemsize)
            self._bytes[array] = round(size * self._room(array))
        return self._bytes[array]

    def _room(self, array: Any) -> float:
        """Returns how many times an array its buffer has room for."""
        if array.room is None:
            return 1
        name, size, limit = array.room
        (axes,) = self.mesh_axes((name,), (size,))
        return min(limit, math.prod(self.sizes[axis] for axis in axes))

    def resident(self, tree: str, itemsize: int | None = None) -> dict[str, int]:
        """Returns bytes on a device of each array, in its own dtype or another."""
        key = tree, itemsize
        if key not in self._resident:
            found = self._resident[key] = {}
            for array in self.trees[tree].arrays:
                axes = [d.mesh_axes for d in array.dimensions]
                shape = self.local_shape(array.shape, axes)
                found[array.path] = self.stored(shape, itemsize or array.itemsize)
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


def _only_in(stored: ResolvedArray, whole: ResolvedArray) -> tuple[str, ...]:
    """Returns the mesh axes that shard an array as stored, but not as computed with."""
    both = {axis for d in whole.dimensions for axis in d.mesh_axes}
    return tuple(a for d in stored.dimensions for a in d.mesh_axes if a not in both)


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
