"""Joining a job: its description is complete, or there is none."""

import os
import socket
import sys

import jax
import jobs
import pytest

from meshloom.launch import rendezvous
from meshloom.trainer.job import joining

JOB = {
    "MESHLOOM_COORDINATOR": "127.0.0.1:1234",
    "MESHLOOM_NUM_PROCESSES": "1",
    "MESHLOOM_PROCESS_ID": "0",
}


@pytest.fixture
def joined(monkeypatch):
    """Records calls of jax.distributed.initialize instead of making them."""
    calls = []
    monkeypatch.setattr(
        jax.distributed, "initialize", lambda *args, **kw: calls.append((args, kw))
    )
    monkeypatch.setattr(rendezvous, "meet", lambda place, host, bind, has_gpus: (host,))
    for name in JOB:
        monkeypatch.delenv(name, raising=False)
    return calls


def describe(monkeypatch, job):
    for name, value in job.items():
        monkeypatch.setenv(name, value)


def test_no_description_is_no_job(joined):
    group = joining.join(os.environ)
    assert joined == [] and (group.index, group.size) == (0, 1)


@pytest.mark.parametrize("missing", JOB)
def test_half_a_description_is_an_error(joined, monkeypatch, missing):
    job = JOB | {"MESHLOOM_NUM_PROCESSES": "2"}
    describe(monkeypatch, {k: v for k, v in job.items() if k != missing})
    with pytest.raises(ValueError, match=f"{missing} is not set.*or none"):
        joining.join(os.environ)
    assert joined == []


@pytest.mark.parametrize("name", ["MESHLOOM_NUM_PROCESSES", "MESHLOOM_PROCESS_ID"])
@pytest.mark.parametrize("value", ["two", "-1", ""])
def test_numbers_must_be_numbers(joined, monkeypatch, name, value):
    describe(monkeypatch, JOB | {name: value})
    with pytest.raises(ValueError, match=f"{name} must be a whole number"):
        joining.join(os.environ)
    assert joined == []


def test_joins_the_job_described(joined, monkeypatch):
    describe(monkeypatch, JOB)
    joining.join(os.environ)
    ((args, settings),) = joined
    assert args == ("127.0.0.1:1234", 1, 0)
    # Not on all addresses of this machine, which is jax's default.
    assert settings["coordinator_bind_address"] == "127.0.0.1:1234"


def test_a_different_number_of_processes_than_described(joined, monkeypatch):
    describe(monkeypatch, JOB | {"MESHLOOM_NUM_PROCESSES": "2"})
    with pytest.raises(ValueError, match="expected 2 processes, got 1"):
        joining.join(os.environ)


BARRIER = """
import os, time
from meshloom.launch.exit_codes import Unreachable
from meshloom.trainer.job import joining

group = joining.join(os.environ)
if group.index == 1:
    time.sleep(6)
    os._exit(0)
try:
    group.wait("the bridge", seconds=1)
except Unreachable as error:
    print(error, flush=True)
time.sleep(2)  # process 0 serves the store; the others may have begun to wait later
os._exit(0)
"""


@pytest.mark.processes
def test_a_barrier_names_who_did_not_arrive():
    argv = [sys.executable, "-c", BARRIER]
    env = {"JAX_PLATFORMS": "cpu"}
    first, second, third = jobs.run_job(3, 1, argv, timeout=120, env=env)
    for process in (first, third):
        assert (
            "waited 1 s for every process of this job at 'the bridge', but process 1 "
            f"on {socket.gethostname()} did not arrive."
        ) in process.stdout, process
    assert "waited" not in second.stdout


@pytest.mark.processes
@pytest.mark.parametrize("started", [(0, 2), (1, 2)])
def test_a_process_that_never_starts_is_named(started, tmp_path):
    """By each process that did start, in one line, and not by an abort of jax."""
    env = {"JAX_PLATFORMS": "cpu", "MESHLOOM_JOIN_SECONDS": "5"}
    env |= jobs.job_env(3) | {"MESHLOOM_HOSTS": "localhost,localhost,localhost"}
    envs = [env | {"MESHLOOM_PROCESS_ID": str(number)} for number in started]
    argv = [sys.executable, "-m", "meshloom.trainer.cli", "train"]
    found = jobs.run_processes(envs, 1, [*argv, "--workdir", str(tmp_path / "w")], 60)
    address = env["MESHLOOM_COORDINATOR"]
    for process, number in zip(found, started, strict=True):
        assert (process.status, process.stderr.count("\n")) == (69, 1), process
        assert f"process {number} of 3 on host {socket.gethostname()}" in process.stdout
        message = (
            f"5 s for all 3 processes of this job at {address}, but process 1 on "
            "localhost did not join"
            if 0 in started
            else f"tried for 5 s to reach process 0 at {address}: Connection refused"
        )
        assert message in process.stderr


LISTENING = """
import os
from meshloom.trainer.job import joining

group = joining.join(os.environ)
if group.index == 0:
    port = int(os.environ["MESHLOOM_COORDINATOR"].split(":")[1])
    rows = [r.split() for f in ("tcp", "tcp6") for r in open(f"/proc/net/{f}")]
    print([r[1] for r in rows if r[3] == "0A" and r[1].endswith(f":{port:04X}")])
group.wait("seen")
"""


@pytest.mark.processes
def test_the_coordinator_listens_at_its_own_address_and_is_reached_directly():
    argv = [sys.executable, "-c", LISTENING]
    job = jobs.job_env(2)
    # A proxy that does not answer; many clusters have one for outside connections.
    env = {"JAX_PLATFORMS": "cpu", "http_proxy": "http://127.0.0.1:9"}
    port = int(job["MESHLOOM_COORDINATOR"].split(":")[1])
    envs = [job | env | {"MESHLOOM_PROCESS_ID": str(n)} for n in (0, 1)]
    first, second = jobs.run_processes(envs, 1, argv, timeout=120)
    assert (first.status, second.status) == (0, 0), (first, second)
    assert first.stderr == second.stderr == ""
    # 127.0.0.1 as an IPv6 address.
    only = f"['0000000000000000FFFF00000100007F:{port:04X}']"
    assert only in first.stdout, first.stdout


def test_a_host_whose_name_does_not_resolve(joined, monkeypatch):
    """The error of jax 0.10.2 if the host name is not in /etc/hosts."""

    def start():
        raise RuntimeError(
            "Unable to initialize backend 'cpu': [enforce fail at external/gloo/gloo/"
            "transport/tcp/device.cc:99] rv == 0. -2 vs 0"
        )

    describe(monkeypatch, JOB)
    monkeypatch.setattr(jax, "process_count", start)
    with pytest.raises(ValueError, match="the name of this host, .* does not resolve"):
        joining.join(os.environ)
