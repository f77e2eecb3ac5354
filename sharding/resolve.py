"""The resolver: logical axes, rules and a mesh in; where every dimension is cut, out.

Semantics, in full. The dimensions of an array are taken left to right, the candidates
of a dimension in order. A candidate is taken when all its mesh axes are free on this
array and together divide the dimension. A candidate that loses keeps its reason:

  axis-taken    a mesh axis already cuts a dimension further left
  indivisible   the sizes of the mesh axes do not divide the dimension
  size-1        all its mesh axes have size 1, so there is nothing to cut
  no-rule       no row names this logical axis (not strict only)
  no-axis       it names a mesh axis that the mesh does not have (not strict only)

Mesh axes of size 1 are left out of the result. In strict mode (the default) a name
without a row, a candidate on a mesh axis that does not exist, and a dimension for which
no candidate is left because they do not divide it are errors.
"""

import dataclasses
import math
from collections.abc import Sequence

from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from .mesh import Sizes, mesh_sizes
from .rules import Candidate, Role, Row, Rules

Axes = tuple[str | None, ...]


class Indivisible(ValueError):
    """Mesh axes that do not divide a dimension which the rules cut over them."""


@dataclasses.dataclass(frozen=True)
class Lost:
    """A candidate that was not taken, and why."""

    candidate: Candidate
    reason: str
    detail: str = ""

    def __str__(self) -> str:
        what = "+".join(self.candidate) or "whole"
        return f"{what}: {self.reason}{f' ({self.detail})' if self.detail else ''}"


@dataclasses.dataclass(frozen=True)
class Dimension:
    """How one dimension of one array came out."""

    name: str | None
    size: int
    mesh_axes: Candidate = ()  # of size > 1 only
    plan: str = ""  # the plan whose row won; empty where nothing cuts
    lost: tuple[Lost, ...] = ()


def resolve_dimensions(
    axes: Axes,
    shape: Sequence[int],
    rules: Rules,
    mesh: Mesh | AbstractMesh | Sizes,
    *,
    name: str,
    role: Role = "param",
    strict: bool = True,
) -> tuple[Dimension, ...]:
    """Resolves one array. `name` is used in errors only."""
    if len(axes) != len(shape):
        raise ValueError(
            f"{name}: logical axes {axes} name {len(axes)} dimensions, but its shape "
            f"{tuple(shape)} has {len(shape)}. Name each dimension; None is never cut."
        )
    sizes = mesh_sizes(mesh)
    taken: dict[str, str] = {}
    result = []
    for logical, size in zip(axes, shape, strict=True):
        if logical is None:
            result.append(Dimension(None, size))
            continue
        row = rules.find(logical, role)
        if row is None:
            if strict:
                known = ", ".join(sorted(rules.names)) or "none"
                raise ValueError(
                    f"{name}: no rule for logical axis {logical!r} (role {role}). "
                    f"Known names: {known}. Add a row, for instance "
                    f"Rules.of({{{logical!r}: None}}) to not cut it."
                )
            result.append(Dimension(logical, size, lost=(Lost((), "no-rule"),)))
            continue
        dimension = _one_dimension(row, size, sizes, taken, name, strict)
        if strict and not dimension.mesh_axes:
            _refuse_indivisible(dimension, row, sizes, name)
        taken |= {axis: logical for axis in dimension.mesh_axes}
        result.append(dimension)
    return tuple(result)


def _one_dimension(
    row: Row, size: int, sizes: Sizes, taken: dict[str, str], name: str, strict: bool
) -> Dimension:
    lost = []
    for candidate in row.candidates:
        if candidate == ():
            return Dimension(row.name, size, plan=row.plan, lost=tuple(lost))
        if missing := [axis for axis in candidate if axis not in sizes]:
            if not strict:
                lost.append(Lost(candidate, "no-axis", missing[0]))
                continue
            raise ValueError(
                f"{name}: rule {row} names mesh axis {missing[0]!r}, but the mesh has "
                f"{', '.join(sizes)}. Name one of these, or add the axis to the mesh."
            )
        real = tuple(axis for axis in candidate if sizes[axis] > 1)
        ways = math.prod(sizes[axis] for axis in real)
        if not real:
            lost.append(Lost(candidate, "size-1"))
        elif clash := [axis for axis in real if axis in taken]:
            detail = f"{clash[0]} cuts {taken[clash[0]]!r}"
            lost.append(Lost(candidate, "axis-taken", detail))
        elif size % ways:
            lost.append(Lost(candidate, "indivisible", f"{size} by {ways}"))
        else:
            return Dimension(row.name, size, real, row.plan, tuple(lost))
    return Dimension(row.name, size, lost=tuple(lost))


def _refuse_indivisible(
    dimension: Dimension, row: Row, sizes: Sizes, name: str
) -> None:
    """A dimension left whole only because nothing divides it is an error.

    A row with None among its candidates states that whole is acceptable, and passes.
    """
    bad = [lost for lost in dimension.lost if lost.reason == "indivisible"]
    if not bad or () in row.candidates:
        return
    axes = tuple(a for a in bad[0].candidate if sizes[a] > 1)
    ways = math.prod(sizes[axis] for axis in axes)
    padded = math.ceil(dimension.size / ways) * ways
    cut = ",".join(f"{axis}={sizes[axis]}" for axis in axes)
    raise Indivisible(
        f"{name}: dimension {dimension.name!r} of size {dimension.size} cannot be cut "
        f"{ways} ways ({cut}, plan {row.plan}). Pad it to {padded}, use a mesh axis "
        f"size that divides {dimension.size}, or let the rule end in None to leave it "
        "whole."
    )


def spec_of(dimensions: Sequence[Dimension]) -> P:
    """The PartitionSpec of resolved dimensions."""
    return P(
        *(
            d.mesh_axes[0] if len(d.mesh_axes) == 1 else d.mesh_axes or None
            for d in dimensions
        )
    )
