"""The resolved layout of a tree: how each array is sharded, to print, compare, use."""

import dataclasses
import json
import math
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .logical_axes import axes_of, is_array, is_named, path_name, unwrap
from .mesh import Sizes, mesh_sizes
from .resolve import (
    Axes,
    Dimension,
    refuse_unknown_axes,
    resolve_dimensions,
    spec_of,
    split_unit,
)
from .rules import Role, Rules, check_role
from .text import align
from .text import human_bytes as human_bytes


@dataclasses.dataclass(frozen=True)
class ResolvedArray:
    """One array: its shape, its logical axes, and how each dimension is sharded."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    dimensions: tuple[Dimension, ...]
    ways: int  # number of distinct shards

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
        """Which plan shards each dimension, and which candidates lost, as text."""
        parts = []
        for d in self.dimensions:
            won = f"over {'+'.join(d.mesh_axes)}" if d.mesh_axes else "replicated"
            by = f" by {d.plan}" if d.plan else ""
            lost = "; ".join(map(str, d.lost))
            if d.name is not None:
                parts.append(f"{d.name} {won}{by}{f' [{lost}]' if lost else ''}")
        return ", ".join(parts) or ("no names" if self.shape else "scalar")

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
    """Every array of a tree, resolved for one mesh and one role.

    Attributes:
      treedef: the tree structure, with `None` for each leaf that is not an array.
    """

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
        """The (name, role) of every lookup, for `lint`."""
        names = {n for a in self.arrays for n in a.axes if n is not None}
        return {(split_unit(name)[0], self.role) for name in names}

    def replicated(self) -> list[ResolvedArray]:
        """Returns the fully replicated arrays, largest first; none on one device."""
        if math.prod(self.mesh.values()) == 1:
            return []
        arrays = [a for a in self.arrays if a.ways == 1]
        return sorted(arrays, key=lambda a: -a.bytes)

    def specs(self) -> Any:
        return jax.tree.unflatten(self.treedef, [a.spec for a in self.arrays])

    def shardings(self, mesh: Mesh) -> Any:
        """Returns NamedShardings with the structure of the tree."""
        if mesh_sizes(mesh) != self.mesh:
            raise ValueError(
                f"resolved for mesh {self.mesh}, but shardings were requested for mesh "
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
                _size(a),
                ",".join(str(n or "-") for n in a.axes),
                _spec_text(a),
                human_bytes(a.bytes_per_device),
                a.why,
            )
            for a in self.arrays
        ]
        return align([head, *rows])

    def summary(self, largest: int = 5) -> str:
        """Returns totals and the largest replicated arrays, as text."""
        totals = self.to_json()["totals"]
        what = "parameters" if self.role == "param" else "elements"
        replicated = self.replicated()
        total = f"{human_bytes(totals['replicated_bytes'])} in {len(replicated)} arrays"
        rows = [
            (what, f"{totals['elements']:,} in {totals['arrays']} arrays"),
            ("bytes", human_bytes(self.bytes)),
            ("bytes per device", human_bytes(self.bytes_per_device)),
            ("replicated", total if replicated else "nothing"),
        ]
        rows += [
            (f"  {a.path}", f"{_size(a)}  {human_bytes(a.bytes)}  {a.why}")
            for a in replicated[:largest]
        ]
        if len(replicated) > largest:
            rows.append((f"  and {len(replicated) - largest} smaller", ""))
        return align(rows)


def _size(array: ResolvedArray) -> str:
    return "x".join(map(str, array.shape)) or "scalar"


def _spec_text(array: ResolvedArray) -> str:
    return f"({', '.join('+'.join(d.mesh_axes) or '-' for d in array.dimensions)})"


def resolve(
    tree: Any,
    rules: Rules,
    mesh: Mesh | AbstractMesh | Sizes,
    *,
    axes: Any = None,
    role: Role = "param",
) -> Resolved:
    """Resolves a tree of arrays, ShapeDtypeStructs, NNX variables or Linen boxes.

    A leaf that is not an array must have the axes None (see `axes_from_paths`). Its
    spec and sharding are None.

    Args:
      mesh: any jax mesh, or its axis sizes. A standard axis that it does not have
        counts as size 1; an axis of any other name must occur in a rule.
      axes: a tree of the same structure with a tuple of logical axes for each array.
        Leave it out for trees that carry their names. For trees without names, see
        `axes_from_paths`.
    """
    check_role(role)
    refuse_unknown_axes(rules, mesh)
    sizes = mesh_sizes(mesh)
    arrays, indices = [], []
    flat, treedef = named_leaves(tree, axes)
    for name, leaf, names in flat:
        if names is None:
            indices.append(None)
            continue
        array = unwrap(leaf)
        dimensions = resolve_dimensions(
            names, array.shape, rules, sizes, name=name, role=role
        )
        ways = math.prod(sizes[axis] for d in dimensions for axis in d.mesh_axes)
        dtype = array.dtype
        arrays.append(
            ResolvedArray(
                name, tuple(array.shape), dtype.name, dtype.itemsize, dimensions, ways
            )
        )
        indices.append(len(arrays) - 1)
    if len(arrays) < len(indices):  # drop the leaves that are not arrays
        treedef = jax.tree.structure(jax.tree.unflatten(treedef, indices))
    return Resolved(tuple(arrays), treedef, sizes, role)


def named_leaves(tree: Any, axes: Any = None) -> tuple[list[tuple], Any]:
    """Returns (path, leaf, logical axes) of every leaf, and the tree structure.

    The axes of a leaf that is not an array are None.
    """
    if axes is None:
        axes = axes_of(tree)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_named)
    try:
        flat_axes = treedef.flatten_up_to(axes)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            "the tree of logical axes does not have the structure of the tree of "
            f"arrays: {error}"
        ) from None
    flat = []
    for (path, leaf), names in zip(leaves, flat_axes, strict=True):
        name = path_name(path)
        if not is_array(leaf) and names is not None:
            raise ValueError(
                f"{name}: expected an array or a ShapeDtypeStruct, got {leaf!r}. "
                "Filter out leaves that are not arrays, or give them the axes None."
            )
        if is_array(leaf) and not isinstance(names, tuple):
            raise ValueError(
                f"{name}: its logical axes must be a tuple of names, got {names!r}"
            )
        flat.append((name, leaf, names))
    return flat, treedef


def diff(a: Resolved, b: Resolved) -> list[str]:
    """Returns one line for each array sharded differently, or present in only one."""
    left, right = ({x.path: x for x in r.arrays} for r in (a, b))
    lines = []
    for path in dict.fromkeys([*left, *right]):
        old, new = left.get(path), right.get(path)
        if old is None or new is None:
            lines.append(f"{'+' if old is None else '-'} {path}")
        elif (old.spec, old.shape, old.ways) != (new.spec, new.shape, new.ways):
            lines.append(
                f"~ {path}: {_spec_text(old)} {human_bytes(old.bytes_per_device)} -> "
                f"{_spec_text(new)} {human_bytes(new.bytes_per_device)}"
            )
    return lines
