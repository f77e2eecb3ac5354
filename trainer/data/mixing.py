"""The order of a mixture: which source each example of the run comes from.

Positions of the run are dealt in blocks, each with the same number of places for every
source, in an order of its own. The examples of a source are taken in the order they
would have if the source were alone: epoch after epoch, each shuffled. All of it is
computed for each position independently, as in `shuffle`.
"""

import dataclasses
import fractions
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from . import shuffle

# Weights that are not fractions of a smaller number are rounded to this one.
MAX_BLOCK = 1000
_SALT = np.uint64(0xD1B54A32D192ED03)


def places(weights: Mapping[str, float], what: str) -> tuple[int, ...]:
    """Returns how many places of a block each source gets."""
    exact = [fractions.Fraction(str(weight)) for weight in weights.values()]
    shares = [weight / sum(exact) for weight in exact]
    size = math.lcm(*(share.denominator for share in shares))
    size = min(size, MAX_BLOCK)
    found = [int(share * size) for share in shares]
    rests = [found[i] - share * size for i, share in enumerate(shares)]
    for i in sorted(range(len(rests)), key=rests.__getitem__)[: size - sum(found)]:
        found[i] += 1
    for name, share, count in zip(weights, shares, found, strict=True):
        if share and not count:
            raise ValueError(
                f"{what}: '{name}' has a share of {float(share):.2g}, less than "
                f"1/{MAX_BLOCK}. Raise its weight, or set it to 0."
            )
    return tuple(found)


@dataclasses.dataclass(frozen=True)
class MixedOrder:
    """Maps example k of the run to an example of a mixture.

    Attributes:
      sizes: examples of each source. The mixture has those of the first source first.
      phases: (position of the run from which on it holds, places in a block of each
        source); the first holds from 0 on.
    """

    sizes: tuple[int, ...]
    phases: tuple[tuple[int, tuple[int, ...]], ...]
    seed: int = 0

    @property
    def num_examples(self) -> int:
        return sum(self.sizes)

    def facts(self) -> dict[str, Any]:
        """Returns what `order_from` needs besides number of examples and seed."""
        return {"mixture": {"sizes": self.sizes, "phases": self.phases}}

    def index(self, k: Any) -> tuple[Any, Any]:
        """Returns (epoch of its source, index in the mixture) of example k of the run.

        Two integers if k is an integer, and two int64 arrays if k is an array.
        """
        numbers = np.asarray(k, dtype=np.int64)
        if (numbers < 0).any():
            raise ValueError(f"MixedOrder: example number is {k}; it must be >= 0.")
        flat = np.atleast_1d(numbers)
        epochs, indices = np.zeros_like(flat), np.zeros_like(flat)
        starts = np.array([start for start, _ in self.phases])
        phases = np.searchsorted(starts, flat, side="right") - 1
        for phase in np.unique(phases).tolist():
            here = phases == phase
            epochs[here], indices[here] = self._in_phase(phase, flat[here])
        if numbers.ndim == 0:
            return int(epochs[0]), int(indices[0])
        return epochs, indices

    def counts(self, position: int) -> np.ndarray:
        """Returns how many of the examples before a position are from each source."""
        total = np.zeros(len(self.sizes), np.int64)
        for number, (start, slots) in enumerate(self.phases):
            last = number + 1 == len(self.phases)
            stop = position if last else min(position, self.phases[number + 1][0])
            if stop <= start:
                break
            blocks, rest = divmod(stop - start, sum(slots))
            total += blocks * np.array(slots)
            sources = self._sources(number, np.array([blocks]))[0, :rest]
            total += np.bincount(sources, minlength=len(slots))
        return total

    @functools.cached_property
    def _before(self) -> list[np.ndarray]:
        """How many examples of each source come before each phase."""
        return [self.counts(start) for start, _ in self.phases]

    def _sources(self, phase: int, blocks: np.ndarray) -> np.ndarray:
        """Returns the source of each place [block, place]."""
        slots = self.phases[phase][1]
        size = sum(slots)
        keys = shuffle.mix(shuffle.keys(self.seed, blocks) + _SALT)
        places = np.tile(np.arange(size), len(blocks))
        order = shuffle.permute(places, size, np.repeat(keys, size)).astype(np.int64)
        sources = np.searchsorted(np.cumsum(slots), order, side="right")
        return sources.reshape(len(blocks), size)

    def _in_phase(
        self, phase: int, positions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        start, slots = self.phases[phase]
        blocks, places = np.divmod(positions - start, sum(slots))
        numbers, rows = np.unique(blocks, return_inverse=True)
        sources = self._sources(phase, numbers)
        epochs, indices = np.zeros_like(positions), np.zeros_like(positions)
        first = 0
        for source, size in enumerate(self.sizes):
            is_it = sources == source
            ranks = np.cumsum(is_it, axis=1) - 1
            here = is_it[rows, places]
            count = self._before[phase][source] + blocks[here] * slots[source]
            epoch, place = np.divmod(count + ranks[rows, places][here], size)
            if len(place):
                keys = (
                    shuffle.keys(self.seed, epoch)
                    + np.array([source], np.uint64) * _SALT
                )
                place = shuffle.permute(place, size, keys).astype(np.int64)
            epochs[here], indices[here] = epoch, first + place
            first += size
        return epochs, indices


def shares(order: MixedOrder, names: Sequence[str], position: int) -> dict[str, float]:
    """Returns each source's share of the examples before a position."""
    counts = order.counts(position)
    pairs = zip(names, counts.tolist(), strict=True)
    return {f"share_{name}": count / position for name, count in pairs}
