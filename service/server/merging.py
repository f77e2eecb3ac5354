"""From contributions to their mean, with numpy.

Each operation rounds once, whatever the number of contributions. A compiler may fuse a
product with a sum, and then the bits depend on the machine.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .staging import Pool


class Addend(NamedTuple):
    """One contribution to a block.

    Attributes:
      arrays: its slabs.
      base: the parameters that it started from, to compensate for the delay; None if
        they are those of now.
      weight: the tokens (or examples) that a gradient is a sum over.
    """

    arrays: Sequence[np.ndarray]
    coefficient: float
    base: Sequence[np.ndarray] | None = None
    weight: float = 1.0


def mean_of(
    addends: Sequence[Addend],
    divisor: float,
    params: Sequence[np.ndarray],
    pool: Pool,
    *,
    compensation: float = 0.0,
) -> list[np.ndarray]:
    """Returns sum(coefficient * array) / divisor of every slab of a block.

    The sum is added in the order given. Its buffers are taken from the pool.

    Args:
      params: of now.
      compensation: lambda of DC-ASGD: adds lambda * g * g * (params - base) to each
        gradient g = array / weight.
    """
    means = []
    # Gradients that are not finite are found by their sum of squares.
    with np.errstate(all="ignore"):
        for i, now in enumerate(params):
            out, scratch = pool.take(now.shape), pool.take(now.shape)
            for n, addend in enumerate(addends):
                array = addend.arrays[i]
                if addend.base is not None:
                    factor = compensation / addend.weight
                    array = _compensated(array, now, addend.base[i], factor, scratch)
                if addend.coefficient != 1.0:
                    factor = np.float32(addend.coefficient)
                    array = np.multiply(array, factor, out=scratch)
                if n == 0:
                    np.copyto(out, array)
                else:
                    np.add(out, array, out=out)
            np.divide(out, np.float32(divisor if divisor > 0 else 1.0), out=out)
            pool.give(scratch)
            means.append(out)
    return means


def sum_of_squares(array: np.ndarray) -> float:
    """Returns the sum of squares, added in float64."""
    with np.errstate(all="ignore"):
        return float(np.sum(np.square(array, dtype=np.float64)))


def _compensated(
    array: np.ndarray,
    now: np.ndarray,
    base: np.ndarray,
    factor: float,
    scratch: np.ndarray,
) -> np.ndarray:
    """Returns array + factor * array * array * (now - base), in `scratch`."""
    np.subtract(now.astype(np.float32), base.astype(np.float32), out=scratch)
    np.multiply(scratch, array, out=scratch)
    np.multiply(scratch, array, out=scratch)
    np.multiply(scratch, np.float32(factor), out=scratch)
    return np.add(array, scratch, out=scratch)
