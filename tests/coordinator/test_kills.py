"""A coordinator that is killed between any two of its actions.

A process that dies takes its memory with it and leaves the log, the files and, if they
run elsewhere, the servers. So each case runs the job up to one point, throws everything
else away, starts anew, and compares the end with that of a run without a kill.
"""

import json

import pytest
from mortal_jobs import Learner, load_if_done, play_to_the_end

from meshloom.service.coordinator.history import make_history

ROUNDS = 4


def run(make_house, killed, name, fatal, *, lose_servers=False, **changes):
    house = make_house(name, num_rounds=ROUNDS, **changes)
    house.fate.fatal = fatal
    learners = [Learner(house, index) for index in range(2)]
    play_to_the_end(house, learners, killed, lose_servers=lose_servers)
    return house


def outcome(house) -> tuple:
    load_if_done(house)
    values = [server.jobs["run"]["versions"][ROUNDS] for server in house.servers]
    folder = house.folder / "run"
    final = json.loads((folder / "final.json").read_text())
    rows = [json.loads(x) for x in (folder / "commits.jsonl").read_text().splitlines()]
    metrics = (folder / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in metrics]
    used = [
        [(c["learner"], c["round"], c["base"]) for c in row["contributions"]]
        for row in rows
    ]
    blocks = sorted(
        tuple(b) for row in rows for c in row["contributions"] for b in c["blocks"]
    )
    assert blocks == [(k, k + 1) for k in range(2 * ROUNDS)], "not each block once"
    return values, final, used, steps


@pytest.mark.parametrize("lose_servers", [False, True], ids=["coordinator", "both"])
def test_a_kill_at_any_point_changes_nothing(make_house, killed, lose_servers):
    expected = run(make_house, killed, "whole", None)
    points = list(expected.fate.passed)
    assert sum("log of" in point for point in points) > 20
    for fatal in range(1, len(points) + 1):
        house = run(make_house, killed, f"at {fatal}", fatal, lose_servers=lose_servers)
        assert outcome(house) == outcome(expected), house.fate.passed[fatal - 1]
        if not lose_servers:
            # Nothing was taken back and nothing was applied twice.
            assert [s.applied for s in house.servers] == [[1, 2, 3, 4]] * 2
            kinds = {entry.kind for entry in house.log.read("run")}
            assert "rollback" not in kinds
        house.stop()


def test_what_a_rollback_takes_back_is_kept_apart(make_house, killed):
    whole = run(make_house, killed, "whole", None)
    # Killed with the servers in round 4, after the checkpoint of version 2.
    logged = [i for i, p in enumerate(whole.fate.passed, 1) if "log of commit" in p]
    house = run(make_house, killed, "one", logged[5], lose_servers=True)
    entries = house.log.read("run")
    (rollback,) = [entry.body for entry in entries if entry.kind == "rollback"]
    assert rollback["version"] == 2
    abandoned = (house.folder / "run" / "abandoned.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in abandoned] == [3]
    assert any("1 commits abandoned" in line for line in house.said)
    history = make_history(entries)
    assert sorted(history.commits) == [1, 2, 3, 4]
    assert {c["incarnation"] for c in history.commits[2]["contributions"]} == {1}
    assert {c["incarnation"] for c in history.commits[3]["contributions"]} == {2}


def start_with_checkpoints(make_house, killed):
    """Returns a house with checkpoints 0, 2 and 4 whose servers are gone."""
    house = run(make_house, killed, "house", None)
    names = sorted(p.name for p in (house.folder / "run" / "service").iterdir())
    assert names == ["0", "2", "4"]
    for server in house.servers:
        server.lose()
    house.said.clear()
    return house, house.folder / "run" / "service"


def test_a_finished_job_still_has_its_parameters_after_a_restart(make_house, killed):
    house, _ = start_with_checkpoints(make_house, killed)
    before = (house.folder / "run" / "final.json").read_text()
    job = house.start()
    assert job.is_finished and house.next(0, 1, 0)["state"] == "done"
    assert not house.servers[0].jobs  # nobody needs them
    house.ask("join", learner=0, owner="me0")
    assert house.servers[0].jobs["run"]["version"] == ROUNDS
    assert house.next(0, 2, 0)["version"] == ROUNDS
    assert (house.folder / "run" / "final.json").read_text() == before


DAMAGES = {
    "torn": (lambda f: (f / "s0.json").write_text("1"), "s0.json has 1 bytes"),
    "missing": (lambda f: (f / "s1.json").unlink(), "s1.json is missing"),
    "unfinished": (
        lambda f: (f / "manifest.json").unlink(),
        "the save was not completed",
    ),
    "no manifest": (
        lambda f: (f / "manifest.json").write_text("{"),
        "manifest.json is not a manifest",
    ),
    "damaged": (  # only the server can tell
        lambda f: (f / "s0.json").write_text(
            "x" * len((f / "s0.json").read_text()),
        ),
        "version 4 cannot be loaded: .*s0.json is damaged",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_an_older_one_used(
    make_house, killed, damage
):
    import re

    house, folder = start_with_checkpoints(make_house, killed)
    spoil, message = DAMAGES[damage]
    spoil(folder / "4")
    job = house.start()
    if damage == "damaged":  # it is not loaded before a learner returns
        assert job.is_finished
        house.ask("join", learner=0, owner="me0")
    assert job.engine.version == 2 and not job.is_finished
    assert any(re.search(message, line) for line in house.said), house.said
    assert any("continues from version 2; 2 commits abandoned" in x for x in house.said)
    learners = [Learner(house, index) for index in range(2)]
    play_to_the_end(house, learners, killed)
    assert outcome(house)[3] == [1, 2, 3, 4]


def test_a_checkpoint_of_an_abandoned_history_is_never_used(make_house, killed):
    house, folder = start_with_checkpoints(make_house, killed)
    kept = (folder / "4" / "s0.json").read_text()
    (folder / "4" / "s0.json").write_text("torn")
    assert house.start().engine.version == 2
    # It turns up again, intact, after versions 3 and 4 were abandoned.
    (folder / "4" / "s0.json").write_text(kept)
    for server in house.servers:
        server.lose()
    assert house.start().engine.version == 2
    assert [s.jobs["run"]["version"] for s in house.servers] == [2, 2]


def test_without_any_usable_checkpoint_the_job_stops_with_the_remedy(
    make_house, killed
):
    house, folder = start_with_checkpoints(make_house, killed)
    for name in ("0", "2", "4"):
        (folder / name / "manifest.json").unlink()
    with pytest.raises(ValueError, match="no checkpoint in .* can be loaded"):
        house.start()


def test_other_servers_take_over_a_checkpoint(make_house, killed):
    house, folder = start_with_checkpoints(make_house, killed)
    one = house.servers[0]
    one.name = "another"
    (folder / "4" / "s0.json").rename(folder / "4" / "another.json")
    manifest = json.loads((folder / "4" / "manifest.json").read_text())
    manifest["files"]["another.json"] = manifest["files"].pop("s0.json")
    (folder / "4" / "manifest.json").write_text(json.dumps(manifest))
    job = house.start()
    house.ask("join", learner=0, owner="me0")
    assert job.engine.version == ROUNDS
    assert [s.jobs["run"]["version"] for s in house.servers] == [ROUNDS] * 2
    assert make_history(house.log.read("run")).servers == ("another", "s1")
