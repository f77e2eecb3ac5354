"""Finds mesh axes that shard nothing: devices along them duplicate work."""

from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from .plans import PLANS
from .resolve import split_unit
from .rules import Rules
from .tree import Resolved

SHOWN = 4  # how many dimensions that could use the axis a message lists


def idle_axes(
    rules: Rules, layouts: Sequence[Resolved], program: Any = None
) -> dict[str, str]:
    """Returns the mesh axes larger than 1 that shard nothing, each with the reason.

    Args:
      layouts: everything resolved for the mesh: parameters, optimizer state, a batch.
      program: the result of `jax.jit(f).trace(...)` for the step, or its jaxpr. With
        it, axes that shard only activations count as used.
    """
    if not layouts:
        return {}
    used = {axis for r in layouts for a in r.arrays for axis in _axes_of(a.spec)}
    if program is not None:
        used |= set(_axes_in(getattr(program, "jaxpr", program)))
    sizes = layouts[0].mesh
    return {
        axis: _reason(axis, size, rules, layouts)
        for axis, size in sizes.items()
        if size > 1 and axis not in used
    }


def _axes_of(spec: P) -> Iterator[str]:
    for entry in spec:
        yield from (entry,) if isinstance(entry, str) else entry or ()


def _axes_in(value: Any) -> Iterator[str]:
    """Yields the mesh axes of every sharding in a jaxpr and its inner jaxprs."""
    if isinstance(value, ClosedJaxpr):
        value = value.jaxpr
    if isinstance(value, Jaxpr):
        for equation in value.eqns:
            yield from _axes_in(list(equation.params.values()))
    elif isinstance(value, NamedSharding):
        yield from _axes_of(value.spec)
    elif isinstance(value, P):
        yield from _axes_of(value)
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _axes_in(one)


def _reason(axis: str, size: int, rules: Rules, layouts: Sequence[Resolved]) -> str:
    parts = [f"no array is sharded over it, so its {size} ways would duplicate work"]
    rows = [row for row in rules.rows if any(axis in c for c in row.candidates)]
    if not rows:
        plans = [name for name, plan in PLANS.items() if axis in plan().mesh_axes]
        suggestion = f"; plans that do: {', '.join(plans)}" if plans else ""
        parts.append(f"no rule names it{suggestion}")
    lost = dict.fromkeys(
        f"{dimension.name} of {array.path}: {one}"
        for layout in layouts
        for array in layout.arrays
        for dimension in array.dimensions
        for one in dimension.lost
        if axis in one.candidate
    )
    if lost:
        parts.append("rules that name it did not apply: " + "; ".join([*lost][:SHOWN]))
    elif rows:
        names = ", ".join(dict.fromkeys(row.name for row in rows))
        parts.append(f"no array has a logical axis whose rule names it ({names})")
    could = _could_use(size, layouts)
    shown = ", ".join(could[:SHOWN]) or "none"
    more = f" and {len(could) - SHOWN} more" if len(could) > SHOWN else ""
    parts.append(f"unsharded dimensions that it divides: {shown}{more}")
    first, *others = parts
    return ". ".join([first, *(part[0].upper() + part[1:] for part in others)])


def _could_use(size: int, layouts: Sequence[Resolved]) -> list[str]:
    """Returns one example array per unsharded logical axis that `size` divides."""
    examples: dict[str, str] = {}
    for layout in layouts:
        for array in layout.arrays:
            for d in array.dimensions:
                if d.name is None or d.mesh_axes or d.size <= 1:
                    continue
                name, unit = split_unit(d.name)
                if d.size // unit % size == 0:
                    examples.setdefault(name, f"{name} of {array.path} ({d.size})")
    return [*examples.values()]
