"""A log whose oldest entries were removed: a restart finds the same as with all."""

import dataclasses
import json
import re

import mortal_jobs
import pytest
from mortal_jobs import load_if_done, play_to_the_end

from meshloom.service.coordinator import cleaning, snapshots
from meshloom.service.coordinator.history import make_history
from meshloom.service.coordinator.servers import ServerLost
from meshloom.service.rounds import snapshot as engine_snapshot
from meshloom.service.rounds.encoding import get_fields

ROUNDS = 4
STOP = {"patience": 50, "min_change": 0.0}
FILES = ("commits.jsonl", "metrics.jsonl", "eval.jsonl", "abandoned.jsonl")


class Learner(mortal_jobs.Learner):
    """Evaluates each version, as learner 0, and has the service clean up each turn."""

    def play(self) -> None:
        super().play()
        self.house.ask("clean")

    def begin(self, version: int) -> None:
        if self.index == 0 and version:
            row = {"step": version, "local_step": version, "loss": 9.0 / version}
            self.house.ask("report", kind="eval", row=row)


class Lazy(Learner):
    """Never has anything cleaned up."""

    def play(self) -> None:
        mortal_jobs.Learner.play(self)


def make(make_house, name, **changes):
    facts = {"num_rounds": ROUNDS, "save_every": 1, "keep_checkpoints": 2}
    return make_house(name, stop=STOP, **{**facts, **changes})


def play(house, killed, kind=Learner, **options):
    play_to_the_end(
        house, [kind(house, index) for index in range(2)], killed, **options
    )
    return house


def rows(house, name: str) -> list[dict]:
    text = (house.folder / "run" / name).read_text()
    return [json.loads(line) for line in text.splitlines()]


def outcome(house) -> tuple:
    load_if_done(house)
    values = [server.jobs["run"]["versions"][ROUNDS] for server in house.servers]
    final = json.loads((house.folder / "run" / "final.json").read_text())
    commits = rows(house, "commits.jsonl")
    used = [
        [(c["learner"], c["round"], c["base"]) for c in row["contributions"]]
        for row in commits
    ]
    blocks = sorted(
        tuple(b) for row in commits for c in row["contributions"] for b in c["blocks"]
    )
    assert blocks == [(k, k + 1) for k in range(2 * ROUNDS)], "not each block once"
    names = ("metrics.jsonl", "eval.jsonl")
    return values, final, used, [[r["step"] for r in rows(house, n)] for n in names]


@pytest.mark.parametrize("lose_servers", [False, True], ids=["coordinator", "both"])
def test_a_kill_at_any_point_changes_nothing(make_house, killed, lose_servers):
    expected = play(make(make_house, "lazy"), killed, Lazy)
    whole = play(make(make_house, "whole"), killed)
    assert outcome(whole) == outcome(expected)
    points = list(enumerate(whole.fate.passed, start=1))
    compacting = [n for n, name in points if name.endswith("of the log")]
    assert len(compacting) >= 3 * 4
    others = [n for n, _ in points if n % 5 == 0]
    for fatal in sorted({*compacting, *others}):
        house = make(make_house, f"at {fatal}")
        house.fate.fatal = fatal
        play(house, killed, lose_servers=lose_servers)
        assert outcome(house) == outcome(expected), house.fate.passed[fatal - 1]
        assert any(e.kind == "snapshot" for e in house.log.read("run"))
        house.stop()


def state_of(job) -> dict:
    """Returns all that a job has taken up."""
    members = get_fields(job.members, ("_live", "_incarnations"), snapshots.CLASSES)
    evaluations = get_fields(
        job._evaluations, snapshots.OF_EVALUATIONS, snapshots.CLASSES
    )
    return {
        "engine": engine_snapshot.take(job.engine),
        "job": get_fields(job, (*snapshots.OF_JOB, "is_finished"), snapshots.CLASSES),
        "saved": (job.saved, job.is_initialized, job.engine.version),
        "places": get_fields(job._places, snapshots.OF_PLACES, snapshots.CLASSES),
        "members": members,
        "evaluations": evaluations,
    }


MODES = {
    "sync": {},
    "async": {},
    "stale-sync": {},
    "reuse": {"mode": "backup-workers", "policy": {"late": "reuse", "staleness": 2}},
}


@pytest.mark.parametrize("mode", MODES)
def test_a_restart_takes_up_the_same_as_from_the_whole_log(make_house, killed, mode):
    found = []
    for kind in (Learner, Lazy):
        changes = {"mode": mode, "num_rounds": 9, **MODES[mode]}
        house = make(make_house, kind.__name__, **changes)
        learners = [kind(house, index) for index in range(2)]
        house.start()
        house.initialize()
        for turn in range(36):
            if turn in (
                5,
                20,
            ):  # versions are lost with the servers, and learners return
                for server in house.servers:
                    server.lose()
                newest = house.folder / "run" / "service" / str(house.job.saved)
                (newest / "manifest.json").unlink()
            if turn in (5, 14, 20):
                house.start()
            if turn == 26:
                house.ask("leave", learner=1, incarnation=learners[1].incarnation)
            learners[turn % 2].play()
        assert sum("1 commits abandoned" in line for line in house.said) == 2
        kinds = {entry.kind for entry in house.log.read("run")}
        assert ("snapshot" in kinds) == (kind is Learner)
        job = house.start()
        files = [rows(house, name) for name in FILES]
        assert all(files), "a file is empty"
        found.append((state_of(job), files))
    assert found[0] == found[1]


def test_a_snapshot_has_the_newest_placement(make_house, killed):
    """A server is lost; the entry of it is removed, and a restart knows it."""
    house = make(make_house, "copies", copies=2, num_rounds=20)
    learners = [Learner(house, index) for index in range(2)]
    house.start()
    house.initialize()
    for turn in range(10):
        learners[turn % 2].play()
    gone = house.servers.pop().name
    house.job.servers.lose(ServerLost(gone, "it was killed"))
    placement = house.job.servers.placement
    assert placement.members == ("s0",) and placement.lost == ("s1",)
    for turn in range(20):
        learners[turn % 2].play()
    kinds = [entry.kind for entry in house.log.read("run")]
    assert "snapshot" in kinds and "placement" not in kinds
    assert make_history(house.log.read("run")).placement == placement
    version = house.job.engine.version
    assert version > 3
    job = house.start()
    assert job.servers.placement == placement and job.engine.version == version
    assert not any("abandoned" in line for line in house.said)


def test_blocks_with_copies_stay_when_a_job_is_done(make_house, killed):
    """Servers that come and go move them: they cannot be at none."""
    house = finished(make_house, killed, copies=2)
    house.ask("clean")
    assert house.ask("clean") == {"found": []} and house.servers[0].jobs
    for server in house.servers:
        server.lose()
    house.start()  # they are loaded again
    assert house.job.engine.version == ROUNDS and house.servers[0].jobs


def test_the_log_stays_short_and_the_commits_are_all_there(make_house, killed):
    house = play(make(make_house, "long", num_rounds=40), killed)
    assert len(house.log.read("run")) < 20
    assert [row["step"] for row in rows(house, "commits.jsonl")] == list(range(1, 41))
    said = [line for line in house.said if "of the log" in line]
    assert len(said) > 30
    assert re.fullmatch(
        r"run: removed \d+ entries \(\d+ bytes\) of the log: version 1, the oldest "
        r"checkpoint, has what they led to",
        said[0],
    )


def test_an_evaluation_of_a_later_version_keeps_the_log_as_it_is(make_house, killed):
    house = make(make_house, "ahead")
    house.start()
    house.initialize()
    house.ask("join", learner=0)
    house.ask("report", row={"step": 9, "loss": 1.0})
    house.ask("leave", learner=0, incarnation=1)
    learners = [Learner(house, index) for index in range(2)]
    for turn in range(6):
        learners[turn % 2].play()
    assert house.job.saved >= 2
    assert not [line for line in house.said if "of the log" in line]


@pytest.mark.parametrize("name", FILES[:3])
def test_rows_that_are_in_the_file_only_are_not_written_anew(make_house, killed, name):
    house = play(make(make_house, "house"), killed)
    path = house.folder / "run" / name
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]) + lines[-1][:-5])  # torn: it is in the log
    house.start()
    assert path.read_text() == "".join(lines)
    path.write_text(lines[0])
    with pytest.raises(ValueError, match=f"{name} has 1 rows, expected at least [23]"):
        house.start()


def test_a_snapshot_has_all_that_a_job_remembers(make_house):
    house = make(make_house, "house")
    job = house.start()
    constant = {"spec", "servers", "board", "around", "files", "checkpoints"}
    # From the log, the servers or the folder, at every start.
    found = {"is_initialized", "is_finished", "is_held", "saved"}
    found |= {"_logged", "_newest_logged"}
    moment = {"_queue", "_polled", "history"}
    parts = {"engine", "members", "_evaluations", "_places"}
    assert set(vars(job)) == constant | found | moment | parts | {*snapshots.OF_JOB}
    assert {*snapshots.OF_MEMBERS, "_incarnations"} == set(vars(job.members)) - {
        *("_job", "_num_learners", "_lease_seconds")
    }
    assert {*snapshots.OF_PLACES} == set(vars(job._places))
    evaluations = set(vars(job._evaluations)) - {"_rule"}
    assert evaluations == {*snapshots.OF_EVALUATIONS}


def test_a_dry_run_removes_nothing(make_house, killed):
    house = play(make(make_house, "house"), killed, Lazy)
    before = house.log.read("run")
    for _ in range(2):
        (line,) = house.ask("clean", dry_run=True)["found"]
        assert line.startswith("would remove ") and "entries" in line
    assert house.log.read("run") == before
    (line,) = house.ask("clean")["found"]
    assert line.startswith("removed ") and f"run: {line}" in house.said
    assert house.ask("clean") == {"found": []}


def test_a_log_that_leads_elsewhere_stays_as_it_is(make_house, killed, monkeypatch):
    house = play(make(make_house, "house"), killed, Lazy)
    before = house.log.read("run")
    usable = cleaning.usable

    def wrong(*arguments):
        return [dataclasses.replace(c, cut=c.cut - 1) for c in usable(*arguments)]

    monkeypatch.setattr(cleaning, "usable", wrong)
    (line,) = house.ask("clean")["found"]
    assert re.match("not everything was removed: the entries of the log up to ", line)
    assert f"run: {line}" in house.said and house.log.read("run") == before
    assert house.ask("save_now") == {"version": ROUNDS}  # it goes on


def finished(make_house, killed, **changes):
    """Returns a house whose job is done and whose learners have left."""
    house = play(make(make_house, "house", **changes), killed, Lazy)
    assert house.ask("clean", dry_run=True)["found"][1:] == []  # learners read
    for learner in range(2):
        house.ask("leave", learner=learner, incarnation=1)
    return house


def test_a_job_that_is_done_leaves_the_memory_of_the_servers(make_house, killed):
    house = finished(make_house, killed)
    value = house.servers[0].jobs["run"]["versions"][ROUNDS]
    about = r"2 blocks \(128 bytes\) from the memory of servers: the job is done, and "
    line = house.ask("clean", dry_run=True)["found"][1]
    assert re.match(f"would remove {about}its parameters are in .*/service/4$", line)
    assert house.servers[0].jobs
    assert re.match(f"removed {about}", house.ask("clean")["found"][1])
    assert not house.servers[0].jobs and not house.servers[1].jobs
    assert house.ask("clean") == {"found": []}
    assert house.ask("save_now") == {"version": ROUNDS}
    # A learner returns, and reads the final parameters.
    house.ask("join", learner=1, owner="x")
    place = house.next(1, 2, 0)
    assert (place["state"], place["version"]) == ("done", ROUNDS)
    assert house.servers[0].jobs["run"]["versions"] == {ROUNDS: value}
    assert any("loaded again, for a learner that has returned" in x for x in house.said)
    assert house.ask("clean") == {"found": []}
    house.ask("leave", learner=1, incarnation=2)
    assert len(house.ask("clean")["found"]) == 1


def test_a_service_that_restarts_leaves_a_finished_job_on_the_disk(make_house, killed):
    house = finished(make_house, killed)
    house.ask("clean")
    entries = len(house.log.read("run"))
    job = house.start()
    assert job.is_finished and job.engine.version == ROUNDS
    assert not house.servers[0].jobs and len(house.log.read("run")) == entries
    house.ask("join", learner=0, owner="x")
    assert house.servers[1].jobs["run"]["version"] == ROUNDS


def test_it_is_cleaned_up_every_minute(make_house, killed):
    house = finished(make_house, killed)
    house.said.clear()
    house.pass_time(61)
    assert [re.sub(r"\d+", "N", line)[:40] for line in house.said] == [
        "run: removed N entries (N bytes) of the l"[:40],
        "run: removed N blocks (N bytes) from the m"[:40],
    ]
