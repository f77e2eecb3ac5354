"""Where the seconds of a recovery go: what a run notes of its start, and the table."""

import json

from tiny_runs import main, train

from meshloom.trainer.record import ledger, phases
from meshloom.trainer.verify import recovery_timing
from meshloom.trainer.verify.drill_job import Job


def test_a_run_notes_when_it_reached_each_phase_of_its_start(tmp_path):
    assert main(train(tmp_path / "run")) == 0
    rows = ledger.Ledger(tmp_path / "run", is_writer=False).read()
    noted = next(row for row in rows if row["event"] == "phases")
    assert noted["attempt"] == 1
    for found in (noted["times"], noted["cpu"]):
        assert tuple(found) == phases.NAMES
        assert list(found.values()) == sorted(found.values())
    # Before the first step.
    kinds = [row["event"] for row in rows]
    assert kinds.index("phases") < kinds.index("step")


def test_the_spans_of_a_recovery_add_up(tmp_path):
    (tmp_path / "logs").mkdir()
    write(
        tmp_path / "logs" / "supervisor.jsonl",
        {"event": "start", "time": 10.0},
        {"event": "death", "time": 100.1},
        {"event": "start", "time": 100.3},
    )
    times = dict(zip(phases.NAMES, (101.0, 101.5, 102.5, 103.5, 106.0), strict=True))
    write(
        tmp_path / ledger.FILE,
        {"event": "phases", "time": 20.0, "attempt": 1, "times": {}},
        {"event": "phases", "time": 106.0, "attempt": 2, "times": times},
    )
    job = Job(tmp_path, None, 0.0)  # type: ignore
    found = recovery_timing.spans(job, 100.0, 107.0)
    assert tuple(found) == recovery_timing.SPANS
    assert list(found.values()) == [0.1, 0.2, 0.7, 0.5, 1.0, 1.0, 2.5, 1.0]
    assert recovery_timing.spans(job, 200.0, 207.0) == {}  # nothing was noted since
    lines = recovery_timing.table([found, {}, found]).splitlines()
    assert lines[0].split() == ["span", "median", "longest"]
    assert lines[7].split() == ["compile", "2.5", "s", "2.5", "s"]
    assert recovery_timing.table([{}]) == ""


def write(path, *rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
