"""A learner that the service has given up: it joins again, which is not its fault."""

import time

import numpy as np
import pytest

from meshloom.service.blocks.layout import Leaf, make_layout
from meshloom.service.learner import client as client_lib
from meshloom.service.learner.client import Client
from meshloom.service.learner.exchange import Exchange, Turn
from meshloom.service.rounds.policy import make_policy
from meshloom.service.wire.errors import Refused, Unavailable

LAYOUT = make_layout([Leaf("w", (4,), "float32", (None,))])


class Coordinator:
    """A channel to a coordinator that does not know this incarnation any more."""

    def call(self, method, message, seconds):
        if method == "Alive":
            raise Refused("learner 1 must join again: not heard of for 10 s")
        return {"incarnation": 1, "state": "wait"}

    def close(self):
        pass


def test_what_a_beat_learns_ends_the_learner_so_that_it_is_restarted(monkeypatch):
    monkeypatch.setattr(client_lib, "BEAT_SECONDS", 0.01)
    client = Client(Coordinator(), "run", 1)  # type: ignore
    client.join({})
    deadline = time.monotonic() + 10
    while client.lost is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(Unavailable, match="learner 1 must join again: not heard"):
        client.next(3)
    client.close()


class Alone:
    """A group of one process, and a mover whose servers refuse."""

    is_first = True

    def exchange(self, what, work, judge):
        return judge([work()])

    def push(self, *args):
        return 16

    def pull(self, version, buffers, fragment, base):
        raise Refused("version 3 of job 'run' is gone; the newest is 40")

    def close(self):
        pass


def test_a_version_that_is_gone_ends_the_learner_so_that_it_is_restarted():
    client = Client(Coordinator(), "run", 1)  # type: ignore
    group = Alone()

    class Parameters:
        like = {}

    exchange = Exchange(
        client,
        group,
        Parameters(),  # type: ignore
        LAYOUT,
        make_policy("async"),
        connect=lambda opened: group,  # type: ignore
    )
    exchange._attached.mover = group  # type: ignore
    exchange.turn = Turn(4, 3)
    with pytest.raises(Unavailable, match="must join again: version 3 .* is gone"):
        exchange.start(np.zeros(4))
    exchange.leave("done")
