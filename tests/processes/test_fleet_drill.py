"""Drills of learners and a service: a short form with real processes, and its parts."""

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from real_fleets import SMALL
from test_jobs import ends
from tiny_runs import command, main, refused

from meshloom.trainer.commands import drill_fleet
from meshloom.trainer.job.fault_points import TRAPS, Traps, reached_of
from meshloom.trainer.verify import (
    fleet_drill,
    fleet_faults,
    fleet_job,
    fleet_settings,
    fleet_soak,
)
from meshloom.trainer.verify.drill_job import Failed
from meshloom.trainer.verify.fleet_drill import Result, Training

# The settings of a drill's own config, with a model that compiles fast.
QUICK = [*SMALL, "--set", "exchange.wait=0.5"]
DRILL = ["drill", "--learners", "2", "--servers", "2", "--limit-seconds", "240"]


@pytest.mark.fleets
@pytest.mark.timeout(500)
def test_a_short_drill(tmp_path):
    """A learner that has pushed a part, a coordinator before a commit, and a server.

    Each learner is sharded over two processes, and each block has two copies.
    """
    names = ["learner-pushing", "coordinator-before-commit", "server-applying"]
    argv = [*DRILL, *QUICK, "--steps", "40", "--workdir", str(tmp_path / "drill")]
    argv += ["--mesh", "fsdp=2@2", "--copies", "2"]
    found = command(*argv, "--faults", *names, timeout=480)
    assert found.returncode == 0, found.stdout + found.stderr
    *_, first, second, third, verdict = found.stdout.splitlines()
    hit = ("learner", "coordinator", "server")
    for name, role, line in zip(names, hit, (first, second, third)):  # noqa: B905
        assert line.startswith(name) and f" {role}" in line and " yes " in line
    assert "640 samples in one update each" in verdict
    assert "40 commits of 80 rounds recomputed: all" in verdict
    assert verdict.endswith("arrays are bit-equal")
    written = json.loads((tmp_path / "drill" / "drill.json").read_text())
    (training,) = written["trainings"]
    assert [r["fault"] for r in training["results"]] == names
    assert all(0 < r["next_commit"] <= r["seconds"] for r in training["results"])
    assert training["taken_back"] == 0
    assert " process " in training["results"][0]["target"]
    folder = tmp_path / "drill" / "training-0"
    rows = (folder / "logs" / "supervisor.jsonl").read_text().splitlines()
    starts = [e["name"] for e in map(json.loads, rows) if e["event"] == "start"]
    assert starts.count("coordinator") >= 2
    assert not list(tmp_path.glob("drill/*.traps"))


@pytest.mark.fleets
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_faults(tmp_path):
    found = command(*DRILL, "--workdir", str(tmp_path / "drill"), timeout=3500)
    assert found.returncode == 0, found.stdout + found.stderr
    written = json.loads((tmp_path / "drill" / "drill.json").read_text())
    results = [r for training in written["trainings"] for r in training["results"]]
    assert [r["fault"] for r in results] == list(fleet_faults.FAULTS)


@pytest.mark.fleets
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_short_soak(tmp_path):
    argv = [*DRILL, "--workdir", str(tmp_path / "soak"), "--soak", "8"]
    found = command(*argv, timeout=1700)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "faults recovered from           8 of 8\n" in found.stdout
    assert "soak: every audit is clean and every replay bit-equal" in found.stdout


def test_a_trap_holds_one_process_until_it_is_released(tmp_path):
    reached = reached_of({TRAPS: str(tmp_path)})
    reached("push")  # nobody has asked
    (tmp_path / "push").touch()
    reached("log")
    held = threading.Thread(target=reached, args=("push",))
    held.start()
    mine = tmp_path / f"push.{os.getpid()}"
    deadline = time.monotonic() + 20
    while not mine.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    Traps(tmp_path).reached("push", 3, 0)  # another one goes on
    assert held.is_alive()
    mine.unlink()
    held.join(20)
    assert not held.is_alive()
    reached_of({})("push")


SPEC = fleet_job.FleetSpec((), 2, 2, 1, num_steps=100, save_every=5, limit_seconds=0.5)


class Running:
    """A process that does not end, nor exists."""

    def poll(self):
        return None

    def __call__(self):
        return self


@pytest.fixture
def fleet(tmp_path):
    (tmp_path / "run").mkdir()
    traps = tmp_path / "traps"
    return fleet_job.Fleet(SPEC, tmp_path / "run", Running(), traps)  # type: ignore


def write(fleet, *rows) -> None:
    """Args:
    rows: (version, time, {learner: incarnation}) of commits.
    """
    lines = []
    for version, when, parts in rows:
        contributions = [
            {"learner": k, "incarnation": v, "steps": 1} for k, v in parts.items()
        ]
        lines.append({"version": version, "time": when, "contributions": contributions})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (fleet.run / "commits.jsonl").write_text(text)


def test_a_training_that_does_not_come_back_has_not_recovered(fleet):
    before = [(n, 100.0 + n, {0: 1, 1: 1}) for n in (1, 2, 3)]
    write(fleet, *before)
    mark = fleet.mark(["learner 1"])
    assert (mark.version, mark.hit, mark.target) == (3, {1: 1}, "learner 1")
    with pytest.raises(Failed, match="no commit after the fault of learner 1 within"):
        fleet.recover(mark)
    later = mark.time + 2
    # It was taken back to version 1 and did version 2 again; no new one yet.
    write(fleet, before[0], (2, later, {0: 1, 1: 2}))
    with pytest.raises(Failed, match="no recovery of learner 1"):
        fleet.recover(mark)
    # New versions, but nothing of the learner that was killed.
    write(fleet, *before, (4, later, {0: 1, 1: 1}), (5, later, {0: 1}))
    with pytest.raises(Failed, match="no recovery of learner 1"):
        fleet.recover(mark)
    write(fleet, *before, (4, later, {0: 1}), (5, later + 1, {0: 1, 1: 2}))
    assert fleet.recover(mark) == pytest.approx((2, 3))


def test_processes_of_a_learner_have_roles(fleet):
    """Of several, the first one and the others are hit."""
    logs = fleet.run / "learners" / "1" / "logs"
    logs.mkdir(parents=True)
    starts = [{"event": "start", "pids": pids} for pids in ([10, 11], [20, 21])]
    lines = [json.dumps(start) + "\n" for start in starts]
    (logs / "supervisor.jsonl").write_text("".join(lines))
    fleet.spec = dataclasses.replace(SPEC, processes=2)
    assert fleet.pid_of("learner 1") == fleet.pid_of("learner 1 process 0") == 20
    assert fleet.pid_of("learner 1 process 1") == 21
    assert fleet.role_of(11) == "learner 1 process 1"
    assert fleet.mark([fleet.role_of(21)]).hit == {1: 0}
    rolls = {
        fleet_faults._any_process(fleet, "learner 1", random.Random(n))
        for n in range(9)
    }
    assert rolls == {"learner 1 process 0", "learner 1 process 1"}


def test_what_a_fault_took_back_is_counted(fleet):
    assert fleet.taken_back() == 0
    (fleet.run / "abandoned.jsonl").write_text('{"version": 7}\n{"version": 8}\n')
    assert fleet.taken_back() == 2


def test_faults_end_before_the_training_does(fleet):
    assert not fleet.is_ending()
    write(fleet, *((n, 0.0, {0: 1}) for n in range(1, 71)))
    assert not fleet.is_ending()
    write(fleet, *((n, 0.0, {0: 1}) for n in range(1, 72)))
    assert fleet.is_ending()


def test_faults_go_on_in_the_next_training(monkeypatch, tmp_path):
    """After one that was not recovered from, and after a training that is done."""
    found = []

    class Fleet:
        spec = SPEC

        def wait_for_commits(self, number):
            pass

        def is_ending(self):
            return False

        def commits(self):
            return []

        def taken_back(self):
            return 0

        def recover(self, mark):
            if found == ["server"]:
                raise Failed("no recovery of server 0")
            if len(found) == 3:
                raise fleet_job.Ended("it was done before")
            return 1.0, 2.0

        def finish(self):
            pass

    class Context:
        def __init__(self, spec, folder):
            pass

        def __enter__(self):
            return Fleet()

        def __exit__(self, *_):
            pass

    def fault(name):
        def inject(fleet, rng):
            found.append(name)
            return fleet_job.Mark(0.0, 1, {}, f"{name} 0")

        return inject

    monkeypatch.setattr(fleet_drill, "running", Context)
    monkeypatch.setattr(fleet_drill, "_check", lambda *_: None)
    monkeypatch.setattr(fleet_drill, "QUIET_SECONDS", 0.0)
    names = ("server", "learner", "coordinator")
    monkeypatch.setattr(fleet_drill, "FAULTS", {name: fault(name) for name in names})
    trainings = fleet_drill.run(SPEC, tmp_path, names, lambda text: None)
    assert [t.problem for t in trainings] == ["no recovery of server 0", "", ""]
    # The second one was done before it had recovered from the last: that one again.
    assert [[r.fault for r in t.results] for t in trainings] == [[n] for n in names]
    assert fleet_drill.has_failed(trainings)
    lines = fleet_drill.table(trainings).splitlines()
    assert lines[1].split() == ["server", "server", "0", "NO", "0", "0"]


def test_a_training_without_any_fault_is_an_error(tmp_path):
    """It would be followed by the next one forever."""
    spec = FakeSpec((), 2, 2, 1, num_steps=9, save_every=5, limit_seconds=20.0)
    with pytest.raises(ValueError, match="exited with status 7 .*--steps$"):
        fleet_drill.run(spec, tmp_path, ["server"], lambda text: None)


def test_the_numbers_of_a_soak(tmp_path):
    results = [Result("server", 0, "server 1", s / 2, s) for s in (2.0, 4.0, 9.0)]
    good = Training(0, results, commits=60, taken_back=3, rounds=120, samples=960)
    good.seconds, good.clear_seconds, good.clear_rounds = 60.0, 10.0, 40
    found = fleet_soak.summary([good], 3)
    assert (found["recovery_median"], found["recovery_p95"]) == (4.0, 9.0)
    assert found["goodput"] == 0.5 and found["is_passed"]
    text = fleet_soak.describe(found)
    assert "next commit, median             2.0 s\n" in text
    assert "goodput                         50 %\n" in text
    bad = Training(1, [Result("learner", 1, problem="no recovery")], problem="audit")
    found = fleet_soak.summary([good, bad], 4)
    assert (found["recovered"], found["passed"]) == (3, 1)
    assert fleet_soak.describe(found).endswith("soak: FAILED\n  FAILED: audit")
    fleet_drill.write(tmp_path / "soak.json", [good, bad], found)
    written = json.loads((tmp_path / "soak.json").read_text())
    assert written["summary"]["recovered"] == 3 and len(written["trainings"]) == 2


def test_a_soak_chooses_by_its_seed():
    def rolls(seed: int) -> list[str]:
        rng, fleet = random.Random(seed), type("Fleet", (), {"spec": SPEC})()
        return [fleet_faults._one(fleet, "learner", rng) for _ in range(8)]

    assert rolls(1) == rolls(1) != rolls(2)
    assert set(rolls(1)) == {"learner 0", "learner 1"}


def test_wrong_input(tmp_path, capfd):
    line = refused(capfd, ["drill", "--servers", "2"])
    assert line == "--servers needs --learners; add it, or leave both out"
    line = refused(capfd, [*DRILL, "--faults", "sigterm"])
    assert line.startswith("'sigterm' is not a fault")
    assert "learners must be >= 1, got 0" in refused(capfd, ["drill", "--learners=0"])
    line = refused(capfd, [*DRILL, "--mesh", "data=1", "fsdp=1"])
    assert line.startswith("a drill of learners takes one --mesh")
    line = refused(capfd, ["drill", "--copies", "2"])
    assert line == "--copies needs --learners; add it, or leave both out"
    line = refused(capfd, [*DRILL, "--mesh", "fsdp=2@two"])
    assert "expected a number of processes after @, found 'two'" in line
    assert "fsdp=4" in refused(capfd, [*DRILL, "--mesh", "fsdp=4@2"])
    (tmp_path / "mine").touch()
    line = refused(capfd, [*DRILL, "--workdir", str(tmp_path)])
    assert "is not empty" in line
    assert main(["drill", "--learners", "2", "--list"]) == 0
    assert capfd.readouterr().out.splitlines() == list(fleet_faults.FAULTS)


def test_what_cannot_be_injected_here_is_refused_or_left_out(
    monkeypatch, tmp_path, capfd
):
    monkeypatch.setattr(fleet_settings, "can_mount", lambda: False)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    line = refused(capfd, [*DRILL, "--faults", "server", "full-disk"])
    assert line == (
        "full-disk: cannot mount file systems here; leave it out of --faults"
    )
    line = refused(capfd, [*DRILL, "--faults", "cut-network"])
    assert line.startswith("cut-network: a network can be cut by root only")
    names = drill_fleet._names(None, fleet_faults.FAULTS)
    assert set(fleet_faults.FAULTS) - set(names) == {"full-disk", "cut-network"}
    assert "full-disk: skipped: cannot mount" in capfd.readouterr().out


def test_ids_that_others_got_are_not_those_of_a_training(tmp_path):
    spec = FakeSpec((), 2, 2, 1, num_steps=9, save_every=5, limit_seconds=20.0)
    with fleet_job.running(spec, tmp_path / "run") as fleet:
        while not fleet._has(fleet._process.pid):  # not yet the program that it becomes
            assert fleet._process.poll() is None
        assert not fleet._has(os.getpid())
        with pytest.raises(Failed, match=f"process {os.getpid()} ended before"):
            fleet.send(os.getpid(), signal.SIGKILL)
        assert fleet.end() == 7
        fleet.start_again()
        assert fleet.end() == 7
        with pytest.raises(Failed, match="it exited with status 7"):
            fleet.finish()


class FakeSpec(fleet_job.FleetSpec):
    def argv(self, run):
        return [sys.executable, "-c", "import sys, time; time.sleep(1); sys.exit(7)"]


class SlowSpec(fleet_job.FleetSpec):
    """Commits for two seconds, and then does nothing."""

    def argv(self, run):
        source = (
            "import pathlib, sys, time\n"
            "file = pathlib.Path(sys.argv[1], 'commits.jsonl')\n"
            "file.parent.mkdir()\n"
            "for _ in range(20):\n"
            "    file.open('a').write('{}\\n')\n"
            "    time.sleep(0.1)\n"
            "time.sleep(60)\n"
        )
        return [sys.executable, "-c", source, str(run)]


def test_the_rest_of_a_training_takes_as_long_as_there_are_commits(tmp_path):
    spec = SlowSpec((), 2, 2, 1, num_steps=9, save_every=5, limit_seconds=1.0)
    began = time.monotonic()
    with fleet_job.running(spec, tmp_path / "run") as fleet:
        fleet.wait_for_commits(1)
        with pytest.raises(Failed, match="not done, and no commit within 1 s"):
            fleet.end()
    assert time.monotonic() - began > 2.9


KILLED = """
import dataclasses, pathlib, sys, time
from meshloom.trainer.verify import fleet_job
class Spec(fleet_job.FleetSpec):
    def argv(self, run):
        return ["sleep", "100"]
spec = Spec((), 2, 2, 1, 10, 5, 60.0)
with fleet_job.running(spec, pathlib.Path(sys.argv[1])) as fleet:
    print(fleet._process.pid, flush=True)
    time.sleep(100)
"""


def test_a_drill_that_is_killed_takes_its_training_along(tmp_path: Path):
    argv = [sys.executable, "-c", KILLED, str(tmp_path / "run")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        os.kill(pid, 0)
        process.send_signal(signal.SIGKILL)
    assert ends(pid)
