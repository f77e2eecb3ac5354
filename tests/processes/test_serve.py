"""`meshloom serve` with real processes on this machine, ended by SIGKILL if need be."""

import contextlib
import json
import os
import re
import signal
import subprocess

import numpy as np
import pytest
from authorities import Authority
from disks import small_disk
from services import (
    LIMIT,
    NUM_ROUNDS,
    Learner,
    Service,
    expected,
    play_to_the_end,
    spec,
)
from tiny_runs import COMMAND

from meshloom.service.wire.calls import Channel
from meshloom.service.wire.credentials import Tls
from meshloom.service.wire.errors import Refused, Unavailable
from meshloom.trainer.cli import main
from meshloom.trainer.program.digest import tree_digests

pytestmark = pytest.mark.fleets


@pytest.fixture
def service(tmp_path):
    made = Service(tmp_path)
    yield made
    made.close()


def final(service: Service, job: str = "run") -> dict:
    return json.loads((service.home() / job / "final.json").read_text())


def events_of(service: Service, folder: str = "service") -> list[dict]:
    text = (service.home(folder) / "events.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_two_jobs_share_one_service_and_do_not_meet(service):
    process = service.start("--once")
    jobs = [[Learner(service, i, job) for i in range(2)] for job in ("one", "two")]
    for learners in jobs:
        for learner in learners:
            learner.join()
    for learners in jobs:
        play_to_the_end(learners)
        np.testing.assert_allclose(learners[0].pull(NUM_ROUNDS), expected(), rtol=1e-6)
        digests = tree_digests({"w": learners[0].pull(NUM_ROUNDS)})
        assert final(service, learners[0].job)["digests"] == digests
    for learners in jobs:
        for learner in learners:
            learner.call("Leave", reason="done")
    assert process.wait(LIMIT) == 0, service.output()


def test_cleaning_removes_old_entries_and_the_blocks_of_a_finished_job(service, capfd):
    flags = ("--role", "coordinator", "--save-every", "1")
    service.start(*flags)
    service.start(
        *("--role", "server", "--coordinator", service.address()), folder="s0"
    )

    def clean(*more: str) -> list[str]:
        capfd.readouterr()
        assert main(["serve", "clean", f"{service.address()}/run", *more]) == 0
        out, err = capfd.readouterr()
        assert err == ""
        return out.splitlines()

    learners = [Learner(service, index) for index in range(2)]
    for learner in learners:
        learner.join()
    assert clean() == ["run: nothing to remove"]
    play_to_the_end(learners, until=4)
    (would,) = clean("--dry-run")
    (line,) = clean()
    assert re.fullmatch(r"run: removed \d+ entries \(\d+ bytes\) of the log: .*", line)
    assert would == line.replace("removed", "would remove")
    assert f"meshloom serve: {line}" in service.output()
    # It goes on from the shorter log, which has no entry of the first commits.
    os.killpg(service.processes[0].pid, signal.SIGKILL)
    service.processes[0].wait()
    service.start(*flags, "--bind", service.address())
    play_to_the_end(learners)
    assert [learner.incarnation for learner in learners] == [1, 1]
    np.testing.assert_allclose(learners[0].pull(NUM_ROUNDS), expected(), rtol=1e-6)
    rows = (service.home() / "run" / "commits.jsonl").read_text()
    steps = [json.loads(line)["step"] for line in rows.splitlines()]
    assert steps == list(range(1, NUM_ROUNDS + 1))
    for learner in learners:
        learner.call("Leave", reason="done")
    assert any("4 blocks (128 bytes) from the memory of s" in line for line in clean())
    with pytest.raises(Refused, match="this server has no job 'run'"):
        learners[0].pull(NUM_ROUNDS)
    learners[0].join()
    np.testing.assert_allclose(learners[0].pull(NUM_ROUNDS), expected(), rtol=1e-6)
    events = events_of(service)
    assert {row["role"] for row in events} == {"coordinator"}
    told = ("started", "server_joined", "opened", "joined", "left", "cleaned", "loaded")
    assert {*told, "done", "checkpoint"} <= {row["event"] for row in events}
    joined = [row for row in events if row["event"] == "joined"]
    who = [(row["job"], row["learner"], row["incarnation"]) for row in joined]
    assert who == [("run", 0, 1), ("run", 1, 1), ("run", 0, 2)]
    assert [row["event"] for row in events_of(service, "s0")] == ["started"]


def test_kill_9_of_everything_continues_from_the_checkpoint(service):
    service.start("--save-every", "2")
    learners = [Learner(service, index) for index in range(2)]
    for learner in learners:
        learner.join()
    play_to_the_end(learners, until=3)
    os.killpg(service.processes[-1].pid, signal.SIGKILL)
    service.processes[-1].wait()
    with pytest.raises(Unavailable):
        learners[0].call("Next", round=3)
    service.start("--save-every", "2")
    for learner in learners:
        learner.open()
    play_to_the_end(learners)
    assert [learner.incarnation for learner in learners] == [2, 2]
    np.testing.assert_allclose(learners[0].pull(NUM_ROUNDS), expected(), rtol=1e-6)
    assert "continues from version 2" in service.output()
    rows = (service.home() / "run" / "metrics.jsonl").read_text()
    steps = [json.loads(line)["step"] for line in rows.splitlines()]
    assert steps == list(range(1, NUM_ROUNDS + 1))


def test_kill_9_of_the_coordinator_alone_loses_nothing(service):
    flags = ("--role", "coordinator", "--servers", "2", "--save-every", "100")
    service.start(*flags)
    address = service.address()
    for name in ("a", "b"):
        service.start("--role", "server", "--coordinator", address, folder=name)
    learners = [Learner(service, index) for index in range(2)]
    for learner in learners:
        learner.join()
    play_to_the_end(learners, until=3)
    os.killpg(service.processes[0].pid, signal.SIGKILL)
    service.processes[0].wait()
    coordinator = service.start(*flags, "--bind", address)
    for learner in learners:
        learner.open()
    play_to_the_end(learners)
    assert [learner.incarnation for learner in learners] == [1, 1]
    np.testing.assert_allclose(learners[0].pull(NUM_ROUNDS), expected(), rtol=1e-6)
    assert "abandoned" not in service.output()
    # And servers that are killed stop the service aloud; one of them may hold no block.
    for server in service.processes[1:3]:
        os.killpg(server.pid, signal.SIGKILL)
    assert coordinator.wait(LIMIT) == 69
    assert "is lost: not heard of for 10 s" in service.output()
    assert "Restart the service: it continues from the checkpoint of version" in (
        service.output()
    )


def test_sigterm_saves_and_leaves_with_75(service):
    process = service.start("--save-every", "100")
    learners = [Learner(service, index) for index in range(2)]
    for learner in learners:
        learner.join()
    play_to_the_end(learners, until=3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT) == 75, service.output()
    assert "run: saved at version 3" in service.output()
    assert not (service.home() / "address").exists()
    manifest = service.home() / "run" / "service" / "3" / "manifest.json"
    assert json.loads(manifest.read_text())["version"] == 3
    service.start()
    for learner in learners:
        learner.open()
    play_to_the_end(learners)
    np.testing.assert_allclose(learners[0].pull(NUM_ROUNDS), expected(), rtol=1e-6)


def test_a_folder_or_port_in_use_is_one_line(service, tmp_path):
    service.start()
    address = service.address()
    process = service.start()
    assert process.wait(LIMIT) == 2
    last = service.output().splitlines()[-1]
    assert "another coordinator is writing this log" in last
    status, error = run("--bind", address, folder=tmp_path / "other")
    assert status == 2 and len(error.splitlines()) == 1
    assert f"cannot bind {address}: is the port taken" in error


def test_a_full_disk_is_named_and_once_there_is_space_it_goes_on(tmp_path):
    """That of the coordinator: its log, its files and the checkpoints."""
    (tmp_path / "disk").mkdir()
    with small_disk(tmp_path / "disk", 3) as disk:
        service = Service(tmp_path / "disk", disk.around, disk.root)
        with contextlib.closing(service):
            process = service.start("--save-every", "2")
            learners = [Learner(service, index) for index in range(2)]
            for learner in learners:
                learner.join()
            play_to_the_end(learners, until=3)
            disk.fill()
            with pytest.raises(Unavailable, match="Free some space"):
                play_to_the_end(learners)
            assert process.wait(LIMIT) == 2
            (error,) = [x for x in service.output().splitlines() if "meshloom: " in x]
            assert re.search(r"/run|coordinator.db", error), error
            assert "Traceback" not in service.output()
            disk.empty()
            service.start("--save-every", "2")
            for learner in learners:
                learner.open()
            play_to_the_end(learners)
            found = learners[0].pull(NUM_ROUNDS)
    np.testing.assert_allclose(found, expected(), rtol=1e-6)


def test_a_full_disk_under_its_own_output_changes_no_status(tmp_path):
    """As where logs are on the disk that is full: the status still says it."""
    with open("/dev/full", "wb") as full:
        process = subprocess.run(
            [COMMAND, "serve", "--folder", str(tmp_path), "--servers", "0"],
            stdout=full,
            stderr=full,
            timeout=LIMIT,
        )
    assert process.returncode == 2


def strangers(service: Service, flags: list[str], friend: dict, others: dict) -> None:
    """Checks that only a friend gets in, at the coordinator and at its server."""
    service.start(*flags)
    channel = Channel(service.address(), **friend)
    (server,) = channel.call("OpenJob", spec(), 20)["servers"].values()
    for name, shown in others.items():
        for address in (service.address(), server):
            stranger = Channel(address, **shown)
            calls = {
                "Status": lambda: stranger.call("Status", {}, 5),  # noqa: B023
                "Push": lambda: stranger.push("run", 0, 0, 0, [], 5),  # noqa: B023
                "Pull": lambda: stranger.pull("run", 0, [], {}, 5),  # noqa: B023
            }
            for method, call in calls.items():
                # The coordinator has no streams, which a stranger is told without TLS.
                refused = "wrong or missing token|has no method|no answer to"
                with pytest.raises((Refused, Unavailable), match=refused) as caught:
                    call()
                if method == "Status" or address == server:
                    assert "has no method" not in str(caught.value), (name, method)
            stranger.close()
    assert channel.call("Status", {}, 5)["jobs"]["run"]["learners"] == 0
    channel.close()


def test_strangers_without_the_token_are_refused(service, tmp_path):
    (token := tmp_path / "token").write_text("a secret\n")
    others = {"none": {}, "wrong": {"token": "a secre"}}
    flags = ["--token-file", str(token)]
    strangers(service, flags, {"token": "a secret"}, others)


def test_strangers_without_a_certificate_are_refused(service, tmp_path):
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    own, other, client = ours.tls("service"), theirs.tls("stranger"), ours.tls("client")
    others = {
        "no TLS": {},
        "another authority": {"tls": other},
        "a certificate of another authority": {
            "tls": Tls(ca=own.ca, cert=other.cert, key=other.key)
        },
    }
    flags = ["--tls-ca", str(own.ca), "--tls-cert", str(own.cert)]
    strangers(service, [*flags, "--tls-key", str(own.key)], {"tls": client}, others)


def run(*flags: str, folder) -> tuple[int, str]:
    """Runs the command with flags that it refuses."""
    done = subprocess.run(
        [COMMAND, "serve", "--folder", str(folder), *flags],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    return done.returncode, done.stderr.strip()


BAD_FLAGS = {
    "no coordinator": (["--role", "server"], "give the address of the coordinator"),
    "wildcard": (["--bind", "0.0.0.0:0"], "it must be one at which they reach"),
    "open": (["--bind", "10.0.0.1:0"], "so set a token or TLS files"),
    "half of TLS": (["--tls-ca", "ca.pem"], "--tls-cert is missing: TLS needs all"),
    "no servers": (["--servers", "0"], "--servers must be >= 1, got 0"),
    "no bind": (["--bind", "here"], "expected HOST:PORT"),
}


@pytest.mark.parametrize("bad", BAD_FLAGS)
def test_flags_that_cannot_work_are_one_line(tmp_path, bad):
    flags, message = BAD_FLAGS[bad]
    status, error = run(*flags, folder=tmp_path)
    assert status == 2 and message in error and len(error.splitlines()) == 1, error
