"""Learners that count their own rounds: stale-synchronous, asynchronous, merging."""

import collections
import dataclasses
import heapq

from .events import Contributed
from .state import Member, State


@dataclasses.dataclass
class Group:
    """Contributions to one fragment that will be committed together."""

    arrivals: list[Contributed] = dataclasses.field(default_factory=list)
    due: float | None = None


class Independent:
    """Commits at each quorum; a learner goes on when the policy lets it."""

    def __init__(self, state: State):
        self._state = state
        self._groups: dict[int, Group] = {}
        self._num_waiting = 0  # live learners that have contributed and not gone on
        self._finished: set[int] = set()  # learners without rounds left to contribute
        self._num_finished_live = 0
        self._num_done = 0  # finished, and what they contributed is committed
        # How many live unfinished learners are in a round, and a heap of these rounds.
        self._in_round: collections.Counter[int] = collections.Counter()
        self._rounds: list[int] = []
        self._blocked: list[tuple[int, int, int]] = []  # round, learner, incarnation

    @property
    def deadline(self) -> float | None:
        return min(
            (g.due for g in self._groups.values() if g.due is not None), default=None
        )

    @property
    def kept(self) -> set[tuple[int, int, int]]:
        """Contributions that may still be committed."""
        arrivals = [a for group in self._groups.values() for a in group.arrivals]
        return {(a.learner, a.incarnation, a.round) for a in arrivals}

    def join(self, member: Member) -> None:
        if member.learner in self._finished:
            self._num_finished_live += 1
            if member.status == "done":
                self._state.finish(member.learner)
            return
        # Whoever was away does not make the others wait until it has caught up.
        slowest = self._slowest() or 0
        round = max(member.contributed + 1, slowest)
        if slowest and self._is_ahead(round, slowest):
            member.round, member.status = round - 1, "waiting"
            self._enter(member.round)
            self._block(member)
        else:
            self._enter(round)
            self._state.release(member, round)

    def leave(self, member: Member) -> None:
        if member.learner in self._finished:
            self._num_finished_live -= 1
            return
        self._in_round[member.round] -= 1
        if member.status == "waiting":
            self._num_waiting -= 1

    def contribute(self, member: Member, arrival: Contributed) -> None:
        state, policy = self._state, self._state.policy
        fragment = policy.fragment_of(arrival.round)
        age = state.age(arrival)
        is_last = arrival.round == state.num_rounds
        if is_last:
            self._finished.add(member.learner)
            self._num_finished_live += 1
            self._in_round[member.round] -= 1
        if policy.late == "merge" and age > (policy.staleness or age):
            state.drop(
                arrival,
                f"{age} commits old, and the policy allows {policy.staleness}",
            )
            self._go_on(member)
            return
        self._groups.setdefault(fragment, Group()).arrivals.append(arrival)
        if not is_last and policy.late == "wait":
            self._block(member)
        elif not is_last:
            self._num_waiting += 1

    def stop(self) -> list[Contributed]:
        """Forgets everything; returns what was not committed."""
        groups = [self._groups[fragment] for fragment in sorted(self._groups)]
        self._groups, self._blocked = {}, []
        return [arrival for group in groups for arrival in group.arrivals]

    def restore(self) -> list[Contributed]:
        """Forgets what the servers have lost; returns what was not committed.

        Learners that contributed it do their round again once they have joined again.
        """
        lost = self.stop()
        self._num_waiting = 0
        for arrival in lost:
            member = self._state.members[arrival.learner]
            if member.contributed == arrival.round:
                member.contributed -= 1
            if arrival.round == self._state.num_rounds:
                self._finished.remove(member.learner)
                if member.is_live:
                    self._num_finished_live -= 1
                    self._enter(member.round)
        return lost

    def settle(self) -> None:
        """Commits what is due, and lets learners go on."""
        for fragment in sorted(self._groups):
            self._settle_group(fragment, self._groups[fragment])
        self._release_blocked()
        self._complete()

    def _settle_group(self, fragment: int, group: Group) -> None:
        state = self._state
        if group.due is None:
            if len(group.arrivals) < self._needed():
                return
            group.due = state.begin_grace()
        if not self._are_all_waiting() and state.time < group.due:
            return
        del self._groups[fragment]
        state.commit(fragment, [(arrival, False) for arrival in group.arrivals])
        for arrival in sorted(group.arrivals, key=lambda a: (a.learner, a.round)):
            member = state.members[arrival.learner]
            is_current = member.incarnation == arrival.incarnation
            if arrival.round == state.num_rounds:
                self._finish(member)
            elif state.policy.late == "merge" and is_current and member.is_live:
                self._num_waiting -= 1
                self._go_on(member)

    def _go_on(self, member: Member) -> None:
        if member.learner in self._finished:
            self._finish(member)
            return
        self._in_round[member.round] -= 1
        self._enter(member.round + 1)
        self._state.release(member, member.round + 1)

    def _finish(self, member: Member) -> None:
        member.status = "done"
        self._num_done += 1
        self._state.finish(member.learner)

    def _enter(self, round: int) -> None:
        if not self._in_round[round]:
            heapq.heappush(self._rounds, round)
        self._in_round[round] += 1

    def _block(self, member: Member) -> None:
        self._num_waiting += 1
        key = member.round, member.learner, member.incarnation
        heapq.heappush(self._blocked, key)

    def _is_ahead(self, round: int, slowest: int) -> bool:
        """Returns whether a learner must not begin a round yet."""
        policy = self._state.policy
        bound = policy.staleness
        return policy.late == "wait" and bound is not None and round - slowest > bound

    def _release_blocked(self) -> None:
        """Releases learners that are not too far ahead of the slowest."""
        while self._blocked:
            round, learner, incarnation = self._blocked[0]
            member = self._state.members[learner]
            is_current = (member.round, member.incarnation) == (round, incarnation)
            if is_current and member.is_live and member.status == "waiting":
                slowest = self._slowest()
                assert slowest is not None
                if self._is_ahead(round + 1, slowest):
                    return
                self._num_waiting -= 1
                self._go_on(member)
            heapq.heappop(self._blocked)

    def _slowest(self) -> int | None:
        """Returns the smallest round that a live unfinished learner is in."""
        while self._rounds and not self._in_round[self._rounds[0]]:
            self._in_round.pop(heapq.heappop(self._rounds), None)
        return self._rounds[0] if self._rounds else None

    def _num_unfinished(self) -> int:
        """Returns the number of live learners that have rounds left to contribute."""
        return self._state.num_live - self._num_finished_live

    def _quorum(self) -> int:
        """Returns the quorum; learners that have finished count, also if they left."""
        return self._state.needed(self._num_unfinished() + len(self._finished))

    def _needed(self) -> int:
        # Those that are done will not contribute again: nobody should wait for them.
        return max(self._quorum() - self._num_done, 1)

    def _are_all_waiting(self) -> bool:
        return self._num_waiting == self._num_unfinished()

    def _complete(self) -> None:
        """Ends the job if a quorum has finished and nobody else is to be waited for."""
        state = self._state
        if self._num_done < self._quorum():
            return
        is_empty = not self._groups and not self._num_unfinished()
        if state.policy.late == "merge" or is_empty:
            for arrival in self.stop():
                state.drop(arrival, "the job is complete")
            state.finish(None)
