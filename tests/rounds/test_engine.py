"""The engine in single scenes: who is waited for, what is merged with which weight."""

import pytest

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
    Tick,
)
from meshloom.service.rounds.policy import Outer, Policy, make_policy

SGD = Outer(learning_rate=1.0)


def start(policy: Policy, num_learners: int, num_rounds: int = 10) -> Engine:
    engine = Engine(policy, num_learners, num_rounds)
    for learner in range(num_learners):
        decisions = engine.handle(Joined(0.0, learner, 1))
        assert bool(decisions) == (learner == num_learners - 1)
    return engine


def send(engine: Engine, learner: int, time: float, weight: float = 1.0, steps=1):
    """Contributes the round that a learner is in."""
    member = engine.members[learner]
    key = learner, member.incarnation, member.round, member.base
    return engine.handle(Contributed(time, *key, weight, steps))


def commits(decisions) -> list[Commit]:
    return [d for d in decisions if isinstance(d, Commit)]


def released(decisions) -> list[tuple[int, int, int]]:
    found = [d for d in decisions if isinstance(d, Release)]
    return [(d.learner, d.round, d.version) for d in found]


def test_sync_commits_when_all_have_contributed():
    engine = start(make_policy("sync"), 3, num_rounds=2)
    assert send(engine, 2, 1.0, weight=5) == []
    assert send(engine, 0, 2.0, weight=3) == []
    decisions = send(engine, 1, 9.0, weight=4)
    (commit,) = commits(decisions)
    assert (commit.version, commit.step, commit.share) == (1, 0, 1.0)
    assert [c.learner for c in commit.contributions] == [0, 1, 2]
    # Gradients are sums already: only the divisor knows the weights.
    assert [c.coefficient for c in commit.contributions] == [1, 1, 1]
    assert commit.divisor == 12
    assert released(decisions) == [(0, 2, 1), (1, 2, 1), (2, 2, 1)]
    send(engine, 0, 10.0), send(engine, 1, 10.0)
    assert send(engine, 2, 11.0)[-1] == Done(None)
    assert engine.is_done and engine.version == 2


def test_sync_goes_on_without_a_learner_that_left_and_takes_it_back():
    engine = start(make_policy("sync"), 3)
    send(engine, 0, 1.0), send(engine, 1, 1.0)
    decisions = engine.handle(Left(5.0, 2, 1, "lease expired"))
    assert len(commits(decisions)[0].contributions) == 2
    # It begins at once, and the others wait for it.
    assert released(engine.handle(Joined(6.0, 2, 2))) == [(2, 2, 1)]
    send(engine, 0, 7.0), send(engine, 1, 7.0)
    assert len(commits(send(engine, 2, 8.0))[0].contributions) == 3


def test_rounds_may_begin_before_all_have_joined():
    engine = Engine(make_policy("sync", start_with=2), 3, 10)
    assert engine.handle(Joined(0.0, 2, 1)) == []
    assert engine.handle(Left(1.0, 2, 1, "crashed")) == []  # is not counted
    assert engine.handle(Joined(2.0, 0, 1)) == []
    assert released(engine.handle(Joined(3.0, 1, 1))) == [(0, 1, 0), (1, 1, 0)]
    send(engine, 0, 4.0)
    assert len(commits(send(engine, 1, 5.0))[0].contributions) == 2
    # From now on everyone waits for the one that came late.
    assert released(engine.handle(Joined(6.0, 2, 2))) == [(2, 2, 1)]
    send(engine, 0, 7.0), send(engine, 1, 7.0)
    assert len(commits(send(engine, 2, 8.0))[0].contributions) == 3


def test_who_joins_an_asynchronous_run_late_begins_where_the_slowest_is():
    engine = Engine(make_policy("async", start_with=1), 2, 3)
    assert released(engine.handle(Joined(0.0, 0, 1))) == [(0, 1, 0)]
    send(engine, 0, 1.0)
    assert released(engine.handle(Joined(2.0, 1, 1))) == [(1, 2, 1)]
    send(engine, 0, 3.0), send(engine, 0, 4.0)
    assert not engine.is_done  # learner 1 is waited for
    send(engine, 1, 5.0)
    assert send(engine, 1, 6.0)[-1] == Done(None)


def test_what_a_dead_learner_sent_is_committed_and_not_done_again():
    engine = start(make_policy("sync"), 2)
    send(engine, 0, 1.0)
    assert engine.handle(Left(2.0, 0, 1, "crashed")) == []
    assert engine.handle(Joined(3.0, 0, 2)) == []  # its round 1 is in
    decisions = send(engine, 1, 4.0)
    assert [c.incarnation for c in commits(decisions)[0].contributions] == [1, 1]
    assert released(decisions) == [(0, 2, 1), (1, 2, 1)]


def test_backup_workers_drop_what_is_late():
    engine = start(make_policy("backup-workers"), 4)
    for learner in (0, 1):
        assert send(engine, learner, 1.0) == []
    assert released(send(engine, 2, 1.5)) == [(0, 2, 1), (1, 2, 1), (2, 2, 1)]
    dropped, release = send(engine, 3, 2.0)
    assert isinstance(dropped, Dropped) and "began at version 0" in dropped.reason
    assert (release.learner, release.round, release.version) == (3, 2, 1)


def test_a_grace_lets_more_contributions_in():
    engine = start(Policy(quorum=2, late="drop", grace=1.0), 4)
    send(engine, 0, 1.0), send(engine, 1, 2.0)
    assert engine.deadline == 3.0
    assert engine.handle(Tick(2.9)) == [] and send(engine, 3, 2.95) == []
    decisions = engine.handle(Tick(3.0))
    assert [c.learner for c in commits(decisions)[0].contributions] == [0, 1, 3]
    assert engine.deadline is None


def test_a_slow_learner_is_represented_by_its_last_contribution():
    policy = Policy(quorum=2, staleness=2, late="reuse")
    engine = start(policy, 3)
    send(engine, 0, 1.0), send(engine, 1, 1.0)  # commit 1 without learner 2
    assert released(send(engine, 2, 2.0, weight=7)) == [(2, 2, 1)]
    seen = []
    for time in (3.0, 4.0, 5.0):
        send(engine, 0, time)
        (commit,) = commits(send(engine, 1, time))
        seen.append([(c.learner, c.is_reused) for c in commit.contributions])
        assert commit.divisor == 2 + (7 if len(commit.contributions) == 3 else 0)
    # Its base is version 0: 1 and 2 versions old, and then too old.
    assert seen[0] == seen[1] == [(0, False), (1, False), (2, True)]
    assert seen[2] == [(0, False), (1, False)]


def test_stale_sync_holds_the_fast_back():
    engine = start(make_policy("stale-sync", staleness=2), 2)
    assert released(send(engine, 0, 1.0)) == [(0, 2, 1)]
    assert released(send(engine, 0, 2.0)) == [(0, 3, 2)]
    assert released(send(engine, 0, 3.0)) == []  # round 4 is 3 ahead of round 1
    assert released(send(engine, 1, 4.0)) == [(1, 2, 4), (0, 4, 4)]
    send(engine, 0, 5.0)
    # A learner that is gone holds nobody back.
    assert released(engine.handle(Left(6.0, 1, 1, "crashed"))) == [(0, 5, 5)]
    # Who comes back begins where the slowest is.
    assert released(engine.handle(Joined(7.0, 1, 2))) == [(1, 5, 5)]


def test_async_commits_count_as_shares_of_an_update():
    engine = start(make_policy("async"), 2, num_rounds=3)
    found = []
    for learner in (0, 0, 0, 1, 1, 1):
        decisions = send(engine, learner, 1.0)
        found += commits(decisions)
    assert [(c.step, c.share) for c in found] == [
        (0, 0.5),
        (0, 0.5),
        (1, 0.5),
        (1, 0.5),
        (2, 0.5),
        (2, 0.5),
    ]
    assert [c.contributions[0].base for c in found] == [0, 1, 2, 0, 4, 5]
    assert decisions[-2:] == [Done(1), Done(None)]


def test_merging_discounts_by_age_and_drops_beyond_the_bound():
    policy = Policy(
        local_steps=4,
        quorum=1,
        staleness=2,
        late="merge",
        weights="tokens_squared_per_step",
        outer=SGD,
    )
    engine = start(policy, 3)
    send(engine, 0, 1.0, weight=8, steps=4)
    (commit,) = commits(send(engine, 1, 2.0, weight=8, steps=4))
    (part,) = commit.contributions
    # 8 x 8 / 4 tokens, one commit old; the divisor keeps the discount effective.
    assert (part.coefficient, commit.divisor) == (8.0, 16.0)
    send(engine, 0, 3.0)
    dropped, release = send(engine, 2, 4.0)
    assert dropped.reason == "3 commits old, and the policy allows 2"
    assert (release.round, release.version) == (2, 3)


def test_merging_ends_for_all_when_a_quorum_has_finished():
    policy = Policy(quorum=2, staleness=1, late="merge")
    engine = start(policy, 3, num_rounds=1)
    send(engine, 0, 1.0)
    decisions = send(engine, 1, 2.0)
    assert decisions[1:] == [Done(0), Done(1), Done(None)]
    (dropped,) = send(engine, 2, 3.0)
    assert dropped.reason == "the job is complete"


def test_learners_in_different_rounds_merge_only_the_same_fragment():
    policy = Policy(
        local_steps=2, fragments=2, quorum=1, staleness=9, late="merge", outer=SGD
    )
    engine = start(policy, 2)
    (commit,) = commits(send(engine, 0, 1.0))
    assert commit.fragment == 0
    (commit,) = commits(send(engine, 0, 2.0))
    assert commit.fragment == 1
    (commit,) = commits(send(engine, 1, 3.0))
    # Fragment 0 was changed once since version 0, and fragment 1 does not matter.
    assert commit.fragment == 0 and commit.contributions[0].coefficient == 0.5


def test_a_fragment_is_as_old_as_its_last_exchange():
    """Not as the round, which began when the fragment before was exchanged."""
    policy = Policy(
        local_steps=2, fragments=2, quorum=1, staleness=9, late="merge", outer=SGD
    )
    engine = start(policy, 2)
    send(engine, 0, 1.0), send(engine, 1, 2.0), send(engine, 0, 3.0)
    # Learner 0 has had fragment 0 since version 1, and version 2 has changed it.
    (commit,) = commits(send(engine, 0, 4.0))
    (part,) = commit.contributions
    assert (commit.version, commit.fragment, part.base) == (4, 0, 3)
    assert part.coefficient == 0.5
    # A learner that comes back reads all fragments of one version.
    engine.handle(Left(5.0, 1, 1, "crashed"))
    engine.handle(Joined(5.0, 1, 2))
    found = commits(send(engine, 1, 6.0) + send(engine, 1, 7.0))
    assert [commit.fragment for commit in found] == [1, 0]
    assert [c.contributions[0].coefficient for c in found] == [1.0, 1.0]


def test_adaptive_grace_follows_the_lags_but_not_the_stragglers():
    policy = Policy(quorum=1, staleness=None, late="merge", grace="adaptive")
    engine = start(policy, 3, num_rounds=100)
    time, sizes = 0.0, []
    for _ in range(20):
        time += 10.0
        decisions = send(engine, 0, time)
        decisions += send(engine, 1, time + 0.5)
        if engine.deadline is not None:
            assert engine.deadline <= time + 10
            decisions += engine.handle(Tick(engine.deadline))
        sizes += [len(c.contributions) for c in commits(decisions)]
    # Learner 2 never comes. The other two meet as soon as the lag is known.
    assert sizes[-10:] == [2] * 10


def test_repeated_messages_change_nothing():
    engine = start(make_policy("sync"), 2)
    event = Contributed(1.0, 0, 1, 1, 0, 1.0, 1)
    assert engine.handle(event) == [] and engine.handle(event) == []
    assert engine.kept == {(0, 1, 1)}
    assert engine.handle(Joined(1.0, 0, 1)) == []
    send(engine, 1, 2.0)
    (dropped,) = engine.handle(event)
    assert dropped.reason == "repeated, or of a round that is over"
    (dropped,) = engine.handle(Contributed(3.0, 0, 1, 5, 1, 1.0, 1))
    assert dropped.reason == "the learner was released for round 2"
    (dropped,) = engine.handle(Contributed(3.0, 0, 1, 2, 7, 1.0, 1))
    assert dropped.reason == "version 7 does not exist yet"


def test_contributions_without_weight_divide_by_one():
    engine = start(make_policy("sync"), 1)
    (commit,) = commits(send(engine, 0, 1.0, weight=0.0))
    assert commit.divisor == 1.0


def test_wrong_input_is_refused():
    with pytest.raises(ValueError, match="num_rounds must be >= 1, got 0"):
        Engine(Policy(), 1, 0)
    with pytest.raises(ValueError, match="learner 2 is not in 0 .. 1"):
        Engine(Policy(), 2, 1).handle(Joined(0.0, 2, 1))
    with pytest.raises(ValueError, match="learner 0, round 1: weight must be a number"):
        Contributed(0.0, 0, 1, 1, 0, float("nan"), 1)
    with pytest.raises(ValueError, match="kind 'Jumped' is not an event or decision"):
        events.from_json({"kind": "Jumped"})
    old = {"kind": "Left", "time": 0.0, "learner": 1, "incarnation": 2, "reason": ""}
    assert events.from_json(old) == Left(0.0, 1, 2, "", failed=True)
    with pytest.raises(ValueError, match=r"Tick: fields \['when'\] are missing or unk"):
        events.from_json({"kind": "Tick", "time": 0.0, "when": 1})
