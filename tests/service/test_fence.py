"""Servers obey the coordinator with the highest term, and no other."""

import threading

import pytest

from meshloom.service.server.fence import Fence
from meshloom.service.server.server import BlockServer, ServerProcess
from meshloom.service.wire.calls import Channel, Server
from meshloom.service.wire.errors import OldTerm, Refused

ORDERS = (
    *("Create", "Place", "Fetch", "Merge", "Apply", "Digest", "Save", "Load", "Drop"),
    "Forget",
)


def test_every_order_of_an_older_term_is_refused_by_name():
    server = BlockServer()
    assert server.methods["Forget"]({"job": "run", "term": 4}) == {}
    assert {*server.methods} == {*ORDERS, "Status"}
    for order in (*ORDERS, "Status"):
        with pytest.raises(OldTerm, match="obeys the coordinator of term 4, and was c"):
            server.methods[order]({"job": "run", "term": 3})
    for order in ORDERS:  # a message without a term is older than all
        with pytest.raises(OldTerm, match="was called by one of term 0"):
            server.methods[order]({"job": "run"})
    assert server.methods["Status"]({}) == {"jobs": []}  # for people
    assert server.methods["Forget"]({"job": "run", "term": 4}) == {}
    assert server.methods["Forget"]({"job": "other", "term": 9}) == {}
    with pytest.raises(OldTerm):  # a term is for all jobs of the process
        server.methods["Forget"]({"job": "run", "term": 4})


@pytest.mark.parametrize("term", ["5", -1, True, None, 2.0])
def test_a_term_that_is_no_number_is_refused(term):
    fence = Fence()
    with pytest.raises(ValueError, match="expected a whole number >= 0"):
        fence.admit(term)
    assert fence.term == 0


def test_what_a_deposed_coordinator_began_is_over_before_its_successor_is_answered():
    fence, order = Fence(), []
    began, go_on = threading.Event(), threading.Event()

    def slow(message):
        began.set()
        assert go_on.wait(20)
        order.append("old")
        return {}

    def fast(message):
        order.append("new")
        return {}

    old = threading.Thread(target=fence.guarded(slow), args=({"job": "a", "term": 1},))
    old.start()
    assert began.wait(20)
    new = threading.Thread(target=fence.guarded(fast), args=({"job": "a", "term": 2},))
    new.start()
    assert fence.guarded(fast)({"job": "b", "term": 2}) == {}  # another job goes on
    new.join(0.3)
    go_on.set()
    old.join()
    new.join()
    assert order == ["new", "old", "new"]


def test_an_old_term_travels_over_the_wire_as_such():
    process = ServerProcess()
    channel = Channel(process.address)
    channel.call("Forget", {"job": "run", "term": 2})
    with pytest.raises(OldTerm, match=f"{process.address}: this server obeys the coo"):
        channel.call("Forget", {"job": "run", "term": 1})
    channel.close()
    process.close()


def test_a_server_does_not_register_with_a_coordinator_of_an_older_term():
    terms = iter([7, 6])

    def register(message):
        return {"lease_seconds": 10, "term": next(terms)}

    calls = Server("127.0.0.1:0", {"RegisterServer": register, "Beat": lambda m: {}})
    process = ServerProcess(coordinator=f"127.0.0.1:{calls.port}")
    assert process.blocks.fence.term == 7
    with pytest.raises(Refused, match="called by one of term 6, which is over"):
        process._register()
    process.close()
    calls.close(0)
