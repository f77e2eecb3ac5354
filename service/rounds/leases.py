"""Leases of data: which learner computes on which blocks, and what became of them.

A block is the batch of one local step of one learner: block k has the examples
k * rows to (k + 1) * rows - 1 of the run's shuffled order. A block is todo, leased to
a learner for a round, contributed, and consumed by the commit of that contribution.
Whatever prevents this makes it todo again, and such blocks are dealt first.

A lease belongs to (learner, incarnation, round), which is never given twice: that is
its token. It lasts as long as the coordinator hears of the learner.
"""

import collections
import heapq
from collections.abc import Iterable, Sequence

from .events import Contributed, Release

Key = tuple[int, int, int]  # learner, incarnation, round
Range = tuple[int, int]
# A block is set aside when so many learners failed while they computed on it.
MAX_FAILURES = 3


class Leases:
    """The blocks of a job; a function of the order of the calls."""

    def __init__(self):
        self._next = 0  # the first block that was never dealt
        self._returned: list[int] = []  # a heap
        self._held: dict[int, Sequence[int]] = {}  # by learner, for its round
        self._ahead: dict[int, Sequence[int]] = {}  # by learner, for the round after
        self._contributed: dict[Key, Sequence[int]] = {}
        self._failures: collections.Counter[int] = collections.Counter()
        self._set_aside: list[int] = []

    def lease(self, release: Release, num: int) -> Sequence[int]:
        """Leases blocks for a round; those that were leased ahead come first."""
        ahead = self._ahead.pop(release.learner, ())
        self._return(ahead[num:])
        blocks = [*ahead[:num], *self._take(num - len(ahead))]
        self._held[release.learner] = blocks
        return blocks

    def lease_ahead(self, release: Release, num: int) -> Sequence[int]:
        """Leases blocks for the round after the one that a learner begins.

        They are read while it computes, and computed on before its next release if
        the policy has a delay.
        """
        blocks = self._ahead[release.learner] = self._take(num)
        return blocks

    def contributed(self, arrival: Contributed) -> None:
        key = arrival.learner, arrival.incarnation, arrival.round
        self._contributed[key] = self._held.pop(arrival.learner, ())

    def consume(self, key: Key) -> Sequence[int]:
        """Returns the blocks of a contribution; none if it is committed once more."""
        return self._contributed.pop(key, ())

    def give_back(self, key: Key) -> None:
        """Makes the blocks of a contribution todo; none if that was committed."""
        self._return(self._contributed.pop(key, ()))

    def give_up(self, learner: int, *, failed: bool) -> list[int]:
        """Makes what a learner holds todo; returns blocks that are set aside instead.

        Args:
          failed: whether the learner ended in a way that may be the fault of its
            blocks: it crashed, or was not heard of. One that was told to stop did not.
        """
        self._return(self._ahead.pop(learner, ()))
        held = self._held.pop(learner, ())
        self._failures.update(held if failed else ())
        gone = [block for block in held if self._failures[block] >= MAX_FAILURES]
        self._return(block for block in held if block not in gone)
        self._set_aside += gone
        return gone

    def take_set_aside(self) -> list[int]:
        """Returns the blocks that were set aside since the last call."""
        found, self._set_aside = self._set_aside, []
        return found

    def _take(self, num: int) -> list[int]:
        found = []
        for _ in range(num):
            if self._returned:
                found.append(heapq.heappop(self._returned))
            else:
                found.append(self._next)
                self._next += 1
        return found

    def _return(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            heapq.heappush(self._returned, block)


def as_ranges(blocks: Iterable[int]) -> tuple[Range, ...]:
    """Returns blocks, in their order, as ranges [first, stop)."""
    ranges: list[Range] = []
    for block in blocks:
        if ranges and ranges[-1][1] == block:
            ranges[-1] = ranges[-1][0], block + 1
        else:
            ranges.append((block, block + 1))
    return tuple(ranges)


def from_ranges(ranges: Iterable[Sequence[int]]) -> list[int]:
    """Returns the blocks that `as_ranges` was given."""
    return [block for first, stop in ranges for block in range(first, stop)]
