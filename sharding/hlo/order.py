"""Whether data alone puts the collectives of a program in one order.

Devices that wait for one another in different collectives wait for ever, or mix up what
they send. A compiled program keeps the order of its schedule. XLA's CPU programs that
are loaded from a file keep it only within a computation: between a loop (or call, or
conditional) that holds collectives and the collectives around it, nothing but the data
that one needs of the other says which comes first (jaxlib 0.10).
"""

from .collectives import KINDS
from .text import Computation, Instruction, Module, parse

_COLLECTIVES = {kind + suffix for kind in KINDS for suffix in ("", "-start")}
_CALLING = (
    *("body", "condition", "calls", "to_apply", "branch_computations"),
    *("true_computation", "false_computation"),
)


def unordered(text: str) -> tuple[str, str] | None:
    """Returns two instructions whose collectives may change places; None without any.

    Args:
      text: the optimized HLO of one module.
    """
    module = parse(text)
    holding: dict[str, bool] = {}
    for computation in module.computations.values():
        if pair := _first_pair(module, computation, holding):
            return pair
    return None


def _first_pair(
    module: Module, computation: Computation, holding: dict[str, bool]
) -> tuple[str, str] | None:
    instructions = computation.instructions
    nested = [i for i in instructions.values() if _holds(module, i, holding)]
    if not nested:
        return None
    direct = [i for i in instructions.values() if i.opcode in _COLLECTIVES]
    needs: dict[str, set[str]] = {}
    for name, instruction in instructions.items():  # operands stand before their users
        own = [operand for operand in instruction.operands() if operand in needs]
        needs[name] = set(own).union(*(needs[operand] for operand in own))
    for one in nested:
        for other in (*direct, *nested):
            both = {one.name, other.name}
            if len(both) == 2 and not any(both & needs[name] for name in both):
                return one.name, other.name
    return None


def _holds(module: Module, instruction: Instruction, holding: dict[str, bool]) -> bool:
    """Whether an instruction that is none itself calls a collective, at any depth."""
    if instruction.opcode in _COLLECTIVES:
        return False
    for key in _CALLING:
        for name in instruction.called(key):
            if name in module.computations and name not in holding:
                inside = module.computations[name].instructions.values()
                holding[name] = any(
                    i.opcode in _COLLECTIVES or _holds(module, i, holding)
                    for i in inside
                )
            if holding.get(name):
                return True
    return False
