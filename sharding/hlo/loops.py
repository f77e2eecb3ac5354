"""Counts how often each computation of an HLO module runs, from loop trip counts.

XLA for CPU annotates trip counts, XLA for TPU does not. Missing ones are derived from
the start, step and bound of the loop counter.
"""

import functools
import graphlib
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from .text import Computation, Instruction, Module

_CALL_KEYS = {
    "while": ("body", "condition"),
    "conditional": ("branch_computations", "true_computation", "false_computation"),
    "fusion": ("calls",),
    "call": ("to_apply",),
    "async-start": ("calls",),
    "custom-call": ("called_computations",),
}
# Opcodes that pass a scalar through. A copy to another memory may be split in two.
_SAME_VALUE = {
    "bitcast",
    "broadcast",
    "convert",
    "copy",
    "copy-done",
    "copy-start",
    "reshape",
}
_MIRRORED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE"}
_KNOWN_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_SCALAR = re.compile(r"\{?(-?\d+)\}?\)")


class Call(NamedTuple):
    callee: str
    instruction: Instruction
    key: str


class Frame(NamedTuple):
    """A computation and its caller, which determines the values of its parameters."""

    computation: Computation
    caller: Instruction | None = None
    parent: "Frame | None" = None


class Value(NamedTuple):
    """An integer scalar: `offset`, plus the loop-carried value `carried` if any.

    Attributes:
      carried: the name of a loop, and an index into the tuple it carries.
    """

    carried: tuple[str, int] | None
    offset: int


def executions(
    module: Module, count_unknown_loops_as: int | None = None
) -> tuple[dict[str, int], dict[str, str]]:
    """Returns how often each computation runs, and the computations without a count.

    A loop multiplies its body by the trip count, and its condition by one more. Every
    branch of a conditional counts as taken, which gives an upper bound. Combiners of
    reductions and the like are not counted.

    Args:
      count_unknown_loops_as: the trip count to assume if none can be derived. By
        default, computations inside such a loop appear only in the second dictionary,
        with a description of the loop.
    """
    calls = {name: list(_calls(module, name)) for name in module.computations}
    callers: dict[str, set[str]] = {name: set() for name in calls}
    for caller, made in calls.items():
        for call in made:
            callers[call.callee].add(caller)
    order = graphlib.TopologicalSorter(callers).static_order()
    times, unknown = dict.fromkeys(calls, 0), {}
    frames = {module.entry: Frame(module.computations[module.entry])}
    times[module.entry] = 1
    for caller in order:
        if caller not in frames:
            continue  # not reachable from the entry
        for callee, instruction, key in calls[caller]:
            # With several callers, the values of the parameters are ambiguous.
            frames[callee] = (
                Frame(module.computations[callee])
                if callee in frames
                else Frame(module.computations[callee], instruction, frames[caller])
            )
            trips: int | None = 1
            if instruction.opcode == "while":
                trips = _trip_count(module, frames[caller], instruction)
                trips = count_unknown_loops_as if trips is None else trips
            if caller in unknown:
                unknown[callee] = unknown[caller]
            elif trips is None:
                where = module.source(instruction) or instruction.op_name()
                unknown[callee] = f"{instruction.name} in {caller} ({where})"
            else:
                times[callee] += times[caller] * (trips + (key == "condition"))
    return {name: n for name, n in times.items() if name not in unknown}, unknown


def _calls(module: Module, caller: str) -> Iterator[Call]:
    for instruction in module.computations[caller].instructions.values():
        for key in _CALL_KEYS.get(instruction.opcode, ()):
            for callee in instruction.called(key):
                if callee not in module.computations:
                    raise ValueError(
                        f"HLO computation {caller}: {instruction.name} calls {callee}, "
                        "which the text does not define; pass the full module"
                    )
                yield Call(callee, instruction, key)


def _trip_count(module: Module, frame: Frame, loop: Instruction) -> int | None:
    known = _KNOWN_TRIPS.search(loop.rest)
    if known:
        return int(known[1])
    scalars = _Scalars(module)
    condition = scalars.callee(frame, loop, "condition")
    comparison = scalars.comparison(condition, condition.computation.root)
    if comparison is None:
        return None
    left, direction, right = comparison
    if left.carried is None:
        left, direction, right = right, _MIRRORED.get(direction, ""), left
    if left.carried is None or left.carried[0] != loop.name or right.carried:
        return None
    slot = left.carried[1]
    start = scalars.element(frame, loop.operands()[0], slot)
    body = scalars.callee(frame, loop, "body")
    updated = scalars.element(body, body.computation.root, slot)
    if start is None or start.carried or updated is None:
        return None
    if updated.carried != left.carried:
        return None
    distance = right.offset - left.offset - start.offset
    return _count(direction, distance, updated.offset)


def _count(direction: str, distance: int, step: int) -> int | None:
    """Returns the first i >= 0 for which `i * step <direction> distance` is false."""
    if direction in ("GT", "GE"):
        direction, distance, step = _MIRRORED[direction], -distance, -step
    if direction == "LE":
        direction, distance = "LT", distance + 1
    if direction == "LT":
        if distance <= 0:
            return 0
        return -(-distance // step) if step > 0 else None
    if direction == "NE" and step and distance % step == 0 and distance // step >= 0:
        return distance // step
    return None


class _Scalars:
    """Evaluates integer scalars that are constants or loop counters."""

    def __init__(self, module: Module):
        self._module = module

    def callee(self, frame: Frame, caller: Instruction, key: str) -> Frame:
        return Frame(self._module.computations[caller.called(key)[0]], caller, frame)

    def comparison(self, frame: Frame, name: str) -> tuple[Value, str, Value] | None:
        instruction = frame.computation.instructions[name]
        if instruction.opcode in ("fusion", "call"):
            return self._inside(frame, instruction, self.comparison)
        if instruction.opcode in _SAME_VALUE:
            return self.comparison(frame, instruction.operands()[0])
        if instruction.opcode != "compare":
            return None
        left, right = (self.value(frame, operand) for operand in instruction.operands())
        if left is None or right is None:
            return None
        return left, instruction.attribute("direction"), right

    def value(self, frame: Frame, name: str) -> Value | None:
        """Returns the value of a scalar instruction, or None if it is unknown."""
        instruction = frame.computation.instructions[name]
        opcode, operands = instruction.opcode, instruction.operands
        if opcode == "constant":
            number = _SCALAR.match(instruction.rest)
            return Value(None, int(number[1])) if number else None
        if opcode == "parameter":
            return self._argument(frame, instruction, self.value)
        if opcode == "get-tuple-element":
            index = int(instruction.attribute("index"))
            return self.element(frame, operands()[0], index)
        if opcode in ("fusion", "call"):
            return self._inside(frame, instruction, self.value)
        if opcode in _SAME_VALUE:
            return self.value(frame, operands()[0])
        if opcode in ("add", "subtract"):
            left, right = (self.value(frame, operand) for operand in operands())
            return _sum(left, right, 1 if opcode == "add" else -1)
        return None

    def element(self, frame: Frame, name: str, index: int) -> Value | None:
        """Returns the value of a scalar in a tuple, or None if it is unknown."""
        instruction = frame.computation.instructions[name]
        take = functools.partial(self.element, index=index)
        if instruction.opcode == "tuple":
            return self.value(frame, instruction.operands()[index])
        if instruction.opcode == "parameter":
            if frame.caller is not None and frame.caller.opcode == "while":
                return self._carried(frame, index)
            return self._argument(frame, instruction, take)
        if instruction.opcode in ("fusion", "call"):
            return self._inside(frame, instruction, take)
        if instruction.opcode == "opt-barrier":
            return take(frame, instruction.operands()[0])
        if instruction.opcode == "while" and self._invariant(frame, instruction, index):
            return take(frame, instruction.operands()[0])
        return None

    def _carried(self, frame: Frame, index: int) -> Value | None:
        assert frame.caller and frame.parent
        if self._invariant(frame.parent, frame.caller, index):
            return self.element(frame.parent, frame.caller.operands()[0], index)
        return Value((frame.caller.name, index), 0)

    def _invariant(self, frame: Frame, loop: Instruction, index: int) -> bool:
        """Returns whether the loop body passes the element through unchanged."""
        body = self.callee(frame, loop, "body").computation
        root = body.instructions[body.root]
        if root.opcode != "tuple":
            return False
        element = body.instructions[root.operands()[index]]
        if element.opcode != "get-tuple-element":
            return False
        carried = body.instructions[element.operands()[0]]
        same = int(element.attribute("index")) == index
        return carried.opcode == "parameter" and same

    def _inside(
        self, frame: Frame, caller: Instruction, evaluate: Callable[[Frame, str], Any]
    ) -> Any:
        key = _CALL_KEYS[caller.opcode][0]
        callee = self.callee(frame, caller, key)
        return evaluate(callee, callee.computation.root)

    def _argument(
        self,
        frame: Frame,
        parameter: Instruction,
        evaluate: Callable[[Frame, str], Any],
    ) -> Any:
        if frame.caller is None or frame.parent is None:
            return None
        if frame.caller.opcode not in ("fusion", "call"):
            return None
        number = int(parameter.rest.split(")")[0])
        return evaluate(frame.parent, frame.caller.operands()[number])


def _sum(left: Value | None, right: Value | None, sign: int) -> Value | None:
    if left is None or right is None or (right.carried and (left.carried or sign < 0)):
        return None
    return Value(left.carried or right.carried, left.offset + sign * right.offset)
