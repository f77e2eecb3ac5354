"""Which pieces of a contribution go to which servers, when these come and go."""

from playing import first_values

from meshloom.service.blocks.layout import Leaf, make_layout
from meshloom.service.blocks.placement import Placement
from meshloom.service.learner.mover import Mover
from meshloom.service.learner.servers import Servers
from meshloom.service.learner.shards import to_pieces

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
