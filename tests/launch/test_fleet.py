"""A fleet restarts what dies and nothing else, and says how it ended."""

import json
import os
import signal
import sys
import time

import pytest
from fleets import RunningFleet
from supervised import FAKE as FAKE_WORKER
from supervised import PROGRAM as SUPERVISOR
from test_jobs import ends

from meshloom.launch import exit_codes

# They watch how much time passes.
pytestmark = pytest.mark.processes

DONE = {"step": 3, "end": 0}
LEARNERS = {"learner 0": [{"step": 1}], "learner 1": [{"step": 1}]}
ALL = ("coordinator", "server-0", "server-1", "learner-0", "learner-1")
FIRST = tuple(f"{name}-0" for name in ALL)


def test_it_is_done_when_every_learner_is(tmp_path):
    plan = {"learner 0": [DONE], "learner 1": [DONE | {"say": "0 | hello"}]}
    with RunningFleet(tmp_path, plan) as fleet:
        assert fleet.status() == 0
        assert set(fleet.starts().values()) == {1}
        assert "2 learners and 2 servers, logs in " in fleet.stderr
        assert fleet.stderr.endswith("meshloom launch: done: every learner is done\n")
        assert "learner 1 | hello\n" in fleet.stdout
        # The coordinator may need the servers to save.
        assert fleet.order()[0] == "coordinator"
        assert set(fleet.order()[1:]) == {"server-0", "server-1"}
        assert (fleet.logs / "server-1.log").exists()


def test_a_learner_that_is_killed_is_restarted_alone(tmp_path):
    plan = {"learner 0": [{"step": 1, "end": "kill"}, DONE], "learner 1": [DONE]}
    with RunningFleet(tmp_path, plan) as fleet:
        assert fleet.status() == 0
        assert fleet.starts().pop("learner 0") == 2
        assert sum(fleet.starts().values()) == 6
        assert (
            "learner 0 was killed by signal 9 (SIGKILL) at step 1; restarting it at "
            "once (1 of 5 without progress)"
        ) in fleet.stderr


@pytest.mark.parametrize(
    "role, action, restarted",
    [
        ("coordinator", {"end": "kill"}, {"coordinator"}),
        ("coordinator", {"end": 1}, {"coordinator"}),
        ("coordinator", {"end": 69}, {"coordinator", "server 0", "server 1"}),
        ("server 1", {"end": "kill"}, {"coordinator", "server 0", "server 1"}),
        ("server 1", {"end": "kill", "copies": 2}, {"server 1"}),
    ],
)
def test_what_of_the_service_is_restarted(role, action, restarted, tmp_path):
    copies = action.get("copies", 1)
    everyone = [f"seen/{name}.json" for name in FIRST]
    plan = {role: [action | {"until": everyone}, {"final": True}], **LEARNERS}
    (tmp_path / "spec.json").write_text(json.dumps({"copies": copies}))
    with RunningFleet(tmp_path, plan) as fleet:
        names = [name.replace(" ", "-") for name in restarted]
        fleet.until_seen(*FIRST, *(f"{name}-1" for name in names))
        fleet.process.send_signal(signal.SIGTERM)
        assert fleet.status() == exit_codes.PREEMPTED
        found = {name for name, starts in fleet.starts().items() if starts == 2}
        assert found == restarted
        assert max(fleet.starts().values()) == 2


def test_a_coordinator_that_is_stopped_is_killed_and_restarted(tmp_path):
    everyone = [f"seen/{name}.json" for name in FIRST]
    stopped = {"until": everyone, "beats": 30}
    plan = {"coordinator": [stopped, {"final": True}], **LEARNERS}
    with RunningFleet(tmp_path, plan, silent_seconds=1.5) as fleet:
        fleet.until_seen(*FIRST, "coordinator-1")
        fleet.process.send_signal(signal.SIGTERM)
        assert fleet.status() == exit_codes.PREEMPTED
        assert {n for n, k in fleet.starts().items() if k == 2} == {"coordinator"}
        assert "coordinator sent no heartbeat for 1.5 s; killing it" in fleet.stderr
        assert "coordinator was killed by signal 9" in fleet.stderr
        (death,) = fleet.events("death")
        (start, *_) = fleet.events("start")
        assert death["time"] - start["time"] > 3  # it beat for so long before


def test_one_of_several_coordinators_is_restarted_alone(tmp_path):
    everyone = [f"seen/{name}.json" for name in (*FIRST, "coordinator-1-0")]
    deposed = {"until": everyone, "end": 69}
    plan = {"coordinator": [deposed, {"end": "wait"}], **LEARNERS}
    plan["coordinator 1"] = [{"end": "wait"}]  # it stands by, and does not beat
    with RunningFleet(tmp_path, plan, silent_seconds=0.5) as fleet:
        fleet.until_seen(*FIRST, "coordinator-1-0", "coordinator-1")
        (tmp_path / "beat").touch()
        time.sleep(1.5)
        fleet.process.send_signal(signal.SIGTERM)
        assert fleet.status() == exit_codes.PREEMPTED
        assert {n for n, k in fleet.starts().items() if k == 2} == {"coordinator"}
        assert "2 learners and 2 servers" in fleet.stderr
        # Who coordinates may need the servers to save.
        told = fleet.order()
        assert {*told[2:4]} == {"coordinator", "coordinator-1"}
        assert {*told[4:]} == {"server-0", "server-1"}


def test_it_gives_up_on_a_service_that_keeps_dying(tmp_path):
    plan = {"server 0": [{"end": 1}], **LEARNERS}
    with RunningFleet(tmp_path, plan, max_restarts=2) as fleet:
        assert fleet.status() == exit_codes.GAVE_UP
        assert fleet.starts()["server 0"] == 3
        assert "; giving up, 2 restarts without progress\n" in fleet.stderr


def test_commits_are_progress_of_the_service(tmp_path):
    dies = [{"commit": n, "end": "kill"} for n in (1, 2, 3)]
    waits = {"step": 1, "until": ["final.json"], "end": 0}
    plan = {"coordinator": [*dies, {"final": True}], "learner 0": [waits]}
    with RunningFleet(tmp_path, plan, max_restarts=1) as fleet:
        assert fleet.status() == 0
        assert fleet.starts()["coordinator"] == 4


def test_commits_that_are_computed_again_are_progress_of_the_service(tmp_path):
    """If it gets further than the time before: a checkpoint may be long ago."""
    dies = [{"commits": [5, n], "end": "kill"} for n in (9, 7, 8, 6, 7)]
    waits = {"step": 1, "until": ["final.json"], "end": 0}
    plan = {"coordinator": [*dies, {"final": True}], "learner 0": [waits]}
    with RunningFleet(tmp_path, plan, max_restarts=2) as fleet:
        assert fleet.status() == 0
        assert fleet.starts()["coordinator"] == 6


def test_it_gives_up_on_a_service_that_always_dies_at_the_same_commit(tmp_path):
    plan = {"coordinator": [{"commits": [1, 3], "end": "kill"}], **LEARNERS}
    with RunningFleet(tmp_path, plan, max_restarts=2) as fleet:
        assert fleet.status() == exit_codes.GAVE_UP
        assert fleet.starts()["coordinator"] == 3


def test_a_learner_that_gave_up_is_left_behind(tmp_path):
    plan = {
        "learner 0": [{"step": 1, "until": ["stderr.seen"], "end": 1}],
        "learner 1": [{"step": 3, "until": ["go"], "end": 0}],
    }
    with RunningFleet(tmp_path, plan) as fleet:
        fleet.until(lambda: "2 running at step 1 to 3; 0 restarts" in fleet.stderr)
        (tmp_path / "stderr.seen").touch()
        fleet.until(lambda: "learner 0 gave up; the others continue" in fleet.stderr)
        fleet.until(lambda: "learners: 1 running, 1 given up at" in fleet.stderr)
        (tmp_path / "go").touch()
        assert fleet.status() == exit_codes.GAVE_UP
        assert fleet.starts()["learner 0"] == 1
        assert fleet.stderr.endswith("some learners gave up; the others are done\n")


def test_the_others_do_not_wait_for_one_that_never_started(tmp_path):
    plan = {"learner 0": [{"end": 1, "say": "no disk"}], "learner 1": [{}]}
    with RunningFleet(tmp_path, plan) as fleet:
        assert fleet.status() == exit_codes.GAVE_UP
        assert "learner 0 gave up before its first step" in fleet.stderr
        assert "saying 'no disk'; stopping" in fleet.stderr


def test_one_that_never_started_is_left_behind_if_the_others_do_not_wait(tmp_path):
    """As with exchange.start_with: there are commits without it."""
    plan = {
        "coordinator": [{"commit": 1, "final": True}],
        "learner 0": [{"until": ["go"], "end": 1}],
        "learner 1": [{"step": 1, "until": ["go on"], "end": 0}],
    }
    with RunningFleet(tmp_path, plan) as fleet:
        fleet.until(lambda: "commit 1;" in fleet.stderr)
        (tmp_path / "go").touch()
        fleet.until(lambda: "learner 0 gave up; the others continue" in fleet.stderr)
        (tmp_path / "go on").touch()
        assert fleet.status() == exit_codes.GAVE_UP


@pytest.mark.parametrize("role", ["learner 1", "coordinator", "server 0"])
def test_bad_input_ends_everything_and_is_shown(role, tmp_path):
    refusal = {"say": "meshloom: the port is taken", "end": 2}
    with RunningFleet(tmp_path, {**LEARNERS, role: [refusal]}) as fleet:
        assert fleet.status() == exit_codes.BAD_INPUT
        assert fleet.starts()[role] == 1
        line = (
            f"{role} exited with code 2 (bad input), saying 'meshloom: the port is "
            "taken'; not restarting"
        )
        assert fleet.stderr.count("the port is taken") == 1 and line in fleet.stderr


def test_a_refusal_of_a_learners_process_is_shown(tmp_path):
    logs = tmp_path / "learners" / "0" / "logs"
    logs.mkdir(parents=True)
    (logs / "worker-0.log").write_text("== attempt 1 ==\nlearning\n")
    (logs / "worker-1.log").write_text("== attempt 1 ==\nmeshloom: no such model\n")
    own = "meshloom launch: attempt 1: worker 1 exited with code 2"
    with RunningFleet(tmp_path, {"learner 0": [{"end": 2, "say": own}]}) as fleet:
        assert fleet.status() == exit_codes.BAD_INPUT
        assert "(bad input), saying 'meshloom: no such model';" in fleet.stderr


def test_restarts_by_a_learners_own_supervisor_are_counted(tmp_path):
    events = tmp_path / "learners" / "0" / "logs" / "supervisor.jsonl"
    events.parent.mkdir(parents=True)
    events.write_text('{"event": "restart"}\n')  # of an earlier fleet
    with RunningFleet(tmp_path, LEARNERS) as fleet:
        fleet.until(lambda: "2 running at step 1; 0 restarts" in fleet.stderr)
        with open(events, "a") as file:
            file.write('{"event": "restart"}\n' * 2)
        fleet.until(lambda: "2 running at step 1; 2 restarts" in fleet.stderr)


def test_steps_of_an_earlier_fleet_do_not_count(tmp_path):
    logs = tmp_path / "learners" / "0" / "logs"
    logs.mkdir(parents=True)
    (logs / "progress-0.json").write_text('{"step": 7, "time": 1}')
    plan = {"learner 0": [{"end": 1}], "learner 1": [{}]}
    with RunningFleet(tmp_path, plan) as fleet:
        assert fleet.status() == exit_codes.GAVE_UP
        assert "gave up before its first step" in fleet.stderr


# Signals.


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop_the_learners_save_before_the_service(number, tmp_path):
    with RunningFleet(tmp_path, LEARNERS) as fleet:
        fleet.until_seen(*FIRST)
        fleet.process.send_signal(number)
        assert fleet.status() == exit_codes.PREEMPTED
        assert {*fleet.order()[:2]} == {"learner-0", "learner-1"}
        assert fleet.order()[2] == "coordinator"
        assert {*fleet.order()[3:]} == {"server-0", "server-1"}
        assert "stopped: every learner and the service saved" in fleet.stderr


@pytest.mark.parametrize("role", ["learner 0", "coordinator"])
def test_it_says_if_not_everyone_saved(role, tmp_path):
    action = {"told": 1} | ({"step": 1} if role == "learner 0" else {"final": True})
    plan = {**LEARNERS, role: [action]}
    with RunningFleet(tmp_path, plan) as fleet:
        fleet.until_seen(*FIRST)
        fleet.process.send_signal(signal.SIGTERM)
        assert fleet.status() == 143
        assert "stopped: not everyone saved" in fleet.stderr


def test_a_second_signal_kills_at_once(tmp_path):
    plan = {**LEARNERS, "learner 0": [{"step": 1, "end": "deaf", "child": True}]}
    with RunningFleet(tmp_path, plan, grace_seconds=1000, repeat_seconds=0) as fleet:
        fleet.until_seen(*FIRST)
        fleet.process.send_signal(signal.SIGINT)
        fleet.until(lambda: "SIGINT: asking the learners" in fleet.stderr)
        fleet.process.send_signal(signal.SIGINT)
        assert fleet.status() == 130


def test_killed_it_takes_everyone_along(tmp_path):
    """Also the workers of a learner, which its own supervisor has started."""
    plan = {"learner 0": [{"step": 1, "child": True}]}
    work = tmp_path / "work"
    work.mkdir()
    hangs = {"steps": 2, "faults": {"*": {0: ["hang", 2]}}, "child": True}
    fake = [sys.executable, str(FAKE_WORKER), str(work), json.dumps(hangs)]
    logs = tmp_path / "learners" / "1" / "logs"
    supervisor = [sys.executable, "-c", SUPERVISOR, str(logs), json.dumps(fake)]
    supervisor.append(json.dumps({"processes": 2}))
    with RunningFleet(tmp_path, plan, argvs={"learner 1": supervisor}) as fleet:
        fleet.until_seen("coordinator-0", "server-0-0", "server-1-0", "learner-0-0")
        fleet.until(lambda: len(list(work.glob("stepped-*"))) == 2)
        seen = [json.loads(file.read_text()) for file in work.glob("seen-*.json")]
        workers = [pid for worker in seen for pid in worker["pids"]]
        assert len(workers) == 4  # two workers, each with a child
        fleet.process.send_signal(signal.SIGKILL)
        assert fleet.status() == -signal.SIGKILL
        assert all(ends(pid) for pid in workers)


def test_a_second_fleet_in_the_same_folder_is_refused(tmp_path):
    with RunningFleet(tmp_path, LEARNERS) as fleet:
        fleet.until_seen(*FIRST)
        with RunningFleet(tmp_path, LEARNERS) as second:
            assert second.process.wait(60) != 0
            assert "is in use by another supervisor" in second.stderr
        os.kill(fleet.pids_of("server-0-0")[0], 0)  # the first one goes on
