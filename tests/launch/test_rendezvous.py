"""The rendezvous of processes before jax joins them: one that is missing is named."""

import concurrent.futures
import dataclasses
import json
import socket
import threading
import time

import pytest

from meshloom.launch import rendezvous
from meshloom.launch.exit_codes import Unreachable
from meshloom.launch.process_env import ProcessEnv

HERE = "127.0.0.1"


@pytest.fixture
def job():
    """The place of process 0 of a job of 3, at a port that is free."""
    with socket.socket() as probe:
        probe.bind((HERE, 0))
        port = probe.getsockname()[1]
    return ProcessEnv(f"{HERE}:{port}", 3, 0, "a test", join_seconds=5)


def of(job: ProcessEnv, number: int, **changes) -> ProcessEnv:
    return dataclasses.replace(job, process_id=number, **changes)


def meet_all(*places: ProcessEnv, late: float = 0.0, with_gpus=()) -> list:
    """What each process gets, answer or error; process 0 comes late."""

    def meet(place: ProcessEnv):
        if place.process_id == 0:
            time.sleep(late)
        try:
            has_gpus = place.process_id in with_gpus
            name = f"h{place.process_id}"
            return rendezvous.meet(place, name, HERE, has_gpus=has_gpus)
        except (ValueError, Unreachable) as error:
            return str(error)

    with concurrent.futures.ThreadPoolExecutor(len(places)) as pool:
        return list(pool.map(meet, places))


def test_all_learn_the_hosts_and_the_port_is_free_again(job):
    for late in (0.0, 0.3):
        found = meet_all(job, of(job, 1), of(job, 2), late=late)
        assert found == [("h0", "h1", "h2")] * 3
        with socket.socket() as taken:  # at once, and without any option
            taken.bind(job.address)


def test_who_does_not_come_is_named_to_all(job):
    job = dataclasses.replace(job, join_seconds=1, hosts=("a", "b", "c"))
    first, second = meet_all(job, of(job, 1))
    assert first.startswith(
        f"waited 1 s for all 3 processes of this job at {job.coordinator}, but process "
        "2 on c did not join."
    )
    assert "127.0.0.1 here, which only this host can reach" in first
    assert second == f"process 0 of this job says: {first}"


def test_process_0_that_does_not_come_is_named(job):
    job = of(job, 1, join_seconds=1)
    (found,) = meet_all(job)
    assert f"process 1 on h1 tried for 1 s to reach process 0 at {HERE}" in found
    assert "Connection refused" in found
    assert "127.0.0.1 can only be reached from process 0's own host" in found


def test_two_with_one_number(job):
    found = meet_all(job, of(job, 1), of(job, 1))
    assert "two processes of this job have index 1: one on h1" in found[0]
    assert all(found[0] in words for words in found[1:])


def test_two_sizes_of_a_job(job):
    first, second = meet_all(job, of(job, 1, num_processes=4))
    assert "process 1 on h1 expects 4 processes in this job, process 0 on h0 e" in first
    assert first in second


@pytest.mark.parametrize("number, words", [(0, "1 on h1"), (1, "0 on h0")])
def test_a_process_without_gpus_among_others(job, number, words):
    first, second = meet_all(job, of(job, 1), with_gpus=[number])
    assert f"process {words} has no usable GPU, but process {number} on" in first
    assert first in second


def test_strangers_and_those_who_leave_do_not_count(job):
    def disturb():
        while True:  # until process 0 listens
            try:
                stranger = socket.create_connection(job.address)
                break
            except OSError:
                time.sleep(0.01)
        stranger.sendall(b"GET / HTTP/1.1\n")
        assert stranger.recv(10) == b""
        with socket.create_connection(job.address) as leaver:
            greeting = {"process": 2, "host": "gone", "count": 4, "gpus": False}
            leaver.sendall(json.dumps(greeting).encode() + b"\n")
            time.sleep(0.1)
        stranger.close()

    thread = threading.Thread(target=disturb)
    thread.start()
    job = dataclasses.replace(job, join_seconds=1, num_processes=4)
    first, _ = meet_all(job, of(job, 1))
    thread.join()
    assert "but process 2, process 3 did not join" in first


def test_a_port_that_is_taken(job):
    with socket.socket() as taken:
        taken.bind(job.address)
        taken.listen()
        with pytest.raises(
            Unreachable, match="is in use by another program on this ho"
        ):
            rendezvous.meet(job, "h0", HERE)


def test_process_0_must_be_on_the_coordinators_host(job):
    away = dataclasses.replace(job, coordinator="192.0.2.77:1234")
    with pytest.raises(ValueError, match="process 0 runs on host .* is another machin"):
        rendezvous.resolve(away)
    assert rendezvous.resolve(job) == HERE


def test_a_name_that_nobody_knows(job):
    unknown = dataclasses.replace(
        job, coordinator="no.such.host.invalid:1", join_seconds=0
    )
    with pytest.raises(Unreachable, match="'no.such.host.invalid' has no address here"):
        rendezvous.resolve(unknown)


def test_a_name_that_means_loopback_here_does_not_serve_several_hosts(job, monkeypatch):
    answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 1234))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kw: answer)
    named = dataclasses.replace(job, coordinator="node0:1234")
    assert rendezvous.resolve(named) == "127.0.1.1"
    with pytest.raises(ValueError, match="node0, which is 127.0.1.1 here: other hosts"):
        rendezvous.resolve(dataclasses.replace(named, num_hosts=2))


def test_the_others_wait_until_jax_listens(job):
    """A gRPC client that is refused once waits a second before it tries again."""
    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(rendezvous.wait_for_service, of(job, 1))
        time.sleep(0.2)
        assert not waiting.done()
        with socket.create_server(job.address):
            waiting.result(timeout=5)
    assert 0.2 <= time.monotonic() - began < 1
