"""What the engine knows: members, version, and the decisions of one event."""

import bisect
import dataclasses
import math

from .events import (
    Commit,
    Contributed,
    Contribution,
    Decision,
    Done,
    Dropped,
    Release,
    SetAside,
)
from .lags import Lags
from .leases import Leases, as_ranges
from .policy import ADAPTIVE, Policy


@dataclasses.dataclass
class Member:
    """A learner that has joined at least once, in its newest incarnation.

    Attributes:
      round: the last round it was released for; 0 before the first.
      base: the version it was released with.
      released: when that was.
      status: "joined", "computing", "waiting" (has contributed), "done", or "lost" (the
        servers restarted from a checkpoint, so it must join again).
      contributed: the last round that any incarnation of it contributed.
      bases: the version that it has read of each fragment, last exchanged or all at
        once; empty before the first round of an incarnation.
    """

    learner: int
    incarnation: int
    is_live: bool = True
    round: int = 0
    base: int = 0
    released: float = 0.0
    status: str = "joined"
    contributed: int = 0
    bases: dict[int, int] = dataclasses.field(default_factory=dict)


class State:
    """The part of the engine that all policies share; changed by one event a time."""

    def __init__(self, policy: Policy, num_learners: int, num_rounds: int):
        self.policy = policy
        self.num_learners = num_learners
        self.num_rounds = num_rounds
        self.time = 0.0
        self.version = 0
        self.members: dict[int, Member] = {}
        self.num_live = 0
        self.is_started = False
        self.is_done = False
        self.decisions: list[Decision] = []
        self._leases = Leases()
        self._lags = Lags()
        self._last_quorum: float | None = None  # when the last commit had its quorum
        self._commits_of = {f: [] for f in range(policy.fragments)}
        self._num_committed = 0
        # With several fragments a round begins when another one is read: the versions
        # of those that the contributions change.
        self._read: dict[tuple[int, int, int], int] = {}

    def age(self, arrival: Contributed) -> int:
        """Returns how many commits have changed its fragment since it was read."""
        base = self._read.get(_key(arrival), arrival.base)
        commits = self._commits_of[self.policy.fragment_of(arrival.round)]
        return len(commits) - bisect.bisect_right(commits, base)

    def release(self, member: Member, round: int) -> None:
        # The learner reads what it has exchanged, or everything if it goes elsewhere.
        fragments = range(self.policy.fragments)
        if member.bases and round == member.round + 1:
            fragments = (self.policy.fragment_of(member.round),)
        member.bases |= dict.fromkeys(fragments, self.version)
        member.round, member.base = round, self.version
        member.released, member.status = self.time, "computing"
        self.decisions.append(
            Release(member.learner, member.incarnation, round, self.version)
        )

    def drop(self, arrival: Contributed, reason: str) -> None:
        self._read.pop(_key(arrival), None)
        self.decisions.append(Dropped(*_key(arrival), reason))
        self._leases.give_back(_key(arrival))

    def give_up(self, member: Member, *, failed: bool) -> None:
        """Takes back the data that a learner holds and has not contributed."""
        if gone := self._leases.give_up(member.learner, failed=failed):
            self.decisions.append(SetAside(member.learner, tuple(gone)))

    def deal(self) -> None:
        """Leases data to the learners that were released.

        Nobody gets data for its next round before all have some for this one: in
        lockstep a round consumes the data that comes next in the order.
        """
        policy, found = self.policy, self.decisions
        released = [i for i, d in enumerate(found) if isinstance(d, Release)]
        for name, lease, after in (
            ("blocks", self._leases.lease, 0),
            ("ahead", self._leases.lease_ahead, 1),
        ):
            for index in released:
                release = found[index]
                assert isinstance(release, Release)
                round = release.round + after
                if round <= self.num_rounds:
                    ranges = as_ranges(lease(release, policy.steps_of(round)))
                    found[index] = dataclasses.replace(release, **{name: ranges})

    def finish(self, learner: int | None) -> None:
        self.is_done = self.is_done or learner is None
        self.decisions.append(Done(learner))

    def needed(self, num_learners: int) -> int:
        """Returns the contributions that are a quorum of so many learners."""
        quorum = self.policy.quorum
        if isinstance(quorum, int):
            return quorum
        # 0.1 x 30 is 3.0000000000000004: not a reason to wait for a fourth.
        return max(math.ceil(quorum * num_learners - 1e-9), 1)

    def note_arrival(self, member: Member, arrival: Contributed) -> None:
        """Records the timing, data and age of a contribution that has just arrived."""
        self._leases.contributed(arrival)
        if self.policy.fragments > 1:
            fragment = self.policy.fragment_of(arrival.round)
            self._read[_key(arrival)] = member.bases[fragment]
        self._lags.add_duration(self.time - member.released)
        if self._last_quorum is not None:
            self._lags.add_lag(self.time - self._last_quorum)

    def begin_grace(self) -> float:
        """Notes that a commit has its quorum; returns when it is due."""
        self._last_quorum = self.time
        grace = self.policy.grace
        return self.time + (self._lags.grace if grace == ADAPTIVE else float(grace))

    def commit(self, fragment: int, arrivals: list[tuple[Contributed, bool]]) -> None:
        """Commits contributions, each with whether it is reused."""
        policy = self.policy
        arrivals.sort(key=lambda a: (a[0].learner, a[0].incarnation, a[0].round))
        contributions, divisor = [], 0.0
        for arrival, is_reused in arrivals:
            coefficient, part = self._coefficient(arrival)
            divisor += part
            contributions.append(
                Contribution(
                    arrival.learner,
                    arrival.incarnation,
                    arrival.round,
                    arrival.base,
                    arrival.weight,
                    coefficient,
                    is_reused,
                    as_ranges(self._leases.consume(_key(arrival))),
                )
            )
        is_full = policy.update == "full"
        step = self.version if is_full else self._num_committed // self.num_learners
        share = 1.0 if is_full else len(arrivals) / self.num_learners
        self.version += 1
        self._num_committed += len(arrivals)
        self._commits_of[fragment].append(self.version)
        for arrival, _ in arrivals:
            self._read.pop(_key(arrival), None)
        # Without any weight the sum is zero already.
        parts = tuple(contributions)
        gone = tuple(self._leases.take_set_aside())
        self.decisions.append(
            Commit(self.version, fragment, step, share, divisor or 1.0, parts, gone)
        )

    def _coefficient(self, arrival: Contributed) -> tuple[float, float]:
        """Returns the coefficient and what it adds to the divisor.

        The discount of old contributions is not part of the divisor: one that is
        merged alone would otherwise count as if it were fresh.
        """
        discount = 1.0
        if self.policy.late == "merge":
            discount /= 1 + self.age(arrival)
        coefficient, part = self.policy.coefficient(arrival.weight, arrival.steps)
        return discount * coefficient, part


def _key(arrival: Contributed) -> tuple[int, int, int]:
    return arrival.learner, arrival.incarnation, arrival.round
