"""How a plan cuts arrays over a mesh, found once and remembered.

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
# The smallest part of an array that a TPU stores: so many rows of so many lanes.
SUBLANES, LANES = 8, 128


class Cutting:
    """Arrays of any kind under one plan on one mesh.

    Attributes:
      params, opt_state, gradients, compute: the state as each is cut.
    """

    def __init__(
        self, rules: Rules, sizes: dict[str, int], tiled: bool, state: State, axes: Any
    ):
        self.rules, self.sizes, self.tiled = rules, sizes, tiled
        self._cuts: dict[Any, tuple[tuple[str, ...], ...]] = {}
        self._bytes: dict[Any, int] = {}
        self._resident: dict[Any, dict[str, int]] = {}
        self.totals: dict[Any, float] = {}  # for arrays.py, of what it has summed
        self.params = self._tree(state.params, axes.params, "param")
        self.opt_state = self._tree(state.opt_state, axes.opt_state, "optimizer")
        self.gradients = self._tree(state.params, axes.params, "optimizer")
        self.compute = self._tree(state.params, axes.params, "compute")

    def _tree(self, tree: Any, axes: Any, role: Role) -> Resolved:
        return resolve(tree, self.rules, self.sizes, axes=axes, role=role)

    def cuts(
        self, axes: Any, shape: Sequence[int], role: Role, name: str = ""
    ) -> tuple[tuple[str, ...], ...]:
        """The mesh axes that cut each dimension of an array."""
        key = axes, tuple(shape), role
        if key not in self._cuts:
            dims = resolve_dimensions(
                axes,
                shape,
                self.rules,
                self.sizes,
                name=name or f"array {axes}",
                role=role,
            )
            self._cuts[key] = tuple(d.mesh_axes for d in dims)
        return self._cuts[key]

    def bytes(self, array: Any) -> int:
        """What a device stores of an array of the model's costs, one of its count."""
        key = array.axes, array.shape, array.itemsize, array.rows
        if key not in self._bytes:
            cuts = self.cuts(array.axes, array.shape, "compute", array.name)
            shape = [
                size // math.prod(self.sizes[axis] for axis in cut)
                for size, cut in zip(array.shape, cuts, strict=True)
            ]
            if array.rows and self.tiled:
                shape[-1] = math.ceil(shape[-1] / LANES) * LANES
            self._bytes[key] = self.stored(shape, array.itemsize)
        return self._bytes[key]

    def resident(self, tree: Resolved, itemsize: int | None = None) -> dict[str, int]:
        """Bytes on a device of each array of one of the four trees."""
        key = id(tree), itemsize  # the trees live as long as this does
        if key not in self._resident:
            self._resident[key] = {
                array.path: self.stored(
                    [
                        d.size // math.prod(self.sizes[axis] for axis in d.mesh_axes)
                        for d in array.dimensions
                    ],
                    itemsize or array.itemsize,
                )
                for array in tree.arrays
            }
        return self._resident[key]

    def stored(self, shape: Sequence[int], itemsize: int) -> int:
        if self.tiled:
            return tiled_bytes(tuple(shape), itemsize)
        return itemsize * math.prod(shape)


@functools.lru_cache(maxsize=4096)
def tiled_bytes(shape: tuple[int, ...], itemsize: int) -> int:
    """Bytes in tiles of 8 x 128 values (of 32 bits; of 16 bits, twice as many rows).

    The compiler lays two dimensions into tiles so that least is filled up.
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
