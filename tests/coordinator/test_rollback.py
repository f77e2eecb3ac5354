"""What servers lose with a restart is never merged, in modes where it could be."""

import json


def commits_of(house) -> list[dict]:
    text = (house.folder / "run" / "commits.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_contributions_that_were_lost_do_not_stand_in_for_their_learner(make_house):
    policy = {"quorum": 1, "grace": 1.0, "late": "reuse", "staleness": 3}
    house = make_house(policy=policy, num_rounds=9, save_every=1)
    house.start()
    for learner in range(2):
        house.ask("join", learner=learner, owner=str(learner))
    house.initialize()
    for learner in range(2):
        house.stage(learner, 1, 1, 1.0)
        house.contribute(learner, 1, 1, 0)
    assert len(commits_of(house)[0]["contributions"]) == 2
    for server in house.servers:
        server.lose()
    house.start()
    assert house.next(0, 1, 1)["state"] == "left"
    # What it computed may come from a version that no longer exists.
    late = house.contribute(0, 1, 2, 1)
    assert late["state"] == "left" and "restarted from version 1" in late["reason"]
    # Only learner 0 returns. Its round is over after the grace; the contribution of
    # learner 1, which would stand in for it, is gone with the servers.
    assert house.ask("join", learner=0)["incarnation"] == 2  # also as another owner
    place = house.next(0, 2, 0)
    assert (place["round"], place["version"]) == (2, 1)
    house.stage(0, 2, 2, 1.0)
    house.contribute(0, 2, 2, 1)
    house.time += 2.0
    house.ask("report", row={"step": 1})
    parts = commits_of(house)[1]["contributions"]
    assert [(c["learner"], c["incarnation"]) for c in parts] == [(0, 2)]
    assert [c["blocks"] for c in parts] == [[[2, 3]]]


def test_the_data_of_contributions_that_were_lost_is_leased_again(make_house):
    house = make_house(num_rounds=3, save_every=1)
    house.start()
    for learner in range(2):
        house.ask("join", learner=learner, owner=str(learner))
    house.initialize()
    for learner, round in ((0, 1), (1, 1), (1, 2)):  # round 2 has no commit yet
        house.stage(learner, 1, round, 1.0)
        house.contribute(learner, 1, round, round - 1)
    for server in house.servers:
        server.lose()
    house.start()
    for learner in (1, 0):
        house.ask("join", learner=learner, owner=str(learner))
        place = house.next(learner, 2, 0)
        assert (place["state"], place["round"]) == ("go", 2)
    for learner in range(2):
        house.stage(learner, 2, 2, 1.0)
        house.contribute(learner, 2, 2, 1)
    parts = [row["contributions"] for row in commits_of(house)]
    assert [[c["blocks"] for c in found] for found in parts] == [
        [[[0, 1]], [[1, 2]]],
        # Learner 1 came first. It had leased blocks 3 and 5, the other 2 and 4.
        [[[4, 5]], [[2, 3]]],
    ]


def test_members_have_time_to_return_and_then_have_left(make_house):
    house = make_house(policy={"quorum": 0.5, "late": "drop"}, save_every=1)
    house.start()
    for learner in range(2):
        house.ask("join", learner=learner)
    house.initialize()
    house.time += 500.0  # while nobody ran
    job = house.start()
    assert len(job.members) == 2
    house.pass_time(59)
    assert len(job.members) == 2
    house.pass_time(2)
    assert len(job.members) == 0
