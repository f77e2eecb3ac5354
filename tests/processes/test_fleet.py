"""A real fleet on this machine: two learners, two servers, and what kills do to it."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launched import default_signals, ending, wait_until
from slurm_cluster import slurm_cluster
from test_jobs import ends
from tiny_runs import COMMAND, command
from two_hosts import ssh_daemon, two_hosts

from meshloom.launch.fleet_status import last_commit
from meshloom.trainer.record import metrics

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

NUM_STEPS = 300
SECONDS = 240  # a fleet takes about 60 on two quiet cores
SERVICE = ("coordinator", "server 0", "server 1")


class RealFleet:
    def __init__(self, folder: Path, process: subprocess.Popen):
        self.run, self.output, self.process = folder / "run", folder / "output", process

    def events(self, *folder: str) -> list[dict]:
        file = self.run.joinpath(*folder, "logs", "supervisor.jsonl")
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line) for line in lines]

    def pids(self) -> list[int]:
        """Everything that was started, and by whom ever."""
        found = [*self.events(), *self.events("learners", "0")]
        found += self.events("learners", "1")
        return [pid for event in found for pid in event.get("pids", [])]

    def pid_of(self, name: str) -> int:
        """Returns the newest process of a role; of "learner I" its training process."""
        if name.startswith("learner"):
            events = self.events("learners", name.split()[1])
            starts = [e for e in events if e["event"] == "start"]
        else:
            starts = [e for e in self.events() if e.get("name") == name]
            starts = [e for e in starts if e["event"] == "start"]
        return starts[-1]["pids"][0]

    def starts(self) -> dict[str, int]:
        names = [e["name"] for e in self.events() if e["event"] == "start"]
        return {name: names.count(name) for name in names}

    def until(self, done) -> None:
        wait_until(done, self.process, self.output, SECONDS)

    def until_commit(self, number: int) -> None:
        self.until(lambda: (last_commit(self.run) or 0) >= number)

    def status(self) -> int:
        status = self.process.wait(SECONDS)
        assert self.pids() and all(ends(pid) for pid in self.pids()), self.text
        return status

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")


@pytest.fixture
def fleet(tmp_path, request) -> Iterator[RealFleet]:
    """Args:
    request: may have more flags of train.
    """
    flags = ["--learners", "2", "--servers", "2", "--cpu-devices", "1"]
    flags += ["--save-commits", "20"]
    train = ["train", "--config", "drill", "--steps", str(NUM_STEPS)]
    train += ["--workdir", str(tmp_path / "run"), *getattr(request, "param", [])]
    with open(tmp_path / "output", "wb") as output, default_signals():
        process = subprocess.Popen(
            [COMMAND, "launch", "local", *flags, "--", *train],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    with ending(process):
        yield RealFleet(tmp_path, process)


def check_done(fleet: RealFleet, steps: int = NUM_STEPS) -> None:
    assert fleet.status() == 0, fleet.text
    rows = metrics.read(fleet.run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert rows[-1]["loss"] < rows[0]["loss"]
    final = json.loads((fleet.run / "final.json").read_text())
    assert final["version"] == steps


def test_a_learner_that_is_killed_comes_back_alone(fleet):
    fleet.until_commit(5)
    os.kill(fleet.pid_of("learner 1"), signal.SIGKILL)
    check_done(fleet)
    assert set(fleet.starts().values()) == {1}  # its own supervisor restarted it
    (restart,) = [e for e in fleet.events("learners", "1") if e["event"] == "restart"]
    assert "was killed by signal 9 (SIGKILL)" in restart["reason"]
    assert not [e for e in fleet.events("learners", "0") if e["event"] == "restart"]


SLOWLY = ["--steps", "160", "--set", "exchange.wait=0.2"]


@pytest.mark.parametrize("fleet", [SLOWLY], indirect=True)
def test_a_learner_that_stands_still_is_left_behind_and_comes_back(fleet):
    """Longer than its lease; all others, the service too, only for a moment."""

    def alone() -> bool:
        return metrics.read(fleet.run / "metrics.jsonl")[-1]["learners"] == 1

    fleet.until_commit(5)
    moment = [fleet.pid_of(name) for name in (*SERVICE, "learner 0")]
    sleeper = fleet.pid_of("learner 1")
    for pid in (*moment, sleeper):
        os.kill(pid, signal.SIGSTOP)
    time.sleep(3)
    for pid in moment:
        os.kill(pid, signal.SIGCONT)
    fleet.until(alone)
    os.kill(sleeper, signal.SIGCONT)
    check_done(fleet, 160)
    assert set(fleet.starts().values()) == {1}
    assert not [e for e in fleet.events("learners", "0") if e["event"] == "restart"]
    (restart,) = [e for e in fleet.events("learners", "1") if e["event"] == "restart"]
    assert "exited with code 69" in restart["reason"]
    rows = metrics.read(fleet.run / "commits.jsonl")
    parts = [part for row in rows for part in row["contributions"]]
    found = {(part["learner"], part["incarnation"]) for part in parts}
    assert found == {(0, 1), (1, 1), (1, 2)}  # it waits for nobody, and comes back
    replayed = command("rounds", "replay", str(fleet.run), timeout=SECONDS)
    assert "are bit-equal" in replayed.stdout, replayed.stdout + replayed.stderr


@pytest.mark.parametrize(
    "role, restarted",
    [
        ("coordinator", SERVICE[:1]),
        ("server 1", SERVICE),
    ],
)
def test_a_service_that_loses_a_process_comes_back(role, restarted, fleet):
    fleet.until_commit(30)
    os.kill(fleet.pid_of(role), signal.SIGKILL)
    check_done(fleet)
    assert {name for name, n in fleet.starts().items() if n == 2} == set(restarted)


@pytest.mark.slow
def test_a_coordinator_that_is_stopped_is_killed_and_comes_back(fleet):
    fleet.until_commit(30)
    os.kill(fleet.pid_of("coordinator"), signal.SIGSTOP)
    check_done(fleet)
    assert "coordinator gave no sign of life for 20 s; killing it" in fleet.text
    assert {name for name, n in fleet.starts().items() if n == 2} == {"coordinator"}
    assert not [e for e in fleet.events("learners", "0") if e["event"] == "restart"]


def test_told_to_stop_everyone_saves(fleet):
    fleet.until_commit(5)
    fleet.process.send_signal(signal.SIGTERM)
    assert fleet.status() == 75, fleet.text
    assert "every learner and the service saved and exited" in fleet.text
    version = last_commit(fleet.run)
    assert (fleet.run / "service" / str(version) / "manifest.json").exists()


def test_killed_it_leaves_nobody_behind(fleet):
    fleet.until_commit(5)
    fleet.process.send_signal(signal.SIGKILL)
    assert fleet.status() == -signal.SIGKILL
    assert len(fleet.pids()) >= 7


# On two hosts: the service runs on the first, and each has a learner.


@pytest.mark.parametrize("target", ["ssh", "slurm"])
def test_a_fleet_on_two_hosts(target, tmp_path):
    run, output = tmp_path / "run", tmp_path / "output"
    train = ["train", "--config", "drill", "--steps", "8", "--workdir", str(run)]
    with two_hosts(tmp_path) as (a, b), contextlib.ExitStack() as stack:
        flags, env = ["--nodes", "2"], {}
        if target == "slurm":
            env = stack.enter_context(slurm_cluster(a, b))
        else:
            ssh = ssh_daemon(b, tmp_path / "ssh")
            flags = ["--hosts", f"{a.name},{b.name}", "--ssh", " ".join(ssh)]
        argv = [COMMAND, "launch", target, *flags, "--learners", "2", "--cpu-devices"]
        fleet = a.start([*argv, "1", "--", *train], output, env)
        with ending(fleet):
            status = fleet.wait(SECONDS)
        assert status == 0, output.read_text(errors="replace")
    rows = metrics.read(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 9))
    for number, host in enumerate((a, b)):
        log = run / "learners" / str(number) / "logs" / "worker-0.log"
        assert f"process 0 of 1 on host {host.name}, " in log.read_text()
