"""A real fleet on this machine: two learners, two servers, and what kills do to it."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator

import pytest
from launched import ending
from real_fleets import SECONDS, SMALL, RealFleet, check_replay, real_fleet
from slurm_cluster import slurm_cluster
from tiny_runs import COMMAND, sets_of
from two_hosts import ssh_daemon, two_hosts

from meshloom.launch.fleet_status import last_commit
from meshloom.trainer.cli import main
from meshloom.trainer.record import metrics

pytestmark = [pytest.mark.fleets, pytest.mark.timeout(400)]

NUM_STEPS = 100
SERVICE = ("coordinator", "server 0", "server 1")
# Rounds that take their time, so that whoever comes back still finds some.
SLOWLY = sets_of("exchange.wait=0.4")


@pytest.fixture
def fleet(tmp_path, request) -> Iterator[RealFleet]:
    """Args:
    request: may have more flags of train.
    """
    flags = ["--cpu-devices", "1", "--save-commits", "10"]
    train = [*SMALL, "--steps", str(NUM_STEPS), *SLOWLY, *getattr(request, "param", [])]
    with real_fleet(tmp_path, train, flags=flags) as fleet:
        yield fleet


def check_done(fleet: RealFleet) -> None:
    assert fleet.status() == 0, fleet.text
    rows = metrics.read(fleet.run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1))
    assert rows[-1]["loss"] < rows[0]["loss"]
    final = json.loads((fleet.run / "final.json").read_text())
    assert final["version"] == NUM_STEPS


@pytest.mark.parametrize(
    "fleet",
    [sets_of('exchange.push="topk:0.01+int8"', 'exchange.pull="int8"')],
    indirect=True,
)
def test_whoever_is_killed_comes_back(fleet):
    """One after the other; a learner comes back with what it had not sent yet."""
    fleet.until_saved(1)
    fleet.kill("learner 1")
    fleet.until(lambda: (1, 2) in fleet.who())
    assert set(fleet.starts().values()) == {1}  # its own supervisor restarted it
    (restart,) = fleet.restarts(1)
    assert "was killed by signal 9 (SIGKILL)" in restart["reason"]
    joined = [row for row in fleet.ledger(1) if row["event"] == "joined"]
    assert joined[-1]["optimizer_step"] > 0

    # From here on the log begins with a snapshot.
    fleet.until_commit(31)
    address = (fleet.run / "service" / "log" / "address").read_text().strip()
    token = str(fleet.run / "logs" / "token")
    assert main(["serve", "clean", address, "--token-file", token]) == 0
    fleet.until(lambda: "the oldest checkpoint, has what they led to" in fleet.text)
    before = last_commit(fleet.run)
    fleet.kill("coordinator")
    fleet.until_commit(before + 3)
    starts = fleet.starts()
    assert {name for name, n in starts.items() if n == 2} == {"coordinator"}
    assert not fleet.restarts(0) and len(fleet.restarts(1)) == 1

    # With one of its servers the service loses its state, and starts as a whole.
    fleet.until_service_saved(before)
    fleet.kill("server 1")
    fleet.until(lambda: (0, 2) in fleet.who())
    for name in SERVICE:
        starts[name] += 1
    check_done(fleet)
    assert fleet.starts() == starts
    assert fleet.num_busy_servers() == 2
    assert fleet.who() >= {(0, 1), (1, 1), (1, 2), (0, 2), (1, 3)}
    check_replay(fleet.run)


@pytest.mark.parametrize("fleet", [sets_of('exchange.push="int8"')], indirect=True)
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
    check_done(fleet)
    assert set(fleet.starts().values()) == {1} and not fleet.restarts(0)
    (restart,) = fleet.restarts(1)
    assert "exited with code 69" in restart["reason"]
    # It waits for nobody, and comes back.
    assert fleet.who() == {(0, 1), (1, 1), (1, 2)}
    check_replay(fleet.run)


@pytest.mark.slow
def test_a_coordinator_that_is_stopped_is_killed_and_comes_back(fleet):
    fleet.until_commit(15)
    os.kill(fleet.pid_of("coordinator"), signal.SIGSTOP)
    check_done(fleet)
    assert "coordinator sent no heartbeat for 20 s; killing it" in fleet.text
    assert {name for name, n in fleet.starts().items() if n == 2} == {"coordinator"}
    assert not fleet.restarts(0)


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
    train = ["train", *SMALL, "--steps", "8", "--workdir", str(run)]
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


@pytest.mark.slow
def test_a_server_that_is_killed_is_replaced_and_nobody_else_notices(tmp_path):
    """Two copies of each block, with AdamW's state; both servers of some blocks die."""
    flags = ["--cpu-devices", "1", "--servers", "3", "--copies", "2"]
    train = [*SMALL, "--steps", str(NUM_STEPS), *SLOWLY]
    with real_fleet(tmp_path, train, flags=flags) as fleet:
        for number, name in enumerate(("server 0", "server 1"), start=1):
            commit = last_commit(fleet.run) or 0
            fleet.until_commit(commit + 3)
            fleet.kill(name)
            fleet.until(lambda: fleet.text.count("copies of blocks in") >= 2 * number)  # noqa: B023
        check_done(fleet)
    assert "abandoned" not in fleet.text
    starts = {name: n for name, n in fleet.starts().items() if n > 1}
    assert starts == {"server 0": 2, "server 1": 2}
    assert fleet.who() == {(0, 1), (1, 1)}
    check_replay(fleet.run)
