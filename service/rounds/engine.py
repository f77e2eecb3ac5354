"""The round engine: events in, decisions out, without clock, network or randomness."""

from .events import (
    Contributed,
    Decision,
    Event,
    Joined,
    Left,
    Restored,
    Stopped,
    Tick,
)
from .independent import Independent
from .lockstep import Lockstep
from .policy import Policy
from .state import Member, State


class Engine:
    """Decides what is committed when.

    The decisions are a function of the sequence of events: a coordinator that
    restarts feeds its log to a new engine and is where it was.

    Args:
      policy: when to commit, and what.
      num_learners: learners are 0 .. num_learners - 1; the first round begins when all
        of them, or `policy.start_with`, have joined.
      num_rounds: rounds of the job in lockstep, otherwise of each learner.
    """

    def __init__(self, policy: Policy, num_learners: int, num_rounds: int):
        policy.check_learners(num_learners)
        if num_rounds < 1:
            raise ValueError(f"num_rounds must be >= 1, got {num_rounds}")
        self._state = State(policy, num_learners, num_rounds)
        rule = Lockstep if policy.is_lockstep else Independent
        self._rule = rule(self._state)

    @property
    def version(self) -> int:
        """The newest version, which is also the number of commits."""
        return self._state.version

    @property
    def deadline(self) -> float | None:
        """When the engine needs a Tick, unless an event comes before."""
        return None if self._state.is_done else self._rule.deadline

    @property
    def members(self) -> dict[int, Member]:
        """Every learner that has joined, in its newest incarnation; read only."""
        return self._state.members

    @property
    def is_started(self) -> bool:
        """Whether enough learners were there at some time, so that rounds go on."""
        return self._state.is_started

    @property
    def is_done(self) -> bool:
        """Whether the job is complete."""
        return self._state.is_done

    @property
    def kept(self) -> set[tuple[int, int, int]]:
        """Contributions (learner, incarnation, round) that may still be committed.

        All others that were staged can be deleted.
        """
        return self._rule.kept

    def handle(self, event: Event) -> list[Decision]:
        """Returns the decisions that follow from an event, in order.

        Times that run backwards, as after a change of the clock, count as no time.
        """
        state = self._state
        state.time = max(state.time, event.time)
        state.decisions = []
        if isinstance(event, Joined):
            self._join(event)
        elif isinstance(event, Left):
            self._leave(event)
        elif isinstance(event, Contributed):
            self._contribute(event)
        elif isinstance(event, Stopped):
            self._stop()
        elif isinstance(event, Restored):
            self._restore()
        else:
            assert isinstance(event, Tick), event
        if state.is_started and not state.is_done:
            self._rule.settle()
        if not state.is_done:
            state.deal()
        return state.decisions

    def _join(self, event: Joined) -> None:
        state = self._state
        if not 0 <= event.learner < state.num_learners:
            raise ValueError(
                f"learner {event.learner} is not in 0 .. {state.num_learners - 1}"
            )
        member = state.members.get(event.learner)
        if member is None:
            member = Member(event.learner, event.incarnation)
            state.members[event.learner] = member
        elif event.incarnation <= member.incarnation:
            return  # repeated, or delivered late
        else:
            self._remove(member, failed=True)  # it did not say that it leaves
            member.incarnation, member.is_live = event.incarnation, True
            member.bases = {}
        state.num_live += 1
        if state.is_done:
            member.status = "done"
            state.finish(event.learner)
        elif state.is_started:
            self._rule.join(member)
        elif state.num_live == (state.policy.start_with or state.num_learners):
            state.is_started = True
            for learner in sorted(state.members):
                if state.members[learner].is_live:
                    self._rule.join(state.members[learner])

    def _leave(self, event: Left) -> None:
        member = self._state.members.get(event.learner)
        if member is not None and member.incarnation == event.incarnation:
            self._remove(member, failed=event.failed)

    def _remove(self, member: Member, *, failed: bool) -> None:
        if not member.is_live:
            return
        member.is_live = False
        self._state.num_live -= 1
        if self._state.is_started and not self._state.is_done:
            self._rule.leave(member)
            self._state.give_up(member, failed=failed)

    def _contribute(self, event: Contributed) -> None:
        state = self._state
        member = state.members.get(event.learner)
        reason = self._refusal(member, event)
        if reason:
            # Of a repeated message nothing is dropped: the first one counts.
            if (event.learner, event.incarnation, event.round) not in self.kept:
                state.drop(event, reason)
            return
        assert member is not None
        member.status, member.contributed = "waiting", event.round
        state.note_arrival(member, event)
        self._rule.contribute(member, event)

    def _stop(self) -> None:
        """Ends the job at its newest version; what is not committed never will be."""
        if not self._state.is_done:
            for arrival in self._rule.stop():
                self._state.drop(arrival, "the job was stopped")
            self._state.finish(None)

    def _restore(self) -> None:
        """Makes the data of everything that was not committed todo again.

        Nobody has left: the others wait for learners until they have joined again.
        """
        state = self._state
        if not state.is_started or state.is_done:
            return
        for arrival in self._rule.restore():
            state.drop(arrival, "the servers restarted from a checkpoint")
        for member in state.members.values():
            state.give_up(member, failed=False)
            if member.is_live and member.status != "done":
                member.status = "lost"

    def _refusal(self, member: Member | None, event: Contributed) -> str:
        """Returns why a contribution is not even considered, or an empty string."""
        if self._state.is_done:
            return "the job is complete"
        if member is None or not self._state.is_started:
            return "the learner was not released"
        if event.incarnation != member.incarnation:
            return f"the learner is in incarnation {member.incarnation} by now"
        if not member.is_live:
            return "the learner has left; join again"
        if member.status != "computing" or event.round < member.round:
            return "repeated, or of a round that is over"
        if event.round > member.round:
            return f"the learner was released for round {member.round}"
        if event.base > self._state.version:
            return f"version {event.base} does not exist yet"
        return ""
