"""The coordinator's calls, without network: every bad input gets one line."""

import time

import pytest

from meshloom.service.blocks.layout import Leaf, make_layout
from meshloom.service.rounds.policy import make_policy
from meshloom.service.wire.errors import Refused, Unavailable

VERSION = "0.1.0"


def wide_layout():
    leaves = [Leaf("w", (8, 8), "float32", (None, None))]
    return make_layout(leaves, block_bytes=16).to_json()


OTHERS = {
    "model": (
        {"layout": wide_layout()},
        r"another model: w is float32\[8, 8\] at this learner, float32\[8, 4\] in",
    ),
    "policy": (
        {"policy": make_policy("backup-workers").to_json()},
        "another policy: policy.quorum is 0.75 at this learner, 1.0 in the job",
    ),
    "config": (
        {"config_digest": "beef"},
        'another config: config_digest is "beef" at this learner, "c0ffee" in the job',
    ),
    "compression": (
        {"compression": {"push": "int8", "pull": "float32"}},
        'another compression: compression.push is "int8" at this learner, "float32" in',
    ),
    "rounds": ({"num_rounds": 9}, "another num_rounds: num_rounds is 9"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_learner_of_another_kind_is_refused(opened, make_spec, other):
    changes, message = OTHERS[other]
    with pytest.raises(Refused, match=message):
        opened.call("OpenJob", **{**make_spec(), **changes})
    assert not opened.call("OpenJob", **make_spec())["version"]


BAD_SPECS = {
    "version": ({"version": "9"}, "the learner runs meshloom 9, the service 0.1.0"),
    "name": ({"job": "../up"}, r"job name '../up': expected letters, digits"),
    "copies": ({"copies": 3}, "copies is 3, expected 1 or 2"),
    "learners": ({"num_learners": 0}, "num_learners is 0, expected a whole number"),
    "quorum": (
        {"policy": make_policy("backup-workers", quorum=3).to_json()},
        "quorum=3 is larger than the number of learners, 2; lower it",
    ),
    "policy": ({"policy": {"quorums": 1}}, "'quorums' is not a setting"),
    "layout": ({"layout": {}}, "layout: not what Layout.to_json writes"),
}


@pytest.mark.parametrize("bad", BAD_SPECS)
def test_a_spec_that_cannot_work_is_refused(opened, make_spec, bad):
    changes, message = BAD_SPECS[bad]
    with pytest.raises(Refused, match=message):
        opened.call("OpenJob", **{**make_spec(job="other"), **changes})
    assert list(opened.call("Status")["jobs"]) == ["run"]


def test_a_spec_that_lacks_something_is_refused(opened, make_spec):
    spec = make_spec(job="other")
    del spec["layout"]
    with pytest.raises(Refused, match="the spec of the job has no 'layout'"):
        opened.call("OpenJob", **spec)


def test_an_index_is_taken_while_its_learner_lives(opened):
    opened.call("Join", job="run", learner=0, owner="a")
    with pytest.raises(Refused, match=r"learner 0 is already running .*in 10 s"):
        opened.call("Join", job="run", learner=0, owner="b")
    assert opened.call("Join", job="run", learner=0, owner="a")["incarnation"] == 2
    with pytest.raises(Refused, match=r"learner 2 is not in 0..1; the job was opened"):
        opened.call("Join", job="run", learner=2)
    with pytest.raises(Refused, match="must join again: incarnation 2 of this"):
        opened.call("Alive", job="run", learner=0, incarnation=1)
    assert opened.call("Alive", job="run", learner=0, incarnation=2) == {}


def test_a_contribution_on_other_data_than_leased_is_refused(opened):
    for learner in range(2):
        opened.call("Join", job="run", learner=learner)
    opened.initialize()
    place = opened.call("Next", job="run", learner=1, incarnation=1, round=0)
    assert (place["blocks"], place["ahead"]) == (((1, 2),), ((3, 4),))
    with pytest.raises(
        Refused, match=r"blocks \[\[0, 1\]\] of the data, but leased we"
    ):
        opened.contribute(1, blocks=[[0, 1]])
    assert opened.contribute(1, blocks=[[1, 2]])["state"] == "ok"


BAD_CONTRIBUTIONS = {
    "weight": ({"weight": -1}, "weight must be a number >= 0, got -1"),
    "not a number": ({"weight": "NaN"}, "weight must be a number >= 0, got nan"),
    "round": ({"round": 0}, "round is 0, expected a whole number >= 1"),
    "base": ({"base": "x"}, "base is 'x', expected a whole number >= 0"),
    "sums": ({"sums": {"loss": "high"}}, "not a contribution"),
}


@pytest.mark.parametrize("bad", BAD_CONTRIBUTIONS)
def test_a_contribution_that_makes_no_sense_is_refused(opened, bad):
    opened.call("Join", job="run", learner=0)
    changes, message = BAD_CONTRIBUTIONS[bad]
    with pytest.raises(Refused, match=message):
        opened.contribute(0, **changes)
    assert opened.call("Status", job="run")["state"] != "failed"


def test_a_job_that_nobody_opened_is_refused(opened):
    with pytest.raises(Refused, match=r"there is no job 'x' here, but \['run'\]"):
        opened.call("Join", job="x", learner=0)


def test_a_job_waits_for_its_servers(center, make_spec, monkeypatch):
    from meshloom.service.coordinator import coordinator as module

    monkeypatch.setattr(module, "ANSWER_SECONDS", 0.05)
    center.call("RegisterServer", name="s0", address="s0:1")
    with pytest.raises(Unavailable, match="1 of 2 servers are here; try again"):
        center.call("OpenJob", **make_spec())
    with pytest.raises(Refused, match="server s1 is not registered here"):
        center.call("Beat", name="s1")
    with pytest.raises(Refused, match="server s1 runs meshloom 9, the coordinator"):
        center.call("RegisterServer", name="s1", address="s1:1", version="9")


def test_two_jobs_do_not_meet(opened, make_spec):
    opened.call("OpenJob", **make_spec(job="other", num_learners=1))
    opened.call("Join", job="other", learner=0)
    opened.initialize("other")
    for server in opened.servers:
        server.stage("other", (0, 1, 1), 4.0)
    opened.contribute(0, job="other")
    answer = opened.call("Next", job="other", learner=0, incarnation=1, round=1)
    assert (answer["state"], answer["version"]) == ("go", 1)
    assert opened.call("Status", job="run")["version"] == 0
    assert [s.jobs["run"]["version"] for s in opened.servers] == [None, None]


def fail_of(center) -> str:
    deadline = time.monotonic() + 5
    while center.coordinator.failure is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return center.coordinator.failure


def test_a_silent_server_stops_the_job_aloud(opened):
    opened.call("Join", job="run", learner=0)
    opened.pass_time(9)
    opened.call("Beat", name="s0")
    assert opened.coordinator.failure is None
    opened.time[0] += 100  # it was paused, so it cannot tell who is lost
    opened.pass_time(9)
    opened.call("Beat", name="s0")
    assert opened.coordinator.failure is None
    opened.pass_time(3)
    message = (
        "job 'run' has stopped: server s1 is lost: not heard of for 10 s. Restart the "
        "service: it continues from the checkpoint of version 0."
    )
    assert fail_of(opened) == message
    with pytest.raises(Unavailable, match="server s1 is lost"):
        opened.call("Next", job="run", learner=0, incarnation=1)
    with pytest.raises(Unavailable, match="server s1 is lost"):
        opened.contribute(0)


def test_a_server_that_refuses_a_merge_stops_the_job_aloud(opened):
    for learner in range(2):
        opened.call("Join", job="run", learner=learner)
    opened.initialize()
    for learner in range(2):  # nothing is staged
        opened.contribute(learner)
    assert "is not staged at s" in fail_of(opened)


def test_the_status_of_a_job_follows_it(opened):
    assert opened.call("Status", job="run")["state"].startswith("waiting for the init")
    for learner in range(2):
        opened.call("Join", job="run", learner=learner)
    opened.initialize()
    for learner in range(2):
        for server in opened.servers:
            server.stage("run", (learner, 1, 1), 1.0)
        opened.contribute(learner, bytes=50)
    opened.call("Next", job="run", learner=0, incarnation=1, round=1)
    opened.call("Report", job="run", row={"step": 1})  # after the status was renewed
    status = opened.call("Status", job="run")
    assert (status["state"], status["version"], status["bytes"]) == ("running", 1, 100)
    assert (status["learners"], status["num_learners"]) == (2, 2)
    assert not opened.coordinator.is_over()
    assert opened.call("Save", job="run") == {"version": 1}


def test_a_job_of_the_log_is_not_opened_anew(center, make_spec, monkeypatch):
    """All servers are there a moment before the jobs of the log are taken up."""
    from meshloom.service.coordinator import coordinator as module

    monkeypatch.setattr(module, "ANSWER_SECONDS", 0.2)
    coordinator, spec = center.coordinator, make_spec()
    coordinator._log.append("run", "spec", {"spec": spec, "servers": ["s0", "s1"]})
    coordinator._waiting.append("run")
    take_up = coordinator._take_up_jobs
    monkeypatch.setattr(coordinator, "_take_up_jobs", lambda: None)
    for server in center.servers:
        center.call("RegisterServer", name=server.name, address=server.address)
    with pytest.raises(Unavailable, match="the service is waiting for servers"):
        center.call("OpenJob", **spec)
    assert [entry.kind for entry in coordinator._log.read("run")] == ["spec"]
    monkeypatch.setattr(module, "ANSWER_SECONDS", 5.0)
    take_up()
    assert center.call("OpenJob", **spec)["initialize"]
