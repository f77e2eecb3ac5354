"""The arrays that a part of the memory consists of.

memory.py names them; here they become bytes, and rows that show each array with its
global shape and its shape on a device.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal

from .scenario import Case
from .sharded import FLOAT32

if TYPE_CHECKING:
    from .memory import Part

Tree = Literal["params", "opt_state", "variables", "gradients", "compute"]


@dataclasses.dataclass(frozen=True)
class Weights:
    """Arrays of one of the trees of the state.

    Attributes:
      which: "blocks", "outside", "matrices" (of blocks), or a path; "" for all.
      itemsize: of the dtype that they have here; None for their own.
      times: how many copies there are; a fraction for one layer of several.
      tiled_as: the itemsize by which their tiles are counted, if it is another.
    """

    tree: Tree
    which: str = ""
    itemsize: int | None = None
    times: float = 1
    tiled_as: int | None = None


@dataclasses.dataclass(frozen=True)
class Values:
    """An array of the model's costs, and how many copies there are."""

    array: Any
    times: float = 1


@dataclasses.dataclass(frozen=True)
class DeviceArray:
    """An array; `cut` is its shape on a device, `bytes` those of all its copies."""

    name: str
    axes: tuple[str | None, ...]
    shape: tuple[int, ...]
    cut: tuple[int, ...]
    dtype: str
    count: float
    bytes: int


def of_each(arrays: Iterable[Any], times: float = 1) -> tuple[Values, ...]:
    return tuple(Values(array, times) for array in arrays)


def total_bytes(case: Case, arrays: Iterable[Weights | Values]) -> int:
    known, total = case.sharded.totals, 0.0
    for of in arrays:
        if isinstance(of, Values):
            total += of.times * case.bytes(of.array)
            continue
        if of not in known:
            known[of] = sum(size for _, size in _found(case, of))
        total += known[of]
    return round(total)


def rows(case: Case, part: "Part") -> list[DeviceArray]:
    """Returns the arrays of a part, largest first; their bytes sum to the part's."""
    if not part.arrays:
        one = DeviceArray(part.detail, (), (), (), "", 1, part.bytes)
        return [one] if part.bytes else []
    found = [
        _row(case, of, array, size)
        for of in part.arrays
        for array, size in _found(case, of)
    ]
    found.sort(key=lambda row: -row.bytes)
    # Each was rounded, and so was the sum.
    rest = part.bytes - sum(row.bytes for row in found)
    found[0] = dataclasses.replace(found[0], bytes=found[0].bytes + rest)
    return found


def _found(case: Case, of: Weights | Values) -> Iterator[tuple[Any, float]]:
    """Yields (array, bytes on a device of all its copies)."""
    if isinstance(of, Values):
        yield of.array, of.times * case.bytes(of.array)
        return
    is_named = _named(case, of.which)
    sizes = case.sharded.resident(of.tree, of.tiled_as or of.itemsize)
    scale = of.times
    if of.tiled_as and of.itemsize:
        scale *= of.itemsize / of.tiled_as
    for array in case.sharded.trees[of.tree].arrays:
        if is_named(array.path):
            yield array, scale * sizes[array.path]


def _row(case: Case, of: Weights | Values, array: Any, size: float) -> DeviceArray:
    if isinstance(of, Values):
        name, count = array.name, array.count * of.times
        dtype = _dtype(case, array.itemsize)
        axes = case.sharded.mesh_axes(array.axes, array.shape, name)
    else:
        name, count = array.path, of.times
        dtype = _dtype(case, of.itemsize) if of.itemsize else array.dtype
        axes = [d.mesh_axes for d in array.dimensions]
    cut = tuple(case.sharded.local_shape(array.shape, axes))
    return DeviceArray(name, array.axes, array.shape, cut, dtype, count, round(size))


def _named(case: Case, which: str) -> Callable[[str], bool]:
    """Returns a test for the paths that `which` means."""
    if which == "matrices":
        return {p.weight for p in case.costs.products}.__contains__
    if which == "outside":
        return lambda path: not case.is_block(path)
    if which == "blocks":
        return case.is_block
    return lambda path: which in ("", path)


def _dtype(case: Case, itemsize: int) -> str:
    if itemsize == case.itemsize:
        return case.config.model.compute_dtype  # type: ignore
    return {FLOAT32: "float32", 1: "bool"}.get(itemsize, f"{8 * itemsize} bits")
