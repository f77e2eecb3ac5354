"""Processes that stand still (SIGSTOP) for a while, shorter and longer than a lease."""

import contextlib
import json
import os
import signal
import subprocess
import time

import numpy as np
import pytest
from services import LIMIT, NUM_ROUNDS, Learner, Service, expected, play_to_the_end

from meshloom.service.coordinator.settings import Settings
from meshloom.service.wire.errors import Unavailable

pytestmark = pytest.mark.fleets
LEASE = Settings().lease_seconds


@pytest.fixture
def service(tmp_path):
    """A coordinator, two servers and two learners that have done two rounds."""
    with contextlib.closing(Service(tmp_path)) as made:
        made.start(*COORDINATOR)
        for name in ("a", "b"):
            server(made, name)
        yield made


COORDINATOR = ("--role", "coordinator", "--servers", "2", "--save-every", "2")


def server(service: Service, name: str) -> subprocess.Popen:
    address = service.address()
    return service.start("--role", "server", "--coordinator", address, folder=name)


def begun(service: Service) -> list[Learner]:
    learners = [Learner(service, index) for index in range(2)]
    for learner in learners:
        learner.join()
    play_to_the_end(learners, until=2)
    return learners


@contextlib.contextmanager
def paused(*processes: subprocess.Popen):
    for process in processes:
        os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            os.kill(process.pid, signal.SIGCONT)


def check_end(learners: list[Learner], incarnation: int) -> None:
    play_to_the_end(learners)
    assert [learner.incarnation for learner in learners] == [incarnation] * 2
    np.testing.assert_allclose(learners[0].pull(NUM_ROUNDS), expected(), rtol=1e-6)


@pytest.mark.parametrize(
    "seconds", [3.0, pytest.param(LEASE + 3, marks=pytest.mark.slow)]
)
def test_a_service_that_stands_still_as_a_whole_goes_on(service, seconds):
    learners = begun(service)
    with paused(*service.processes):
        time.sleep(seconds)
    check_end(learners, 1)
    assert "lost" not in service.output() and "left" not in service.output()


@pytest.mark.slow  # tests/coordinator has it in virtual time
def test_a_coordinator_that_was_paused_longer_than_a_lease_loses_nobody(service):
    """It heard nobody in that time, and knows it."""
    learners = begun(service)
    with paused(service.processes[0]):
        with pytest.raises(Unavailable, match="no answer to Next in time"):
            learners[0].channel.call("Next", {"job": "run"}, 1)
        time.sleep(LEASE + 2)
    check_end(learners, 1)
    assert "lost" not in service.output() and "not heard" not in service.output()


def test_a_server_that_was_paused_longer_than_a_lease_does_no_harm(service):
    """The service stops aloud, starts anew, and goes on once the server wakes up."""
    learners = begun(service)
    address = service.address()
    coordinator, sleeper, _ = service.processes
    with paused(sleeper):
        assert coordinator.wait(LIMIT) == 69
        assert "is lost: not heard of for 10 s" in service.output()
        service.start(*COORDINATOR, "--bind", address)
        with pytest.raises(Unavailable, match="waiting for servers: 1 of 2"):
            learners[0].open()
    for learner in learners:
        learner.open()
    check_end(learners, 1)
    assert "abandoned" not in service.output()
    commits = (service.home() / "run" / "commits.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in commits] == [*range(1, NUM_ROUNDS + 1)]
