"""Joining a job: all of its description, or none."""

import sys

import jax
import jobs
import pytest

from meshloom.trainer import distributed

JOB = {
    "MESHLOOM_COORDINATOR": "127.0.0.1:1234",
    "MESHLOOM_NUM_PROCESSES": "1",
    "MESHLOOM_PROCESS_ID": "0",
}


@pytest.fixture
def joined(monkeypatch):
    """The calls of jax.distributed.initialize, none of which is made."""
    calls = []
    monkeypatch.setattr(
        jax.distributed, "initialize", lambda *args, **kw: calls.append((args, kw))
    )
    for name in JOB:
        monkeypatch.delenv(name, raising=False)
    return calls


def describe(monkeypatch, job):
    for name, value in job.items():
        monkeypatch.setenv(name, value)


def test_no_description_is_no_job(joined):
    distributed.initialize()
    assert joined == []


@pytest.mark.parametrize("missing", JOB)
def test_half_a_description_is_an_error(joined, monkeypatch, missing):
    describe(monkeypatch, {k: v for k, v in JOB.items() if k != missing})
    with pytest.raises(ValueError, match=f"{missing} is not set.*or none"):
        distributed.initialize()
    assert joined == []


@pytest.mark.parametrize("name", ["MESHLOOM_NUM_PROCESSES", "MESHLOOM_PROCESS_ID"])
@pytest.mark.parametrize("value", ["two", "-1", ""])
def test_numbers_must_be_numbers(joined, monkeypatch, name, value):
    describe(monkeypatch, JOB | {name: value})
    with pytest.raises(ValueError, match=f"{name} must be a whole number"):
        distributed.initialize()
    assert joined == []


def test_joins_the_job_described(joined, monkeypatch):
    describe(monkeypatch, JOB)
    distributed.initialize()
    ((args, _),) = joined
    assert args == ("127.0.0.1:1234", 1, 0)


def test_another_number_of_processes_than_promised(joined, monkeypatch):
    describe(monkeypatch, JOB | {"MESHLOOM_NUM_PROCESSES": "2"})
    with pytest.raises(ValueError, match="expected 2 processes, got 1"):
        distributed.initialize()


MEETING = """
import os, time
from meshloom.trainer import distributed

distributed.initialize()
if os.environ["MESHLOOM_PROCESS_ID"] == "1":
    time.sleep(6)
    os._exit(0)
try:
    distributed.wait_for_all("the bridge", seconds=1)
except ValueError as error:
    print(error, flush=True)
os._exit(0)
"""


@pytest.mark.processes
def test_a_meeting_names_who_did_not_come():
    argv = [sys.executable, "-c", MEETING]
    env = {"JAX_PLATFORMS": "cpu"}
    first, second, third = jobs.run_job(3, 1, argv, timeout=120, env=env)
    for process in (first, third):
        assert (
            "waited 1 s for all processes of this job at 'the bridge', but process 1 "
            "did not come."
        ) in process.stdout, process
    assert "waited" not in second.stdout
