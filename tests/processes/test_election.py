"""Coordinators that die, stop and stand by, with real processes and a real etcd.

The coordinator under test kills itself around the write of one commit, so the kill is
at exactly that place. Servers and learners live on.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from services import LIMIT, Learner, Service, spec, wait

from meshloom.service.wire.calls import Channel
from meshloom.service.wire.coordinators import reach
from meshloom.service.wire.errors import Unavailable
from meshloom.trainer.program.digest import tree_digests
from meshloom.trainer.verify.etcd_cluster import etcd_cluster

pytestmark = pytest.mark.fleets

NUM_ROUNDS = 8
LEASE = 3  # seconds
FLAGS = ("--role", "coordinator", "--servers", "1", "--save-every", "100")

MAIN = "import sys; from meshloom.trainer import cli; sys.exit(cli.main(sys.argv[1:]))"
# Ends or stops its own process before or after the commit of a version is written.
# A blind one does not notice that it was deposed, so that only fences are left.
MORTAL = """
import os, signal, time
from meshloom.service.coordinator import log
from meshloom.service.store import election
when, version, name, *blind = os.environ["FATE"].split()
append, fatal = log.Log.append_all, {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
def meet_fate():
    os.kill(os.getpid(), fatal[name])
    time.sleep(1)  # another thread may take the signal, and this one go on a little
def mortal(self, job, entries):
    entries = list(entries)
    mine = any(k == "commit" and b["version"] == int(version) for k, b in entries)
    if mine and when == "before":
        meet_fate()
    numbers = append(self, job, entries)
    if mine and when == "after":
        meet_fate()
    return numbers
log.Log.append_all = mortal
if blind:
    from meshloom.service.coordinator import coordinator
    election.Leadership.check = coordinator.Coordinator.watch = lambda self: None
"""


class House(Service):
    """A service whose coordinators are started and killed one by one."""

    def __init__(self, folder, store: str | None = None):
        super().__init__(folder)
        self.store = () if store is None else ("--store", store)
        self.addresses: list[str] = []

    def coordinate(self, number: int, fate: str = "") -> subprocess.Popen:
        """Starts coordinator `number`, at the same address every time."""
        flags = (*FLAGS, *self.store)
        if number < len(self.addresses):
            flags += ("--bind", self.addresses[number])
        command = [sys.executable, "-c", (MORTAL if fate else "") + MAIN, "serve"]
        env = {**os.environ, "PYTHONUNBUFFERED": "1", "FATE": fate}
        home, log = self.folder / "service", self.folder / f"output-{number}"
        home.mkdir(exist_ok=True)
        with open(log, "ab") as output:
            process = subprocess.Popen(
                [*command, "--folder", str(home), *flags],
                env=env,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes.append(process)
        before = self.said(number).count(" at 127.0.0.1:")
        wait(lambda: self.said(number).count(" at 127.0.0.1:") > before)
        if number == len(self.addresses):
            (address, *_) = re.findall(r" at (127.0.0.1:\d+)", self.said(number))
            self.addresses.append(address)
        return process

    def said(self, number: int) -> str:
        return (self.folder / f"output-{number}").read_text()

    def serve(self) -> subprocess.Popen:
        addresses = ",".join(self.addresses)
        return self.start("--role", "server", "--coordinator", addresses, folder="s")


class Patient(Learner):
    """A learner that looks for the coordinator that leads, as a real one does."""

    service: House
    num_rounds = NUM_ROUNDS

    def open(self, message=None) -> dict:
        if not self.servers:
            self.channel = reach(",".join(self.service.addresses))
        message = spec(self.job, num_rounds=self.num_rounds)
        opened = self._patiently("OpenJob", message)
        self.servers = {n: Channel(a) for n, a in opened["servers"].items()}
        return opened

    def call(self, method: str, **message) -> dict:
        who = {"job": self.job, "learner": self.index, "incarnation": self.incarnation}
        return self._patiently(method, {**who, **message})

    def _patiently(self, method: str, message: dict) -> dict:
        deadline = time.monotonic() + LIMIT
        while True:
            try:
                return self.channel.call(method, message, 5)
            except Unavailable:
                assert time.monotonic() < deadline, method
                time.sleep(0.05)


def play(learners: list[Patient], until: int | None = None) -> None:
    """Plays all learners to the end, or until all have done a round."""
    states, deadline = [""], time.monotonic() + 3 * LIMIT
    while set(states) != {"done"}:
        assert time.monotonic() < deadline, states
        states = [learner.play() for learner in learners]
        assert "left" not in states  # nobody has to join again
        if until is not None and min(x.round for x in learners) >= until:
            return


def after(process: subprocess.Popen, *actions) -> list[float]:
    """Acts when a process has died; returns a list that will hold the time."""
    when: list[float] = []

    def run() -> None:
        process.wait()
        when.append(time.time())
        for action in actions:
            action()

    threading.Thread(target=run, daemon=True).start()
    return when


def check(house: House, learners: list[Patient]) -> list[dict]:
    """Everything is as if nobody had died; returns the rows of the commits."""
    rounds = learners[0].num_rounds
    value = np.ones((8, 4), np.float32)
    for _ in range(rounds):
        value = value - (value / 8 + np.float32(0.5))
    found = learners[0].pull(rounds)
    np.testing.assert_allclose(found, value, rtol=1e-5)
    final = house.folder / "service" / "run" / "final.json"
    wait(final.exists)
    assert json.loads(final.read_text())["digests"] == tree_digests({"w": found})
    text = (house.folder / "service" / "run" / "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    assert [row["step"] for row in rows] == list(range(1, rounds + 1))
    assert [learner.incarnation for learner in learners] == [1, 1]
    for number in range(len(house.addresses)):
        assert "abandoned" not in house.said(number)
    return rows


def seconds_to_commit(died: list[float], rows: list[dict]) -> float:
    return min(row["time"] for row in rows if row["time"] > died[0]) - died[0]


@pytest.fixture
def make_house(tmp_path):
    made: list[House] = []

    def make(store: str | None = None) -> House:
        made.append(House(tmp_path, store))
        return made[-1]

    yield make
    for house in made:
        house.close()


def test_killed_around_a_commit_with_the_embedded_store(make_house):
    house = make_house()
    first = house.coordinate(0, "before 2 kill")
    house.serve()
    learners = [Patient(house, index) for index in range(2)]
    seconds: list[list[float]] = []

    def restart_again() -> None:
        seconds.append(after(house.coordinate(0, "after 5 kill"), restart_last))

    def restart_last() -> None:
        house.coordinate(0)

    seconds.append(after(first, restart_again))
    for learner in learners:
        learner.join()
    play(learners)
    rows = check(house, learners)
    waits = [seconds_to_commit(died, rows) for died in seconds]
    address = house.folder / "service" / "address"
    before = address.stat().st_mtime_ns
    wait(lambda: address.stat().st_mtime_ns > before)  # a sign of life for `launch`
    print("seconds to the next commit, embedded:", waits)
    assert len(waits) == 2 and max(waits) < LIMIT


def test_killed_around_a_commit_with_etcd_that_loses_a_member(make_house, tmp_path):
    with etcd_cluster(tmp_path, 3) as etcd:
        house = make_house(etcd.url(options=f"?lease={LEASE}"))
        first = house.coordinate(0, "before 2 kill")
        second = house.coordinate(1, "after 5 kill")
        assert f"standing by at {house.addresses[1]}; {house.addresses[0]} leads" in (
            house.said(1)
        )
        house.serve()
        learners = [Patient(house, index) for index in range(2)]

        def restart() -> None:
            etcd.kill(0)
            wait(lambda: "leads, term 2" in house.said(1))  # not this one again
            house.coordinate(0)

        seconds = [after(first, restart), after(second)]
        for learner in learners:
            learner.join()
        play(learners)
        rows = check(house, learners)
        waits = [seconds_to_commit(died, rows) for died in seconds]
        print("seconds to the next commit, etcd:", waits)
        assert [first.returncode, second.returncode] == [-signal.SIGKILL] * 2
        assert "leads, term 2" in house.said(1) and "leads, term 3" in house.said(0)
        assert max(waits) < LIMIT


DEPOSED = {
    "before 3 stop": "is no longer the leader",
    "before 3 stop blind": r"\(term 1\) is no longer the leader: .*another one was "
    "elected",
    "after 3 stop blind": "this server obeys the coordinator of term 2, and was called "
    "by one of term 1, which is over",
}


@pytest.mark.parametrize("fate", DEPOSED)
def test_stopped_for_longer_than_its_lease_it_can_do_no_harm(
    make_house, tmp_path, fate
):
    with etcd_cluster(tmp_path) as etcd:
        house = make_house(etcd.url(options=f"?lease={LEASE}"))
        first = house.coordinate(0, fate)
        house.coordinate(1)
        house.serve()
        learners = [Patient(house, index) for index in range(2)]
        for learner in learners:
            learner.join()
        play(learners, until=6)  # under the second one, from version 3 on
        assert "leads, term 2" in house.said(1) and first.poll() is None
        first.send_signal(signal.SIGCONT)
        assert first.wait(LIMIT) == 69, house.said(0)
        assert re.search(DEPOSED[fate], house.said(0)), house.said(0)
        play(learners)
        check(house, learners)
        assert "term 3" not in house.said(1)  # nobody else was elected meanwhile


FAULTS = ("kill", "stop", "member", "both", "kill", "stop", "both", "member")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_deaths_in_a_row(make_house, tmp_path, monkeypatch):
    monkeypatch.setattr(Patient, "num_rounds", 2 * len(FAULTS) + 2)
    with etcd_cluster(tmp_path, 3) as etcd:
        house = make_house(etcd.url(options=f"?lease={LEASE}"))
        coordinators = [house.coordinate(number) for number in range(2)]
        house.serve()
        learners = [Patient(house, index) for index in range(2)]
        for learner in learners:
            learner.join()
        for number, fault in enumerate(FAULTS):
            play(learners, until=2 * number + 1)
            leader, member = house.addresses.index(house.address()), number % 3
            began = time.monotonic()
            if fault in ("kill", "both"):
                coordinators[leader].kill()
            if fault in ("member", "both"):
                etcd.kill(member)
            if fault == "stop":
                coordinators[leader].send_signal(signal.SIGSTOP)
            play(learners, until=2 * number + 2)
            print(f"{fault}: next round after {time.monotonic() - began:.1f} s")
            if fault == "stop":
                coordinators[leader].send_signal(signal.SIGCONT)
                assert coordinators[leader].wait(LIMIT) == 69, house.said(leader)
            if fault in ("member", "both"):
                etcd.restart(member)
            if fault != "member":
                coordinators[leader].wait()
                coordinators[leader] = house.coordinate(leader)
        play(learners)
        check(house, learners)
