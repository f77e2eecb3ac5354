"""The report of a training between learners, and of one of its learners."""

import json
import re

import pytest

from meshloom.trainer.record import metrics
from meshloom.trainer.report import write_report

MIB = 1 << 20


def part(learner: int, base: int, is_reused: bool = False) -> dict:
    return {"learner": learner, "base": base, "is_reused": is_reused}


@pytest.fixture
def training(tmp_path):
    """Two commits of two learners; the second merged an older contribution."""
    folder = tmp_path / "training"
    commits = [
        {"step": 1, "version": 1, "contributions": [part(0, 0), part(1, 0)]},
        {"step": 2, "version": 2, "contributions": [part(0, 1), part(1, 0)]},
        {"step": 3, "version": 3, "contributions": [part(0, 2), part(1, 0, True)]},
    ]
    rows = [
        {"step": n, "loss": 3.0 / n, "staleness": n - 1, "learners": 2, "bytes": 8}
        for n in (1, 2, 3)
    ]
    for number, waited in enumerate((0.1, 0.4)):
        home = folder / "learners" / str(number)
        home.mkdir(parents=True)
        own = [
            {
                **{"step": n, "time": float(n), "loss": 3.0 / n},
                **{"pushed_bytes": MIB, "pulled_bytes": 2 * MIB},
                **{"exchange_s": 0.5, "exchange_wait_s": waited},
            }
            for n in (1, 2, 3)
        ]
        metrics.JsonLines(home / "metrics.jsonl").write(own)
        (home / "environment.json").write_text(json.dumps({"mesh": f"fsdp={number}"}))
        values = {"num_steps": {"value": 3, "origin": "--steps"}}
        (home / "config.json").write_text(json.dumps({"digest": "0", "values": values}))
    metrics.JsonLines(folder / "metrics.jsonl").write(rows)
    text = "".join(json.dumps(row) + "\n" for row in commits)
    (folder / "commits.jsonl").write_text(text)
    return folder


def text_of(folder) -> str:
    page = write_report(folder).read_text("utf-8")
    page = re.sub(r"<(script|style|svg)\b.*?</\1>", "", page, flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page))


def test_the_report_of_a_training_has_its_learners(training):
    text = text_of(training)
    assert "At commit 3" in text and "Complete" not in text
    # Learner, mesh, rounds, mean and largest staleness, sent, received, waiting.
    assert "0 fsdp=0 3 0 0 3.0 MiB 6.0 MiB 10 %" in text
    assert "1 fsdp=1 2 0.5 1 3.0 MiB 6.0 MiB 40 %" in text
    assert "Sent 6.0 MiB 12.0 MiB received of 2 learners" in text
    assert "Waiting for others 25 %" in text
    for title in ("Staleness, commits", "Contributions per commit", "Bytes sent per"):
        assert title in text
    assert "num_steps" in text  # the config, which is that of each learner
    assert "sharding.json" not in text
    (training / "final.json").write_text("{}")
    assert "Complete : 3 commits" in text_of(training)


def test_the_report_of_a_learner_has_its_share(training):
    text = text_of(training / "learners" / "1")
    assert "Complete : 3 steps" in text
    assert "Sent 3.0 MiB 6.0 MiB received" in text
    assert "Waiting for others 40 % of the time" in text
    assert "Waiting for the exchange, s" in text


def test_a_learner_that_has_exchanged_nothing_yet_has_a_row(training):
    (training / "learners" / "1" / "metrics.jsonl").unlink()
    assert "1 fsdp=1 2 0.5 1 0 B 0 B" in text_of(training)
