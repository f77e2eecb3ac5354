"""Tests of the ledger, and of the audit that replays it."""

import json
import re

import numpy as np
import pytest
from tiny_runs import NUM_STEPS, main, refused, train

from meshloom.trainer.data.shuffle import Order
from meshloom.trainer.program import digest
from meshloom.trainer.record import ledger, ledger_audit

SIZE, EXAMPLES, SEED = 4, 10, 3
START = {"event": "start", "batch_size": SIZE, "num_examples": EXAMPLES, "seed": SEED}

DATA_A, DATA_B = START | {"data": "aaaa"}, START | {"data": "bbbb"}
CHANGED = {"event": "data_changed", "split": "train", "digest": ["aaaa", "bbbb"]}


def ids(batch: int, seed: int) -> np.ndarray:
    return Order(EXAMPLES, seed).index(np.arange(batch * SIZE, (batch + 1) * SIZE))[1]


def samples(batch: int, seed: int = SEED) -> str:
    return digest.tree_digests({"x": ids(batch, seed).astype(np.uint32)})["x"]


def step(number: int, batch: int | None = None, **fields) -> dict:
    batch = number - 1 if batch is None else batch
    row = {"event": "step", "step": number, "batch": batch, "samples": samples(batch)}
    return row | fields


def steps(*numbers: int) -> list[dict]:
    return [step(number) for number in numbers]


def restore(number: int) -> dict:
    return {"event": "restore", "step": number}


SOUND = {
    "one attempt": ([START, *steps(1, 2, 3)], 3, 0),
    "two epochs and more": ([START, *steps(*range(1, 9))], 8, 0),
    "repeated steps": (
        [START, *steps(1, 2, 3), START, restore(1), *steps(2, 3, 4)],
        4,
        2,
    ),
    "from scratch again": ([START, *steps(1, 2), START, *steps(1, 2, 3)], 3, 2),
    "a skipped step": ([START, step(1), step(2, skipped=True), step(3)], 3, 0),
    "a rewind": (
        [
            START,
            *steps(1, 2, 3, 4),
            restore(2),
            {"event": "rewind", "step": 2, "skipped_batches": [2, 4]},
            step(3, batch=4),
        ],
        3,
        2,
    ),
    "a rewind that a restart has forgotten": (
        [
            START,
            *steps(1, 2, 3),
            restore(1),
            {"event": "rewind", "step": 1, "skipped_batches": [1, 3]},
            step(2, batch=3),
            START,
            restore(1),
            *steps(2, 3),
        ],
        3,
        3,
    ),
}


@pytest.mark.parametrize("name", SOUND)
def test_sound_histories(name):
    rows, num_steps, repeated = SOUND[name]
    found = ledger_audit.examine(rows)
    assert found.faults == []
    assert (len(found.history), found.repeated) == (num_steps, repeated)


FAULTY = {
    "a step done twice": ([START, *steps(1, 2), step(2)], "step 2 is recorded twice"),
    "a step missing": ([START, *steps(1, 3)], "one before 3 is missing"),
    "a batch twice": (
        [START, step(1), step(2, batch=0)],
        "step 2 has 4 samples that epoch 0 has already used, the first is sample",
    ),
    "a batch lost": ([START, step(1), step(2, batch=2)], "examples 4 to 7 are in no"),
    "another seed": (
        [START, *steps(1, 2), START | {"seed": 4}, restore(2), step(3)],
        "step 3 has ",
    ),
    "other data without an event": (
        [DATA_A, step(1), DATA_B, restore(1), step(2)],
        "after step 1 data aaaa (10 examples) became data bbbb (10 examples) without",
    ),
    "other samples": (
        [START, step(1), step(2, samples=samples(0))],
        f"step 2: its samples have digest {samples(0)}, but those of batch 1 have "
        f"{samples(1)}",
    ),
    "a resume that went too far": (
        [START, *steps(1, 2), START, restore(1), *steps(3)],
        "one before 3 is missing",
    ),
}


@pytest.mark.parametrize("name", FAULTY)
def test_faults_are_found(name):
    rows, message = FAULTY[name]
    found = ledger_audit.examine(rows)
    assert any(message in fault for fault in found.faults), found.faults
    assert "audit: FAILED" in str(found)


def test_what_is_proved_of_data_that_was_changed_on_purpose():
    """Batch 0 of one dataset, then batches 1 and 2 of another."""
    rows = [DATA_A, *steps(1, 2), CHANGED, DATA_B, restore(1), *steps(2, 3)]
    found = ledger_audit.examine(rows)
    assert found.faults == []
    assert str(found).endswith(
        "audit: the data was changed on purpose, so this is proved for each part:\n"
        "  steps 1 to 1, data aaaa (10 examples): each sample contributed to exactly "
        "one update of its epoch, or is listed above\n"
        "  steps 2 to 3, data bbbb (10 examples): each sample contributed to exactly "
        "one update of its epoch, or is listed above\n"
        "  Whether a sample of one part is also in another is unknown."
    )


def test_a_sample_used_twice_by_its_number_and_not_by_its_position():
    """Positions 8 to 11 follow 0 to 7, but another seed has other samples there."""
    other = START | {"seed": 4}
    again = step(3, batch=2)
    again["samples"] = samples(2, seed=4)
    found = ledger_audit.examine([START, *steps(1, 2), other, restore(2), again])
    used = set(ids(0, SEED)) | set(ids(1, SEED))
    # Two of the four belong to the next epoch.
    twice = [i for i in ids(2, 4)[:2] if i in used]
    assert twice
    assert found.faults == [
        f"step 3 has {len(twice)} samples that epoch 0 has already used, the first is "
        f"sample {twice[0]}, used by step {1 if twice[0] in ids(0, SEED) else 2}"
    ]


def test_a_torn_line_is_truncated(tmp_path):
    book = ledger.Ledger(tmp_path, clock=lambda: 7.0)
    book.event("start", seed=1)
    with open(book.path, "a") as file:
        file.write('{"event": "ste')
    again = ledger.Ledger(tmp_path, clock=lambda: 8.0)
    again.event("done", step=4)
    assert again.read() == [
        {"event": "start", "time": 7.0, "seed": 1},
        {"event": "done", "time": 8.0, "step": 4},
    ]


def test_only_the_writer_writes(tmp_path):
    ledger.Ledger(tmp_path, is_writer=False).event("start")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ledger") / "run"
    assert main(train(folder)) == 0
    return folder


def test_a_run_is_audited(run, capfd):
    assert main(["ledger", "audit", str(run)]) == 0
    output = capfd.readouterr().out
    assert re.search(rf"^steps in the history +{NUM_STEPS}$", output, re.M)
    assert "audit: each sample contributed to exactly one update" in output


def test_a_ledger_that_lies_is_found(run, tmp_path, capfd):
    rows = ledger.Ledger(run, is_writer=False).read()
    for row in rows:
        if row.get("step") == 2 and row["event"] == "step":
            row["batch"] = 7
    (tmp_path / ledger.FILE).write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert main(["ledger", "audit", str(tmp_path)]) == 1
    assert "step 2: its samples have digest" in capfd.readouterr().out


def test_samples_do_not_depend_on_the_mesh(run, tmp_path):
    assert main([*train(tmp_path / "run"), "--mesh", "fsdp=2,tensor=4"]) == 0
    both = (ledger.Ledger(f, is_writer=False).read() for f in (run, tmp_path / "run"))
    one, other = ([r for r in rows if r["event"] == "step"] for rows in both)
    assert one == other and len(one) == NUM_STEPS


def test_no_ledger(tmp_path, capfd):
    line = refused(capfd, ["ledger", "audit", str(tmp_path)])
    assert line.endswith("records no start of a run. Name the folder of a run.")
