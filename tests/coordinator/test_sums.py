"""Contributions that arrive as a sum: all count, or none, each as its learner's own."""

import json

import pytest

from meshloom.service.coordinator.cleaning import CLEAN_SECONDS, Cleaner
from meshloom.service.wire.errors import Refused
from meshloom.service.wire.sums import FIRST, contributions_of, sums_in, tree_of

SUM = FIRST + 0, 7, 1


def part(learner: int, round: int = 1, incarnation: int = 1, **changes) -> dict:
    return {
        **{"learner": learner, "incarnation": incarnation, "round": round},
        **{"base": round - 1, "weight": 2.0, "steps": 1, "bytes": 16},
        "sums": {"loss": 2.0 * (learner + 1), "weight": 2.0},
        **changes,
    }


def send(house, parts, key=SUM, value: float = 0.0, tree=None) -> dict:
    """Sends a sum that is staged with this value."""
    house.stage(*key, value)
    keys = [(p["learner"], p["incarnation"], p["round"]) for p in parts]
    tree = tree or tree_of(key, keys)
    return house.ask("contribute_sum", tree=tree, parts=parts)


@pytest.fixture
def house(make_house):
    """A job of four learners in round 1."""
    made = make_house(num_learners=4)
    made.start()
    for learner in range(4):
        made.ask("join", learner=learner)
    made.initialize()
    return made


def commits(house) -> list[dict]:
    file = house.folder / "run" / "commits.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


def values(house, version: int) -> list[float]:
    return [server.jobs["run"]["versions"][version] for server in house.servers]


def test_a_sum_and_single_contributions_make_one_commit(house):
    assert send(house, [part(0), part(1)], value=3.0) == {"state": "ok", "gone": []}
    assert send(house, [part(0), part(1)], value=3.0)["state"] == "ok"  # repeated
    house.stage(3, 1, 1, 4.0)
    house.contribute(3, 1, 1, 0)
    house.stage(2, 1, 1, 1.0)
    house.contribute(2, 1, 1, 0)
    assert values(house, 1) == [8.0 / 8.0, 1 + 8.0 / 8.0]
    (row,) = commits(house)
    assert [c["learner"] for c in row["contributions"]] == [0, 1, 2, 3]
    blocks = [tuple(map(tuple, c["blocks"])) for c in row["contributions"]]
    assert len(set(blocks)) == 4  # each learner's own data, consumed once
    assert row["sums"] == [{"key": list(SUM), "of": [[0, 1, 1], [1, 1, 1]]}]
    assert row["divisor"] == 8.0
    # Sum and contributions are not needed any more.
    assert [s.jobs["run"]["staged"] for s in house.servers] == [{}, {}]


def test_a_coordinator_that_restarts_merges_the_sums_of_its_log(house):
    send(house, [part(0), part(1)], value=3.0)
    house.start()
    inner = tree_of((FIRST + 2, 1, 1), [(2, 1, 1), (3, 1, 1)])
    outer = tree_of((FIRST + 2, 2, 1), [inner])
    send(house, [part(2), part(3)], (FIRST + 2, 2, 1), value=5.0, tree=outer)
    assert values(house, 1) == [1.0, 2.0]
    assert commits(house)[0]["sums"][1] == outer
    assert sums_in(outer) == [inner, outer]
    assert contributions_of(outer) == [(2, 1, 1), (3, 1, 1)]


def test_a_sum_with_a_learner_that_has_left_does_not_count_at_all(house):
    house.ask("leave", learner=1, incarnation=1)
    answer = send(house, [part(0), part(1)], value=3.0)
    assert answer == {"state": "regroup", "gone": [[1, 1, 1]]}
    assert send(house, [part(0)], (FIRST, 8, 1), value=1.0)["state"] == "ok"
    for learner in (2, 3):
        house.stage(learner, 1, 1, 1.0)
        house.contribute(learner, 1, 1, 0)
    (row,) = commits(house)
    assert [c["learner"] for c in row["contributions"]] == [0, 2, 3]
    assert values(house, 1)[0] == 3.0 / 6.0


def test_who_has_contributed_by_itself_is_not_counted_in_a_sum_again(house):
    house.stage(1, 1, 1, 9.0)
    house.contribute(1, 1, 1, 0)
    answer = send(house, [part(0), part(1)], value=3.0)
    assert answer == {"state": "regroup", "gone": [[1, 1, 1]]}
    send(house, [part(0), part(2), part(3)], (FIRST, 9, 1), value=3.0)
    house.contribute(0, 1, 1, 0)  # the learner was not told, and sends it again
    (row,) = commits(house)
    assert [c["learner"] for c in row["contributions"]] == [0, 1, 2, 3]
    assert values(house, 1)[0] == 12.0 / 8.0


@pytest.mark.parametrize(
    "parts, tree, found",
    [
        ([part(0)], {"key": [0, 1, 1], "of": [[0, 1, 1]]}, "key of a learner"),
        ([part(0)], {"key": list(SUM), "of": [[1, 1, 1]]}, "one contribution each"),
        ([part(0)], {"key": list(SUM), "of": []}, "what it consists of"),
        ([part(0)], {"key": "x", "of": [[0, 1, 1]]}, "'x' is not the key"),
        ([part(0, round=2)], {"key": list(SUM), "of": [[0, 1, 2]]}, "all of one round"),
        (
            [part(0), part(0)],
            {"key": list(SUM), "of": [[0, 1, 1], [0, 1, 1]]},
            "one contribution each",
        ),
    ],
)
def test_a_sum_that_makes_no_sense_is_refused(house, parts, tree, found):
    with pytest.raises(Refused, match=found):
        house.ask("contribute_sum", parts=parts, tree=tree)
    house.ask("contribute", **part(0))  # nothing was counted


def test_a_sum_needs_a_policy_that_counts_every_contribution(make_house):
    house = make_house(mode="backup-workers", num_learners=4)
    house.start()
    with pytest.raises(Refused, match="late='drop' some may not. Let the learners use"):
        send_unstaged = {"tree": tree_of(SUM, [(0, 1, 1)]), "parts": [part(0)]}
        house.ask("contribute_sum", **send_unstaged)


def test_sums_that_never_came_to_count_are_removed(house):
    """Not those of this round, which may be on their way; and just of their rounds."""
    send(house, [part(learner) for learner in range(4)], value=8.0)
    job = house.job
    assert job.engine.version == 1
    dropped, old, new = [], [FIRST, 9, 1], [FIRST, 9, 2]
    for server in house.servers:
        inner = server.status
        server.status = lambda m, inner=inner: {**inner(m), "staged": [old, new]}
        server.drop = lambda m: dropped.append(m["contributions"]) or {"bytes": 8}
    cleaner = Cleaner(job)
    house.time += CLEAN_SECONDS
    cleaner.clean_if_due()
    assert dropped == [[old]] * 2
    assert "removed 1 staged contributions (16 bytes)" in house.said[-1]
    assert house.said[-1].endswith("a merger in round 1")
