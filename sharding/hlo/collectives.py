"""Finds the collectives of an HLO module, their payloads and device groups."""

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from . import program
from .text import Array, Computation, Instruction, Module, integers

UNKNOWN_AXES = ("?",)
KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# Without use_global_device_ids, these use partition ids and the others replica ids.
_BY_PARTITION = {
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
}
_OPCODES = {kind + suffix: kind for kind in KINDS for suffix in ("", "-start")}


class CollectiveOp(NamedTuple):
    """A collective instruction.

    Attributes:
      groups: groups of flat device positions; for a permute, (source, target) pairs.
      payload: the arrays that one run moves on one device.
    """

    name: str
    kind: str
    computation: str
    groups: program.Groups
    payload: list[Array]
    source: str
    op_name: str


def find(module: Module) -> Iterator[CollectiveOp]:
    """Yields every collective; an asynchronous one is yielded once."""
    callers = _callers(module)
    for computation, instruction in _instructions(module):
        kind = _OPCODES[instruction.opcode]
        groups = _groups(module, instruction, kind)
        width = max(map(len, groups), default=1)
        payload = _payload(computation, instruction, kind, width)
        # XLA for TPU writes a reduce-scatter as an all-reduce that is then sliced.
        if kind == "all-reduce" and computation.name.startswith("all-reduce-scatter"):
            kind = "reduce-scatter"
        origin = _origin(module, instruction, callers.get(computation.name))
        yield CollectiveOp(
            instruction.name, kind, computation.name, groups, payload, *origin
        )


def mesh_axes(
    op: CollectiveOp, names: tuple[str, ...], sizes: tuple[int, ...]
) -> tuple[str, ...]:
    """Returns the mesh axes along which groups vary, () if nothing moves."""
    return _axes(names, sizes, op.groups, op.kind == "collective-permute")


def _instructions(module: Module) -> Iterator[tuple[Computation, Instruction]]:
    """Yields every collective once; for an asynchronous one, only the start."""
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            if instruction.opcode not in _OPCODES:
                continue
            # XLA for TPU repeats an overlapped collective in every fusion it overlaps
            # with. Only one of these fusions starts it.
            if "async_collective_fusion_config" in instruction.rest and not any(
                "AsyncCollectiveStart" in other.rest
                for other in computation.instructions.values()
            ):
                continue
            yield computation, instruction


def _callers(module: Module) -> dict[str, Instruction]:
    """Returns the instruction that wraps each fused or asynchronous computation."""
    return {
        callee: instruction
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
        if instruction.opcode in ("fusion", "async-start")
        for callee in instruction.called("calls")
    }


def _groups(module: Module, instruction: Instruction, kind: str) -> program.Groups:
    """Returns groups of flat device positions; for a permute, (source, target)."""
    replicas, partitions = module.replica_count, module.num_partitions
    if "use_global_device_ids=true" in instruction.rest:
        return program.replica_groups(instruction, replicas * partitions)
    has_channel = " channel_id=" in instruction.rest
    by_partition = has_channel and kind in _BY_PARTITION
    if kind == "collective-permute":
        groups = program.source_target_pairs(instruction)
    else:
        num_ids = partitions if by_partition else replicas
        groups = program.replica_groups(instruction, num_ids)
    if by_partition:
        return tuple(
            tuple(replica * partitions + id for id in group)
            for replica in range(replicas)
            for group in groups
        )
    if has_channel:
        return tuple(
            tuple(id * partitions + p for id in group for p in range(partitions))
            for group in groups
        )
    return tuple(
        tuple(id * partitions + p for id in group)
        for p in range(partitions)
        for group in groups
    )


@functools.lru_cache(maxsize=4096)
def _axes(
    names: tuple[str, ...],
    sizes: tuple[int, ...],
    groups: program.Groups,
    permutes: bool,
) -> tuple[str, ...]:
    if max(map(len, groups), default=0) <= 1:
        return ()
    if len(set(map(len, groups))) > 1:
        return UNKNOWN_AXES
    ids = np.array(groups)
    count = math.prod(sizes)
    if ids.max() >= count:
        return UNKNOWN_AXES
    coordinates = np.stack(np.unravel_index(ids, sizes))
    varies = (coordinates != coordinates[:, :, :1]).any(axis=(1, 2))
    if not permutes:
        width = math.prod(size for size, v in zip(sizes, varies, strict=True) if v)
        covers = np.array_equal(np.sort(ids, axis=None), np.arange(count))
        if width != ids.shape[1] or not covers:
            return UNKNOWN_AXES
    return tuple(name for name, v in zip(names, varies, strict=True) if v)


def _payload(
    computation: Computation, instruction: Instruction, kind: str, width: int
) -> list[Array]:
    operands = computation.operand_arrays(instruction)
    if kind == "ragged-all-to-all":
        # The other operands are the output buffer, offsets and sizes.
        operands = operands[:1]
    arrays = [array for operand in operands for array in operand]
    if kind != "all-gather":
        return arrays
    gathered = integers(instruction.attribute("dimensions"))[0]
    return [
        Array(
            array.dtype,
            tuple(n * width if d == gathered else n for d, n in enumerate(array.dims)),
        )
        for array in arrays
    ]


def _origin(
    module: Module, instruction: Instruction, caller: Instruction | None
) -> tuple[str, str]:
    """Returns source and op_name; falls back to those of the calling instruction."""
    own = module.source(instruction), instruction.op_name()
    if own != ("", "") or caller is None:
        return own
    return module.source(caller), caller.op_name()
