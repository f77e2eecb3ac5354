"""The resolver: logical axes, rules and a mesh in; how each dimension is sharded, out.

Semantics, in full. The dimensions of an array are taken left to right, the candidates
of a dimension in order. A candidate is taken when all its mesh axes are free on this
array and together divide the dimension. A candidate that loses keeps its reason:

  axis-taken    a mesh axis already shards a dimension further left
  indivisible   the sizes of the mesh axes do not divide the dimension
  size-1        all its mesh axes have size 1, so there is nothing to shard
  no-rule       no row names this logical axis (lenient rules only)
  no-axis       it names a mesh axis that the mesh does not have (lenient rules only)

Mesh axes of size 1 are left out of the result, and a standard axis that a mesh does not
have counts as one of size 1. With strict rules (the default) a name without a row, a
candidate on a mesh axis that does not exist, and a dimension for which no candidate is
left because they do not divide it are errors.

A dimension that fuses several into one says how long each of its units is: "heads*64"
is a dimension of heads of 64 elements each, looked up as "heads". It is sharded between
heads, never inside one.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from .mesh import AXES, Sizes, mesh_sizes
from .rules import Candidate, Role, Row, Rules, check_role

Axes = tuple[str | None, ...]


class NoRule(ValueError):
    """A logical axis that no rule names.

    Attributes:
      what: the array; axis: the logical axis.
    """

    def __init__(self, message: str, *, what: str, axis: str):
        super().__init__(message)
        self.what, self.axis = what, axis


class Indivisible(ValueError):
    """Mesh axes that do not divide a dimension which the rules shard over them.

    Attributes:
      what: the array; axis: the logical axis of its dimension, of that `size`.
      mesh_axes: with their sizes; together they shard `ways` ways.
    """

    def __init__(
        self,
        message: str,
        *,
        what: str,
        axis: str,
        size: int,
        mesh_axes: dict[str, int],
    ):
        super().__init__(message)
        self.what, self.axis, self.size = what, axis, size
        self.mesh_axes, self.ways = mesh_axes, math.prod(mesh_axes.values())


@dataclasses.dataclass(frozen=True)
class Lost:
    """A candidate that was not taken, and why."""

    candidate: Candidate
    reason: str
    detail: str = ""

    def __str__(self) -> str:
        what = "+".join(self.candidate) or "replicated"
        return f"{what}: {self.reason}{f' ({self.detail})' if self.detail else ''}"


@dataclasses.dataclass(frozen=True)
class Dimension:
    """How one dimension of one array came out."""

    name: str | None
    size: int
    mesh_axes: Candidate = ()  # of size > 1 only
    plan: str = ""  # the plan whose row won; empty where nothing shards
    lost: tuple[Lost, ...] = ()


@functools.lru_cache(maxsize=1024)
def split_unit(name: str) -> tuple[str, int]:
    """Returns ("heads", 64) for "heads*64", and ("heads", 1) for "heads"."""
    base, star, unit = name.partition("*")
    if not star:
        return name, 1
    if not (base and unit.isdecimal() and int(unit) > 0):
        raise ValueError(
            f"logical axis {name!r}: expected a name, or name*unit for a dimension of "
            "units of that many elements, for instance 'heads*64'"
        )
    return base, int(unit)


def refuse_unknown_axes(rules: Rules, mesh: Mesh | AbstractMesh | Sizes) -> None:
    """Raises ValueError for a mesh axis whose name is neither ours nor in a rule."""
    known = {*AXES, *rules.mesh_axes}
    for axis, size in mesh_sizes(mesh).items():
        if size > 1 and axis not in known:
            named = ", ".join(rules.mesh_axes) or "no mesh axis"
            raise ValueError(
                f"mesh axis {axis!r} of size {size}: no rule names it, so it would "
                f"shard nothing. The rules name {named}. If one of these is meant, "
                f"rename it: rules.rename_axes({{'tensor': {axis!r}}}). Or add a row "
                f"of your own, for instance Rules.of({{'mlp': {axis!r}}})."
            )


def resolve_dimensions(
    axes: Axes,
    shape: Sequence[int],
    rules: Rules,
    mesh: Mesh | AbstractMesh | Sizes,
    *,
    name: str,
    role: Role = "param",
) -> tuple[Dimension, ...]:
    """Resolves one array. `name` is used in errors only."""
    check_role(role)
    if len(axes) != len(shape):
        raise ValueError(
            f"{name}: logical axes {axes} name {len(axes)} dimensions, but its shape "
            f"{tuple(shape)} has {len(shape)}. Name each dimension; None is never "
            "sharded."
        )
    sizes = mesh_sizes(mesh)
    taken: dict[str, str] = {}
    result = []
    for logical, size in zip(axes, shape, strict=True):
        if logical is None:
            result.append(Dimension(None, size))
            continue
        base, unit = split_unit(logical)
        if size % unit:
            raise ValueError(
                f"{name}: dimension {logical!r} of size {size} is not a multiple of "
                f"its unit {unit}. Correct the unit."
            )
        row = rules.find(base, role)
        if row is None:
            if rules.strict:
                known = ", ".join(sorted(rules.names)) or "none"
                raise NoRule(
                    f"{name}: no rule for logical axis {base!r} (role {role}). "
                    f"Known names: {known}. Add a row, for instance "
                    f"Rules.of({{{base!r}: None}}) to replicate it.",
                    what=name,
                    axis=base,
                )
            result.append(Dimension(logical, size, lost=(Lost((), "no-rule"),)))
            continue
        dimension = _one_dimension(logical, row, size, sizes, taken, name, rules.strict)
        if rules.strict and not dimension.mesh_axes:
            _refuse_indivisible(dimension, row, sizes, name)
        taken |= {axis: logical for axis in dimension.mesh_axes}
        result.append(dimension)
    return tuple(result)


def _one_dimension(
    logical: str,
    row: Row,
    size: int,
    sizes: Sizes,
    taken: dict[str, str],
    name: str,
    strict: bool,
) -> Dimension:
    lost = []
    base, unit = split_unit(logical)
    for candidate in row.candidates:
        if candidate == ():
            return Dimension(logical, size, plan=row.plan, lost=tuple(lost))
        missing = [axis for axis in candidate if axis not in sizes]
        if unknown := [axis for axis in missing if axis not in AXES]:
            if not strict:
                lost.append(Lost(candidate, "no-axis", unknown[0]))
                continue
            raise ValueError(
                f"{name}: rule {row} names mesh axis {unknown[0]!r}, but the mesh has "
                f"{', '.join(sizes)}. Name one of these, or add the axis to the mesh."
            )
        real = tuple(axis for axis in candidate if sizes.get(axis, 1) > 1)
        ways = math.prod(sizes[axis] for axis in real)
        if not real:
            lost.append(Lost(candidate, "size-1"))
        elif clash := [axis for axis in real if axis in taken]:
            detail = f"{clash[0]} shards {taken[clash[0]]!r}"
            lost.append(Lost(candidate, "axis-taken", detail))
        elif size // unit % ways:
            what = f"{size // unit} {base} of {unit}" if unit > 1 else f"{size}"
            lost.append(Lost(candidate, "indivisible", f"{what} by {ways}"))
        else:
            return Dimension(logical, size, real, row.plan, tuple(lost))
    return Dimension(logical, size, lost=tuple(lost))


def _refuse_indivisible(
    dimension: Dimension, row: Row, sizes: Sizes, name: str
) -> None:
    """A dimension replicated only because nothing divides it is an error.

    A row with None among its candidates states that this is acceptable, and passes. So
    does one with a later candidate of fewer of the mesh axes, all of size 1 here.
    """
    ways_out = [set(x.candidate) for x in dimension.lost if x.reason == "size-1"]
    bad = [
        lost
        for lost in dimension.lost
        if lost.reason == "indivisible"
        and not any(axes < set(lost.candidate) for axes in ways_out)
    ]
    if not bad or () in row.candidates:
        return
    axes = tuple(a for a in bad[0].candidate if sizes.get(a, 1) > 1)
    ways = math.prod(sizes[axis] for axis in axes)
    over = ",".join(f"{axis}={sizes[axis]}" for axis in axes)
    found = f"{name}: dimension {dimension.name!r} of size {dimension.size}"
    base, unit = split_unit(dimension.name or "")
    facts: dict[str, Any] = {
        "what": name,
        "axis": base,
        "size": dimension.size // unit,
        "mesh_axes": {axis: sizes[axis] for axis in axes},
    }
    if unit > 1:
        raise Indivisible(
            f"{found} is {dimension.size // unit} {base} of {unit} each, which cannot "
            f"be sharded {ways} ways ({over}, plan {row.plan}) without splitting one. "
            f"Use a mesh axis size that divides {dimension.size // unit}, or let the "
            "rule end in None to replicate it.",
            **facts,
        )
    padded = math.ceil(dimension.size / ways) * ways
    raise Indivisible(
        f"{found} cannot be sharded {ways} ways ({over}, plan {row.plan}). Pad it to "
        f"{padded}, use a mesh axis size that divides {dimension.size}, or let the "
        "rule end in None to replicate it.",
        **facts,
    )


def spec_of(dimensions: Sequence[Dimension]) -> P:
    """The PartitionSpec of resolved dimensions."""
    return P(
        *(
            d.mesh_axes[0] if len(d.mesh_axes) == 1 else d.mesh_axes or None
            for d in dimensions
        )
    )
