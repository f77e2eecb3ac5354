"""The order of a run's examples: arithmetic on the step number, with no state.

Example number k of a run (counted over all batches) belongs to epoch k // N at place
k % N; a keyed permutation of range(N), another one for every epoch, says which
example of the dataset that is. The arithmetic is our own and fixed, so no upgrade of
another library can change the order of a run.
"""

import dataclasses
import math
from typing import Any

import numpy as np

# Odd constants with evenly spread bits; wrapping uint64 multiplication is intended.
_STEP = np.uint64(0x9E3779B97F4A7C15)
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
    return mix(mix(seeds + _STEP) + numbers * _STEP)


def permute(places: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    """Returns where a keyed permutation of range(size) sends each place.

    A Feistel network on pairs (left, right) of a grid of a x b >= size cells. The grid
    has fewer than a cells too many, so a place that lands on one of those is permuted
    again, which seldom happens and always ends.
    """
    num_left = np.uint64(math.isqrt(size - 1) + 1)
    num_right = np.uint64(-(-size // int(num_left)))
    one = np.uint64(1)
    first_keys = keys
    left, right = np.divmod(places.astype(np.uint64), num_right)
    for _ in range(_NUM_ROUNDS // 2):
        # Halved, so that the sum cannot wrap around.
        left = (left + (mix(right * _STEP + keys) >> one)) % num_left
        keys = keys + _MIX_1
        right = (right + (mix(left * _STEP + keys) >> one)) % num_right
        keys = keys + _MIX_1
    result = left * num_right + right
    outside = result >= size
    if outside.any():
        result[outside] = permute(result[outside], size, first_keys[outside])
    return result


@dataclasses.dataclass(frozen=True)
class Order:
    """Which example of the dataset is number k of the run."""

    num_examples: int
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self):
        if self.num_examples < 1:
            raise ValueError(
                f"Order: num_examples is {self.num_examples}; an order needs at least "
                "one example."
            )

    def index(self, k: Any) -> tuple[Any, Any]:
        """Returns (epoch, index in the dataset) of example number k.

        Two integers for an integer, two int64 arrays for an array of numbers.
        """
        numbers = np.asarray(k, dtype=np.int64)
        if (numbers < 0).any():
            raise ValueError(
                f"Order: example number {k} is negative; counting is at 0."
            )
        epochs, places = np.divmod(np.atleast_1d(numbers), self.num_examples)
        if self.shuffle:
            epoch_keys = keys(self.seed, epochs)
            places = permute(places, self.num_examples, epoch_keys).astype(np.int64)
        if numbers.ndim == 0:
            return int(epochs[0]), int(places[0])
        return epochs, places
