"""Which pieces of a contribution go to which servers, when these come and go."""

import numpy as np
import pytest
from playing import first_values

from meshloom.service.blocks.layout import Leaf, make_layout
from meshloom.service.blocks.placement import Placement
from meshloom.service.learner import mover as mover_lib
from meshloom.service.learner.mover import Mover
from meshloom.service.learner.servers import Servers
from meshloom.service.learner.shards import to_pieces
from meshloom.service.wire.errors import Unavailable

LAYOUT = make_layout(
    [Leaf("table", (60, 40), "float32", (None, "embed"))], block_bytes=400
)


class Counting:
    """A channel that counts what is pushed."""

    def __init__(self, address):
        self.address = address

    def push(self, job, learner, incarnation, round, pieces):
        return {"bytes": len(list(pieces))}

    def close(self):
        pass


class Breaking:
    """A channel that breaks off whenever it has carried 4 kB; versions are ones."""

    carried = 0

    def __init__(self, address):
        self.address = address

    def carry(self, nbytes):
        Breaking.carried += nbytes
        if Breaking.carried > 4000:
            Breaking.carried = 0
            raise Unavailable("broken")
        return nbytes

    def push(self, job, learner, incarnation, round, pieces):
        return {"bytes": self.carry(sum(array.nbytes for *_, array in pieces))}

    def pull(self, job, version, boxes, into):
        for array in into.values():
            array[...] = 1
        return self.carry(sum(array.nbytes for array in into.values()))

    def close(self):
        pass


def test_what_has_arrived_before_a_break_is_not_moved_again(monkeypatch):
    """Or what takes longer than a connection lives would never be there."""
    monkeypatch.setattr(mover_lib, "STREAM_BYTES", 1000)
    monkeypatch.setattr(mover_lib, "PAUSE_SECONDS", 0.0)
    placement = Placement(copies=1, before=("s0",), members=("s0",))
    said = {"servers": {"s0": "s0:1"}, "placement": placement.to_json()}
    servers = Servers("run", LAYOUT, said, Breaking, lambda: said)
    mover, host = Mover("run", LAYOUT, servers), first_values(LAYOUT)
    (array,) = host.values()
    assert array.nbytes > 2 * 4000
    assert mover.push(to_pieces(LAYOUT, host, None), 0, 1, 1) == array.nbytes
    buffers = {key: np.zeros_like(array) for key in host}
    assert mover.pull(1, buffers) == array.nbytes
    assert all((array == 1).all() for array in buffers.values())
    mover.close()


def test_one_that_breaks_off_at_once_is_not_tried_for_ever(monkeypatch):
    monkeypatch.setattr(mover_lib, "PAUSE_SECONDS", 0.0)
    placement = Placement(copies=1, before=("s0",), members=("s0",))
    said = {"servers": {"s0": "s0:1"}, "placement": placement.to_json()}
    mover = Mover("run", LAYOUT, Servers("run", LAYOUT, said, Breaking, lambda: said))
    with pytest.raises(Unavailable, match="broken"):
        mover.push(to_pieces(LAYOUT, first_values(LAYOUT), None), 0, 1, 1)
    mover.close()


def test_what_servers_may_have_lost_is_pushed_again():
    """One that was started again under its name has nothing of a contribution."""
    names = ("s0", "s1")
    first = Placement(copies=2, before=names, members=names)
    lost = first.without("s0").settled().with_members(names)
    said = [first]
    ask = lambda: {  # noqa: E731
        "servers": {name: f"{name}:1" for name in said[-1].live},
        "placement": said[-1].to_json(),
    }
    mover = Mover("run", LAYOUT, Servers("run", LAYOUT, ask(), Counting, ask))
    sent = list(to_pieces(LAYOUT, first_values(LAYOUT), None))
    assert mover.push(sent, 0, 1, 1) == 2 * len(sent)
    assert mover.push(sent, 0, 1, 1) == 0
    said.append(first.settled())  # nothing came or went
    mover.refresh()
    assert mover.push(sent, 0, 1, 1) == 0 and mover.epoch == 1
    said.append(lost)
    mover.refresh()
    assert mover.push(sent, 0, 1, 1) == 2 * len(sent) and mover.epoch == lost.epoch
    mover.close()
