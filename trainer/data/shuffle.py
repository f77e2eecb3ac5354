"""The order of a run's examples, computed from the step number without any state.

Example k of a run (counted over all batches) is at position k % N of epoch k // N. A
keyed permutation of range(N), with a different key for every epoch, maps that position
to an example of the dataset. The arithmetic is our own and never changes, so no upgrade
of another library can change the order of a run.
"""

import dataclasses
import math
from typing import Any

import numpy as np

# The constants of SplitMix64; uint64 multiplication is meant to wrap around.
STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_NUM_ROUNDS = 4


def mix(x: np.ndarray) -> np.ndarray:
    """Returns 64 well-mixed bits for every element of a uint64 array."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def keys(seed: int, numbers: Any) -> np.ndarray:
    """Returns one uint64 key for every (seed, number)."""
    seeds = np.atleast_1d(np.array(seed % 2**64, dtype=np.uint64))
    numbers = np.atleast_1d(np.asarray(numbers)).astype(np.uint64)
    return mix(mix(seeds + STEP) + numbers * STEP)


def permute(positions: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    """Applies a keyed permutation of range(size) to each position.

    A Feistel network on pairs (left, right) of a grid of a x b >= size cells. The grid
    has fewer than a extra cells. A position that lands on one of them is permuted
    again, which is rare and always terminates.
    """
    num_left = np.uint64(math.isqrt(size - 1) + 1)
    num_right = np.uint64(-(-size // int(num_left)))
    one = np.uint64(1)
    first_keys = keys
    left, right = np.divmod(positions.astype(np.uint64), num_right)
    for _ in range(_NUM_ROUNDS // 2):
        # Shifted right by one bit so that the sum cannot wrap around.
        left = (left + (mix(right * STEP + keys) >> one)) % num_left
        keys = keys + _MIX_1
        right = (right + (mix(left * STEP + keys) >> one)) % num_right
        keys = keys + _MIX_1
    result = left * num_right + right
    outside = result >= size
    if outside.any():
        result[outside] = permute(result[outside], size, first_keys[outside])
    return result


@dataclasses.dataclass(frozen=True)
class Order:
    """Maps example k of the run to an example of the dataset."""

    num_examples: int
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self):
        if self.num_examples < 1:
            raise ValueError(
                f"Order: num_examples is {self.num_examples}; it must be >= 1."
            )

    def facts(self) -> dict[str, Any]:
        """Returns what `order_from` needs besides number of examples and seed."""
        return {}

    def index(self, k: Any) -> tuple[Any, Any]:
        """Returns (epoch, index in the dataset) of example k of the run.

        The result is two integers if k is an integer, and two int64 arrays if k is an
        array.
        """
        numbers = np.asarray(k, dtype=np.int64)
        if (numbers < 0).any():
            raise ValueError(f"Order: example number is {k}; it must be >= 0.")
        epochs, indices = np.divmod(np.atleast_1d(numbers), self.num_examples)
        if self.shuffle:
            epoch_keys = keys(self.seed, epochs)
            indices = permute(indices, self.num_examples, epoch_keys).astype(np.int64)
        if numbers.ndim == 0:
            return int(epochs[0]), int(indices[0])
        return epochs, indices
