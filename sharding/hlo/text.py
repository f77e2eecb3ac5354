"""Parses the optimized HLO text of a compiled program, as XLA prints it.

A module is a set of computations; a computation is a list of instructions. One pass
splits each line into name, shape, opcode and the rest. Operands and attributes are
parsed on demand.
"""

import dataclasses
import math
import os
import re

_INSTRUCTION = re.compile(r"\s+(ROOT )?%?(\S+) = (.+?) ([a-z][a-z0-9-]*)\((.*)")
_COMPUTATION = re.compile(r"(ENTRY )?%?([^\s(]+) ?(?:\(.*)?\{$")
_TABLE_ROW = re.compile(r"(\d+) (.*)")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_BITS = re.compile(r"[a-z]+(\d+)")
_COMMENT = re.compile(r"/\*.*?\*/")
_BRACKET = re.compile(r"[][(){},]")
_OWN_FOLDER = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
_TABLES = {"FileNames", "FunctionNames", "FileLocations", "StackFrames"}


@dataclasses.dataclass(frozen=True, slots=True)
class Array:
    """Element type and dimensions of one array of a shape."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def num_bytes(self) -> int:
        """Bytes without the padding of a tiled layout, rounded up."""
        if self.dtype == "pred":
            return self.size
        bits = _BITS.match(self.dtype)
        return -(-self.size * int(bits[1]) // 8) if bits else 0


@dataclasses.dataclass(slots=True)
class Instruction:
    """One line, `name = shape opcode(rest`, where rest is operands and attributes."""

    name: str
    opcode: str
    shape: str
    rest: str

    def arrays(self) -> list[Array]:
        """Returns the arrays of the result; nested tuples are flattened."""
        return [
            Array(dtype, integers(dims)) for dtype, dims in _ARRAY.findall(self.shape)
        ]

    def operands(self) -> list[str]:
        """Returns the names of the operands, with or without printed types."""
        parts = _split_operands(self.rest)
        return [part.split()[-1].lstrip("%") for part in parts if part.strip()]

    def attribute(self, key: str) -> str:
        """Returns the value of `key=...` as text, braces included, or ""."""
        match = re.search(rf"[,{{ ]{key}=(\{{[^{{}}]*\}}|[^,\s}}]+)", self.rest)
        return match[1] if match else ""

    def called(self, key: str) -> list[str]:
        """Returns the names of the computations that an attribute lists."""
        names = self.attribute(key).strip("{}").split(",")
        return [name.strip().lstrip("%") for name in names if name.strip()]

    def op_name(self) -> str:
        match = re.search(r'[{ ]op_name="((?:[^"\\]|\\.)*)"', self.rest)
        return match[1] if match else ""


@dataclasses.dataclass(slots=True)
class Computation:
    """Instructions by name, in order; `root` names the result."""

    name: str
    instructions: dict[str, Instruction] = dataclasses.field(default_factory=dict)
    root: str = ""

    def operand_arrays(self, instruction: Instruction) -> list[list[Array]]:
        """Returns the arrays of every operand of one of the instructions."""
        try:
            operands = [self.instructions[name] for name in instruction.operands()]
        except KeyError as missing:
            raise ValueError(
                f"HLO computation {self.name}: {instruction.name} has the operand "
                f"{missing}, which the computation does not define; pass the full "
                "text of the module"
            ) from None
        return [operand.arrays() for operand in operands]


@dataclasses.dataclass(slots=True)
class Module:
    """The computations of a program, and the tables of their source lines."""

    header: str = ""
    entry: str = ""
    computations: dict[str, Computation] = dataclasses.field(default_factory=dict)
    tables: dict[str, dict[int, str]] = dataclasses.field(default_factory=dict)

    @property
    def replica_count(self) -> int:
        return self._header_number("replica_count")

    @property
    def num_partitions(self) -> int:
        return self._header_number("num_partitions")

    def _header_number(self, key: str) -> int:
        match = re.search(rf"\b{key}=(\d+)", self.header)
        return int(match[1]) if match else 1

    def source(self, instruction: Instruction) -> str:
        """Returns the `file:line` of the innermost user frame, or "" if there is none.

        Frames of this package are skipped: the caller of a constraint is more useful
        than the line here that applies it.
        """
        inline = re.search(r'source_file="([^"]*)"', instruction.rest)
        if inline:
            return f"{inline[1]}:{instruction.attribute('source_line') or '?'}"
        frame = int(instruction.attribute("stack_frame_id") or 0)
        innermost = location = self._location(frame)
        while location.startswith(_OWN_FOLDER) and self._parent(frame) < frame:
            frame = self._parent(frame)
            location = self._location(frame)
        return location or innermost

    def _location(self, frame: int) -> str:
        location = self._row("StackFrames", frame).get("file_location_id", 0)
        row = self._row("FileLocations", location)
        file = self.tables.get("FileNames", {}).get(row.get("file_name_id", 0))
        return f"{file.strip(chr(34))}:{row['line']}" if file else ""

    def _parent(self, frame: int) -> int:
        # Frame 1 has no parent; if one is printed for it, all parent ids are off by 1.
        shift = self._row("StackFrames", 1).get("parent_frame_id", 0)
        return self._row("StackFrames", frame).get("parent_frame_id", shift) - shift

    def _row(self, table: str, index: int) -> dict[str, int]:
        row = self.tables.get(table, {}).get(index, "")
        return {key: int(number) for key, number in re.findall(r"(\w+)=(\d+)", row)}


def parse(text: str) -> Module:
    """Parses the text of one module."""
    module = Module()
    computation: Computation | None = None
    last: Instruction | None = None
    table: dict[int, str] = {}
    for line in text.splitlines():
        if line[:1].isspace() and (match := _INSTRUCTION.match(line)):
            if computation is not None:
                root, name, shape, opcode, rest = match.groups()
                last = Instruction(name, opcode, shape, rest)
                computation.instructions[name] = last
                if root:
                    computation.root = name
        elif line == "}" or line.startswith("}, "):
            last = None
        elif last is not None:
            last.rest += line  # the attributes of a kernel may span several lines
        elif line.startswith("HloModule"):
            if module.header:
                raise ValueError("HLO text: found a second HloModule; pass one module")
            module.header = line
        elif line.endswith("{") and (match := _COMPUTATION.match(line)):
            computation = module.computations[match[2]] = Computation(match[2])
            if match[1]:
                module.entry = match[2]
        elif line in _TABLES:
            table = module.tables.setdefault(line, {})
        elif computation is None and (match := _TABLE_ROW.match(line)):
            table[int(match[1])] = match[2]
    if not module.entry:
        raise ValueError(
            "HLO text: found no ENTRY computation; pass the text of a compiled "
            "program, jax.jit(f).lower(...).compile().as_text(), not of a lowered one"
        )
    return module


def integers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))


def _split_operands(rest: str) -> list[str]:
    """Splits the text before the closing bracket at top-level commas."""
    parts, depth, start = [], 0, 0
    for bracket in _BRACKET.finditer(rest):
        char, end = bracket[0], bracket.start()
        if char == "," and depth == 0 or char == ")" and depth == 0:
            parts.append(_COMMENT.sub("", rest[start:end]))
            start = end + 1
            if char == ")":
                return parts
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
    raise ValueError(f"HLO text: found no end of the operands in {rest[:200]!r}")
