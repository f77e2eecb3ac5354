"""The timeline of a report: from logs of supervisors, or from ledgers."""

import json
import re

import pytest

from meshloom.trainer.report import write_report
from meshloom.trainer.report.timeline_data import Lane, Mark, read_timeline


def write(path, *rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def event(time: float, kind: str, **fields) -> dict:
    return {"time": time, "event": kind, **fields}


RESIZE = {"before": 2, "processes": 1}


@pytest.fixture
def training(tmp_path):
    """Two learners: one died and shrank, one was killed with its supervisor."""
    run = tmp_path / "<run>"
    commits = [{"step": n, "version": n, "contributions": []} for n in (1, 2)]
    write(run / "commits.jsonl", *({**c, "time": 10.0 + c["step"]} for c in commits))
    write(run / "abandoned.jsonl", {**commits[1], "time": 11.5})
    write(run / "metrics.jsonl", {"step": 1, "loss": 1.0}, {"step": 2, "loss": 1.0})
    write(
        run / "logs" / "supervisor.jsonl",
        event(1, "start", name="coordinator"),
        event(2, "start", name="server 0"),
        event(2, "start", name="learner 0"),
        event(20, "death", name="server 0", reason="server 0: <killed>"),
        event(20, "restart", name="server 0"),
        event(21, "start", name="coordinator"),
        event(22, "start", name="server 0"),
        event(60, "finished", status=0),
    )
    write(
        run / "learners" / "0" / "logs" / "supervisor.jsonl",
        event(3, "warm", pid=1),
        event(4, "start", attempt=1),
        event(30, "death", reason="worker 1: signal 9"),
        event(30, "resize", **RESIZE, reason="shrinking"),
        event(30.5, "restart", attempt=2),
        event(35, "start", attempt=2),
        event(50, "done", attempt=2),
    )
    write(
        run / "learners" / "1" / "logs" / "supervisor.jsonl",
        event(5, "start", attempt=1),
        event(40, "start", attempt=1),
    )
    write(
        run / "learners" / "1" / "metrics.jsonl",
        *({"step": n, "time": float(n), "loss": 1.0} for n in (9, 24, 55)),
    )
    return run


def test_lanes_of_a_fleet(training):
    found = read_timeline(training, ["0", "1"])
    assert found is not None and found.what == "commits"
    assert (found.commits, found.taken_back) == ([11.0, 12.0], [11.5])
    assert found.lanes == [
        Lane("coordinator", [(1, 20), (21, 60)]),
        Lane(
            "server 0",
            [(2, 20), (22, 60)],
            [Mark(20, "death", "server 0: <killed>")],
        ),
        Lane(
            "learner 0",
            [(4, 30), (35, 50)],
            [
                Mark(30, "death", "worker 1: signal 9"),
                Mark(30, "resize", "2 to 1 processes"),
            ],
        ),
        Lane(
            "learner 1",
            [(5, 24), (40, 55)],
            [Mark(24, "death", "ended with its supervisor")],
        ),
    ]


def test_servers_that_come_and_go(training):
    """Blocks are moved until each has all of its copies again."""
    two, three = ["a", "b"], ["a", "b", "c"]
    write(
        training / "service" / "log" / "events.jsonl",
        event(2, "started"),
        event(6, "placed", servers=two, reason="the blocks are placed"),
        event(15, "placed", servers=three, reason="servers that have come: c"),
        event(17, "placed", servers=three, reason="all blocks are where they belong"),
        event(17, "moved", copies=3, seconds=2),
        event(25, "placed", servers=two, reason="server c is lost"),
        event(30, "moved", copies=3, seconds=5),
        event(55, "done"),
    )
    found = read_timeline(training, ["0", "1"])
    assert found is not None
    (lane,) = [lane for lane in found.lanes if lane.name == "copies"]
    assert lane.spans == [(6, 15), (17, 25), (30, 55)]
    assert [(m.time, m.text) for m in lane.marks] == [
        (15, "servers that have come: c"),
        (25, "server c is lost"),
    ]


def test_a_run_without_a_supervisor_is_read_from_its_ledger(tmp_path):
    ledger = tmp_path / "ledger.jsonl"
    rows = [
        event(1, "start", processes=2),
        {"event": "step", "step": 1},
        event(5, "commit", step=1),
        event(20, "death", reason="worker 1: signal 9"),
        event(20, "resize", **RESIZE),
        event(20, "start", processes=1),
        event(30, "done", step=2),
    ]
    write(ledger, *rows)
    write(tmp_path / "metrics.jsonl", {"step": 1, "time": 7.0, "loss": 1.0})
    found = read_timeline(tmp_path, [])
    assert found is not None and (found.what, found.commits) == ("checkpoints", [5])
    assert found.lanes == [
        Lane(
            "run",
            [(1, 7.0), (20, 30)],
            [
                Mark(20, "resize", "2 to 1 processes"),
                Mark(7.0, "death", "worker 1: signal 9"),
            ],
        )
    ]
    write(ledger, *rows[:3], rows[-1])  # nothing has happened
    assert read_timeline(tmp_path, []) is None


def test_the_picture_has_all_of_it_and_names_are_escaped(training):
    page = write_report(training).read_text("utf-8")
    (picture,) = re.findall(r'<div class="schedule timeline">.*?</div>', page)
    assert picture.count('class="up"') == 8
    assert picture.count('class="death"') == 3 and picture.count('"resize"') == 1
    # 59 s on 900 pixels: learner 0 is up from 0:03 to 0:29 after the start.
    assert '<rect class="up" x="145.8"' in picture
    assert "learner 0: up from 0:00:03 to 0:00:29" in picture
    lines = re.findall(r'<path class="(commit|back)" d="([^"]*)"', picture)
    assert [(kind, d.count("M")) for kind, d in lines] == [("commit", 2), ("back", 1)]
    assert "<killed>" not in page and "server 0: &lt;killed&gt;" in picture
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page))
    assert "0:00:29 learner 0 resize 2 to 1 processes" in text


def test_commits_on_the_same_pixel_are_drawn_once(training):
    rows = [
        {"step": n, "version": n, "contributions": [], "time": 5 + n / 1000}
        for n in range(1, 20_001)
    ]
    write(training / "commits.jsonl", *rows)
    page = write_report(training).read_text("utf-8")
    (line,) = re.findall(r'<path class="commit" d="([^"]*)"', page)
    assert 250 < line.count("M") < 350
