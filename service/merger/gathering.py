"""Which contributions a merger adds up: those of all learners below it, if it can.

Whom it waits for decides how much goes to the service, never what the training
computes: the coordinator logs what was added up.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from ..wire.sums import Key, contributions_of

# How long to wait for learners that are connected, but not told to begin this round.
GRACE_SECONDS = 2.0


@dataclasses.dataclass
class Child:
    """A learner below this merger, directly or not.

    Attributes:
      heard: when it last sent a heartbeat.
      released: the last round that it was told to begin.
      contributed: the last round that it contributed here.
    """

    incarnation: int
    heard: float
    released: int = 0
    contributed: int = 0


@dataclasses.dataclass
class Item:
    """Something staged here: a contribution, or the sum of a merger below.

    Attributes:
      tree: of a sum; None if this is the contribution of one learner.
      parts: what each learner in it has said of its contribution.
      answer: for whoever sent it, once it is known.
      error: instead of an answer.
    """

    key: Key
    parts: list[Mapping[str, Any]]
    coefficient: float
    arrived: float
    tree: Mapping[str, Any] | None = None
    answer: dict[str, Any] | None = None
    error: Exception | None = None

    @property
    def keys(self) -> list[Key]:
        """The keys of all contributions in it."""
        return [self.key] if self.tree is None else contributions_of(self.tree)

    @property
    def is_over(self) -> bool:
        return self.answer is not None or self.error is not None


class Gathering:
    """The learners below a merger, and what they have sent that is not passed on yet.

    It has no clock and no lock.

    Args:
      silence_seconds: who sends no heartbeat for so long is not waited for.
    """

    def __init__(self, silence_seconds: float):
        self._silence = silence_seconds
        self._looked: float | None = None
        self.children: dict[int, Child] = {}
        self.items: dict[Key, Item] = {}

    def hear(self, learner: int, incarnation: int, now: float) -> None:
        """Notes that a learner is here; an older incarnation of it is not."""
        child = self.children.get(learner)
        if child is None or child.incarnation < incarnation:
            self.children[learner] = Child(incarnation, now)
        elif child.incarnation == incarnation:
            child.heard = now

    def release(self, learner: int, incarnation: int, round: int) -> None:
        """Notes that a learner was told to begin a round."""
        child = self.children.get(learner)
        if child is not None and child.incarnation == incarnation:
            child.released = max(child.released, round)

    def remove(self, learner: int, incarnation: int) -> None:
        """Notes that a learner has left; what it has contributed still counts."""
        child = self.children.get(learner)
        if child is not None and child.incarnation == incarnation:
            del self.children[learner]

    def add(self, item: Item) -> None:
        self.items[item.key] = item
        for learner, incarnation, round in item.keys:
            child = self.children.get(learner)
            if child is not None and child.incarnation == incarnation:
                child.contributed = max(child.contributed, round)

    def look(self, now: float) -> None:
        """Removes the learners that sent no heartbeat."""
        if self._looked is not None and now - self._looked > self._silence / 2:
            for child in self.children.values():  # this process was paused
                child.heard = now
        self._looked = now
        for learner, child in list(self.children.items()):
            if now - child.heard > self._silence:
                del self.children[learner]

    def ready(self, now: float) -> list[Item]:
        """Returns what is to be added up now; [] while somebody is waited for."""
        waiting = [item for item in self.items.values() if not item.is_over]
        if not waiting:
            return []
        round = min(item.key[2] for item in waiting)
        items = [item for item in waiting if item.key[2] == round]
        newest = max(item.arrived for item in items)
        for child in self.children.values():
            if child.contributed < round and (
                child.released >= round or now < newest + GRACE_SECONDS
            ):
                return []
        return sorted(items, key=lambda item: item.key)


def without(items: Iterable[Item], gone: Iterable[Key]) -> list[Item]:
    """Answers the items of which something cannot count; returns the others.

    A learner asks what comes next, and is told. A merger below must add up anew.
    """
    gone, left = set(gone), []
    for item in items:
        inside = [list(key) for key in item.keys if key in gone]
        if not inside:
            left.append(item)
        elif item.tree is None:
            item.answer = {"state": "ok"}
        else:
            item.answer = {"state": "regroup", "gone": inside}
    return left
