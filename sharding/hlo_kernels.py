"""FLOPs of kernels, each of which is one custom call in HLO text.

jax's splash attention for TPUs is known here; the text names it, its arrays and its
blocks. It is taken to be causal: blocks of scores above the diagonal are skipped.
"""

import math
import re

from .hlo_text import Computation, Instruction

_SPLASH = re.compile(r"splash_m[hq]a_(fwd|dq|dkv)")
# Products of a block of scores: with their values forward; backward the scores again,
# the gradient of the shares, and those of queries, or of keys and values.
_PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4}
_BLOCKS = {
    "fwd": ("block_q", "block_kv"),
    "dq": ("block_q_dq", "block_kv_dq"),
    "dkv": ("block_q_dkv", "block_kv_dkv"),
}


def kernel_flops(computation: Computation, instruction: Instruction) -> float:
    """FLOPs of a custom call, and 0 of one that is not known."""
    found = _SPLASH.match(instruction.name)
    if not found:
        return 0.0
    phase = found[1]
    # Before the queries come integers that say which blocks to do.
    queries, keys, *_ = (
        arrays[0]
        for arrays in computation.operand_arrays(instruction)
        if arrays[0].dtype in ("bf16", "f32")
    )
    *heads, length, width = queries.dims
    sizes = [_block(instruction, name) for name in _BLOCKS[phase]]
    products = _PRODUCTS[phase]
    # One kernel for all gradients also gives those of queries, a part for each block
    # of keys: one dimension more than the queries have.
    partial = (*queries.dims[:-3], keys.dims[-2] // sizes[1], *queries.dims[-3:])
    if phase == "dkv" and partial in [a.dims for a in instruction.arrays()]:
        products += 1
    pairs = causal_pairs(length, keys.dims[-2], *sizes)
    return 2.0 * products * math.prod(heads) * pairs * math.prod(sizes) * width


def causal_pairs(num_queries: int, num_keys: int, block_q: int, block_kv: int) -> int:
    """Blocks of scores that have a key no later than a query."""
    return sum(
        min(math.ceil((i + 1) * block_q / block_kv), num_keys // block_kv)
        for i in range(num_queries // block_q)
    )


def _block(instruction: Instruction, name: str) -> int:
    found = re.search(rf'"{name}\\": (\d+)', instruction.rest)
    if not found:
        raise ValueError(
            f"HLO instruction {instruction.name}: {name} is not in its metadata, so "
            "its FLOPs cannot be told; pass the text as the compiler printed it"
        )
    return int(found[1])
