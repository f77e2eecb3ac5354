"""What becomes of every block of data, seen from outside the engine."""

import collections

from meshloom.service.rounds.events import (
    Commit,
    Contributed,
    Decision,
    Done,
    Dropped,
    Event,
    Joined,
    Left,
    Release,
    Restored,
    SetAside,
)
from meshloom.service.rounds.leases import MAX_FAILURES, from_ranges
from meshloom.service.rounds.policy import Policy


class LeasedData:
    """Follows each block from lease to commit, and says who must get which."""

    def __init__(self, policy: Policy, num_rounds: int):
        self._policy, self._num_rounds = policy, num_rounds
        self.frontier = 0  # blocks from here on were never leased
        self.consumed: set[int] = set()
        self.set_aside: list[int] = []
        self.reported: list[int] = []  # set aside, as the commits say
        self._held: dict[int, tuple[tuple, list[int]]] = {}
        self._ahead: dict[int, list[int]] = {}
        self._pending: dict[tuple, list[int]] = {}
        self._all: dict[tuple, list[int]] = {}  # of each contribution
        self._failures: collections.Counter[int] = collections.Counter()

    def check(self, event: Event, decisions: list[Decision], *, was_done: bool) -> None:
        """Checks the decisions of one event."""
        expected = []
        if isinstance(event, Contributed):
            self.sent(event)
        elif isinstance(event, Joined | Left) and not was_done:
            expected = self.lost(event.learner)
        elif isinstance(event, Restored):
            self.restored()
        gone = [b for d in decisions if isinstance(d, SetAside) for b in d.blocks]
        assert gone == expected
        for decision in decisions:
            if isinstance(decision, Commit):
                self.committed(decision)
            elif isinstance(decision, Dropped):
                key = decision.learner, decision.incarnation, decision.round
                self.dropped(key)
        if not was_done and Done(None) not in decisions:
            self.released([d for d in decisions if isinstance(d, Release)])

    @property
    def todo(self) -> list[int]:
        used = {*self.consumed, *self.set_aside}
        used.update(*self._ahead.values(), *self._pending.values())
        used.update(*(blocks for _, blocks in self._held.values()))
        return [block for block in range(self.frontier) if block not in used]

    def sent(self, arrival: Contributed) -> None:
        key = arrival.learner, arrival.incarnation, arrival.round
        if self._held.get(arrival.learner, ((), []))[0] == key:
            self._pending[key] = self._all[key] = self._held.pop(arrival.learner)[1]

    def lost(self, learner: int) -> list[int]:
        """Returns what is set aside now."""
        self._ahead.pop(learner, None)
        held = self._held.pop(learner, ((), []))[1]
        self._failures.update(held)
        gone = [b for b in held if self._failures[b] == MAX_FAILURES]
        self.set_aside += gone
        return gone

    def restored(self) -> None:
        self._held, self._ahead, self._pending = {}, {}, {}

    def dropped(self, key: tuple) -> None:
        self._pending.pop(key, None)

    def committed(self, commit: Commit) -> None:
        for part in commit.contributions:
            key = part.learner, part.incarnation, part.round
            blocks = from_ranges(part.blocks)
            assert blocks == self._pending.pop(key, [])
            if not part.is_reused:
                assert blocks == self._all[key]
                assert len(blocks) == self._policy.steps_of(part.round)
            assert not self.consumed & set(blocks), "consumed twice"
            self.consumed |= set(blocks)
        self.reported += commit.set_aside

    def released(self, releases: list[Release]) -> None:
        """Checks what was leased: first what came back, then what comes next."""
        for release in releases:
            ahead = self._ahead.pop(release.learner, [])
            num = self._policy.steps_of(release.round)
            expected = [*ahead[:num], *self._take(num - len(ahead))]
            assert from_ranges(release.blocks) == expected
            key = release.learner, release.incarnation, release.round
            self._held[release.learner] = key, expected
        for release in releases:
            num = 0
            if release.round < self._num_rounds:
                num = self._policy.steps_of(release.round + 1)
            expected = self._take(num)
            assert from_ranges(release.ahead) == expected
            self._ahead[release.learner] = expected

    def _take(self, num: int) -> list[int]:
        found = self.todo[: max(num, 0)]
        fresh = range(self.frontier, self.frontier + num - len(found))
        self.frontier += len(fresh)
        return [*found, *fresh]
