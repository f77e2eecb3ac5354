"""Lists the collectives of a compiled step, with their mesh axes and bytes.

They are read from the optimized program: they show what the compiler decided, not what
the source asked for.
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
from .hlo.collectives import CollectiveOp
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
      axes: The mesh axes, in mesh order, along which the members of a group differ. For
        a permute, the axes along which source and target differ. ("?",) if the groups
        do not correspond to mesh axes.
      count: How often it runs in one step.
      bytes: Payload on one device, summed over all runs. The payload of one run is the
        unsharded side: the result of an all-gather, the operand of every other kind.
        The bytes on the wire depend on the algorithm.
      source: `file:line` of the innermost user frame, "" if the compiler kept none.
      op_name: The path of the jax operations it was compiled from.
      dtype: Element type in HLO notation. If arrays of several types are combined, the
        types joined with "+".
      shape: Shape of the payload. If several arrays are combined, the total number of
        elements.
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
    """The collectives of one program, in program order."""

    collectives: tuple[Collective, ...]

    def total(self, kind: str | None = None, axis: str | None = None) -> Count:
        """Returns the (count, bytes) of one kind of collective along one mesh axis."""
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
        """Raises ValueError unless the program has exactly the expected collectives.

        Args:
          expected: Maps (kind, axes) to the expected count, to (count, bytes), or to
            None for any number >= 1.
          small: Ignore collectives that move fewer bytes than this in one run, for
            instance the all-reduce of a scalar loss.
        """
        checked = Audit(
            tuple(c for c in self.collectives if c.bytes >= small * c.count)
        )
        totals = checked.by_kind_and_axes()
        errors = []
        for key, want in expected.items():
            have = totals.get(key)
            if have is None:
                errors.append(f"missing: {_label(key)}, expected {_describe(want)}")
            elif want is not None and want not in (have[0], have):
                errors.append(
                    f"wrong: {_label(key)}, expected {_describe(want)}, "
                    f"found {_describe(have)}:\n{checked._only({key})}"
                )
        unexpected = checked._only(totals.keys() - expected.keys())
        if unexpected.collectives:
            errors.append(f"unexpected:\n{unexpected}")
        if errors:
            raise ValueError(
                "the collectives of the program are not the expected ones "
                f"(ignoring those below {small} bytes)\n" + "\n".join(errors)
            )

    def to_json(self) -> str:
        """Returns a JSON object with the lists `collectives` and `totals`."""
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
    """Returns the collectives of a compiled program, multiplied by loop trip counts.

    Collectives within groups of one device move nothing and are left out. Every branch
    of a conditional counts as taken.

    Args:
      compiled: The result of `jax.jit(f).lower(...).compile()`, or its `as_text()`.
      mesh: The mesh of the program's shardings. Device ids in the program are positions
        in its flattened device array.
      dcn: The mesh axis that crosses TPU slices, and the number of slices, as in
        MeshSpec. The compiler then writes the program of a single slice.
      count_unknown_loops_as: The trip count to assume if none can be derived. By
        default, a collective in such a loop is an error.
    """
    if isinstance(compiled, str):
        text = compiled
    else:
        _check_device_order(compiled, mesh)
        text = compiled.as_text()
    if not text:
        raise ValueError(
            "compiled program: the backend returned no HLO text to audit; compile it "
            "for a backend that provides the text"
        )
    module = hlo.parse(text)
    crossed, sizes = slice_of(mesh, dcn or {})
    num_devices = module.replica_count * module.num_partitions
    if num_devices != math.prod(sizes):
        raise ValueError(
            f"compiled program: it runs on {num_devices} devices, but the mesh "
            f"{dict(mesh.shape)} has {math.prod(sizes)}"
            f"{' in a slice' if crossed else ''}; pass the mesh of its shardings"
        )
    times, unknown = hlo.executions(module, count_unknown_loops_as)
    collectives = []
    ops_and_axes = [
        (op, hlo_collectives.mesh_axes(op, mesh.axis_names, sizes))
        for op in hlo_collectives.find(module)
    ]
    num_slices = mesh.size // num_devices
    ops_and_axes += [(op, crossed) for op in crossings(module, num_slices)]
    for op, axes in ops_and_axes:
        if axes and op.computation in unknown:
            what = f"{op.computation} runs the {op.kind} {op.name}"
            raise hlo.unknown_loop(what, unknown[op.computation])
        count = times.get(op.computation, 0)
        if axes and count:
            collectives.append(_collective(op, axes, count))
    return Audit(tuple(collectives))


def _check_device_order(compiled: jax.stages.Compiled, mesh: Mesh) -> None:
    """Raises ValueError if no sharding of the program has this device order."""
    leaves = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    meshes = [leaf.mesh for leaf in leaves if isinstance(leaf, NamedSharding)]
    orders = {_device_ids(m) for m in meshes if isinstance(m, Mesh)}
    given = _device_ids(mesh)
    if orders and given not in orders:
        raise ValueError(
            f"compiled program: its device order is {orders.pop()}, but that of the "
            f"mesh is {given}; pass the mesh of its shardings"
        )


def _device_ids(mesh: Mesh) -> tuple[int, ...]:
    return tuple(device.id for device in mesh.devices.ravel())


def _collective(op: CollectiveOp, axes: tuple[str, ...], count: int) -> Collective:
    arrays = op.payload
    elements = sum(array.size for array in arrays)
    return Collective(
        kind=op.kind,
        axes=axes,
        count=count,
        bytes=count * sum(array.num_bytes for array in arrays),
        source=op.source,
        op_name=op.op_name,
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
    """Returns the file name with its parent directory only."""
    return "/".join(source.split("/")[-2:])
