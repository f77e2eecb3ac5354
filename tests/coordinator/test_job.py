"""A job from its spec to its final parameters, without network, threads or clock."""

import json
import math

import pytest

from meshloom.service.wire.errors import Refused


def rows(house, name: str) -> list[dict]:
    text = (house.folder / "run" / name).read_text()
    return [json.loads(line) for line in text.splitlines()]


def join_all(house, num: int = 2) -> None:
    for learner in range(num):
        assert house.ask("join", learner=learner)["incarnation"] == 1


def play_round(house, round: int, values=(1.0, 3.0), **more) -> None:
    for learner, value in enumerate(values):
        place = house.next(learner, 1, round - 1)
        assert (place["state"], place["round"]) == ("go", round)
        house.stage(learner, 1, round, value)
        house.contribute(learner, 1, round, place["version"], **more)


def test_a_job_runs_to_its_end(make_house):
    house = make_house()
    house.start()
    join_all(house)
    assert house.next(0, 1, 0)["state"] == "wait"  # there are no parameters yet
    assert house.ask("initialize") == {"state": "push"}
    house.initialize()
    for round in range(1, 5):
        play_round(house, round)
    assert house.next(0, 1, 4)["state"] == "done"
    # Payloads are sums: (1 + 3) / (2 + 2) each round, from 0 and 1.
    assert [s.jobs["run"]["versions"][4] for s in house.servers] == [4.0, 5.0]
    assert [s.applied for s in house.servers] == [[1, 2, 3, 4]] * 2
    assert [s.jobs["run"]["staged"] for s in house.servers] == [{}, {}]
    metrics = rows(house, "metrics.jsonl")
    assert [row["step"] for row in metrics] == [1, 2, 3, 4]
    assert metrics[0]["loss"] == (2.0 + 4.0) / 4.0  # the weighted mean
    assert metrics[0]["learners"] == 2 and metrics[0]["weight"] == 4.0
    commit = rows(house, "commits.jsonl")[2]
    assert [c["base"] for c in commit["contributions"]] == [2, 2]
    assert commit["scale"] == 1.0 and commit["divisor"] == 4.0


def test_the_final_digest_is_the_sum_of_the_servers_lanes(make_house):
    from meshloom.service.blocks.digest import digest_of

    house = make_house(num_rounds=1)
    job = house.start()
    join_all(house)
    house.initialize()
    play_round(house, 1)
    final = json.loads((house.folder / "run" / "final.json").read_text())
    leaf = job.spec.layout.leaves[0]  # the servers hold 1 and 2, times 8
    assert final == {"version": 1, "digests": {"w": digest_of(leaf, (8 + 16, 2))}}


def test_the_scale_is_that_of_the_trainer(make_house):
    house = make_house(max_grad_norm=0.5)
    house.start()
    join_all(house)
    house.initialize()
    play_round(house, 1)
    # Each server's mean is 1, so the norm over both is sqrt(2).
    commit = rows(house, "commits.jsonl")[0]
    assert commit["norm"] == pytest.approx(math.sqrt(2), rel=1e-7)
    assert commit["scale"] == pytest.approx(0.5 / math.sqrt(2), rel=1e-7)
    assert house.servers[0].jobs["run"]["versions"][1] == commit["scale"]


@pytest.mark.parametrize("case", ["payload", "loss", "norm"])
def test_an_update_that_is_not_finite_or_too_large_is_skipped(make_house, case):
    house = make_house(skip_grad_norm=1.0 if case == "norm" else None)
    house.start()
    join_all(house)
    house.initialize()
    if case == "payload":
        play_round(house, 1, values=(1.0, math.nan))
    elif case == "loss":
        play_round(house, 1, sums={"loss": "NaN", "weight": 2.0})
    else:
        play_round(house, 1)
    assert house.servers[1].jobs["run"]["versions"][1] == 1.0  # as it was
    row = rows(house, "metrics.jsonl")[0]
    assert row["skipped"] == 1 and row["step"] == 1
    if case == "payload":
        assert row["grad_norm"] == "NaN"
    play_round(house, 2, values=(0.5, 0.5))
    assert rows(house, "metrics.jsonl")[1]["skipped"] == 0


def test_a_repeated_contribution_gets_the_same_answer_and_counts_once(make_house):
    house = make_house()
    house.start()
    join_all(house)
    house.initialize()
    house.stage(0, 1, 1, 1.0)
    first = house.contribute(0, 1, 1, 0)
    events = len(house.log.read("run"))
    assert house.contribute(0, 1, 1, 0) == first == {"state": "ok", "version": 0}
    assert len(house.log.read("run")) == events


def test_a_silent_learner_has_left_after_its_lease(make_house):
    house = make_house(policy={"quorum": 0.5, "late": "drop"})
    job = house.start()
    join_all(house)
    house.initialize()
    house.pass_time(9)
    job.board.hear(0, 1, house.time)
    house.pass_time(2)
    assert [m.learner for m in job.members] == [0]
    place = house.next(1, 1, 0)
    assert place == {"state": "left", "reason": "not heard of for 10 s"}
    assert house.contribute(1, 1, 1, 0)["state"] == "left"
    # It returns with the next incarnation, and is released from the newest version.
    assert house.ask("join", learner=1)["incarnation"] == 2
    assert house.next(1, 2, 0)["state"] == "go"
    assert house.next(1, 1, 0)["state"] == "left"


def test_a_job_that_was_paused_loses_nobody(make_house):
    """While the process stood still, it could not hear anybody."""
    house = make_house()
    job = house.start()
    join_all(house)
    house.initialize()
    house.pass_time(9)
    house.time += 100.0
    house.pass_time(9)  # another lease from then on
    assert len(job.members) == 2
    job.board.hear(0, 1, house.time)
    house.pass_time(3)
    assert [m.learner for m in job.members] == [0]


def test_grace_needs_no_event_but_the_time(make_house):
    policy = {"quorum": 1, "grace": 5.0, "late": "drop"}
    house = make_house(policy=policy)
    house.start()
    join_all(house)
    house.initialize()
    house.stage(0, 1, 1, 1.0)
    house.contribute(0, 1, 1, 0)
    assert house.next(0, 1, 1)["state"] == "wait"
    house.time += 5.0
    house.ask("report", row={"step": 0})
    place = house.next(0, 1, 1)
    assert (place["state"], place["round"], place["version"]) == ("go", 2, 1)
    norm = pytest.approx(math.sqrt(0.5))  # each server's mean is 1 / 2
    assert place["commit"] == {"version": 1, "norm": norm, "scale": 1.0, "skipped": 0}
    # The late one is dropped, is told so, and joins the others in round 2.
    house.stage(1, 1, 1, 1.0)
    house.contribute(1, 1, 1, 0)
    place = house.next(1, 1, 1)
    assert (place["state"], place["round"], place["version"]) == ("go", 2, 1)
    assert place["dropped"]["round"] == 1 and "late" in place["dropped"]["reason"]


def test_versions_that_somebody_may_read_are_kept(make_house):
    house = make_house(mode="async", num_rounds=9)
    house.start()
    join_all(house)
    house.initialize()
    for round in (1, 2, 3):
        base = house.next(0, 1, round - 1)["version"]
        house.stage(0, 1, round, 1.0)
        house.contribute(0, 1, round, base)
    # Learner 1 still works on version 0, learner 0 went on from version 2 to 3.
    assert sorted(house.servers[0].jobs["run"]["versions"]) == [0, 2, 3]


def test_the_version_at_which_a_learner_was_done_is_kept_until_it_leaves(make_house):
    house = make_house(mode="async", num_rounds=2)
    house.start()
    join_all(house)
    house.initialize()

    def contribute(learner: int, round: int) -> None:
        base = house.next(learner, 1, round - 1)["version"]
        house.stage(learner, 1, round, 1.0)
        house.contribute(learner, 1, round, base)

    for learner, round in ((0, 1), (0, 2), (1, 1)):
        contribute(learner, round)
    place = house.next(0, 1, 2)
    assert (place["state"], place["version"]) == ("done", 2)
    versions = lambda: house.servers[0].jobs["run"]["versions"]  # noqa: E731
    assert versions().keys() == {0, 2, 3}  # learner 1 went on from version 0
    house.ask("leave", learner=0, incarnation=1, reason="done")
    contribute(1, 2)
    assert versions().keys() == {3, 4}


def test_reused_contributions_stay_on_the_servers(make_house):
    policy = {"quorum": 1, "late": "reuse", "staleness": 2}
    house = make_house(policy=policy, num_rounds=9)
    house.start()
    join_all(house)
    house.initialize()
    for round in (1, 2, 3):
        base = house.next(0, 1, round - 1)["version"]
        if round == 1:
            house.stage(1, 1, 1, 5.0)
            house.stage(0, 1, 1, 1.0)
            house.contribute(0, 1, 1, base)
            house.contribute(1, 1, 1, base)
        else:
            house.stage(0, 1, round, 1.0)
            house.contribute(0, 1, round, base)
    used = [
        [(c["learner"], c["round"]) for c in row["contributions"]]
        for row in rows(house, "commits.jsonl")
    ]
    assert used[1] == [(0, 2), (1, 1)]


def test_evaluations_are_written_with_the_time(make_house):
    house = make_house()
    house.start()
    house.ask("report", row={"step": 3, "loss": 2.5})
    assert rows(house, "eval.jsonl") == [{"step": 3, "loss": 2.5, "time": 100.0}]
    with pytest.raises(Refused, match="expected an object with an integer step"):
        house.ask("report", row={"loss": 2.5})


def test_a_learner_of_another_log_is_told_to_join_again(make_house):
    """Rather than to wait for ever, for the turn of somebody who has not joined."""
    house = make_house()
    house.start()
    join_all(house, 1)
    house.initialize()
    house.job.board.hear(1, 7, house.time)
    house.pass_time(1)
    told = house.next(1, 7, 0)
    assert told["state"] == "left" and "was its folder removed? Join" in told["reason"]
    assert house.ask("join", learner=1, owner="x")["incarnation"] == 8
    house.pass_time(1)
    assert house.next(1, 8, 0)["state"] == "go"
    assert house.next(1, 7, 0)["state"] == "left"
