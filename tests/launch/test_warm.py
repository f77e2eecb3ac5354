"""Workers that are forked from a process that has imported everything."""

import json
import os
import signal
import sys
import time

import pytest
from supervised import FAKE, Job
from test_jobs import ends

from meshloom.launch import warm
from meshloom.launch.logs import Logs
from meshloom.launch.target import Command

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")

# The real one, with another command to run and nothing to import.
PROGRAM = """
import runpy, sys
from meshloom.trainer import cli, warm

def run(command):
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")

warm.MODULES, cli.main = (), run
sys.exit(warm.main(sys.argv[1:]))
"""
WORKER = """
import os, sys, time
name, leads = os.environ["MESHLOOM_NAME"], os.getsid(0) == os.getpid()
print(name, os.getppid(), leads, flush=True)
if name == "slow":
    time.sleep(1000)
sys.exit(7)
"""


def of(script, *argv: str) -> list[str]:
    return [sys.executable, "-c", PROGRAM, str(script), *argv]


def environment(name: str, **more: str) -> dict[str, str]:
    return {**os.environ, "MESHLOOM_NAME": name, **more}


def wait_for(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_workers_are_children_with_environments_and_logs_of_their_own(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    logs = {name: tmp_path / f"{name}.log" for name in ("quick", "slow")}
    with Logs(tmp_path / "logs") as folder, warm.Warm(of(script), folder) as started:
        workers = {}
        for name, log in logs.items():
            command = Command(name, ["not", "run"], environment(name))
            workers[name] = started.fork(command, log)
            assert workers[name] is not None
        wait_for(lambda: workers["quick"].poll() is not None)
        assert workers["quick"].poll() == 7
        wait_for(lambda: logs["slow"].read_text())
        for name, log in logs.items():
            assert log.read_text() == f"{name} {os.getpid()} True\n"
        workers["slow"].send_signal(signal.SIGKILL)
        wait_for(lambda: workers["slow"].poll() is not None)
        assert workers["slow"].poll() == -signal.SIGKILL
        # Imports may depend on any variable but our own.
        other = Command("quick", ["not", "run"], environment("quick", JAX_OTHER="1"))
        assert started.fork(other, logs["quick"]) is None
    events = (tmp_path / "logs" / "supervisor.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in events] == ["warm"]


def test_a_job_comes_back_by_forks(tmp_path):
    plan = {"steps": 6, "faults": {"1": {1: ["kill", 3]}}}
    with Job(tmp_path, plan, warm=of(FAKE, str(tmp_path), json.dumps(plan))) as job:
        assert job.status() == 0
        assert job.said()[-1] == "done at attempt 2"
        assert len(job.events("warm")) == 1


def test_forked_workers_end_with_a_supervisor_that_is_killed(tmp_path):
    plan = {"steps": 1000}
    with Job(tmp_path, plan, warm=of(FAKE, str(tmp_path), json.dumps(plan))) as job:
        job.until_stepped(1)
        forked, (event,) = job.pids(), job.events("warm")
        job.process.kill()
        assert forked and all(ends(pid) for pid in [*forked, event["pid"]])


def test_without_an_answer_workers_start_by_themselves(tmp_path):
    broken = [sys.executable, "-c", "raise SystemExit('no such module')"]
    with Job(tmp_path, {"steps": 3}, warm=broken) as job:
        assert job.status() == 0
        said = [line for line in job.said() if "warm process" in line]
        assert said == [
            "the warm process does not answer; from now on each worker imports for "
            f"itself, see {job.logs / 'warm.log'}"
        ]
        assert (job.logs / "warm.log").read_text() == "no such module\n"
