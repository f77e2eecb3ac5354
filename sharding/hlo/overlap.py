"""Finds which collectives of a scheduled HLO program overlap with other work.

Compilers express overlap in several ways:

  all-gather-start ... all-gather-done      likewise all-reduce, collective-permute
  async-start(calls=...) ... async-done     the collective is in the called computation
                                            (for SparseCores, that of a custom call); an
                                            async-update in between passes the operands
  fusions with AsyncCollectiveStart ... AsyncCollectiveDone
                                            XLA for TPU: fusions between the two carry
                                            the collective along with their own work

The text of a compiled program lists instructions in execution order, so the work
between start and done can hide the collective. On GPUs, a pair marked is_sync runs
synchronously.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from .collectives import KINDS, CollectiveOp, find
from .text import Computation, Instruction, Module

_STARTED = "AsyncCollectiveStart"
_DONE = "AsyncCollectiveDone"
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")
_SYNC = re.compile(r'"is_sync":\s*true')
_CALLS = {
    "fusion": ["calls"],
    "async-start": ["calls"],
    "custom-call": ["called_computations"],
}
_STARTS = ("-start", "send", "recv")
_CARRIER = "async_collective_fusion_config"


class Scheduled(NamedTuple):
    """A collective and its position in the schedule.

    Attributes:
      computation: the computation whose schedule runs it.
      start: the instruction in it that runs or starts the collective.
      done: the instruction in it that waits for the collective, "" if synchronous.
      carriers: how many fusions between the two carry it along.
    """

    op: CollectiveOp
    computation: str
    start: str
    done: str = ""
    carriers: int = 0


def pairs(computation: Computation) -> dict[str, str]:
    """Maps each -done instruction of a computation to the start of its work."""
    return {done: begin for _, begin, done in _chains(computation)}


def _chains(computation: Computation) -> Iterator[tuple[str, str, str]]:
    """Yields (start, begin, done); work begins at the instruction with operands."""
    for instruction in computation.instructions.values():
        if not instruction.opcode.endswith("-done"):
            continue
        start = begin = computation.instructions[instruction.operands()[0]]
        while start.opcode == "async-update":
            start = computation.instructions[start.operands()[0]]
        if not start.opcode.endswith(_STARTS):
            raise ValueError(
                f"HLO computation {computation.name}: {instruction.name} waits for "
                f"{start.name}, a {start.opcode}; expected a start in the same "
                "computation. Pass the text of a scheduled program"
            )
        begin = start if start.operands() else begin
        yield start.name, begin.name, instruction.name


def schedule(module: Module) -> list[Scheduled]:
    """Returns every collective once, with its position in the schedule."""
    callers = _callers(module)
    chains = {
        (computation.name, start): (begin, done)
        for computation in module.computations.values()
        for start, begin, done in _chains(computation)
    }
    fused = {
        (caller[0], _channel(instruction)): caller[1].name
        for computation, instruction in _collectives(module)
        if any(_DONE in other.rest for other in computation.instructions.values())
        for caller in [callers[computation.name]]
    }
    carriers = _carriers(module)
    scheduled = []
    for op in find(module):
        owner, name = op.computation, op.name
        computation = module.computations[owner]
        instruction = computation.instructions[name]
        started = any(_STARTED in i.rest for i in computation.instructions.values())
        while owner in callers:
            owner, name = callers[owner][0], callers[owner][1].name
        start = module.computations[owner].instructions[name]
        name, end = chains.get((owner, name), (name, ""))
        if started:
            end = _fused_end(fused, owner, instruction)
        if _SYNC.search(start.rest):
            end = ""
        num = carriers.get(_channel(instruction), 0) if started else 0
        scheduled.append(Scheduled(op, owner, name, end, num))
    return scheduled


def _fused_end(
    fused: dict[tuple[str, str], str], owner: str, instruction: Instruction
) -> str:
    key = owner, _channel(instruction)
    if key not in fused:
        raise ValueError(
            f"HLO computation {owner}: {instruction.name} on channel {key[1]} is "
            f"started by {_STARTED}, but no {_DONE} of that channel follows there. "
            "Pass the full text of a scheduled program"
        )
    return fused[key]


def _carriers(module: Module) -> dict[str, int]:
    """Counts the fusions, loops included, that carry the collective of each channel."""
    counts: dict[str, int] = {}
    for computation, instruction in _collectives(module):
        ends = any(
            _STARTED in other.rest or _DONE in other.rest
            for other in computation.instructions.values()
        )
        if _CARRIER in instruction.rest and not ends:
            channel = _channel(instruction)
            counts[channel] = counts.get(channel, 0) + 1
    return counts


def _collectives(module: Module) -> Iterator[tuple[Computation, Instruction]]:
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            if instruction.opcode in KINDS:
                yield computation, instruction


def _channel(instruction: Instruction) -> str:
    match = _CHANNEL.search(instruction.rest)
    return match[1] if match else ""


def _callers(module: Module) -> dict[str, tuple[str, Instruction]]:
    """Returns the caller of each computation that has no schedule of its own."""
    return {
        callee: (computation.name, instruction)
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
        for key in _CALLS.get(instruction.opcode, ())
        for callee in instruction.called(key)
    }
