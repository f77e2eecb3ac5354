"""Leases of data in single scenes."""

import pytest

from meshloom.service.rounds.engine import Engine
from meshloom.service.rounds.events import (
    Commit,
    Contributed,
    Dropped,
    Joined,
    Left,
    Release,
    Restored,
    SetAside,
)
from meshloom.service.rounds.leases import MAX_FAILURES, as_ranges, from_ranges
from meshloom.service.rounds.policy import Outer, Policy, make_policy


def start(policy: Policy, num_learners: int, num_rounds: int = 10) -> Engine:
    engine = Engine(policy, num_learners, num_rounds)
    for learner in range(num_learners):
        engine.handle(Joined(0.0, learner, 1))
    return engine


def send(engine: Engine, learner: int, incarnation: int | None = None):
    """Contributes the round that a learner is in."""
    member = engine.members[learner]
    key = learner, incarnation or member.incarnation, member.round, member.base
    return engine.handle(Contributed(1.0, *key, 1.0, 1))


def of(decisions, kind):
    return [d for d in decisions if isinstance(d, kind)]


def leased(decisions) -> dict[int, list[int]]:
    return {d.learner: from_ranges(d.blocks) for d in of(decisions, Release)}


def consumed(decisions) -> list[int]:
    (commit,) = of(decisions, Commit)
    return [b for part in commit.contributions for b in from_ranges(part.blocks)]


def test_sync_consumes_the_data_in_its_order():
    engine = start(make_policy("sync"), 3)
    for version in range(4):
        send(engine, 2), send(engine, 0)
        found = consumed(send(engine, 1))
        assert found == list(range(3 * version, 3 * version + 3))


def test_the_block_of_a_lost_learner_is_dealt_first():
    engine = Engine(make_policy("sync"), 2, 10)
    engine.handle(Joined(0.0, 0, 1))
    first = engine.handle(Joined(0.0, 1, 1))
    assert leased(first) == {0: [0], 1: [1]}
    assert [d.ahead for d in of(first, Release)] == [((2, 3),), ((3, 4),)]
    send(engine, 0)
    after = engine.handle(Left(9.0, 1, 1, "crashed"))
    assert consumed(after) == [0]
    assert leased(after) == {0: [2]} and of(after, Release)[0].ahead == ((1, 2),)
    assert consumed(send(engine, 0)) == [2]
    assert consumed(send(engine, 0)) == [1]


def test_a_contribution_under_an_old_lease_is_refused():
    engine = start(make_policy("sync"), 2)
    engine.handle(Left(9.0, 1, 1, "stood still"))
    back = engine.handle(Joined(10.0, 1, 2))
    assert leased(back) == {1: [1]}
    (dropped,) = of(send(engine, 1, incarnation=1), Dropped)
    assert "in incarnation 2 by now" in dropped.reason
    send(engine, 0)
    assert consumed(send(engine, 1)) == [0, 1]


def test_what_comes_late_is_computed_again_by_somebody():
    engine = start(Policy(quorum=1, late="drop"), 2)
    decisions = send(engine, 0)
    assert consumed(decisions) == [0]
    late = send(engine, 1)
    assert of(late, Dropped)
    assert leased(late) == {1: [3]}  # leased ahead, before block 1 came back
    assert of(late, Release)[0].ahead == ((1, 2),)


def test_a_contribution_that_stands_in_again_consumes_nothing():
    engine = start(Policy(quorum=1, staleness=2, late="reuse"), 2)
    assert consumed(send(engine, 0)) == [0]
    assert leased(send(engine, 1)) == {1: [3]}  # late: it will stand in
    (commit,) = of(send(engine, 0), Commit)
    assert [(p.is_reused, p.blocks) for p in commit.contributions] == [
        (False, ((2, 3),)),
        (True, ((1, 2),)),
    ]
    (commit,) = of(send(engine, 0), Commit)
    assert [p.is_reused for p in commit.contributions] == [False, True]
    assert commit.contributions[1].blocks == ()


def test_a_block_that_fails_too_often_is_set_aside():
    engine = start(make_policy("sync"), 2)
    found = []
    for incarnation in range(2, MAX_FAILURES + 2):
        decisions = engine.handle(Joined(1.0, 1, incarnation))
        found += of(decisions, SetAside)
    assert found == [SetAside(1, (1,))]
    assert leased(decisions) == {1: [3]}
    send(engine, 0)
    (commit,) = of(send(engine, 1), Commit)
    assert commit.set_aside == (1,)
    assert consumed([commit]) == [0, 3]


def test_a_block_is_not_set_aside_because_learners_were_told_to_stop():
    """All blocks of a long round would be, after three preemptions within it."""
    engine = start(make_policy("diloco", local_steps=4), 2)
    blocks = leased(engine.handle(Joined(1.0, 1, 2)))[1]
    for incarnation in range(2, MAX_FAILURES + 3):
        left = engine.handle(Left(1.0, 1, incarnation, "Preempted"))
        assert not of(left, SetAside)
        assert leased(engine.handle(Joined(2.0, 1, incarnation + 1))) == {1: blocks}
    for incarnation in range(MAX_FAILURES + 3, MAX_FAILURES + 5):
        left = engine.handle(Left(3.0, 1, incarnation, "ValueError", failed=True))
        engine.handle(Joined(4.0, 1, incarnation + 1))
    # The first incarnation did not say that it leaves: that is the third failure.
    assert of(left, SetAside) == [SetAside(1, tuple(blocks))]


@pytest.mark.parametrize("mode", ["sync", "async", "local-sgd"])
def test_restoring_a_checkpoint_puts_back_what_was_not_committed(mode):
    quorum = 2 if mode == "async" else 1.0
    policy = make_policy(mode, quorum=quorum)
    engine, steps = start(policy, 2), policy.steps_of(1)
    send(engine, 0)
    found = engine.handle(Restored(3.0))
    assert [d.learner for d in of(found, Dropped)] == [0]
    assert of(send(engine, 1), Dropped)  # it must join again
    for learner in (0, 1):
        blocks = leased(engine.handle(Joined(4.0, learner, 2)))[learner]
        # Each leases for two rounds.
        first = 2 * steps * learner
        assert blocks == list(range(first, first + steps))
    send(engine, 0)
    assert len(of(send(engine, 1), Commit)[0].contributions) == 2


def test_a_learner_that_had_finished_does_its_lost_round_again():
    engine = start(Policy(quorum=2, staleness=None, update="share"), 2, num_rounds=1)
    send(engine, 0)
    engine.handle(Restored(3.0))
    (release,) = of(engine.handle(Joined(4.0, 0, 2)), Release)
    assert (release.round, release.blocks) == (1, ((0, 1),))


def test_fragments_of_different_length():
    policy = Policy(local_steps=5, fragments=2, outer=Outer(learning_rate=1.0))
    engine = Engine(policy, 1, 4)
    (release,) = engine.handle(Joined(0.0, 0, 1))
    assert (release.blocks, release.ahead) == (((0, 2),), ((2, 5),))
    (release,) = of(send(engine, 0), Release)
    assert (release.blocks, release.ahead) == (((2, 5),), ((5, 7),))


def test_ranges():
    assert as_ranges([]) == ()
    assert as_ranges([4, 5, 2, 7, 8]) == ((4, 6), (2, 3), (7, 9))
    assert from_ranges([[4, 6], [2, 3], [7, 9]]) == [4, 5, 2, 7, 8]
