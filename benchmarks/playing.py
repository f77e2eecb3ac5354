"""Learners without a model, in threads, that play a job over real sockets."""

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from meshloom.service.blocks.box import Box
from meshloom.service.blocks.layout import Layout
from meshloom.service.learner.client import Client
from meshloom.service.learner.mover import Mover
from meshloom.service.learner.servers import Servers
from meshloom.service.learner.shards import Host, to_pieces
from meshloom.service.wire import codecs
from meshloom.service.wire.calls import Channel
from meshloom.service.wire.errors import Refused, Unavailable


def first_values(layout: Layout) -> Host:
    """The parameters of version 0, which are different everywhere."""
    found: Host = {}
    for number, leaf in enumerate(layout.leaves):
        values = np.random.default_rng(number).normal(size=leaf.shape)
        found[number, Box.whole(leaf.shape)] = values.astype(np.float32)
    return found


class Player:
    """A learner whose change follows from its version: start / 8 + its index.

    Args:
      address: of the coordinator.
      pause: called before each round.
      hold: called when a round was pushed, before the coordinator is told.

    Attributes:
      waits: seconds that each of its rounds took, from pushing to the next parameters.
      joined: how often it has joined.
    """

    def __init__(
        self,
        address: str,
        spec: dict[str, Any],
        index: int,
        pause: Callable[[int], None] = lambda round: None,
        hold: Callable[[int], None] = lambda round: None,
    ):
        self.address, self.spec, self.index = address, spec, index
        self.layout = Layout.from_json(spec["layout"])
        self.waits: list[float] = []
        self.version = self.joined = 0
        self.failure: Exception | None = None
        self._pause, self._hold = pause, hold
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> "Player":
        self._thread.start()
        return self

    def finish(self, seconds: float) -> None:
        """Waits until the job is done; raises what went wrong."""
        self._thread.join(seconds)
        if self.failure is not None:
            raise self.failure
        assert not self._thread.is_alive(), f"learner {self.index} takes too long"

    def _run(self) -> None:
        try:
            while not self._play():
                pass
        except Exception as error:
            self.failure = error

    def _play(self) -> bool:
        """Joins and plays; returns whether the job is done, or it must join again."""
        center = Channel(self.address)
        client = Client(center, self.spec["job"], self.index)
        opened = client.open(self.spec)
        where = {"job": self.spec["job"]}
        servers = Servers(
            self.spec["job"],
            self.layout,
            opened,
            Channel,
            lambda: center.call("Servers", where, 5.0),
        )
        mover = Mover(self.spec["job"], self.layout, servers)
        try:
            if opened["initialize"] and self.index == 0:
                values = first_values(self.layout)
                mover.push(to_pieces(self.layout, values, None), 0, 0, 0)
                assert client.initialized() == {"state": "ok"}
            client.join({"owner": f"me {self.index}"})
            self.joined += 1
            return self._play_rounds(client, mover)
        finally:
            mover.close()
            client.close()

    def _play_rounds(self, client: Client, mover: Mover) -> bool:
        round, began, base = 0, None, {}
        pulls_changes = not codecs.of_job(self.spec, "pull").is_plain
        while True:
            turn = client.next(round)
            if turn["state"] == "left":
                return False
            if turn["state"] == "wait":
                continue
            self.version = turn["version"]
            values = {
                (i, Box.whole(leaf.shape)): np.zeros(leaf.shape, np.float32)
                for i, leaf in enumerate(self.layout.leaves)
            }
            mover.pull(turn["version"], values, base=base)
            base = values if pulls_changes else {}
            if began is not None:
                self.waits.append(time.monotonic() - began)
            if turn["state"] == "done":
                return True
            round = turn["round"]
            self._pause(round)
            began = time.monotonic()
            if not self._contribute(client, mover, turn, values):
                return False

    def _contribute(
        self, client: Client, mover: Mover, turn: dict[str, Any], start: Host
    ) -> bool:
        change = {k: x / 8 + np.float32(self.index) for k, x in start.items()}
        about = {"round": turn["round"], "base": turn["version"], "weight": 1.0}
        about |= {"steps": 2, "sums": {"loss": 1.0, "weight": 1.0}}
        while True:
            sent = to_pieces(self.layout, change, None)
            try:
                mover.push(sent, self.index, client.incarnation, turn["round"])
            except (Refused, Unavailable):
                return False
            self._hold(turn["round"])
            answer = client.contribute({**about, "epoch": mover.epoch})
            if answer["state"] != "moved":
                return answer["state"] == "ok"
            mover.refresh()
