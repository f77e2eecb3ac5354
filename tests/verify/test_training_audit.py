"""The audit of a training between learners, on logs made by hand."""

import json

import numpy as np
import pytest
from tiny_runs import main

from meshloom.trainer.data.shuffle import Order
from meshloom.trainer.program import digest
from meshloom.trainer.verify.training_audit import audit_training

ROWS, EXAMPLES, SEED = 2, 9, 3  # the third step of learner 0 is in two epochs


def samples(block: int) -> str:
    ids = Order(EXAMPLES, SEED).index(np.arange(block * ROWS, (block + 1) * ROWS))[1]
    return digest.tree_digests({"x": ids.astype(np.uint32)})["x"]


def part(learner: int, round: int, *blocks: int, **more) -> dict:
    ranges = [[block, block + 1] for block in blocks]
    who = {"learner": learner, "incarnation": 1, "round": round}
    return {**who, "blocks": ranges, "is_reused": False, **more}


class Log:
    """What a sound training of two learners leaves; tests then spoil it."""

    def __init__(self):
        self.commits = [
            [part(0, 1, 0), part(1, 1, 1)],
            [part(0, 2, 2), part(1, 2, 3)],
            [part(0, 3, 4)],
        ]
        self.set_aside: list[int] = []
        self.ledgers = [self.ledger(0, 0, 2, 4), self.ledger(1, 1, 3)]

    def ledger(self, learner: int, *blocks: int) -> list[dict]:
        facts = {"batch_size": ROWS, "seed": SEED, "num_examples": EXAMPLES}
        rows = [{"event": "start", **facts, "data": "aa", "learner": [learner, 2]}]
        for round, block in enumerate(blocks, 1):
            rows.append({"event": "round", **part(learner, round, block)})
            about = {"batch": block, "samples": samples(block)}
            rows.append({"event": "step", "step": round, **about})
        return rows

    def write(self, folder) -> None:
        data = {"digest": "aa", "batch_size": 2 * ROWS}
        data |= {"num_examples": EXAMPLES, "seed": SEED}
        spec = {"num_learners": 2, "data": data}
        (folder / "spec.json").write_text(json.dumps(spec))
        commits = [
            {"version": n, "step": n, "contributions": parts, "set_aside": []}
            for n, parts in enumerate(self.commits, 1)
        ]
        commits[-1]["set_aside"] = self.set_aside
        files = {"commits.jsonl": commits}
        for learner, rows in enumerate(self.ledgers):
            files[f"learners/{learner}/ledger.jsonl"] = rows
        for name, rows in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / name).write_text(text)


@pytest.fixture
def log():
    return Log()


def test_a_sound_training_passes(log, tmp_path, capsys):
    log.write(tmp_path)
    assert main(["ledger", "audit", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("samples in an update")]
    assert line.split()[-1] == "10"
    assert "audit: each sample contributed to exactly one update" in lines[-1]


def test_what_is_in_no_update_is_listed(log, tmp_path):
    log.commits[1] = [part(0, 2, 2)]  # round 2 of learner 1 came to nothing
    log.set_aside = [6]
    log.write(tmp_path)
    found = audit_training(tmp_path)
    assert (found.unfinished, found.set_aside, found.faults) == ([3, 5], [6], [])
    assert "not finished at the end  4 (examples 6 to 7, 10 to 11)" in str(found)


def test_a_contribution_that_stood_in_again_counts_once(log, tmp_path):
    log.commits[2].append(part(1, 2, is_reused=True))
    log.write(tmp_path)
    assert audit_training(tmp_path).faults == []
    assert audit_training(tmp_path).consumed == 5


def test_steps_that_a_kill_left_unrecorded_are_counted(log, tmp_path):
    del log.ledgers[0][-2:]
    log.write(tmp_path)
    found = audit_training(tmp_path)
    assert (found.unrecorded, found.faults) == (1, [])


def twice(log):
    log.commits[2] = [part(0, 3, 1)]


def other_blocks(log):
    log.commits[2] = [part(0, 3, 5)]


def other_samples(log):
    log.ledgers[1][-1]["samples"] = samples(0)


def no_record(log):
    del log.ledgers[0][1:3]  # round 1, although round 2 is there


def no_data(log):
    log.commits[0][1]["blocks"] = []


def other_data(log):
    log.ledgers[1][0]["data"] = "bb"


def aside_and_used(log):
    log.set_aside = [3]


SPOILED = {
    twice: "block 1 is in commit 1 and again in commit 3",
    other_blocks: "committed with blocks ((5, 6),), but was computed on ((4, 5),)",
    other_samples: "a learner's step 2: its samples have digest",
    no_record: "round 1 of learner 0, incarnation 1 is not in its learner's ledger",
    no_data: "commit 1: round 1 of learner 1 has no data",
    other_data: "learner 1 has started with other data",
    aside_and_used: "block 3 was set aside, and is in commit 2",
}


@pytest.mark.parametrize("spoil", SPOILED, ids=lambda spoil: spoil.__name__)
def test_what_is_wrong_is_found(log, tmp_path, capsys, spoil):
    spoil(log)
    log.write(tmp_path)
    assert main(["ledger", "audit", str(tmp_path)]) == 1
    assert SPOILED[spoil] in capsys.readouterr().out


def test_a_missing_commit_is_found(log, tmp_path):
    log.write(tmp_path)
    file = tmp_path / "commits.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([lines[0], lines[2]]))
    assert "commit 2 is missing: 3 comes next" in audit_training(tmp_path).faults


def test_a_training_of_an_older_version_is_refused(log, tmp_path, capsys):
    """Its commits do not say which data they consumed."""
    del log.commits[1][0]["blocks"]
    log.write(tmp_path)
    assert main(["ledger", "audit", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "commits.jsonl: commit 2 does not say on which blocks" in error
