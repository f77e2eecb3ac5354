"""What a coordinator says of its members, servers and jobs, and as metrics."""

import pytest

from meshloom.service.coordinator.metrics import of_coordinator
from meshloom.service.coordinator.status import Rates
from meshloom.service.wire.exposition import text


def settle(service) -> dict:
    """Returns the status after the job's thread has posted a new one."""
    service.time[0] += 0.3
    service.call("Report", job="run", row={"step": 10**6 + int(10 * service.time[0])})
    service.call("Report", job="run", row={"step": 2 * 10**6 + int(service.time[0])})
    return service.call("Status")


@pytest.fixture
def playing(opened):
    """Learner 0 has contributed round 1, learner 1 computes it."""
    for learner in range(2):
        opened.call("Join", job="run", learner=learner)
    opened.initialize()
    for server in opened.servers:
        server.stage("run", (0, 1, 1), 1.0)
    opened.contribute(0, bytes=50)
    return opened


def members(status) -> list[dict]:
    return status["jobs"]["run"]["members"]


def test_a_job_without_servers_is_listed(center, make_spec):
    status = center.call("Status")
    assert (status["servers"], status["num_servers"], status["jobs"]) == ([], 2, {})
    assert status["version"] == "0.1.0" and status["term"] == 1


def test_each_learner_has_a_row_with_its_place(playing):
    first, second = members(settle(playing))
    assert (first["state"], first["round"], first["contributed"]) == ("waiting", 1, 1)
    assert (second["state"], second["round"]) == ("computing", 1)
    assert second["contributed"] == second["lag"] == second["staleness"] == 0
    assert playing.call("Status")["jobs"]["run"]["waiting"] == 1


def test_lag_and_staleness_grow_while_the_others_go_on(center, make_spec):
    for server in center.servers:
        center.call("RegisterServer", name=server.name, address=server.address)
    center.call("OpenJob", **make_spec(mode="async"))
    for learner in range(2):
        center.call("Join", job="run", learner=learner)
    center.initialize()
    for round in (1, 2):
        for server in center.servers:
            server.stage("run", (0, 1, round), 1.0)
        center.contribute(0, round)
        center.call("Next", job="run", learner=0, incarnation=1, round=round)
    first, second = members(settle(center))
    assert (first["round"], first["lag"], first["staleness"]) == (3, 0, 0)
    assert (second["round"], second["lag"], second["staleness"]) == (1, 2, 2)


def test_a_sign_of_life_counts_at_once(playing):
    settle(playing)
    playing.time[0] += 4.0
    playing.call("Alive", job="run", learner=0, incarnation=1)
    # Whether or not the job's thread has seen it, which it does a few times a second.
    first, second = members(playing.call("Status"))
    assert first["heard_s"] == 0.0
    assert second["heard_s"] >= 4.0
    assert "heard" not in first


def test_a_learner_that_left_keeps_its_row(playing):
    playing.call("Leave", job="run", learner=1, incarnation=1, reason="enough")
    row = members(settle(playing))[1]
    assert (row["state"], row["reason"]) == ("left", "enough")
    assert "lag" not in row and "heard_s" not in row


def test_bytes_are_counted_by_the_second(playing):
    before = settle(playing)["jobs"]["run"]
    playing.time[0] += 10.0
    for server in playing.servers:
        server.stage("run", (1, 1, 1), 1.0)
    playing.contribute(1, bytes=1000)
    job = settle(playing)["jobs"]["run"]
    assert job["bytes"] - before["bytes"] == 1000
    assert job["bytes_per_s"] == pytest.approx(1000 / 10.3, rel=0.05)
    assert job["commits_per_s"] == pytest.approx(1 / 10.3, rel=0.05)


def test_rates_are_those_of_the_last_seconds():
    rates = Rates(seconds=10.0)
    assert rates.add(0.0, 0) == [0.0]
    assert rates.add(5.0, 50) == [10.0]
    for now in range(6, 40):
        latest = rates.add(float(now), 50)
    assert latest == [0.0]
    assert rates.add(41.0, 0) == [0.0]  # it began anew
    assert rates.add(42.0, 7) == [7.0]


def test_servers_say_with_their_beats_what_they_hold(opened):
    held = {"blocks": 3, "bytes": 96, "staged": 1, "jobs": []}
    moved = {"received_bytes": 0, "sent_bytes": 0}
    opened.call("Beat", name="s0", held={**held, **moved})
    opened.time[0] += 2.0
    moved = {"received_bytes": 4000, "sent_bytes": 1000}
    opened.call("Beat", name="s0", held={**held, **moved})
    opened.time[0] += 1.0
    first, second = opened.call("Status")["servers"]
    assert (first["name"], first["address"], first["heard_s"]) == ("s0", "s0:1", 1.0)
    assert (first["blocks"], first["bytes"], first["staged"]) == (3, 96, 1)
    assert (first["received_bytes_per_s"], first["sent_bytes_per_s"]) == (2000, 500)
    assert second == {"name": "s1", "address": "s1:1", "heard_s": 3.0}


def test_a_status_becomes_metrics(playing):
    lines = text(of_coordinator(settle(playing))).splitlines()
    assert "meshloom_leads 1" in lines and "meshloom_term 1" in lines
    assert 'meshloom_job_state{job="run",state="running"} 1' in lines
    assert 'meshloom_contributed_bytes_total{job="run"} 50' in lines
    assert 'meshloom_learners_waiting{job="run"} 1' in lines
    assert 'meshloom_learner_lag_rounds{job="run",learner="1"} 0' in lines
    assert any(
        x.startswith('meshloom_server_heard_seconds{server="s1"} ') for x in lines
    )


def test_one_that_stands_by_says_only_that():
    samples = [x for x in text(of_coordinator(None)).splitlines() if x[0] != "#"]
    assert samples == ["meshloom_leads 0"]
