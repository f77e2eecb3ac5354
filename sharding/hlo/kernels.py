"""FLOPs of attention kernels, as far as HLO text reveals them.

A Pallas kernel for TPUs is opaque machine code, with an optional cost estimate. jax's
splash attention has no estimate but records its block sizes. All blocks with an
unmasked score under a causal mask are counted, in full, as the kernel computes them.
The mask is not in the text, so a kernel with another mask is counted wrongly. cuDNN
attention records the shape of its scores; under a causal mask half of them are counted.
"""

import math
import re

from .text import Array, Computation, Instruction, integers

_TARGET = re.compile(r'custom_call_target="(tpu_custom_call|__cudnn\$fmha\w+)"')
_SCORES = re.compile(
    r'"intermediate_tensor_shape": ?\{[^{}]*"dimensions": ?\[([^]]*)\]'
)
_CAUSAL = re.compile(r'"mask_type": ?"\w*CAUSAL')
_ESTIMATE = re.compile(r'"cost_estimate":\{[^}]*"flops":"?(\d+)')
_SPLASH = re.compile(r"splash_m[hq]a_(fwd|dq|dkv)")
_BLOCK = r'\\"{}\\": (\d+)'
# Matrix products per block. Forward: the scores, and their product with the values.
# Backward: the scores again, their gradient, and one product per operand's gradient.
_PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4}
_FUSED = 5


def is_kernel(instruction: Instruction) -> bool:
    return instruction.opcode == "custom-call" and bool(
        _TARGET.search(instruction.rest)
    )


def kernel_flops(computation: Computation, instruction: Instruction) -> float | None:
    """Returns the FLOPs of a kernel, or None if the text does not reveal them."""
    estimate = _ESTIMATE.search(instruction.rest)
    if estimate:
        return float(estimate[1])
    if "__cudnn$fmha" in instruction.rest:
        return _cudnn_flops(computation, instruction)
    splash = _SPLASH.search(instruction.op_name() or instruction.name)
    if not splash:
        return None
    return _splash_flops(computation, instruction, splash[1])


def _cudnn_flops(computation: Computation, instruction: Instruction) -> float:
    shape = _SCORES.search(instruction.rest)
    if not shape:
        raise ValueError(
            f"HLO instruction {instruction.name}: expected the shape of the scores, "
            f"intermediate_tensor_shape, found {instruction.rest[:200]!r}"
        )
    scores = math.prod(integers(shape[1]))
    width = computation.operand_arrays(instruction)[0][0].dims[-1]
    products = _FUSED if "Backward" in instruction.rest else _PRODUCTS["fwd"]
    share = 0.5 if _CAUSAL.search(instruction.rest) else 1.0
    return 2.0 * products * share * scores * width


def _splash_flops(
    computation: Computation, instruction: Instruction, part: str
) -> float | None:
    suffix = "" if part == "fwd" else f"_{part}"
    matches = [
        re.search(_BLOCK.format(name + suffix), instruction.rest)
        for name in ("block_q", "block_kv")
    ]
    operands: list[Array] = [
        arrays[0] for arrays in computation.operand_arrays(instruction) if arrays
    ]
    wide = [a for a in operands if len(a.dims) > 2 and a.dtype in ("bf16", "f32")]
    if None in matches or len(wide) < 2:
        return None
    block_q, block_kv = (int(match[1]) for match in matches if match)
    queries, keys = wide[:2]
    length, width = queries.dims[-2:]
    blocks = causal_blocks(
        length // block_q, keys.dims[-2] // block_kv, block_q, block_kv
    )
    # The fused backward kernel also returns query gradients, as a partial sum for each
    # block of keys: one more dimension than the queries.
    *batch, _, _, _ = queries.dims
    partial = (*batch, keys.dims[-2] // block_kv, *queries.dims[-3:])
    is_fused = part == "dkv" and partial in [a.dims for a in instruction.arrays()]
    products = _FUSED if is_fused else _PRODUCTS[part]
    heads = math.prod(queries.dims[:-2])
    return 2.0 * products * heads * blocks * block_q * block_kv * width


def causal_blocks(rows: int, columns: int, block_q: int, block_kv: int) -> int:
    """Returns the number of blocks with at least one unmasked (query, key) pair."""
    return sum(
        min(columns, math.ceil((row + 1) * block_q / block_kv)) for row in range(rows)
    )
