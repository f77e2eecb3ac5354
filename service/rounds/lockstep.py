"""Learners in lockstep: all work on round version + 1."""

from .events import Contributed
from .state import Member, State


class Lockstep:
    """Commits a round at its quorum; late contributions are dropped or reused."""

    def __init__(self, state: State):
        self._state = state
        self._fresh: dict[int, Contributed] = {}
        self._num_waiting = 0  # live learners that have nothing to do in this round
        self._due: float | None = None
        # Learner to its last contribution, and whether that has been committed.
        self._last: dict[int, tuple[Contributed, bool]] = {}

    @property
    def deadline(self) -> float | None:
        return self._due

    @property
    def kept(self) -> set[tuple[int, int, int]]:
        """Contributions that may still be committed."""
        arrivals = [*self._fresh.values(), *(a for a, _ in self._last.values())]
        return {(a.learner, a.incarnation, a.round) for a in arrivals}

    def join(self, member: Member) -> None:
        if member.learner in self._fresh:
            # The incarnation before has done this round: its samples are in.
            member.status = "waiting"
            self._num_waiting += 1
        else:
            self._state.release(member, self._state.version + 1)

    def leave(self, member: Member) -> None:
        if member.status == "waiting":
            self._num_waiting -= 1
        if member.learner in self._last:
            self._forget(member.learner, "its learner left")

    def contribute(self, member: Member, arrival: Contributed) -> None:
        state, policy = self._state, self._state.policy
        age = state.age(arrival)
        is_late = arrival.round <= state.version or age > 0
        if not is_late:
            self._fresh[member.learner] = arrival
            self._num_waiting += 1
            return
        if policy.late == "reuse" and age <= (policy.staleness or 0):
            if member.learner in self._last:
                self._forget(member.learner, "a newer contribution has arrived")
            self._last[member.learner] = (arrival, False)
        else:
            state.drop(
                arrival,
                f"late: it began at version {arrival.base}, and the newest is "
                f"{state.version}",
            )
        state.release(member, state.version + 1)

    def stop(self) -> list[Contributed]:
        """Forgets everything; returns what was not committed."""
        old = [
            arrival for arrival, is_committed in self._last.values() if not is_committed
        ]
        left = [*self._fresh.values(), *old]
        self._fresh, self._last, self._due = {}, {}, None
        return sorted(left, key=lambda a: (a.learner, a.incarnation, a.round))

    def restore(self) -> list[Contributed]:
        """Forgets what the servers have lost; returns what was not committed."""
        self._num_waiting = 0
        return self.stop()

    def settle(self) -> None:
        """Commits the round if it is due."""
        state = self._state
        if self._due is None:
            if not self._is_quorum():
                return
            self._due = state.begin_grace()
        if self._num_waiting == state.num_live or state.time >= self._due:
            self._commit()

    def _is_quorum(self) -> bool:
        state = self._state
        if isinstance(state.policy.quorum, int):
            return len(self._fresh) >= state.policy.quorum
        # Contributions of learners that have left are welcome, but not counted.
        return state.needed(state.num_live) <= self._num_waiting

    def _commit(self) -> None:
        state = self._state
        arrivals = [(arrival, False) for arrival in self._fresh.values()]
        if state.policy.late == "reuse":
            arrivals += self._stand_ins()
        state.commit(state.policy.fragment_of(state.version + 1), arrivals)
        self._fresh, self._num_waiting, self._due = {}, 0, None
        if state.version == state.num_rounds:
            self._last = {}
            state.finish(None)
            return
        for learner in sorted(state.members):
            member = state.members[learner]
            if member.is_live and member.status == "waiting":
                state.release(member, state.version + 1)

    def _stand_ins(self) -> list[tuple[Contributed, bool]]:
        """Returns the last contributions of learners without a fresh one."""
        found = []
        for learner, arrival in self._fresh.items():
            if learner in self._last:
                self._forget(learner, "a newer contribution has arrived")
            if self._state.members[learner].is_live:
                self._last[learner] = (arrival, True)
        for learner, (arrival, _) in list(self._last.items()):
            if learner in self._fresh:
                continue
            if self._state.age(arrival) > (self._state.policy.staleness or 0):
                self._forget(learner, "too old to be reused")
            else:
                found.append((arrival, True))
                self._last[learner] = (arrival, True)
        return found

    def _forget(self, learner: int, reason: str) -> None:
        arrival, is_committed = self._last.pop(learner)
        if not is_committed:
            self._state.drop(arrival, reason)
