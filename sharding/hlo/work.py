"""FLOPs and memory traffic of single HLO instructions.

FLOPs are those of matrix products and of kernels whose FLOPs are known. Bytes are the
operands and results in the device's main memory; other memory spaces, such as S(1),
VMEM on TPUs, are free. For a fusion, only the bytes it uses count: the slice it reads
of an operand, the part of a buffer it updates in place, and nothing it passes through.
"""

import functools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from . import program
from .collectives import KINDS
from .kernels import is_kernel, kernel_flops
from .text import Array, Computation, Instruction, Module, integers

_ARRAYS = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\](?:\{([^{}]*)\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_FREE = {
    "after-all",
    "async-start",
    "async-update",
    "bitcast",
    "constant",
    "domain",
    "get-tuple-element",
    "opt-barrier",
    "parameter",
    "partition-id",
    "replica-id",
    "tuple",
}
# Calls that annotate a buffer and do no work.
_FREE_CALLS = re.compile(
    r'custom_call_target="(AllocateBuffer|AssumeGatherIndicesInBound|ConcatBitcast)"'
)
_SLICES = {"dynamic-slice", "slice", "gather"}
# Reading part of the result reads only the corresponding part of the operand.
_ELEMENTWISE = {"bitcast", "convert", "copy", "pad", "reshape", "transpose"}
_CALLS = {"fusion": "calls", "async-start": "calls", "call": "to_apply"}
_COLLECTIVES = {kind + suffix for kind in KINDS for suffix in ("", "-start", "-done")}


class Work(NamedTuple):
    flops: float
    bytes: int


class Reader:
    """Computes the work of the instructions of one module.

    Attributes:
      unknown_kernels: kernels seen so far whose FLOPs the text does not reveal.
    """

    def __init__(self, module: Module):
        self._module = module
        self.unknown_kernels: set[str] = set()
        self._needed = functools.cache(self._elements_needed)
        self._flops = functools.cache(self._computation_flops)
        self._users = functools.cache(self._find_users)

    def work(self, computation: str, name: str) -> Work:
        """Returns the work of one run of an instruction, not for loops or calls."""
        instruction = self._instruction(computation, name)
        if instruction.opcode in _FREE or _FREE_CALLS.search(instruction.rest):
            return Work(0.0, 0)
        return Work(
            self._own_flops(computation, instruction),
            self._read(computation, instruction) + self._written(computation, name),
        )

    def moved(self, computation: str, start: str, done: str) -> int:
        """Returns the bytes that an asynchronous copy or slice moves."""
        instruction = self._instruction(computation, start)
        while instruction.opcode == "async-update":
            begun = instruction.operands()[0]
            instruction = self._instruction(computation, begun)
        callees = instruction.called("calls")
        if callees:
            read = sum(
                self._read_parameter(callees[0], other)
                for other in self._computation(callees[0]).instructions.values()
                if other.opcode == "parameter"
            )
        else:
            read = min(
                self._read(computation, instruction), self._size(computation, done)
            )
        return read + _hbm_bytes(self._instruction(computation, done).shape)

    def _size(self, computation: str, name: str) -> int:
        arrays = self._instruction(computation, name).arrays()
        return sum(array.num_bytes for array in arrays)

    def _read(self, computation: str, instruction: Instruction) -> int:
        total = 0
        for position, operand in enumerate(instruction.operands()):
            shape = self._instruction(computation, operand).shape
            in_hbm, elements = _hbm_bytes(shape), _elements(shape)
            if in_hbm and elements:
                used = self._used(computation, instruction, position, elements)
                total += round(in_hbm * used / elements)
        return total

    def _read_parameter(self, computation: str, parameter: Instruction) -> int:
        in_hbm, elements = _hbm_bytes(parameter.shape), _elements(parameter.shape)
        needed = self._needed(computation, parameter.name) if in_hbm else 0
        return round(in_hbm * needed / elements) if elements else 0

    def _elements_needed(self, computation: str, name: str) -> int:
        """Returns how many elements of a value its users read."""
        total = _elements(self._instruction(computation, name).shape)
        needed = 0
        for user in self._users(computation).get(name, ()):
            for position, operand in enumerate(user.operands()):
                if operand == name:
                    needed += self._used(computation, user, position, total)
        return min(total, needed)

    def _used(
        self, computation: str, user: Instruction, position: int, total: int
    ) -> int:
        """Returns how many of the `total` elements of an operand `user` reads."""
        opcode = user.opcode
        if opcode in _SLICES and position == 0:
            return min(total, user.arrays()[0].size)
        if opcode in ("dynamic-update-slice", "scatter") and position == 0:
            return 0  # updated in place
        if opcode in ("tuple", "get-tuple-element") or opcode in _COLLECTIVES:
            return 0  # passed through; collectives are charged to the network
        key = _CALLS.get(opcode)
        if key:
            callee = user.called(key)[0]
            return self._needed(callee, self._parameter(callee, position))
        if opcode in _ELEMENTWISE and self._inside_fusion(computation):
            return self._needed(computation, user.name)
        return total

    def _written(self, computation: str, name: str) -> int:
        """Returns the bytes that an instruction writes to main memory."""
        shape = self._instruction(computation, name).shape
        spaces = [space for _, space in _arrays(shape)]
        return sum(
            count
            for count, space in zip(
                self._results(computation, name), spaces, strict=True
            )
            if not space
        )

    def _results(self, computation: str, name: str) -> Iterator[int]:
        """Yields the bytes written to each array of a result."""
        instruction = self._instruction(computation, name)
        opcode, operands = instruction.opcode, instruction.operands
        arrays = instruction.arrays()
        if opcode == "tuple":
            for operand in operands():
                yield from self._results(computation, operand)
        elif opcode == "parameter" or opcode in _COLLECTIVES:
            yield from (0 for _ in arrays)
        elif opcode in _CALLS:
            callee = instruction.called(_CALLS[opcode])[0]
            inside = list(self._results(callee, self._computation(callee).root))
            same = len(inside) == len(arrays)
            yield from inside if same else (array.num_bytes for array in arrays)
        elif opcode in ("dynamic-update-slice", "scatter"):
            position = 1 if opcode == "dynamic-update-slice" else -1
            update = self._instruction(computation, operands()[position]).arrays()[0]
            yield math.prod(update.dims) * arrays[0].num_bytes // max(1, arrays[0].size)
        elif opcode == "bitcast" and self._inside_fusion(computation):
            yield from self._results(computation, operands()[0])
        else:
            yield from (array.num_bytes for array in arrays)

    def _own_flops(self, computation: str, instruction: Instruction) -> float:
        owner = self._computation(computation)
        if is_kernel(instruction):
            flops = kernel_flops(owner, instruction)
            if flops is None:
                self.unknown_kernels.add(instruction.op_name() or instruction.name)
            return flops or 0.0
        key = _CALLS.get(instruction.opcode)
        if key:
            return sum(self._flops(callee) for callee in instruction.called(key))
        return program.product_flops(owner, instruction)

    def _computation_flops(self, name: str) -> float:
        instructions = self._computation(name).instructions.values()
        return sum(self._own_flops(name, instruction) for instruction in instructions)

    def _find_users(self, computation: str) -> dict[str, list[Instruction]]:
        users: dict[str, list[Instruction]] = {}
        for instruction in self._computation(computation).instructions.values():
            for operand in dict.fromkeys(instruction.operands()):
                users.setdefault(operand, []).append(instruction)
        return users

    def _parameter(self, computation: str, number: int) -> str:
        for instruction in self._computation(computation).instructions.values():
            if instruction.opcode == "parameter":
                if int(instruction.rest.split(")")[0]) == number:
                    return instruction.name
        raise ValueError(
            f"HLO computation {computation} is called with an operand {number}, but "
            f"has no parameter({number}); pass the full text of the module"
        )

    @functools.cached_property
    def _fused(self) -> set[str]:
        return {
            callee
            for computation in self._module.computations.values()
            for instruction in computation.instructions.values()
            if instruction.opcode in ("fusion", "async-start")
            for callee in instruction.called("calls")
        }

    def _inside_fusion(self, computation: str) -> bool:
        return computation in self._fused

    def _computation(self, name: str) -> Computation:
        return self._module.computations[name]

    def _instruction(self, computation: str, name: str) -> Instruction:
        return self._module.computations[computation].instructions[name]


def _arrays(shape: str) -> list[tuple[Array, int]]:
    """Returns the arrays of a shape, each with its memory space."""
    arrays = []
    for dtype, dims, layout in _ARRAYS.findall(shape):
        space = _SPACE.search(layout)
        arrays.append((Array(dtype, integers(dims)), int(space[1]) if space else 0))
    return arrays


def _hbm_bytes(shape: str) -> int:
    return sum(array.num_bytes for array, space in _arrays(shape) if not space)


def _elements(shape: str) -> int:
    return sum(array.size for array, _ in _arrays(shape))
