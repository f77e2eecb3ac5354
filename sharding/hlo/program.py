"""Reads the device groups of collectives and the FLOPs of an optimized HLO program."""

import functools
import math
import re

import numpy as np

from .kernels import is_kernel, kernel_flops
from .loops import executions
from .text import Array, Computation, Instruction, integers, parse

_GROUPS = re.compile(
    r"replica_groups=(\{\{.*?\}\}|\{\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?"
    r"|@?mesh[\[<].*?\{[^}]*\})"
)
_IOTA = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?$")
_MESH = re.compile(r"@?mesh[\[<](.*?)[\]>](.*?) ?\{(.*)\}$")
_MESH_AXIS = re.compile(r"'?([^'=,]+)'?=(\d+)")
_GROUP_AXIS = re.compile(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?(?:,|$)")
_PAIRS = re.compile(r"[ ,]source_target_pairs=(\{\{.*?\}\}|\{\})")
_GEMM = re.compile(r'custom_call_target="__cublas\$')
_GEMM_CONTRACTED = re.compile(r'"lhs_contracting_dimensions": ?\[([^]]*)\]')

Groups = tuple[tuple[int, ...], ...]


def replica_groups(instruction: Instruction, num_ids: int) -> Groups:
    """Returns the groups of ids of a collective, in any of the formats XLA prints.

    These are lists `{{0,1},{2,3}}`, iotas `[4,2]<=[2,4]T(1,0)`, and axes of an internal
    mesh, `mesh['a'=4,'b'=2] {'a':(1)2}`; `{}` is one group of all `num_ids` ids.
    """
    match = _GROUPS.search(instruction.rest)
    if not match:
        raise ValueError(
            f"HLO instruction {instruction.name}: replica_groups are missing or in an "
            f"unknown format: {instruction.rest[:200]!r}"
        )
    return _parse_groups(match[1], num_ids)


def source_target_pairs(instruction: Instruction) -> Groups:
    """Returns the (source, target) pairs of a collective-permute."""
    match = _PAIRS.search(instruction.rest)
    if not match:
        raise ValueError(
            f"HLO instruction {instruction.name}: expected source_target_pairs, found "
            f"{instruction.rest[:200]!r}"
        )
    return tuple(integers(pair) for pair in re.findall(r"[\d,]+(?=\})", match[1]))


@functools.lru_cache(maxsize=4096)
def _parse_groups(text: str, num_ids: int) -> Groups:
    if text.startswith("{"):
        groups = (integers(group) for group in text.split("}"))
        return tuple(filter(None, groups)) or (tuple(range(num_ids)),)
    if text.startswith("["):
        shape, order = text.split("<=")
        return _rows(_iota(order).reshape(integers(shape)))
    match = _MESH.match(text)
    assert match, text
    return _mesh_groups(*match.groups())


def _iota(text: str) -> np.ndarray:
    """Returns the flat ids of `[4,2]T(1,0)`: an arange, reshaped and transposed."""
    match = _IOTA.search(text)
    if not match:
        raise ValueError(
            f"HLO text: expected an iota such as [4,2]T(1,0), found {text}"
        )
    dims = integers(match[1])
    ids = np.arange(math.prod(dims)).reshape(dims)
    return (ids.transpose(integers(match[2])) if match[2] else ids).ravel()


def _mesh_groups(axes: str, order: str, grouped: str) -> Groups:
    sizes = {name: int(size) for name, size in _MESH_AXIS.findall(axes)}
    count = math.prod(sizes.values())
    listed = re.search(r"\((?:devices=\[[\d,]+\])?(?:<=)?(.*)\)", order)
    ids = np.arange(count)
    if listed:
        text = listed[1]
        ids = _iota(text) if "[" in text else np.array(integers(text))
    shape = tuple(sizes.values())
    unravelled = np.unravel_index(np.arange(count), shape)
    coordinates = dict(zip(sizes, unravelled, strict=True))
    for name, before, size in _GROUP_AXIS.findall(grouped):
        # `name:(before)size` is one mixed-radix digit of the coordinate: `size` values,
        # with `before` values in the more significant digits.
        width = int(size or sizes[name])
        stride = sizes[name] // (int(before or 1) * width)
        digit = coordinates[name] // stride % width
        coordinates[name] = coordinates[name] - digit * stride
    rest = np.ravel_multi_index(tuple(coordinates.values()), shape)
    by_group = np.argsort(rest, kind="stable")
    num_groups = len(np.unique(rest))
    return _rows(ids[by_group].reshape(num_groups, -1))


def _rows(ids: np.ndarray) -> Groups:
    return tuple(tuple(row) for row in ids.tolist())


def flops(text: str, *, count_unknown_loops_as: int | None = None) -> float:
    """Returns the floating-point operations of matrix products on one device.

    A multiply-add counts as two. Dots, convolutions (XLA for TPU turns dots into
    convolutions; positions in the padding are free), cuBLAS calls and attention kernels
    are counted as often as they run. Elementwise work and other custom calls are not
    counted.

    Args:
      text: Optimized HLO text of one program.
      count_unknown_loops_as: The trip count to assume if none can be derived. By
        default, a matrix product in such a loop is an error.
    """
    module = parse(text)
    times, unknown = executions(module, count_unknown_loops_as)
    total = 0.0
    for name, computation in module.computations.items():
        once = sum(
            product_flops(computation, instruction)
            for instruction in computation.instructions.values()
        )
        if once and name in unknown:
            raise unknown_loop(f"{name} multiplies matrices", unknown[name])
        total += once * times.get(name, 0)
    return total


def unknown_loop(what: str, loop: str) -> ValueError:
    return ValueError(
        f"HLO computation {what} in the loop {loop}, whose trip count cannot be "
        "derived from its start, step and bound; pass count_unknown_loops_as with "
        "the trip count to assume"
    )


def product_flops(computation: Computation, instruction: Instruction) -> float:
    """Returns the FLOPs of one run of a matrix product, 0 for anything else."""
    if instruction.opcode == "dot":
        contracted = integers(instruction.attribute("lhs_contracting_dims"))
    elif instruction.opcode == "convolution":
        left, right = (arrays[0] for arrays in computation.operand_arrays(instruction))
        return _convolution_flops(instruction, left, right)
    elif instruction.opcode == "custom-call" and _GEMM.search(instruction.rest):
        match = _GEMM_CONTRACTED.search(instruction.rest)
        contracted = integers(match[1]) if match else ()
    elif is_kernel(instruction):
        return kernel_flops(computation, instruction) or 0.0
    else:
        return 0.0
    left = computation.operand_arrays(instruction)[0][0]
    depth = math.prod(left.dims[dimension] for dimension in contracted)
    return 2.0 * instruction.arrays()[0].size * depth


def _convolution_flops(instruction: Instruction, left: Array, right: Array) -> float:
    labels = re.split("_|->", instruction.attribute("dim_labels"))
    out = instruction.arrays()[0]
    window = dict(re.findall(r"(\w+)=(\S+?)(?=[ }])", instruction.attribute("window")))
    total = 2.0 * out.dims[labels[2].index("b")] * out.dims[labels[2].index("f")]
    total *= right.dims[labels[1].index("i")]
    for spatial in range(len(labels[0]) - 2):
        size, kernel, steps = (
            array.dims[label.index(str(spatial))]
            for array, label in zip((left, right, out), labels, strict=True)
        )
        options = {key: text.split("x")[spatial] for key, text in window.items()}
        total *= _window_hits(size, kernel, steps, options)
    return total


def _window_hits(size: int, kernel: int, out: int, options: dict[str, str]) -> int:
    """Counts the pairs of output and kernel positions that read a real input."""
    stride = int(options.get("stride", 1))
    hole = int(options.get("lhs_dilate", 1))
    spread = int(options.get("rhs_dilate", 1))
    start = -int(options.get("pad", "0_0").split("_")[0])
    steps = sorted([(out, stride), (kernel, spread)])
    many = np.arange(steps[1][0]) * steps[1][1] + start
    hits = 0
    for position in range(steps[0][0]):
        at = many + position * steps[0][1]
        hits += int(np.sum((at >= 0) & (at <= (size - 1) * hole) & (at % hole == 0)))
    return hits
