"""What the engine promises, whatever happens: random worlds for every policy."""

import collections
import dataclasses
import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from leased_data import LeasedData
from replaying import replay

from meshloom.service.rounds import events
from meshloom.service.rounds.engine import Engine
from meshloom.service.rounds.events import (
    Commit,
    Contributed,
    Done,
    Dropped,
    Joined,
    Left,
    Release,
    Restored,
    SetAside,
    Stopped,
    Tick,
)
from meshloom.service.rounds.policy import PRESETS, Outer, Policy


class World:
    """Feeds an engine with events that can happen, and holds it to its promises."""

    def __init__(self, policy: Policy, num_learners: int, num_rounds: int):
        self.engine = Engine(policy, num_learners, num_rounds)
        self.policy, self.num_learners = policy, num_learners
        self.num_rounds = num_rounds
        self.time = 0.0
        self.events, self.decisions = [], []
        self.incarnations = dict.fromkeys(range(num_learners), 0)
        self.live: set[int] = set()
        self.working: dict[int, Release] = {}  # released learners
        self.current: dict[int, int] = {}  # the round of each live learner
        self.lost: list[Release] = []  # of learners that crashed while they worked
        self.sent: list[Contributed] = []
        self.committed: collections.Counter = collections.Counter()
        self.used: set[tuple[int, int]] = set()  # learners and rounds
        self.dropped: collections.Counter = collections.Counter()
        self.commits: list[Commit] = []
        self.finished: set[int] = set()
        # Of each round that began: the version of what it exchanges at its end.
        self.read: dict[tuple[int, int, int], int] = {}
        self.is_complete = False
        self.data = LeasedData(policy, num_rounds)
        self.must_rejoin: set[int] = set()

    def feed(self, event) -> None:
        self.events.append(event)
        decisions = self.engine.handle(event)
        self.decisions.append(decisions)
        self.data.check(event, decisions, was_done=self.is_complete)
        for decision in decisions:
            line = json.dumps(decision.to_json())
            assert events.from_json(json.loads(line)) == decision
            self._check(decision)

    def join(self, learner: int) -> None:
        self.incarnations[learner] += 1
        self._lose(learner)
        self.current.pop(learner, None)
        self.live.add(learner)
        self.must_rejoin.discard(learner)
        self.feed(Joined(self.time, learner, self.incarnations[learner]))

    def leave(self, learner: int) -> None:
        if learner in self.live:
            self.live.remove(learner)
            self._lose(learner)
            self.current.pop(learner, None)
            self.must_rejoin.discard(learner)
            incarnation = self.incarnations[learner]
            self.feed(Left(self.time, learner, incarnation, "crashed", failed=True))

    def contribute(self, learner: int) -> None:
        if release := self.working.pop(learner, None):
            self._send(release)

    def deliver_lost(self, index: int) -> None:
        """Delivers what a learner had sent when it crashed."""
        if self.lost:
            self._send(self.lost[index % len(self.lost)])

    def _lose(self, learner: int) -> None:
        if release := self.working.pop(learner, None):
            self.lost.append(release)

    def _send(self, release: Release) -> None:
        learner = release.learner
        steps = self.policy.steps_of(release.round)
        weight = float(1 + (learner * 7 + release.round) % 5)
        self.sent.append(
            Contributed(
                self.time,
                learner,
                release.incarnation,
                release.round,
                release.version,
                weight,
                steps,
            )
        )
        self.feed(self.sent[-1])

    def repeat(self, index: int) -> None:
        """Delivers a message once more, late."""
        if self.sent:
            self.feed(self.sent[index % len(self.sent)])

    def restore(self) -> None:
        """Restarts the servers from a checkpoint."""
        if self.engine.is_started and not self.is_complete:
            for learner in self.live:
                self._lose(learner)
            self.current.clear()
            self.must_rejoin = set(self.live)
            self.feed(Restored(self.time))

    def stop(self) -> None:
        self.feed(Stopped(self.time, "enough"))

    def tick(self, seconds: float) -> None:
        self.time += seconds
        self.feed(Tick(self.time))

    def _check(self, decision) -> None:
        assert not self.is_complete or isinstance(decision, Dropped | Done), decision
        if isinstance(decision, Release):
            self._check_release(decision)
        elif isinstance(decision, Commit):
            self._check_commit(decision)
        elif isinstance(decision, Dropped):
            key = decision.learner, decision.incarnation, decision.round
            assert decision.reason
            self.dropped[key] += 1
        elif isinstance(decision, SetAside):
            assert decision.blocks
        elif decision.learner is None:
            assert not self.is_complete
            self.is_complete = True
        else:
            self.finished.add(decision.learner)
            self.current.pop(decision.learner, None)

    def _check_release(self, release: Release) -> None:
        learner = release.learner
        assert learner in self.live and learner not in self.working
        assert release.incarnation == self.incarnations[learner]
        assert 1 <= release.round <= self.num_rounds
        assert release.version == len(self.commits)
        if self.policy.is_lockstep:
            assert release.round == release.version + 1
        self.working[learner] = release
        self.current[learner] = release.round
        self._read(release)
        bound = self.policy.staleness
        if not self.policy.is_lockstep and self.policy.late == "wait" and bound:
            assert release.round - min(self.current.values()) <= bound

    def _read(self, release: Release) -> None:
        """Notes what a learner reads: the fragment of the round before, or all."""
        who, round = (release.learner, release.incarnation), release.round
        turn = self.policy.fragments
        if (*who, round - 1) not in self.read:  # the first round, or elsewhere
            for ahead in range(turn):
                self.read[*who, round + ahead] = release.version
        self.read[*who, round - 1 + turn] = release.version

    def _check_commit(self, commit: Commit) -> None:
        earlier = list(self.commits)
        self.commits.append(commit)
        assert commit.version == len(self.commits)
        learners = [c.learner for c in commit.contributions]
        assert learners and learners == sorted(learners)
        sent = {(c.learner, c.incarnation, c.round): c for c in reversed(self.sent)}
        self._check_quorum(
            commit,
            [
                sent[c.learner, c.incarnation, c.round].time
                for c in commit.contributions
                if not c.is_reused
            ],
        )
        divisor = 0.0
        for part in commit.contributions:
            key = part.learner, part.incarnation, part.round
            assert not self.dropped[key]
            assert (part.base, part.weight) == (sent[key].base, sent[key].weight)
            if not part.is_reused:
                assert not self.committed[key], "committed twice"
                same = part.learner, part.round
                assert same not in self.used, "samples committed twice"
                self.used.add(same)
            self.committed[key] += 1
            since = earlier[self.read[key] :]
            age = sum(c.fragment == commit.fragment for c in since)
            self._check_part(part, commit, age)
            divisor += part.weight
        if self.policy.outer is None or self.policy.weights == "tokens":
            assert abs(commit.divisor - divisor) < 1e-9 * divisor

    def _check_quorum(self, commit: Commit, arrivals: list[float]) -> None:
        quorum, grace = self.policy.quorum, self.policy.grace
        fresh = {c.learner for c in commit.contributions if not c.is_reused}
        if isinstance(quorum, int):
            assert len(fresh | self.finished) >= quorum or not self.policy.is_lockstep
        elif self.policy.is_lockstep and not grace:
            # During a grace members may come and go without undoing the quorum.
            assert len(fresh & self.live) >= quorum * len(self.live) - 1e-9
        if self.working and self.policy.grace != "adaptive":
            assert self.time >= min(arrivals) + float(grace)

    def _check_part(self, part, commit: Commit, age: int) -> None:
        bound = self.policy.staleness
        if not self.policy.is_lockstep:
            assert self.policy.fragment_of(part.round) == commit.fragment
            if self.policy.late == "merge" and bound is not None:
                assert age <= bound
        elif self.policy.late == "reuse":
            assert age <= bound and part.is_reused == (age > 0)
            assert part.learner in self.live or not part.is_reused
        else:
            assert age == 0 and part.round == commit.version


SGD = Outer(learning_rate=1.0)
POLICIES = {
    **PRESETS,
    "backup-count": Policy(quorum=2, late="drop", grace=0.5),
    "backup-adaptive": Policy(quorum=0.5, late="drop", grace="adaptive"),
    "reuse": Policy(quorum=0.5, staleness=2, late="reuse", grace=0.2),
    "reuse-count": Policy(quorum=1, staleness=1, late="reuse"),
    "fragments": Policy(local_steps=6, fragments=3, delay=1, outer=SGD),
    "merge-share": Policy(quorum=0.6, staleness=2, late="merge", grace=0.3),
    "merge-count": Policy(
        local_steps=2,
        quorum=2,
        staleness=1,
        late="merge",
        weights="equal",
        grace=0.4,
        outer=SGD,
    ),
    "merge-unbounded": Policy(quorum=1, staleness=None, late="merge"),
    "merge-fragments": Policy(
        local_steps=2, fragments=2, quorum=1, staleness=1, late="merge", outer=SGD
    ),
    "soft-sync": Policy(quorum=2, staleness=2, update="share"),
    "stale-share": Policy(quorum=0.7, staleness=1, update="share"),
    "tight": Policy(quorum=1, staleness=1, update="share", compensation=0.1),
}
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["work"] * 6
            + ["tick", "leave", "join", "join", "repeat", "lost", "restore"]
        ),
        st.integers(0, 63),
    ),
    max_size=70,
)


def act(world: World, action: str, number: int) -> None:
    """Does one thing that can happen in a world."""
    learner = number % world.num_learners
    world.time += (number % 8) / 10
    if action == "work" and world.working:
        world.contribute(sorted(world.working)[number % len(world.working)])
    elif action == "tick":
        world.tick(number / 20)
    elif action == "leave":
        world.leave(learner)
    elif action == "join":
        world.join(learner)
    elif action == "repeat":
        world.repeat(number)
    elif action == "lost":
        world.deliver_lost(number)
    elif action == "restore":
        world.restore()


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=60, deadline=None)
@given(
    num_learners=st.integers(2, 5),
    num_rounds=st.integers(1, 6),
    actions=ACTIONS,
    absent=st.sets(st.integers(0, 4)),
    late=st.sets(st.integers(0, 4)),
    cut=st.integers(0, 1000),
)
@example(5, 6, [("work", 1), ("work", 1)], set(), set(), 23)  # a grace from lags
def test_engine_keeps_its_promises(
    name, num_learners, num_rounds, actions, absent, late, cut
):
    """Learners that are late join in the middle, if ever.

    The engine of a second replay is replaced by a snapshot after event `cut`.
    """
    policy = POLICIES[name]
    first = [i for i in range(num_learners) if i not in late] or [0]
    if len(first) < num_learners:
        policy = dataclasses.replace(policy, start_with=len(first))
    world = World(policy, num_learners, num_rounds)
    for learner in first:
        assert not world.working
        world.join(learner)
    assert sorted(world.working) == first
    for action, number in actions:
        act(world, action, number)
    # From here on nobody fails, and those who are there can do all that is left.
    least = policy.quorum if isinstance(policy.quorum, int) else 1
    for learner in range(num_learners):
        if learner in absent and len(world.live) > least:
            world.leave(learner)
        elif world.is_complete:
            break
        elif learner not in world.live or learner in world.must_rejoin:
            world.join(learner)
    finish(world)
    assert replay(world) == world.decisions
    cut = cut % (len(world.events) + 1)
    assert replay(world, cut) == world.decisions


def finish(world: World) -> None:
    """Lets every released learner work, and time pass, until the job is complete."""
    for _ in range(40 * world.num_rounds + 40):
        if world.is_complete:
            break
        deadline = world.engine.deadline
        assert world.working or deadline is not None, "deadlock"
        for learner in sorted(world.working):
            world.contribute(learner)
        if (deadline := world.engine.deadline) is not None:
            world.tick(max(deadline - world.time, 0.0))
    assert world.is_complete and world.engine.is_done
    world.repeat(0)
    if world.policy.is_lockstep:
        assert len(world.commits) == world.num_rounds
    assert not world.engine.kept and world.engine.deadline is None
    check_nothing_is_lost(world)
    reported = world.data.reported
    assert reported == world.data.set_aside[: len(reported)]


def check_nothing_is_lost(world: World) -> None:
    for sent in world.sent:
        key = sent.learner, sent.incarnation, sent.round
        assert world.committed[key] or world.dropped[key], "silently lost"


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=30, deadline=None)
@given(num_learners=st.integers(2, 4), before=ACTIONS, after=ACTIONS)
def test_a_job_that_is_stopped_ends_at_once(name, num_learners, before, after):
    world = World(POLICIES[name], num_learners, 4)
    for learner in range(num_learners):
        world.join(learner)
    for action, number in before:
        act(world, action, number)
    version = world.engine.version
    world.stop()
    assert world.is_complete and world.engine.is_done
    assert not world.engine.kept and world.engine.deadline is None
    for action, number in [*after, *[("work", 0)] * num_learners, ("join", 1)]:
        act(world, action, number)
    world.stop()  # a repeated one changes nothing, which `feed` checks
    assert world.engine.version == version == len(world.commits)
    assert not world.engine.kept
    check_nothing_is_lost(world)
    assert replay(world) == world.decisions


@pytest.mark.parametrize("name", POLICIES)
def test_without_failures_every_contribution_is_committed_once(name):
    policy = dataclasses.replace(POLICIES[name], grace=0.0)
    world = World(policy, 4, 5)
    for learner in range(4):
        world.join(learner)
    finish(world)
    commits = sum(world.committed.values())
    if policy.late in ("drop", "reuse"):
        assert commits >= 5
    elif policy.late == "wait":
        assert commits == 20 and set(world.committed.values()) == {1}
        shares = sum(commit.share for commit in world.commits)
        assert shares == pytest.approx(5)
        assert max(commit.step for commit in world.commits) == 4
