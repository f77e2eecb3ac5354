"""Checks whether data dependencies alone order the collectives of a program.

Devices that enter different collectives at the same time deadlock or exchange the wrong
data. A compiled program runs its collectives in the order of its schedule. A CPU
program that XLA loads from a file keeps that order only within a computation. Between a
loop (or call, or conditional) that contains collectives and the collectives around it,
only data dependencies decide which runs first (jaxlib 0.10).
"""

from .collectives import KINDS
from .text import Computation, Instruction, Module, parse

_COLLECTIVES = {kind + suffix for kind in KINDS for suffix in ("", "-start")}
_CALLING = (
    *("body", "condition", "calls", "to_apply", "branch_computations"),
    *("true_computation", "false_computation"),
)


def unordered(text: str) -> tuple[str, str] | None:
    """Returns two instructions whose collectives may run in either order, or None.

    Args:
      text: the optimized HLO of one module.
    """
    module = parse(text)
    contains: dict[str, bool] = {}
    for computation in module.computations.values():
        if pair := _first_pair(module, computation, contains):
            return pair
    return None


def _first_pair(
    module: Module, computation: Computation, contains: dict[str, bool]
) -> tuple[str, str] | None:
    instructions = computation.instructions
    nested = [i for i in instructions.values() if _is_nested(module, i, contains)]
    if not nested:
        return None
    direct = [i for i in instructions.values() if i.opcode in _COLLECTIVES]
    needs: dict[str, set[str]] = {}
    for name, instruction in instructions.items():  # operands precede their users
        own = [operand for operand in instruction.operands() if operand in needs]
        needs[name] = set(own).union(*(needs[operand] for operand in own))
    for one in nested:
        for other in (*direct, *nested):
            both = {one.name, other.name}
            if len(both) == 2 and not any(both & needs[name] for name in both):
                return one.name, other.name
    return None


def _is_nested(
    module: Module, instruction: Instruction, contains: dict[str, bool]
) -> bool:
    """Returns whether a non-collective instruction calls a collective, at any depth."""
    if instruction.opcode in _COLLECTIVES:
        return False
    for key in _CALLING:
        for name in instruction.called(key):
            if name in module.computations and name not in contains:
                inside = module.computations[name].instructions.values()
                contains[name] = any(
                    i.opcode in _COLLECTIVES or _is_nested(module, i, contains)
                    for i in inside
                )
            if contains.get(name):
                return True
    return False
