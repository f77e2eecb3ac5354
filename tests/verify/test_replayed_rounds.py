"""Which rounds of a training a replay computes again, from its log and ledgers."""

import json

from meshloom.service.rounds.policy import make_policy
from meshloom.trainer.verify.replay_rounds import find_rounds

LOCAL = make_policy("local-sgd", local_steps=4)


def ran(folder, learner, incarnation, rounds, joined=0):
    """Writes that an incarnation joined, with a state of step `joined`, and ran."""
    home = folder / "learners" / str(learner)
    home.mkdir(parents=True, exist_ok=True)
    who = {"learner": learner, "incarnation": incarnation}
    rows = [{"event": "joined", **who, "optimizer_step": joined}]
    for number in rounds:
        blocks = [[number, number + 1]]
        about = {"round": number, "base": number - 1, "blocks": blocks}
        rows.append({"event": "round", **who, **about})
    with open(home / "ledger.jsonl", "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def commit(incarnation, number):
    who = {"learner": 0, "incarnation": incarnation, "round": number}
    return {"contributions": [{**who, "base": number - 1, "blocks": [[number, 9]]}]}


def numbers(folder, commits, policy=LOCAL):
    found = find_rounds(folder, commits, policy)[0]
    return [(round.key[1], round.key[2]) for round in found]


def test_rounds_after_the_state_that_a_learner_came_back_with_are_not_computed(
    tmp_path,
):
    """The service fell back to version 2, and the learner to its step 8."""
    ran(tmp_path, 0, 1, [1, 2, 3, 4])
    ran(tmp_path, 0, 2, [3, 4, 5], joined=8)
    commits = [commit(1, 1), commit(1, 2), commit(2, 3), commit(2, 4), commit(2, 5)]
    expected = [(1, 1), (1, 2), (2, 3), (2, 4), (2, 5)]
    assert numbers(tmp_path, commits) == expected


def test_a_round_in_which_the_state_was_saved_is_computed(tmp_path):
    ran(tmp_path, 0, 1, [1, 2, 3, 4])
    ran(tmp_path, 0, 2, [3, 4], joined=10)  # in the middle of round 3
    commits = [commit(1, 1), commit(1, 2), commit(2, 3), commit(2, 4)]
    assert numbers(tmp_path, commits) == [(1, 1), (1, 2), (1, 3), (2, 3), (2, 4)]


def test_a_dropped_round_is_computed_if_a_committed_one_came_after_it(tmp_path):
    ran(tmp_path, 0, 1, [1, 2, 3])
    ran(tmp_path, 0, 2, [4], joined=0)  # without its state: a new optimizer
    commits = [commit(1, 1), commit(1, 3), commit(2, 4)]
    assert numbers(tmp_path, commits) == [(1, 1), (1, 2), (1, 3), (2, 4)]
    assert numbers(tmp_path, [commit(1, 1), commit(2, 4)]) == [(1, 1), (2, 4)]


def test_all_rounds_of_a_learner_that_never_left_are_computed(tmp_path):
    ran(tmp_path, 0, 1, [1, 2, 3])
    assert numbers(tmp_path, [commit(1, 2)]) == [(1, 1), (1, 2), (1, 3)]
