"""Finds the transfers between TPU slices in the program of one slice.

For several slices, XLA for TPU writes the program of one: device ids are positions in
that slice. A collective between slices appears as a `send` to the host and a `recv` of
the result, with the kind of transfer as an attribute.
"""

import re
from collections.abc import Iterator, Mapping

from jax.sharding import Mesh

from .collectives import CollectiveOp
from .text import Array, Module

_KINDS = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}
_TRANSFER = re.compile(r'_xla_megascale_transfer_type="(\w+)"')


def slice_of(
    mesh: Mesh, dcn: Mapping[str, int]
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Returns the axes that cross slices, and the sizes of the mesh in one slice."""
    crossed = tuple(name for name, slices in dcn.items() if slices > 1)
    if len(crossed) > 1:
        raise ValueError(
            f"dcn {dict(dcn)}: the axes {', '.join(crossed)} cross slices, but the "
            "program does not say which of them a transfer is along; only one axis may "
            "cross slices"
        )
    sizes = (size // dcn.get(name, 1) for name, size in mesh.shape.items())
    return crossed, tuple(sizes)


def crossings(module: Module, num_slices: int) -> Iterator[CollectiveOp]:
    """Yields the collectives between slices; their `groups` are empty."""
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            transfer = _TRANSFER.search(instruction.rest)
            if instruction.opcode != "send" or not transfer:
                continue
            if transfer[1] not in _KINDS:
                raise ValueError(
                    f"HLO instruction {instruction.name}: unknown kind of transfer to "
                    f"other slices, {transfer[1]}; expected {', '.join(_KINDS)}"
                )
            kind = _KINDS[transfer[1]]
            payload = computation.operand_arrays(instruction)[0]
            if kind == "all-gather":  # the payload is the gathered result
                payload = [Array(a.dtype, (num_slices, *a.dims)) for a in payload]
            source, op_name = module.source(instruction), instruction.op_name()
            yield CollectiveOp(
                instruction.name, kind, computation.name, (), payload, source, op_name
            )
