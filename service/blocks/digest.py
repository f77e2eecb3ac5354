"""Digests of leaves whose elements are on several servers, with numpy alone.

The same digest as trainer/program/digest.py: a sum, modulo 2**32 and in two lanes, of a
hash of every element with its index. So each server adds up its own elements, and
`digest_of` turns the sum of all of them into the digest of the leaf.
"""

import math
import zlib
from collections.abc import Sequence

import numpy as np

from .box import Box
from .dtypes import dtype_of
from .layout import Leaf

LANES = (0x9E3779B9, 0x85EBCA77)
WORD = np.uint32


def lanes(array: np.ndarray, box: Box, shape: Sequence[int]) -> tuple[int, int]:
    """Returns the two sums over the elements of a box.

    Args:
      array: the elements of `box`, in the dtype of the leaf.
      shape: of the whole leaf.
    """
    words = _words(array)
    position = _position(box, shape)
    sums = [
        int(np.sum(_mix(_mix(position, seed) + words, seed), dtype=WORD))
        for seed in LANES
    ]
    return sums[0], sums[1]


def add(first: Sequence[int], second: Sequence[int]) -> tuple[int, int]:
    """Adds two pairs of sums modulo 2**32."""
    one, two = ((a + b) % 2**32 for a, b in zip(first, second, strict=True))
    return one, two


def digest_of(leaf: Leaf, sums: Sequence[int]) -> str:
    """Returns the digest of a leaf, 16 hexadecimal digits, from the sums of all boxes.

    Shape and dtype are a part of it.
    """
    about = zlib.crc32(f"{dtype_of(leaf.dtype).name}{tuple(leaf.shape)}".encode())
    return "".join(f"{x:08x}" for x in add(sums, [about ^ seed for seed in LANES]))


def _words(array: np.ndarray) -> np.ndarray:
    """Returns the bits of each element as a number, flat."""
    flat = np.ascontiguousarray(array).reshape(-1)
    unsigned = {2: np.uint16, 4: np.uint32}[array.dtype.itemsize]
    return flat.view(unsigned).astype(WORD)


def _position(box: Box, shape: Sequence[int]) -> np.ndarray:
    """Returns a number for each element, from its index along every dimension."""
    position = np.zeros(box.shape or (1,), WORD)
    for dim in range(len(shape)):
        stride = math.prod(shape[dim + 1 :]) % 2**32
        index = np.arange(box.start[dim], box.stop[dim], dtype=np.uint64).astype(WORD)
        along = index * WORD(stride)
        if dim == 0:
            along = along + _mix(index, 0xC2B2AE3D)
        ones = (1,) * (len(shape) - dim - 1)
        position += along.reshape(-1, *ones)
    return (position * WORD(2)).reshape(-1)


def _mix(x: np.ndarray, seed: int) -> np.ndarray:
    """Applies a bijection of 32-bit words in which every bit affects every other."""
    x = x + WORD(seed)
    x = (x ^ (x >> WORD(16))) * WORD(0x85EBCA6B)
    x = (x ^ (x >> WORD(13))) * WORD(0xC2B2AE35)
    return x ^ (x >> WORD(16))
