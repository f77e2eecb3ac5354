"""Coordinators that stand by for each other, in one process and with one store."""

import threading
import time

import pytest

from meshloom.service.coordinator.coordinator import Coordinator
from meshloom.service.coordinator.front import METHODS, Front, stand_by
from meshloom.service.coordinator.log import Log
from meshloom.service.coordinator.settings import Settings
from meshloom.service.store.sqlite import SqliteStore
from meshloom.service.store.store import Deposed, StoreUnavailable
from meshloom.service.wire.errors import NotLeader


@pytest.fixture
def store(tmp_path):
    found = SqliteStore(tmp_path / "store.db")
    yield found
    found.close()


class Candidate:
    """A coordinator in a thread that stands by until it leads."""

    def __init__(self, store, name: str):
        self.front, self.name, self.said = Front(), name, []
        self.leadership, self.is_told = None, False
        self._store = store
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        self.leadership = stand_by(
            *(self._store, self.name, 30, self.front),
            is_told=lambda: self.is_told,
            say=self.said.append,
        )


def until(done) -> None:
    deadline = time.monotonic() + 20
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_one_leads_and_the_next_takes_over(store):
    first = Candidate(store, "a:1")
    first.thread.join(20)
    assert first.leadership is not None and first.said == []
    second = Candidate(store, "b:2")
    until(lambda: second.said)
    assert second.said == ["standing by at b:2; a:1 leads"]
    with pytest.raises(NotLeader, match="stands by; a:1 leads") as caught:
        second.front.methods["Join"]({})
    assert caught.value.leader == "a:1"
    first.leadership.resign()
    second.thread.join(20)
    assert second.leadership is not None and second.leadership.term == 2
    with pytest.raises(Deposed):
        first.leadership.check()


def test_before_an_election_nobody_leads():
    with pytest.raises(NotLeader, match="none leads; try again") as caught:
        Front().methods["Status"]({})
    assert caught.value.leader is None


def test_it_stops_standing_by_when_it_is_told(store):
    first, second = Candidate(store, "a:1"), Candidate(store, "b:2")
    until(lambda: first.said or second.said)
    for one in (first, second):
        one.is_told = True
    for one in (first, second):
        one.thread.join(20)
    assert sum(one.leadership is None for one in (first, second)) == 1


def test_a_store_that_does_not_answer_is_waited_for(store, monkeypatch):
    transact, failures = store.transact, [StoreUnavailable("etcd is away")] * 2

    def failing(*arguments):
        if failures:
            raise failures.pop()
        return transact(*arguments)

    monkeypatch.setattr(store, "transact", failing)
    candidate = Candidate(store, "a:1")
    candidate.thread.join(20)
    assert candidate.leadership is not None
    line = "standing by at a:1; trying again, because etcd is away"
    assert candidate.said == [line]


def test_a_coordinator_that_was_deposed_answers_nothing(store):
    candidate = Candidate(store, "a:1")
    candidate.thread.join(20)
    assert candidate.leadership is not None
    coordinator = Coordinator(
        store.path.parent,
        num_servers=1,
        version="0.1.0",
        settings=Settings(),
        connect=lambda name, address: None,  # type: ignore
        clock=time.monotonic,
        say=lambda *_, **__: None,
        log=Log(store, candidate.leadership),
    )
    assert {*coordinator.methods} == {*METHODS}
    candidate.front.coordinator = coordinator
    status = candidate.front.methods["Status"]({})
    assert (status["jobs"], status["servers"]) == ({}, [])
    candidate.leadership.resign()
    for name in METHODS:
        with pytest.raises(NotLeader, match=r"\(term 1\) is no longer the leader"):
            candidate.front.methods[name]({})
    with pytest.raises(Deposed):
        coordinator.watch()
    coordinator.close()
