"""A supervised group comes back from any death, and ends when it should."""

import os
import re
import signal
import subprocess
from types import SimpleNamespace

import pytest
from supervised import Job

from meshloom.launch import exit_codes, progress_file
from meshloom.launch.exit_codes import Ending
from meshloom.launch.logs import Logs
from meshloom.launch.settings import Settings
from meshloom.launch.supervisor import Supervisor
from meshloom.launch.targets.local import Local

# They watch how much time passes.
pytestmark = pytest.mark.processes

LOG_NOTE = r"== \d{4}-\d\d-\d\d \d\d:\d\d:\d\d (.*) =="


def test_a_job_that_nothing_happens_to(tmp_path):
    with Job(tmp_path, {"steps": 3, "child": True}, cpu_devices=2) as job:
        assert job.status() == 0
        assert job.said() == ["done at attempt 1"]
        shown = [f"{n} | attempt 1: worker {n} speaks" for n in (0, 1)]
        assert sorted(job.stdout.splitlines()) == shown
        assert [event["event"] for event in job.events()] == ["start", "done"]
        first, second = job.seen()
    assert first["COORDINATOR"] == second["COORDINATOR"]
    assert re.fullmatch(r"127\.0\.0\.1:\d+", first["COORDINATOR"])
    assert [env["PROCESS_ID"] for env in (first, second)] == ["0", "1"]
    for number, env in enumerate((first, second)):
        assert env["NUM_PROCESSES"] == "2" and env["ATTEMPT"] == "1"
        assert env["JAX_NUM_CPU_DEVICES"] == "2" and int(env["NPROC"]) >= 8
        assert env["PROGRESS"] == str(job.logs / f"progress-{number}.json")


DEATHS = {
    "kill": "was killed by signal 9 (SIGKILL)",
    "abort": "was killed by signal 6 (SIGABRT)",
    1: "exited with code 1",
    75: "exited with code 75 (preempted)",
    76: "exited with code 76 (its watchdog saw no progress)",
}


@pytest.mark.parametrize(
    "what, worker",
    [("kill", 0), ("kill", 1), ("abort", 1), (1, 0), (75, 1), (76, 1)],
)
def test_any_death_restarts_all(what, worker, tmp_path):
    plan = {"steps": 5, "faults": {"1": {worker: [what, 3]}}, "child": True}
    with Job(tmp_path, plan, grace_seconds=0.5) as job:
        assert job.status() == 0
        reason = f"worker {worker} {DEATHS[what]} at step 3"
        restarting = "restarting all at once (1 of 5 without progress)"
        assert job.said() == [
            f"attempt 1: {reason}; {restarting}",
            "done at attempt 2",
        ]
        kinds = [event["event"] for event in job.events()]
        assert kinds == ["start", "death", "restart", "start", "done"]
        start, death, restart, again, _ = job.events()
        assert (death["worker"], death["step"]) == (worker, 3)
        assert death["reason"] == restart["reason"] == reason
        number = {"kill": 9, "abort": 6}.get(what, what)
        assert death["signal" if isinstance(what, str) else "status"] == number
        assert (restart["attempt"], again["attempt"]) == (2, 2)
        assert again["coordinator"] != start["coordinator"]
        shown = [
            f"{n} | attempt {a}: worker {n} speaks" for a in (1, 2) for n in (0, 1)
        ]
        assert sorted(job.stdout.splitlines()) == sorted(shown)
        other = 1 - worker
        dead, ended = (job.logs / f"worker-{n}.log" for n in (worker, other))
        assert notes(dead)[:2] == ["attempt 1, 2 processes", f"attempt 1: {reason}"]
        assert notes(ended)[1].startswith(f"attempt 1: worker {other} was killed by ")
        assert notes(ended)[1].endswith(f"stopped by the supervisor: {reason}")
        assert "attempt 2: worker 1 speaks" in (job.logs / "worker-1.log").read_text()


def notes(log) -> list[str]:
    return re.findall(LOG_NOTE, log.read_text())


def test_workers_that_ignore_sigterm_are_killed(tmp_path):
    plan = {"steps": 2, "faults": {"1": {1: ["kill", 1]}}, "on_term": "deaf"}
    with Job(tmp_path, plan, processes=3) as job:
        assert job.status() == 0
        log = notes(job.logs / "worker-2.log")
        assert log[1].startswith("attempt 1: worker 2 was killed by signal 9 (SIGKILL)")


def test_all_leave_when_one_is_preempted(tmp_path):
    """Nobody is told again, which would end a worker before it has saved."""
    faults = {"1": {0: [75, 2], 1: ["leave", 2]}}
    with Job(tmp_path, {"steps": 3, "faults": faults}, grace_seconds=1000) as job:
        assert job.status() == 0
        log = notes(job.logs / "worker-1.log")
        assert log[1] == (
            "attempt 1: worker 1 exited with code 75 (preempted) at step 2"
        )


def test_bad_input_is_not_tried_again(tmp_path):
    with Job(tmp_path, {"steps": 2, "sizes": [3]}) as job:
        assert job.status() == exit_codes.BAD_INPUT
        (line,) = job.said()
        assert re.fullmatch(
            r"attempt 1: worker [01] exited with code 2 \(bad input\), saying "
            "'meshloom: the batch is not divided by 2 devices'; not restarting",
            line,
        )
        assert [e["event"] for e in job.events()] == ["start", "death", "failed"]


def test_the_last_report_of_the_dead_counts(tmp_path):
    """A worker that reports and dies between two looks of the supervisor."""

    class Group:
        workers = [SimpleNamespace(number=0, ask_to_end=lambda: None)]
        has_ended = False

        def poll(self):
            progress_file.write(tmp_path / "progress-0.json", 7)
            self.has_ended = True
            return True

        def endings(self, reports):
            return [Ending(0, 1, reports[0].step)] if self.has_ended else []

    supervisor = Supervisor(Local([]), tmp_path, Settings(processes=1))
    with supervisor._logs:
        outcome = supervisor._watch_group(Group())  # type: ignore
    assert outcome.death == Ending(0, 1, 7)


# Restarts: how often, and when.


def test_steps_that_are_repeated_because_of_others_are_progress(tmp_path):
    """If they get further than the attempt before: the service may have fallen back."""
    faults = {str(n): {0: [69, step]} for n, step in enumerate((8, 5, 6, 4, 5), 1)}
    plan = {"steps": 9, "faults": faults, "forgetful": True}
    with Job(tmp_path, plan, max_restarts=2) as job:
        assert job.status() == 0


def test_restarts_without_progress_are_limited_and_further_apart(tmp_path):
    plan = {"steps": 5, "faults": {"*": {1: ["kill", 3]}}}
    with Job(tmp_path, plan, max_restarts=4) as job:
        assert job.status() == exit_codes.GAVE_UP
        assert job.said()[-1] == (
            "attempt 5: worker 1 was killed by signal 9 (SIGKILL); giving up, "
            "4 restarts without progress"
        )
        restarts = job.events("restart")
        assert [event["delay"] for event in restarts] == [0, 0.05, 0.1, 0.2]
        starts = job.events("start")
        for restart, start in zip(restarts, starts[1:], strict=True):
            # The times are rounded to milliseconds.
            assert start["time"] - restart["time"] >= restart["delay"] - 0.002
        assert len({start["coordinator"] for start in starts}) == 5
        assert job.events()[-1]["event"] == "failed"


def test_progress_resets_the_limit(tmp_path):
    faults = {str(n): {n % 2: ["kill", n]} for n in range(1, 6)}
    with Job(tmp_path, {"steps": 6, "faults": faults}, max_restarts=1) as job:
        assert job.status() == 0
        assert [event["step"] for event in job.events("death")] == [1, 2, 3, 4, 5]
        assert all("(1 of 1 without progress)" in line for line in job.said()[:-1])


def test_steps_done_again_are_no_progress_of_the_job(tmp_path):
    plan = {"steps": 6, "faults": {"*": {0: ["kill", 3]}}, "forgetful": True}
    with Job(tmp_path, plan, max_restarts=2) as job:
        assert job.status() == exit_codes.GAVE_UP
        assert [event["step"] for event in job.events("death")] == [3, 3, 3]


# Progress.


def test_a_group_that_is_stuck_is_restarted(tmp_path):
    plan = {"steps": 3, "faults": {"1": {1: ["hang", 2]}}, "on_term": "deaf"}
    with Job(tmp_path, plan, stall_seconds=2) as job:
        assert job.status() == 0
        stall = job.events("stall")[0]
        assert (stall["attempt"], stall["step"]) == (1, 2)
        assert re.fullmatch(r"no progress for \d+ s, last step 2", stall["reason"])
        restarting = "restarting all at once (1 of 5 without progress)"
        assert job.said()[0] == f"attempt 1: {stall['reason']}; {restarting}"
        assert notes(job.logs / "worker-0.log")[1].endswith(stall["reason"])


def test_a_stopped_process_is_no_progress(tmp_path):
    """SIGSTOP: alive for the kernel, and deaf to SIGTERM."""
    plan = {"steps": 3, "faults": {"1": {1: ["hang", 2]}}}
    with Job(tmp_path, plan, stall_seconds=2) as job:
        job.until_stepped(1)
        for pid in job.events("start")[0]["pids"]:
            os.kill(pid, signal.SIGSTOP)
        assert job.status() == 0
        assert job.events("stall")[0]["step"] == 2


def test_a_group_that_never_begins_is_restarted(tmp_path):
    plan = {"steps": 3, "faults": {"1": {1: ["hang", 0]}}}
    with Job(tmp_path, plan, start_seconds=2) as job:
        assert job.status() == 0
        assert re.search(
            r"no progress for \d+ s, before the first step;", job.said()[0]
        )


def test_workers_that_report_nothing_are_watched_for_life_only(tmp_path):
    faults = {"1": {1: ["kill", 1]}}
    plan = {"steps": 1, "silent": True, "seconds": 1, "faults": faults}
    with Job(tmp_path, plan, start_seconds=0.1, stall_seconds=0.1) as job:
        assert job.status() == 0
        note = "the workers report no progress: only deaths are noticed"
        assert job.said().count(note) == 1
        assert job.events("note") and not job.events("stall")
        assert job.events("death")[0]["reason"].endswith("(SIGKILL)")


# The terminal and the log folder.


def test_a_terminal_that_takes_nothing_holds_nobody(tmp_path):
    """A pipe that nobody reads: the job goes on, its output is in the log."""
    plan = {"steps": 3, "noise": 300_000}
    with Job(tmp_path, plan, stdout=subprocess.PIPE) as job:
        assert job.status() == 0
        job.process.stdout.close()
        assert (job.logs / "worker-0.log").stat().st_size > 300_000


def test_a_pipe_that_is_closed_is_no_reason_to_end(tmp_path):
    faults = {"1": {1: ["kill", 1]}}
    with Job(tmp_path, {"steps": 3, "faults": faults}, stdout=subprocess.PIPE) as job:
        job.process.stdout.close()
        assert job.status() == 0


def test_a_log_folder_has_one_supervisor(tmp_path):
    plan = {"steps": 1, "faults": {"*": {0: ["hang", 1]}}}
    with Job(tmp_path, plan) as job:
        job.until_stepped(1)
        with pytest.raises(ValueError, match="logs is in use by another supervisor"):
            with Logs(job.logs):
                pass
        job.send(signal.SIGTERM)
        job.status()


def test_a_malformed_report_is_named_once(tmp_path):
    plan = {"steps": 3, "faults": {"1": {0: ["hang", 1]}}}
    with Job(tmp_path, plan) as job:
        job.until_stepped(1)
        (job.logs / "progress-0.json").write_text("half")
        job.until(lambda: job.events("note"))
        job.send(signal.SIGTERM)
        job.status()
        assert [line for line in job.said() if "progress-0.json holds 'half'" in line]
        assert len(job.events("note")) == 1
