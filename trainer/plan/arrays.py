"""The arrays that a part of the memory is made of.

memory.py names them; here they become bytes, and rows that show each array whole and as
a device has it.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal

from ...sharding.resolve import resolve_dimensions
from .case import FLOAT32, Case

if TYPE_CHECKING:
    from .memory import Part

Tree = Literal["params", "opt_state", "gradients", "compute"]
Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Weights:
    """Arrays of one of a case's trees.

    Attributes:
      which: "blocks", "outside", "matrices" (of blocks), or a path; "" for all.
      itemsize: of their type here; None for their own.
      times: how often they are there; of one layer of several, a part.
      tiled_as: the itemsize by which their tiles are counted, where it is another.
    """

    tree: Tree
    which: str = ""
    itemsize: int | None = None
    times: float = 1
    tiled_as: int | None = None


@dataclasses.dataclass(frozen=True)
class Values:
    """An array of the model's costs, so many times."""

    array: Any
    times: float = 1


@dataclasses.dataclass(frozen=True)
class Row:
    """One array; `cut` is its shape on a device, `bytes` those of all its copies."""

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
    return round(sum(size for of in arrays for _, _, size in _found(case, of)))


def rows(case: Case, part: "Part") -> list[Row]:
    """The arrays of a part, largest first; their bytes sum to the part's."""
    if not part.arrays:
        return [Row(part.detail, (), (), (), "", 1, part.bytes)] if part.bytes else []
    found = []
    for of in part.arrays:
        for array, cut, size in _found(case, of):
            whole = array.axes, array.shape, cut
            if isinstance(of, Values):
                name, count, itemsize = array.name, array.count, array.itemsize
                dtype = _dtype(case, itemsize)
            else:
                name, count = array.path, 1
                dtype = _dtype(case, of.itemsize) if of.itemsize else array.dtype
            found.append(Row(name, *whole, dtype, count * of.times, round(size)))
    found.sort(key=lambda row: -row.bytes)
    # Each was rounded, and so was the sum.
    rest = part.bytes - sum(row.bytes for row in found)
    found[0] = dataclasses.replace(found[0], bytes=found[0].bytes + rest)
    return found


def _found(case: Case, of: Weights | Values) -> Iterator[tuple[Any, Shape, float]]:
    """(array, its shape on a device, bytes there, with all its copies)."""
    if isinstance(of, Values):
        array = of.array
        dims = resolve_dimensions(
            array.axes,
            array.shape,
            case.rules,
            case.sizes,
            name=array.name,
            role="compute",
        )
        cut = _cut(case, dims)
        yield array, cut, of.times * array.count * case.stored(cut, array.itemsize)
        return
    is_named = _named(case, of.which)
    for array in getattr(case, of.tree).arrays:
        if is_named(array.path):
            itemsize = of.itemsize or array.itemsize
            tiled = of.tiled_as or itemsize
            cut = _cut(case, array.dimensions)
            yield array, cut, of.times * case.stored(cut, tiled) * itemsize / tiled


def _named(case: Case, which: str) -> Callable[[str], bool]:
    """Whether an array with a path is one of those."""
    if which == "matrices":
        return {p.weight for p in case.costs.products}.__contains__
    if which == "outside":
        return lambda path: not case.is_block(path)
    if which == "blocks":
        return case.is_block
    return lambda path: which in ("", path)


def _cut(case: Case, dimensions: Iterable[Any]) -> Shape:
    return tuple(
        d.size // math.prod(case.sizes[axis] for axis in d.mesh_axes)
        for d in dimensions
    )


def _dtype(case: Case, itemsize: int) -> str:
    if itemsize == case.itemsize:
        return case.config.model.compute_dtype  # type: ignore
    return {FLOAT32: "float32", 1: "bool"}.get(itemsize, f"{8 * itemsize} bits")
