"""The status line of a fleet: what recent commits were like."""

import json

from meshloom.launch import fleet_status
from meshloom.launch.fleet_parts import FleetLogs


def row(step: int, time: float, **changes) -> dict:
    row = {"step": step, "time": time, "bytes": 3_000_000, "learners": 2}
    return {**row, "staleness": 0, "wait_s": 0.1, **changes}


def test_rates_are_those_of_recent_commits():
    rows = [row(5, 10.0), row(6, 10.5, staleness=3), row(7, 11.0)]
    # 4 contributions waited 0.1 s each, in 1 s of 2 learners.
    assert fleet_status.figures(rows, 2) == (
        "2 commits/s of 2 contributions, staleness up to 3, 6 MB/s sent, 20% of the "
        "time waiting"
    )


def test_rows_that_do_not_say_are_left_out():
    assert fleet_status.figures([], 2) == ""
    assert fleet_status.figures([row(1, 3.0)], 2) == ""
    assert fleet_status.figures([{"step": 1, "loss": 1.0}, row(2, 3.0)], 2) == ""


def test_rows_of_a_file_that_is_being_written(tmp_path):
    assert fleet_status.last_rows(tmp_path) == []
    assert fleet_status.last_commit(tmp_path) is None
    lines = [json.dumps(row(step, float(step))) for step in range(1, 500)]
    text = "\n".join(lines) + "\n" + lines[0][:20]
    (tmp_path / "metrics.jsonl").write_text(text)
    steps = [found["step"] for found in fleet_status.last_rows(tmp_path)]
    assert steps == list(range(steps[0], 500)) and 50 < len(steps) < 300
    assert fleet_status.last_commit(tmp_path) == 499


def test_the_line_of_the_coordinator_is_not_shown_twice(tmp_path, capfd):
    said = "meshloom serve: run: running, version 2, 0.1 rounds/s, learners 2/2 (1 w"
    with FleetLogs(tmp_path, is_single=True) as logs:
        for name in ("coordinator", "server 0"):
            logs.note(name, "attempt 1")
            with open(logs.of(name), "a") as log:
                log.write(f"{said}\nmeshloom serve: run: done\n")
        logs.show(seconds=1)
        assert said in logs.of("coordinator").read_text()
    lines = capfd.readouterr().out.splitlines()
    assert [line for line in lines if "coordinator" in line] == [
        "coordinator | meshloom serve: run: done"
    ]
    assert len([line for line in lines if "server 0" in line]) == 2
