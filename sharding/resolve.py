"""The resolver: decides from logical axes, rules and a mesh how an array is sharded.

The complete semantics: the dimensions of an array are resolved left to right, trying
the candidates of each in order. The first candidate wins whose mesh axes are all unused
on this array and together divide the dimension. Every losing candidate is recorded with
its reason:

  axis-taken    one of its mesh axes already shards a dimension further left
  indivisible   the sizes of its mesh axes do not divide the dimension
  size-1        all its mesh axes have size 1, so there is nothing to shard
  no-rule       no row names this logical axis (lenient rules only)
  no-axis       it names a mesh axis that the mesh does not have (lenient rules only)

Mesh axes of size 1 are dropped from the result, and a standard axis that the mesh does
not have counts as size 1. With strict rules (the default), these are errors: a logical
axis without a row, a candidate with a mesh axis that does not exist, and a dimension
that stays replicated only because no candidate divides it.

A fused dimension gives the length of its units: "heads*64" is a dimension of heads with
64 elements each. It follows the rule for "heads" and is sharded between heads, never
within one.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from .mesh import AXES, Sizes, mesh_sizes
from .rules import Candidate, Role, Rule, Rules, check_role

Axes = tuple[str | None, ...]


class NoRule(ValueError):
    """Raised for a logical axis that no rule names.

    Attributes:
      what: the array.
      axis: the logical axis.
    """

    def __init__(self, message: str, *, what: str, axis: str):
        super().__init__(message)
        self.what, self.axis = what, axis


class Indivisible(ValueError):
    """Raised for a dimension that is not divisible by the mesh axes of its rule.

    Attributes:
      what: the array.
      axis: the logical axis of the dimension.
      size: the size of the dimension, in units.
      mesh_axes: the mesh axes and their sizes.
      ways: the product of those sizes.
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
    """A candidate that lost, and why."""

    candidate: Candidate
    reason: str
    detail: str = ""

    def __str__(self) -> str:
        what = "+".join(self.candidate) or "replicated"
        return f"{what}: {self.reason}{f' ({self.detail})' if self.detail else ''}"


@dataclasses.dataclass(frozen=True)
class Dimension:
    """How one dimension of one array is sharded."""

    name: str | None
    size: int
    mesh_axes: Candidate = ()  # only those of size > 1
    plan: str = ""  # the plan whose row won; empty if no candidate did
    lost: tuple[Lost, ...] = ()


@functools.lru_cache(maxsize=1024)
def split_unit(name: str) -> tuple[str, int]:
    """Returns ("heads", 64) for "heads*64", and ("heads", 1) for "heads"."""
    base, star, unit = name.partition("*")
    if not star:
        return name, 1
    if not (base and unit.isdecimal() and int(unit) > 0):
        raise ValueError(
            f"logical axis {name!r}: expected a name, or name*unit for a fused "
            "dimension, for instance 'heads*64' for heads of 64 elements"
        )
    return base, int(unit)


def refuse_unknown_axes(rules: Rules, mesh: Mesh | AbstractMesh | Sizes) -> None:
    """Raises ValueError for a mesh axis that is neither standard nor in a rule."""
    known = {*AXES, *rules.mesh_axes}
    for axis, size in mesh_sizes(mesh).items():
        if size > 1 and axis not in known:
            named = ", ".join(rules.mesh_axes) or "no mesh axis"
            raise ValueError(
                f"mesh axis {axis!r} of size {size}: no rule names it, so it would "
                f"shard nothing. The rules name {named}. If it is one of these, rename "
                f"it: rules.rename_axes({{'tensor': {axis!r}}}). Otherwise add a row, "
                f"for instance Rules.of({{'mlp': {axis!r}}})."
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
    """Resolves one array. `name` is used only in errors."""
    check_role(role)
    if len(axes) != len(shape):
        raise ValueError(
            f"{name}: logical axes {axes} name {len(axes)} dimensions, but its shape "
            f"{tuple(shape)} has {len(shape)}. Name each dimension; use None for one "
            "that is never sharded."
        )
    sizes = mesh_sizes(mesh)
    used: dict[str, str] = {}  # mesh axis to the logical axis it shards
    result = []
    for logical, size in zip(axes, shape, strict=True):
        if logical is None:
            result.append(Dimension(None, size))
            continue
        base, unit = split_unit(logical)
        if size % unit:
            raise ValueError(
                f"{name}: dimension {logical!r} of size {size} is not a multiple of "
                f"its unit {unit}. Fix the unit."
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
        dimension = _one_dimension(logical, row, size, sizes, used, name, rules.strict)
        if rules.strict and not dimension.mesh_axes:
            _refuse_indivisible(dimension, row, sizes, name)
        used |= {axis: logical for axis in dimension.mesh_axes}
        result.append(dimension)
    return tuple(result)


def _one_dimension(
    logical: str,
    row: Rule,
    size: int,
    sizes: Sizes,
    used: dict[str, str],
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
        elif clash := [axis for axis in real if axis in used]:
            detail = f"{clash[0]} shards {used[clash[0]]!r}"
            lost.append(Lost(candidate, "axis-taken", detail))
        elif size // unit % ways:
            what = f"{size // unit} {base} of {unit}" if unit > 1 else f"{size}"
            lost.append(Lost(candidate, "indivisible", f"{what} by {ways}"))
        else:
            return Dimension(logical, size, real, row.plan, tuple(lost))
    return Dimension(logical, size, lost=tuple(lost))


def _refuse_indivisible(
    dimension: Dimension, row: Rule, sizes: Sizes, name: str
) -> None:
    """Raises Indivisible for a dimension replicated only because nothing divides it.

    A row that lists None as a candidate allows replication. So does one with a later
    candidate of fewer of the mesh axes, all of size 1 here.
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
    what = f"{name}: dimension {dimension.name!r} of size {dimension.size}"
    base, unit = split_unit(dimension.name or "")
    details: dict[str, Any] = {
        "what": name,
        "axis": base,
        "size": dimension.size // unit,
        "mesh_axes": {axis: sizes[axis] for axis in axes},
    }
    if unit > 1:
        raise Indivisible(
            f"{what} is {dimension.size // unit} {base} of {unit} each, which cannot "
            f"be sharded {ways} ways ({over}, plan {row.plan}) without splitting one. "
            f"Use a mesh axis size that divides {dimension.size // unit}, or let the "
            "rule end in None to replicate it.",
            **details,
        )
    padded = math.ceil(dimension.size / ways) * ways
    raise Indivisible(
        f"{what} cannot be sharded {ways} ways ({over}, plan {row.plan}). Pad it to "
        f"{padded}, use a mesh axis size that divides {dimension.size}, or let the "
        "rule end in None to replicate it.",
        **details,
    )


def spec_of(dimensions: Sequence[Dimension]) -> P:
    """Returns the PartitionSpec of resolved dimensions."""
    return P(
        *(
            d.mesh_axes[0] if len(d.mesh_axes) == 1 else d.mesh_axes or None
            for d in dimensions
        )
    )
