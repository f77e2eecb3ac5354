"""A job that ends early because its evaluations say so, whatever is killed when."""

import json

import mortal_jobs
import pytest
from mortal_jobs import load_if_done, play_to_the_end

from meshloom.service.wire.errors import Refused

STOP = {"patience": 2, "min_change": 0.1}
# By version. The lowest is that of version 2: the two after it are not lower by 0.1.
LOSSES = {1: 3.0, 2: 2.0, 3: 1.95, 4: 1.91, 5: 9.0, 6: 9.0}
REASON = (
    "in 2 evaluations the held-out loss did not fall by more than 0.1 below 2.0000, "
    "its value at step 2"
)


def rows(house, name: str) -> list[dict]:
    text = (house.folder / "run" / name).read_text()
    return [json.loads(line) for line in text.splitlines()]


class Learner(mortal_jobs.Learner):
    """Evaluates each version that it starts from, if it is learner 0."""

    def begin(self, version: int) -> None:
        if self.index == 0 and version:
            loss = LOSSES[version]
            row = {"step": version, "local_step": version, "loss": loss}
            self.house.ask("report", kind="eval", row=row)


def play(make_house, killed, name="service", *, fatal=None, lose_servers=False):
    """Plays a job to its end; returns its house and the learners."""
    house = make_house(name, num_rounds=9, stop=STOP)
    house.fate.fatal = fatal
    learners = [Learner(house, index) for index in range(2)]
    play_to_the_end(house, learners, killed, lose_servers=lose_servers)
    return house, learners


def outcome(house, learners) -> tuple:
    load_if_done(house)
    values = [server.jobs["run"]["versions"][4] for server in house.servers]
    final = json.loads((house.folder / "run" / "final.json").read_text())
    losses = [(row["step"], row["loss"]) for row in rows(house, "eval.jsonl")]
    commits = [row["step"] for row in rows(house, "commits.jsonl")]
    return values, final, losses, commits, [learner.reason for learner in learners]


def test_it_ends_at_the_version_that_was_evaluated(make_house, killed):
    house, learners = play(make_house, killed)
    _, final, losses, commits, reasons = outcome(house, learners)
    assert commits == [1, 2, 3, 4] and final["version"] == 4
    assert final["stopped"] == REASON and reasons == [REASON] * 2
    assert losses == [(v, LOSSES[v]) for v in (1, 2, 3, 4)]
    assert [server.jobs["run"]["version"] for server in house.servers] == [4, 4]
    kinds = [entry.kind for entry in house.log.read("run")]
    # The evaluation and what follows from it are one transaction.
    assert "log of evaluation+event" in " ".join(house.fate.passed)
    assert (kinds.count("evaluation"), kinds.count("finished")) == (4, 1)
    assert f"run: done at version 4: {REASON}" in house.said
    # It stays so, also if the final parameters are evaluated and all is started anew.
    row = {"step": 4, "local_step": 5, "loss": LOSSES[4]}
    house.ask("report", row=row)
    for server in house.servers:
        server.lose()
    house.start()
    house.ask("save_now")
    assert json.loads((house.folder / "run" / "final.json").read_text()) == final
    # Who joins a job that was stopped is told so.
    late = house.ask("join", learner=1, owner="me1")["incarnation"]
    place = house.next(1, late, 0)
    assert (place["state"], place["reason"]) == ("done", REASON)


@pytest.mark.parametrize("lose_servers", [False, True], ids=["coordinator", "both"])
def test_a_kill_at_any_point_changes_nothing(make_house, killed, lose_servers):
    whole = play(make_house, killed, "whole")
    expected, points = outcome(*whole), list(whole[0].fate.passed)
    for fatal in range(1, len(points) + 1):
        house, learners = play(
            make_house, killed, f"at {fatal}", fatal=fatal, lose_servers=lose_servers
        )
        assert outcome(house, learners) == expected, points[fatal - 1]
        house.stop()


def test_a_repeated_report_counts_once_and_files_follow_the_log(make_house):
    house = make_house(stop=STOP, num_rounds=9)
    house.start()
    house.initialize()
    row = {"step": 0, "local_step": 7, "loss": 2.0}
    for _ in range(5):
        house.ask("report", row=row)
    house.ask("report", row={**row, "local_step": 6})  # done again, by one that died
    assert house.job.stopped is None
    assert rows(house, "eval.jsonl") == [{**row, "time": 100.0}]
    (house.folder / "run" / "eval.jsonl").write_text('{"step": 0, "lo')
    house.start()
    # Nothing is of a version that the log does not have, so nothing was cut off.
    assert rows(house, "eval.jsonl") == [{**row, "time": 100.0}]
    house.ask("report", row={**row, "local_step": 8})
    assert house.job.stopped is None
    house.ask("report", row={**row, "local_step": 9, "loss": "NaN"})
    assert house.job.stopped is not None and house.job.is_finished


def test_evaluations_of_versions_that_were_taken_back_do_not_count(make_house):
    house = make_house(stop=STOP, num_rounds=9, save_every=2)
    learners = [Learner(house, index) for index in range(2)]
    house.start()
    house.initialize()
    for _ in range(4):  # the first one only joins
        for learner in learners:
            learner.play()
    row = {"step": 3, "local_step": 3, "loss": 5.0}
    house.ask("report", row=row)
    assert [row["step"] for row in rows(house, "eval.jsonl")] == [1, 2, 3]
    for server in house.servers:
        server.lose()
    house.start()
    assert any("continues from version 2" in line for line in house.said)
    assert [row["step"] for row in rows(house, "eval.jsonl")] == [1, 2]
    # Version 3 is another one now, so it is evaluated again.
    house.ask("report", row={**row, "loss": 1.0})
    house.ask("report", row={**row, "local_step": 4, "loss": 1.0})
    assert house.job.stopped is None
    house.ask("report", row={**row, "local_step": 5, "loss": 1.0})
    assert "below 1.0000" in house.job.stopped


def test_without_a_rule_evaluations_end_nothing(make_house):
    house = make_house(num_rounds=9)
    house.start()
    for step in range(20):
        house.ask("report", row={"step": step, "loss": 1.0})
    assert house.job.stopped is None and len(rows(house, "eval.jsonl")) == 20


def test_reports_that_make_no_sense_are_refused(make_house):
    house = make_house(stop=STOP)
    house.start()
    with pytest.raises(Refused, match="expected an object with an integer step"):
        house.ask("report", row={"loss": 2.5})
    with pytest.raises(Refused, match="row has loss 'low', expected a number"):
        house.ask("report", row={"step": 1, "loss": "low"})


@pytest.mark.parametrize(
    "stop, message",
    [
        ([2], r"stop is \[2\], expected an object"),
        ({"patience": 0, "min_change": 0}, "job 'run': patience must be an integer >="),
    ],
)
def test_rules_that_make_no_sense_are_refused(make_house, stop, message):
    with pytest.raises(Refused, match=message):
        make_house(stop=stop)
