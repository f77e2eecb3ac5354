"""The learners of a job: who is there, and since when."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..wire.errors import Refused


@dataclasses.dataclass
class Member:
    """A learner that has joined and not left.

    Attributes:
      owner: what the learner calls itself; the same owner may replace itself at once.
      heard: when it last sent a heartbeat.
      expires: time after which the learner counts as lost unless it sends a heartbeat.
      must_rejoin: whether the service restarted from a checkpoint since it joined, so
        that its parameters may come from a version that no longer exists.
      last_round: the last round that it contributed.
    """

    learner: int
    incarnation: int
    owner: str | None
    heard: float
    expires: float
    must_rejoin: bool = False
    last_round: int = 0


class Members:
    """The members by index, with leases.

    Args:
      incarnations: the highest incarnation that each learner ever had.
    """

    def __init__(
        self,
        job: str,
        num_learners: int,
        lease_seconds: float,
        incarnations: Mapping[int, int] | None = None,
    ):
        self._job = job
        self._num_learners = num_learners
        self._lease_seconds = lease_seconds
        self._incarnations = dict(incarnations or {})
        self._live: dict[int, Member] = {}

    def __iter__(self):
        return iter(list(self._live.values()))

    def __len__(self) -> int:
        return len(self._live)

    def get(self, learner: int, incarnation: int) -> Member | None:
        """Returns the member if exactly this incarnation of it is there."""
        member = self._live.get(learner)
        is_current = member is not None and member.incarnation == incarnation
        return member if is_current else None

    def current(self, learner: int) -> Member | None:
        return self._live.get(learner)

    def check_join(self, learner: int, owner: Any, now: float) -> None:
        """Refuses a learner whose index is taken, or is none of this job."""
        if learner >= self._num_learners:
            raise Refused(
                f"job {self._job!r}: learner {learner} is not in 0.."
                f"{self._num_learners - 1}; the job was opened for "
                f"{self._num_learners} learners"
            )
        member = self._live.get(learner)
        is_same = owner is not None and member is not None and owner == member.owner
        if member is not None and not member.must_rejoin and not is_same:
            left = max(0.0, member.expires - now)
            raise Refused(
                f"job {self._job!r}: learner {learner} is already running "
                f"(incarnation {member.incarnation}). Use another index; or, if that "
                f"process is dead, try again in {left:.0f} s."
            )

    def next_incarnation(self, learner: int) -> int:
        return self._incarnations.get(learner, 0) + 1

    def is_stranger(self, learner: int, incarnation: int) -> bool:
        """Returns whether an incarnation is higher than any that has joined.

        Its number will not be given to another one.
        """
        is_new = incarnation >= self.next_incarnation(learner)
        if is_new and 0 <= learner < self._num_learners:
            self._incarnations[learner] = incarnation
            return True
        return False

    def add(
        self,
        learner: int,
        incarnation: int,
        now: float,
        *,
        owner: str | None = None,
    ) -> Member:
        expires = now + self._lease_seconds
        member = Member(learner, incarnation, owner, now, expires)
        self._live[learner] = member
        highest = self._incarnations.get(learner, 0)
        self._incarnations[learner] = max(highest, incarnation)
        return member

    def remove(self, learner: int) -> None:
        del self._live[learner]

    def expired(self, now: float) -> list[Member]:
        return [m for m in self._live.values() if m.expires < now]

    def hear(self, learner: int, incarnation: int, now: float) -> None:
        """Renews the lease of a learner that sent a heartbeat at `now`."""
        member = self.get(learner, incarnation)
        if member is not None and not member.must_rejoin:
            member.heard = max(member.heard, now)
            member.expires = max(member.expires, now + self._lease_seconds)

    def extend(self, until: float) -> None:
        """Gives everybody time to find a service that restarted."""
        for member in self._live.values():
            member.expires = max(member.expires, until)
