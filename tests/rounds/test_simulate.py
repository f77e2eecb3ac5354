"""The simulator against arithmetic that can be done by hand."""

import dataclasses
import time

import pytest

from meshloom.service.rounds.cluster import Cluster
from meshloom.service.rounds.policy import PRESETS, Policy, make_policy
from meshloom.service.rounds.simulate import simulate

EQUAL = Cluster(step_seconds=(1.0,) * 4)
SLOW = Cluster(step_seconds=(4.0, 1.0, 1.0, 1.0))


def test_learners_that_never_wait_reach_the_ideal():
    # The others lose contributions: those that are late, or come after the first
    # learner has finished.
    for mode in set(PRESETS) - {"backup-workers", "decoupled-diloco"}:
        policy = dataclasses.replace(PRESETS[mode], wait=0.0, grace=0.0)
        found = simulate(policy, EQUAL, policy.num_rounds(96))
        assert found.goodput == pytest.approx(1.0), mode
        assert found.seconds == pytest.approx(96.0)
        assert found.waiting == pytest.approx(0.0)


def test_sync_is_as_slow_as_the_slowest():
    found = simulate(make_policy("sync"), SLOW, 10)
    assert found.seconds == 40.0 and found.num_commits == 10
    # 4 steps in 4 seconds, where 3.25 a second are possible.
    assert found.goodput == pytest.approx(1 / 3.25)
    waits = [learner.seconds["wait"] for learner in found.learners]
    assert waits == pytest.approx([0, 30, 30, 30])
    assert found.staleness == {0: 40}
    assert found.steps_per_second(range(1, 4)) == pytest.approx(0.75)


def test_async_waits_for_nobody_and_pays_in_staleness():
    found = simulate(make_policy("async"), SLOW, 10)
    assert found.waiting == 0 and found.goodput == pytest.approx(1.0, abs=0.05)
    assert max(found.staleness) >= 9
    busy = [learner.seconds["compute"] for learner in found.learners]
    assert busy == pytest.approx([40, 10, 10, 10])


def test_backup_workers_do_without_the_slowest():
    found = simulate(make_policy("backup-workers"), SLOW, 10)
    assert found.seconds == 10.0
    assert found.learners[0].useful_steps == 0 and found.num_dropped == 2


def test_decoupled_learners_lose_little_to_a_straggler():
    policy = make_policy("decoupled-diloco")
    cluster = Cluster(step_seconds=(4.0,) + (1.0,) * 7, jitter=0.02)
    found = simulate(policy, cluster, policy.num_rounds(480))
    others = range(1, 8)
    alone = dataclasses.replace(cluster, step_seconds=(1.0,) * 7)
    without = simulate(policy, alone, policy.num_rounds(480))
    kept = found.steps_per_second(others) / without.steps_per_second(range(7))
    assert kept > 0.95, kept
    sync = simulate(make_policy("sync"), cluster, 100)
    assert sync.goodput < 0.3 < 0.85 < found.goodput


def test_links_take_latency_and_bytes():
    cluster = dataclasses.replace(
        EQUAL, param_bytes=100, up=50.0, down=25.0, latency=0.5
    )
    found = simulate(make_policy("sync"), cluster, 3)
    # Receive 4 + 0.5, compute 1, send 2 + 0.5, three times.
    assert found.seconds == pytest.approx(3 * 8.0)
    assert [learner.bytes_up for learner in found.learners] == [300] * 4
    assert [learner.bytes_down for learner in found.learners] == [300] * 4


def test_changes_are_received_unless_elements_are_less():
    cluster = dataclasses.replace(EQUAL, param_bytes=100, pull_share=0.3)

    def down(mode, rounds):
        found = simulate(make_policy(mode), cluster, rounds)
        return [learner.bytes_down for learner in found.learners]

    # All elements at first, then one change a round.
    assert down("sync", 4) == pytest.approx([100 + 3 * 30] * 4)
    # Of four commits since the round before, changes are more; in the first round
    # there have not been as many.
    assert down("async", 4) == pytest.approx([330, 360, 390, 400])


def test_a_delay_hides_transfers_behind_computing():
    policy = make_policy("streaming-diloco", local_steps=16, fragments=2, delay=4)
    cluster = dataclasses.replace(EQUAL, param_bytes=200, up=100.0, down=100.0)
    hidden = simulate(policy, cluster, 8)
    open_ = simulate(dataclasses.replace(policy, delay=0), cluster, 8)
    # A fragment takes 1 s each way. Only the first read (2 s) and the last send show.
    assert hidden.seconds == pytest.approx(64 + 3)
    assert open_.seconds == pytest.approx(64 + 8 * 2 + 1)


def test_random_waits_slow_a_run_down_within_their_bound():
    policy = make_policy("half-sync", wait=2.0, local_steps=1)
    found = simulate(policy, EQUAL, 50)
    assert 50 * 2 < found.seconds < 50 * 3


def test_failures_cost_more_in_one_world_than_between_independent_learners():
    # Long rounds, so that what a failure destroys is the same in both.
    cluster = dataclasses.replace(
        EQUAL, mean_uptime=400.0, restart_seconds=60.0, jitter=0.01
    )
    sync = simulate(make_policy("sync"), cluster, 1000)
    free = simulate(make_policy("async"), cluster, 1000)
    assert sync.num_failures > 3 and free.num_failures > 3
    assert free.seconds / 1000 < 1.4
    assert sync.goodput < free.goodput < 1
    for learner in sync.learners:
        assert sum(learner.seconds.values()) == pytest.approx(sync.seconds)


def test_the_same_seed_gives_the_same_run():
    cluster = dataclasses.replace(SLOW, jitter=0.2, mean_uptime=50.0)
    policy = make_policy("decoupled-diloco")
    first = simulate(policy, cluster, 40, record=True)
    assert simulate(policy, cluster, 40, record=True) == first
    other = dataclasses.replace(cluster, seed=1)
    assert simulate(policy, other, 40).seconds != first.seconds


def test_recorded_segments_are_the_time_of_the_learners():
    cluster = dataclasses.replace(SLOW, jitter=0.2, mean_uptime=50.0, param_bytes=10**8)
    found = simulate(make_policy("local-sgd"), cluster, 20, record=True)
    for index in range(4):
        parts = [s for s in found.segments if s.learner == index]
        assert sum(s.end - s.start for s in parts) == pytest.approx(found.seconds)
        parts.sort(key=lambda s: s.start)
        for one, two in zip(parts, parts[1:], strict=False):
            assert one.end <= two.start + 1e-9
    assert {s.kind for s in found.segments} == {"compute", "send", "wait", "down"}


def test_hopeless_runs_are_refused():
    cluster = dataclasses.replace(EQUAL, mean_uptime=2.0, restart_seconds=30.0)
    with pytest.raises(ValueError, match="learners fail faster than they finish"):
        simulate(make_policy("local-sgd", local_steps=100), cluster, 1)
    with pytest.raises(ValueError, match="step_seconds must be > 0"):
        Cluster(step_seconds=(0.0,))


@pytest.mark.parametrize("mode", ["sync", "async", "decoupled-diloco"])
def test_many_learners_take_seconds(mode):
    cluster = Cluster(step_seconds=(1.0,) * 1000, jitter=0.3)
    begin = time.process_time()
    overrides = {"staleness": None} if mode == "decoupled-diloco" else {}
    found = simulate(make_policy(mode, **overrides), cluster, 20)
    assert found.num_contributions > 15_000
    # About 1 s; a quadratic engine would take minutes.
    assert time.process_time() - begin < 15


def test_reuse_lets_the_fast_go_on():
    policy = Policy(quorum=0.75, staleness=3, late="reuse")
    found = simulate(policy, SLOW, 12)
    assert found.seconds == 12.0
