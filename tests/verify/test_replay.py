"""Which rounds a replay computes again, from the commits and the ledgers."""

import json

from meshloom.service.rounds.policy import make_policy
from meshloom.trainer.verify.replay_rounds import find_rounds


def part(learner: int, incarnation: int, round: int) -> dict:
    who = {"learner": learner, "incarnation": incarnation, "round": round}
    return {**who, "base": round - 1, "blocks": [[round, round + 1]]}


def joined(incarnation: int, round: int) -> dict:
    who = {"learner": 0, "incarnation": incarnation, "round": round}
    return {"event": "joined", **who, "optimizer_step": round - 1}


def test_rounds_that_a_restart_took_back_are_not_computed(tmp_path):
    """It went back to version 2 after version 4, and then from 3 to 1."""
    history = [(1, 1), (1, 2), (1, 3), (1, 4), (2, 3), (3, 2), (3, 3), (3, 4)]
    rows = [joined(1, 1)]
    for incarnation, round in history:
        if rows[-1]["incarnation"] != incarnation:
            rows.append(joined(incarnation, round))
        rows.append({"event": "round", **part(0, incarnation, round)})
    (tmp_path / "learners" / "0").mkdir(parents=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "learners" / "0" / "ledger.jsonl").write_text(lines)
    # Round 3 of the third incarnation was late and dropped, but it was computed.
    kept = [(1, 1), (3, 2), (3, 4)]
    commits = [{"contributions": [part(0, *key)]} for key in kept]
    policy = make_policy("async")
    found = find_rounds(tmp_path, commits, policy)
    assert [r.key[1:] for r in found[0]] == [(1, 1), (3, 2), (3, 3), (3, 4)]
    assert [r.optimizer_step for r in found[0]] == [0, 1, None, None]
