"""A caller of several coordinators finds the one that leads."""

import threading
import time

import pytest

from meshloom.service.wire.calls import Channel, Server
from meshloom.service.wire.coordinators import Coordinators, reach
from meshloom.service.wire.errors import NotLeader, Refused, Unavailable


class Center:
    """A coordinator that leads, stands by, or does not answer."""

    def __init__(self):
        self.error: Exception | None = None
        self.calls = 0
        self.silent = threading.Event()
        self.silent.set()
        self.server = Server("127.0.0.1:0", {"Hello": self.hello})
        self.address = f"127.0.0.1:{self.server.port}"

    def hello(self, message):
        self.calls += 1
        self.silent.wait(20)
        if self.error is not None:
            raise self.error
        return {"from": self.address}


@pytest.fixture
def centers():
    found = [Center() for _ in range(3)]
    yield found
    for center in found:
        center.silent.set()
        center.server.close(0)


@pytest.fixture
def several(centers):
    found = Coordinators([center.address for center in centers])
    yield found
    found.close()


def test_a_leader_that_is_named_travels_over_the_wire(centers):
    channel = Channel(centers[0].address)
    centers[0].error = NotLeader("stands by; x:1 leads", "x:1")
    with pytest.raises(NotLeader, match="^stands by; x:1 leads$") as caught:
        channel.call("Hello", {})
    assert caught.value.leader == "x:1"
    centers[0].error = NotLeader("nobody leads")
    with pytest.raises(NotLeader) as caught:
        channel.call("Hello", {})
    assert caught.value.leader is None
    channel.close()


def test_it_goes_where_it_is_sent_and_stays_there(centers, several):
    for i in (0, 1):
        leader = centers[2].address
        centers[i].error = NotLeader("stands by", leader)
    for _ in range(3):
        assert several.call("Hello", {}) == {"from": centers[2].address}
    assert [center.calls for center in centers] == [1, 0, 3]


def test_it_passes_over_those_that_are_dead_or_know_no_leader(centers, several):
    centers[0].server.close(0)
    centers[1].error = NotLeader("none leads")
    assert several.call("Hello", {}) == {"from": centers[2].address}


def test_a_leader_that_is_not_in_the_list_is_reached_all_the_same(centers):
    several = Coordinators([center.address for center in centers[:2]])
    for center in centers[:2]:
        center.error = NotLeader("stands by", centers[2].address)
    assert several.call("Hello", {}) == {"from": centers[2].address}
    several.close()


def test_without_a_leader_the_call_is_unavailable(centers, several):
    for center in centers:
        center.error = NotLeader("stands by, and none leads")
    with pytest.raises(Unavailable, match="none leads"):
        several.call("Hello", {})
    for center in centers:
        center.error = NotLeader("stands by", centers[0].address)  # which is wrong
    with pytest.raises(Unavailable):
        several.call("Hello", {})


def test_a_refusal_is_an_answer(centers, several):
    centers[0].error = Refused("no, because")
    with pytest.raises(Refused, match="no, because"):
        several.call("Hello", {})
    assert [center.calls for center in centers] == [1, 0, 0]


def test_calls_that_wait_for_a_silent_one_go_on_elsewhere(centers, several):
    centers[0].silent.clear()
    answers = []

    def wait_long():
        answers.append(several.call("Hello", {}, 60))

    thread = threading.Thread(target=wait_long)
    thread.start()
    while not centers[0].calls:
        time.sleep(0.01)
    began = time.monotonic()
    assert several.call("Hello", {}, 0.5) == {"from": centers[1].address}
    thread.join(10)
    assert not thread.is_alive() and time.monotonic() - began < 10
    assert answers == [{"from": centers[1].address}]


def test_one_address_is_a_plain_channel_and_none_is_refused(centers):
    one = reach(centers[0].address)
    assert isinstance(one, Channel)
    one.close()
    with pytest.raises(ValueError, match="expected HOST:PORT, or several with commas"):
        reach("a:1,,b:2")
