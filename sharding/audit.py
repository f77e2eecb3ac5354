"""Which collectives a compiled step runs, over which mesh axes, and how many bytes.

The answer is read from the optimized program, so it is what the compiler decided, not
what the source asked for.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from . import hlo
from .hlo import collectives as hlo_collectives
from .hlo.slices import crossings, slice_of
from .text import align, human_bytes

Key = tuple[str, tuple[str, ...]]
Count = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction of a program.

    Attributes:
      kind: all-reduce, all-gather, reduce-scatter, all-to-all, ragged-all-to-all,
        collective-permute or collective-broadcast.
      axes: The mesh axes, in mesh order, along which the members of a group differ; of
        a permute, along which source and target differ. ("?",) where the groups are
        not the rows of the mesh along some of its axes.
      count: How often it runs in one step.
      bytes: Payload on one device over all runs. The payload of one run is the array
        that is whole in every group: the result of an all-gather, the operand of every
        other kind. What travels over the wire depends on the algorithm.
      source: `file:line` of the innermost user frame, "" where the compiler kept none.
      op_name: The path of jax operations that it comes from.
      dtype: Element type in HLO's notation; several joined with + where arrays of
        several types are combined.
      shape: Shape of the payload; of several arrays combined into one collective, the
        total number of elements.
    """

    kind: str
    axes: tuple[str, ...]
    count: int
    bytes: int
    source: str
    op_name: str
    dtype: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Audit:
    """The collectives of one program, in the order of its text."""

    collectives: tuple[Collective, ...]

    def total(self, kind: str | None = None, axis: str | None = None) -> Count:
        """Returns (count, bytes) of one kind, over groups that vary along one axis."""
        chosen = [
            c
            for c in self.collectives
            if kind in (None, c.kind) and (axis is None or axis in c.axes)
        ]
        return sum(c.count for c in chosen), sum(c.bytes for c in chosen)

    def by_kind_and_axes(self) -> dict[Key, Count]:
        """Returns (count, bytes) for every pair of kind and axes that occurs."""
        totals: dict[Key, Count] = {}
        for c in self.collectives:
            count, num_bytes = totals.get((c.kind, c.axes), (0, 0))
            totals[c.kind, c.axes] = count + c.count, num_bytes + c.bytes
        return totals

    def expect(
        self, expected: Mapping[Key, int | Count | None], *, small: int = 0
    ) -> None:
        """Raises ValueError unless exactly the expected collectives are there.

        Args:
          expected: (kind, axes) to the expected count, to (count, bytes), or to None
            where any number will do but one at least.
          small: Collectives whose payload of one run is below this many bytes, such as
            that of a scalar loss, are not looked at.
        """
        looked_at = Audit(
            tuple(c for c in self.collectives if c.bytes >= small * c.count)
        )
        found = looked_at.by_kind_and_axes()
        faults = []
        for key, want in expected.items():
            have = found.get(key)
            if have is None:
                faults.append(f"missing: {_label(key)}, expected {_describe(want)}")
            elif want is not None and want not in (have[0], have):
                faults.append(
                    f"wrong: {_label(key)}, expected {_describe(want)}, "
                    f"found {_describe(have)}:\n{looked_at._only({key})}"
                )
        unexpected = looked_at._only(found.keys() - expected.keys())
        if unexpected.collectives:
            faults.append(f"unexpected:\n{unexpected}")
        if faults:
            raise ValueError(
                "collectives of the program differ from the expected ones "
                f"(those below {small} bytes left out)\n" + "\n".join(faults)
            )

    def to_json(self) -> str:
        """Returns a JSON object with `collectives` and `totals`, both lists."""
        totals = [
            {"kind": kind, "axes": axes, "count": count, "bytes": num_bytes}
            for (kind, axes), (count, num_bytes) in self.by_kind_and_axes().items()
        ]
        collectives = [dataclasses.asdict(c) for c in self.collectives]
        return json.dumps({"collectives": collectives, "totals": totals}, indent=1)

    def __str__(self) -> str:
        rows: dict[tuple[str, str, str], Count] = {}
        for c in self.collectives:
            key = c.kind, ",".join(c.axes), _short(c.source) or c.op_name or "-"
            count, num_bytes = rows.get(key, (0, 0))
            rows[key] = count + c.count, num_bytes + c.bytes
        table = [("kind", "axes", "count", "bytes", "source")]
        for (kind, axes, source), (count, num_bytes) in sorted(
            rows.items(), key=lambda row: -row[1][1]
        ):
            table.append((kind, axes, str(count), human_bytes(num_bytes), source))
        return align(table, right=(2, 3)) if rows else "no collectives"

    def _only(self, keys: Any) -> "Audit":
        chosen = (c for c in self.collectives if (c.kind, c.axes) in keys)
        return Audit(tuple(chosen))


def audit(
    compiled: jax.stages.Compiled | str,
    mesh: Mesh,
    *,
    dcn: Mapping[str, int] | None = None,
    count_unknown_loops_as: int | None = None,
) -> Audit:
    """Returns the collectives of a compiled program, loops multiplied out.

    Collectives among groups of one device move nothing and are left out. Every branch
    of a conditional counts as taken.

    Args:
      compiled: What `jax.jit(f).lower(...).compile()` returns, or its `as_text()`.
      mesh: The mesh of the program's shardings. Ids in the program are positions in
        its flat array of devices.
      dcn: The axis of the mesh that crosses TPU slices and over how many, as in
        MeshSpec. The compiler writes the program of one slice then.
      count_unknown_loops_as: The trip count to assume where none can be derived; by
        default a collective in such a loop is an error.
    """
    if isinstance(compiled, str):
        text = compiled
    else:
        _check_device_order(compiled, mesh)
        text = compiled.as_text()
    if not text:
        raise ValueError(
            "compiled program: the backend gave no HLO text, and without it nothing "
            "can be audited; compile it for a backend that does"
        )
    module = hlo.parse(text)
    crossed, sizes = slice_of(mesh, dcn or {})
    num_devices = module.replica_count * module.num_partitions
    if num_devices != math.prod(sizes):
        raise ValueError(
            f"compiled program: it runs on {num_devices} devices, and the mesh "
            f"{dict(mesh.shape)} has {math.prod(sizes)}"
            f"{' in a slice' if crossed else ''}; pass the mesh of its shardings"
        )
    times, unknown = hlo.executions(module, count_unknown_loops_as)
    collectives = []
    found_axes = [
        (found, hlo_collectives.mesh_axes(found, mesh.axis_names, sizes))
        for found in hlo_collectives.find(module)
    ]
    num_slices = mesh.size // num_devices
    found_axes += [(found, crossed) for found in crossings(module, num_slices)]
    for found, axes in found_axes:
        if axes and found.computation in unknown:
            what = f"{found.computation} runs the {found.kind} {found.name}"
            raise hlo.unknown_loop(what, unknown[found.computation])
        count = times.get(found.computation, 0)
        if axes and count:
            collectives.append(_collective(found, axes, count))
    return Audit(tuple(collectives))


def _check_device_order(compiled: jax.stages.Compiled, mesh: Mesh) -> None:
    """Raises ValueError where no sharding of the program has this device order."""
    leaves = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    meshes = [leaf.mesh for leaf in leaves if isinstance(leaf, NamedSharding)]
    orders = {_device_ids(m) for m in meshes if isinstance(m, Mesh)}
    given = _device_ids(mesh)
    if orders and given not in orders:
        raise ValueError(
            f"compiled program: its devices are in the order {orders.pop()}, those of "
            f"the mesh {given}; pass the mesh of its shardings"
        )


def _device_ids(mesh: Mesh) -> tuple[int, ...]:
    return tuple(device.id for device in mesh.devices.ravel())


def _collective(
    found: hlo_collectives.Found, axes: tuple[str, ...], count: int
) -> Collective:
    arrays = found.payload
    elements = sum(array.size for array in arrays)
    return Collective(
        kind=found.kind,
        axes=axes,
        count=count,
        bytes=count * sum(array.num_bytes for array in arrays),
        source=found.source,
        op_name=found.op_name,
        dtype="+".join(sorted({array.dtype for array in arrays})),
        shape=arrays[0].dims if len(arrays) == 1 else (elements,),
    )


def _label(key: Key) -> str:
    return f"{key[0]} over {','.join(key[1])}"


def _describe(want: int | Count | None) -> str:
    if want is None:
        return "any number"
    if isinstance(want, int):
        return f"{want} of them"
    return f"{want[0]} of them with {want[1]} bytes"


def _short(source: str) -> str:
    """Returns the file with its folder only, enough to find it."""
    return "/".join(source.split("/")[-2:])
