"""How long a coordinator waits for a server that is silent."""

import pytest

from meshloom.service.blocks.layout import Leaf, make_layout
from meshloom.service.coordinator.registry import Registered, Registry
from meshloom.service.coordinator.servers import ServerGroup
from meshloom.service.coordinator.settings import Settings
from meshloom.service.coordinator.status import ServerBeats

LAYOUT = make_layout([Leaf("w", (400, 10), "float32", (None, None))], block_bytes=400)


class Silent:
    def __init__(self, name: str):
        self.name = self.address = name

    def call(self, method, message):
        return {}


def silence_until_lost(copies: int, num_servers: int, *, lost: str = "") -> float:
    """Returns for how many seconds server "a" may be silent.

    Args:
      lost: a server that is lost before; its blocks have not been copied since.
    """
    names = "abc"[:num_servers]
    group = ServerGroup("run", LAYOUT, [Silent(name) for name in names], copies=copies)
    if lost:
        group.change(group.placement.without(lost), "it is gone")
    registry = Registry(Settings(), now=0.0)
    for name in names:
        beats = ServerBeats(name, 0.0)
        registry[name] = Registered(Silent(name), beats)  # type: ignore
    for tenth in range(200):
        now = tenth / 10
        for name in names[1:]:
            registry[name].beats.heard = now
        if registry.take_lost(now, [group]):
            return now
    raise AssertionError("it was never lost")


@pytest.mark.parametrize(
    ("seconds", "case"),
    {
        "others have its blocks": (5.0, {"copies": 2, "num_servers": 3}),
        "one copy": (10.0, {"copies": 1, "num_servers": 3}),
        "the only server": (10.0, {"copies": 2, "num_servers": 1}),
        "the last of two": (10.0, {"copies": 2, "num_servers": 2, "lost": "b"}),
        "of three, one is lost": (10.0, {"copies": 2, "num_servers": 3, "lost": "b"}),
    }.values(),
)
def test_the_only_copy_of_a_block_is_waited_for(seconds, case):
    assert silence_until_lost(**case) == pytest.approx(seconds + 0.1)
