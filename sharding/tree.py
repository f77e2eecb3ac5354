"""A resolved tree: what every array of a tree became, to print, compare and use."""

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .mesh import Sizes, mesh_sizes
from .naming import axes_of, is_named, path_name, unwrap
from .resolve import Axes, Dimension, resolve_dimensions, spec_of
from .rules import Role, Rules


@dataclasses.dataclass(frozen=True)
class ResolvedArray:
    """One array: its shape and names, and how each dimension came out."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    dimensions: tuple[Dimension, ...]
    ways: int  # over how many devices one copy is spread

    @property
    def spec(self) -> P:
        return spec_of(self.dimensions)

    @property
    def axes(self) -> Axes:
        return tuple(d.name for d in self.dimensions)

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    @property
    def bytes_per_device(self) -> int:
        return self.bytes // self.ways

    @property
    def why(self) -> str:
        """Which plan cut which dimension, and which candidates lost, in words."""
        parts = []
        for d in self.dimensions:
            won = f"{d.plan} cuts {'+'.join(d.mesh_axes)}" if d.mesh_axes else "whole"
            lost = "; ".join(map(str, d.lost))
            if d.mesh_axes or d.lost:
                parts.append(f"{d.name}: {won}{f' [{lost}]' if lost else ''}")
        return ", ".join(parts)

    def to_json(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "axes": list(self.axes),
            "spec": [
                list(d.mesh_axes) if len(d.mesh_axes) > 1 else (*d.mesh_axes, None)[0]
                for d in self.dimensions
            ],
            "bytes": self.bytes,
            "bytes_per_device": self.bytes_per_device,
            "ways": self.ways,
            "why": self.why,
        }


@dataclasses.dataclass(frozen=True)
class Resolved:
    """Every array of a tree, resolved for one mesh and one role."""

    arrays: tuple[ResolvedArray, ...]
    treedef: Any
    mesh: dict[str, int]
    role: Role

    @property
    def bytes(self) -> int:
        return sum(a.bytes for a in self.arrays)

    @property
    def bytes_per_device(self) -> int:
        return sum(a.bytes_per_device for a in self.arrays)

    @property
    def used(self) -> set[tuple[str, Role]]:
        """(name, role) of every row that was asked for; see `rules.lint`."""
        return {(n, self.role) for a in self.arrays for n in a.axes if n is not None}

    def replicated(self) -> list[ResolvedArray]:
        """Arrays whole on every device, largest first; empty on one device."""
        if math.prod(self.mesh.values()) == 1:
            return []
        whole = [a for a in self.arrays if a.ways == 1]
        return sorted(whole, key=lambda a: -a.bytes)

    def specs(self) -> Any:
        return jax.tree.unflatten(self.treedef, [a.spec for a in self.arrays])

    def shardings(self, mesh: Mesh) -> Any:
        """NamedShardings in the shape of the tree."""
        if mesh_sizes(mesh) != self.mesh:
            raise ValueError(
                f"resolved for mesh {self.mesh}, but shardings were asked for mesh "
                f"{mesh_sizes(mesh)}. Resolve again for that mesh."
            )
        return jax.tree.unflatten(
            self.treedef, [NamedSharding(mesh, a.spec) for a in self.arrays]
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "role": self.role,
            "mesh": self.mesh,
            "arrays": [a.to_json() for a in self.arrays],
            "totals": {
                "arrays": len(self.arrays),
                "elements": sum(math.prod(a.shape) for a in self.arrays),
                "bytes": self.bytes,
                "bytes_per_device": self.bytes_per_device,
                "replicated_bytes": sum(a.bytes for a in self.replicated()),
            },
        }

    def dumps(self) -> str:
        return json.dumps(self.to_json(), indent=1)

    def __str__(self) -> str:
        head = ("parameter", "shape", "axes", "spec", "per device", "why")
        rows = [
            (
                a.path,
                "x".join(map(str, a.shape)) or "scalar",
                ",".join(str(n or "-") for n in a.axes),
                "(" + ", ".join(_cut(d) for d in a.dimensions) + ")",
                human_bytes(a.bytes_per_device),
                a.why or "whole",
            )
            for a in self.arrays
        ]
        return align([head, *rows])


def _cut(dimension: Dimension) -> str:
    return "+".join(dimension.mesh_axes) or "-"


def resolve(
    tree: Any,
    rules: Rules,
    mesh: Mesh | AbstractMesh | Sizes,
    *,
    axes: Any = None,
    role: Role = "param",
    strict: bool = True,
) -> Resolved:
    """Resolves a tree of arrays, ShapeDtypeStructs or NNX variables.

    Args:
      axes: a tree of the same form with a tuple of logical names for each array; left
        out for trees that carry their names (NNX state). See `axes_from_paths` for
        trees that have none.
    """
    if axes is None:
        axes = axes_of(tree)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_named)
    sizes = mesh_sizes(mesh)
    arrays = []
    for (path, leaf), names in zip(leaves, treedef.flatten_up_to(axes), strict=True):
        name, array = path_name(path), unwrap(leaf)
        if not isinstance(names, tuple):
            raise ValueError(
                f"{name}: its logical axes must be a tuple of names, got {names!r}"
            )
        dimensions = resolve_dimensions(
            names, array.shape, rules, sizes, name=name, role=role, strict=strict
        )
        ways = math.prod(sizes[axis] for d in dimensions for axis in d.mesh_axes)
        dtype = array.dtype
        arrays.append(
            ResolvedArray(
                name, tuple(array.shape), dtype.name, dtype.itemsize, dimensions, ways
            )
        )
    return Resolved(tuple(arrays), treedef, sizes, role)


def diff(a: Resolved, b: Resolved) -> list[str]:
    """Lines that say which arrays are cut differently, or stand in one only."""
    left, right = ({x.path: x for x in r.arrays} for r in (a, b))
    lines = []
    for path in dict.fromkeys([*left, *right]):
        old, new = left.get(path), right.get(path)
        if old is None or new is None:
            lines.append(f"{'+' if old is None else '-'} {path}")
        elif (old.spec, old.shape, old.ways) != (new.spec, new.shape, new.ways):
            lines.append(
                f"~ {path}: {old.spec} {human_bytes(old.bytes_per_device)} -> "
                f"{new.spec} {human_bytes(new.bytes_per_device)}"
            )
    return lines


def human_bytes(count: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def align(rows: Sequence[Sequence[str]]) -> str:
    """Rows as text in columns; the last column is free in width."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return "\n".join(
        "  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[-1]])
        for row in rows
    )
