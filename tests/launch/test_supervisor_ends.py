"""A supervised group leaves no orphan, and shrinks and grows."""

import os
import signal
from pathlib import Path

import pytest
from supervised import Job
from test_jobs import ends

from meshloom.launch import exit_codes

# They watch how much time passes.
pytestmark = pytest.mark.processes

WAITING = {"steps": 2, "faults": {"*": {0: ["hang", 2]}}, "child": True}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_told_to_stop_it_lets_the_workers_save(number, tmp_path):
    with Job(tmp_path, WAITING | {"on_term": "leave"}, grace_seconds=1000) as job:
        job.until_stepped(1)
        job.send(number)
        assert job.status() == exit_codes.PREEMPTED
        assert job.said()[-1] == "stopped: every worker saved and exited"
        assert job.events()[-1] | {"time": 0} == {
            "time": 0,
            "event": "stop",
            "signal": number,
            "status": 75,
        }
        log = (job.logs / "worker-1.log").read_text()
        assert f"stopped by the supervisor: told to stop by {number.name} ==" in log


def test_workers_that_do_not_leave_in_time_are_killed(tmp_path):
    with Job(tmp_path, WAITING | {"on_term": "deaf"}, grace_seconds=0.5) as job:
        job.until_stepped(1)
        job.send(signal.SIGTERM)
        assert job.status() == 143
        assert job.said()[-1].startswith("stopped: not every worker saved; ")


def test_a_second_signal_kills_at_once(tmp_path):
    plan = WAITING | {"on_term": "deaf"}
    with Job(tmp_path, plan, grace_seconds=1000, repeat_seconds=0) as job:
        job.until_stepped(1)
        job.send(signal.SIGINT)
        job.until(lambda: "SIGINT: asking the workers" in job.stderr)
        job.send(signal.SIGTERM)
        assert job.status() == 130


def test_told_to_stop_before_a_restart_it_does_not_restart(tmp_path):
    plan = {"steps": 2, "faults": {"*": {0: ["kill", 1]}}}
    with Job(tmp_path, plan, first_delay=1000, longest_delay=1000) as job:
        job.until(lambda: len(job.events("restart")) == 2)  # the first is at once
        job.send(signal.SIGTERM)
        assert job.status() == 143
        assert len(job.events("start")) == 2


def test_a_job_that_is_done_in_time_is_done(tmp_path):
    """The same signal at once again is no second one: GNU timeout sends each twice."""
    plan = {"steps": 2, "on_term": "deaf", "seconds": 1}
    with Job(tmp_path, plan, repeat_seconds=1000) as job:
        job.until_stepped(1)
        job.send(signal.SIGTERM)
        job.until(lambda: "SIGTERM: asking the workers" in job.stderr)
        job.send(signal.SIGTERM)
        assert job.status() == 0
        assert job.said()[-1] == "stopped: every worker is done"


@pytest.mark.parametrize("on_term", ["deaf", "leave"])
def test_killed_it_takes_its_workers_and_their_children_along(on_term, tmp_path):
    with Job(tmp_path, WAITING | {"on_term": on_term}) as job:
        job.until_stepped(1)
        job.send(signal.SIGKILL)
        assert job.status() == -signal.SIGKILL
        assert len(set(job.pids())) == 4


def test_killed_with_its_heir_the_kernel_still_ends_the_workers(tmp_path):
    with Job(tmp_path, WAITING | {"child": False}) as job:
        job.until_stepped(1)
        (heir,) = set(children(job.process.pid)) - set(job.pids())
        os.kill(heir, signal.SIGKILL)
        assert ends(heir)
        job.send(signal.SIGKILL)
        assert job.status() == -signal.SIGKILL


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


# Fewer processes, and more again.


def sizes(job: Job) -> list[int]:
    return [event["processes"] for event in job.events("start")]


def test_it_goes_on_without_a_worker_that_cannot_come_back(tmp_path):
    faults = {str(n): {2: [1, 2]} for n in (1, 2, 3)}
    plan = {"steps": 4, "faults": faults}
    with Job(tmp_path, plan, processes=3, min_processes=1) as job:
        assert job.status() == 0
        # The first death came after progress, the next two before any.
        assert sizes(job) == [3, 3, 3, 2]
        assert job.said()[2] == (
            "attempt 3: worker 2 exited with code 1; worker 2 cannot come back; "
            "continuing with 2 of 3 processes at once"
        )
        (resize,) = job.events("resize")
        assert (resize["before"], resize["processes"]) == (3, 2)
        assert [env["NUM_PROCESSES"] for env in job.seen()[-2:]] == ["2", "2"]
        assert (job.logs / "processes").read_text() == "2\n"


def test_without_min_processes_it_stays_whole(tmp_path):
    plan = {"steps": 4, "faults": {"*": {1: [1, 0]}}}
    with Job(tmp_path, plan, max_restarts=3) as job:
        assert job.status() == exit_codes.GAVE_UP
        assert sizes(job) == [2, 2, 2, 2]


def test_sizes_that_are_refused_are_passed_over(tmp_path):
    faults = {str(n): {3: [1, 0]} for n in (1, 2)}
    plan = {"steps": 2, "faults": faults, "sizes": [4, 2, 1]}
    with Job(tmp_path, plan, processes=4, min_processes=1) as job:
        assert job.status() == 0
        assert sizes(job) == [4, 4, 3, 2]
        assert "3 processes are refused; continuing with 2 at once" in job.stderr


def test_it_never_shrinks_below_the_least(tmp_path):
    faults = {str(n): {3: [1, 0]} for n in (1, 2)}
    plan = {"steps": 2, "faults": faults, "sizes": [4, 1]}
    with Job(tmp_path, plan, processes=4, min_processes=2) as job:
        assert job.status() == exit_codes.BAD_INPUT
        assert sizes(job) == [4, 4, 3, 2]


@pytest.mark.parametrize("told", ["stop", "shrink"])
def test_a_death_while_all_should_save_is_not_waited_for(told, tmp_path):
    """The others are in a collective that never ends, and do not heed SIGTERM."""
    with Job(tmp_path, WAITING | {"on_term": "deaf"}, grace_seconds=1000) as job:
        job.until_stepped(1)
        if told == "stop":
            job.send(signal.SIGTERM)
        else:
            (job.logs / "processes").write_text("1\n")
        job.until(lambda: "save and exit" in job.stderr)
        os.kill(job.pids()[1], signal.SIGKILL)
        if told == "stop":
            assert job.status() == 128 + signal.SIGTERM
        else:
            job.until_stepped(2, processes=1)
            assert sizes(job) == [2, 1]


def test_it_grows_when_told_to(tmp_path):
    plan = {"steps": 2, "faults": {"1": {0: ["hang", 1]}}, "on_term": "leave"}
    with Job(tmp_path, plan, processes=1, grace_seconds=1000) as job:
        job.until_stepped(1, processes=1)
        assert (job.logs / "processes").read_text() == "1\n"
        (job.logs / "processes").write_text("3\n")
        assert job.status() == 0
        assert sizes(job) == [1, 3]
        assert job.said() == [
            "told to continue with 3 processes: asking the workers to save and exit",
            "done at attempt 2",
        ]
        log = (job.logs / "worker-0.log").read_text()
        assert "code 75 (preempted) at step 1, stopped by the supervisor: " in log


def test_a_number_that_is_refused_is_taken_back(tmp_path):
    """Also where the old number of workers got on while they were leaving."""
    plan = {"steps": 2, "faults": {"1": {0: ["hang", 1]}}, "sizes": [1, 2]}
    with Job(tmp_path, plan | {"on_term": "step"}, processes=2) as job:
        job.until_stepped(1)
        (job.logs / "processes").write_text("3")
        assert job.status() == 0
        assert sizes(job) == [2, 3, 2]
        # Nothing was reported in the second attempt; what the first left is gone.
        assert job.events("death")[0]["step"] is None
        assert (job.logs / "processes").read_text() == "2\n"


@pytest.mark.parametrize("text", ["many", "0", "-1", "2.5", "\u0662"])
def test_a_number_that_is_none_is_named(text, tmp_path):
    plan = {"steps": 2, "faults": {"*": {0: ["hang", 1]}}}
    with Job(tmp_path, plan) as job:
        job.until_stepped(1)
        (job.logs / "processes").write_text(text)
        job.until(lambda: "expected a whole number" in job.stderr)
        job.until(lambda: (job.logs / "processes").read_text() == "2\n")
        job.send(signal.SIGTERM)
        job.status()
        assert sizes(job) == [2]
        assert f"contains {text!r}, expected" in job.stderr
