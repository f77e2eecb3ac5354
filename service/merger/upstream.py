"""What is above a merger, for one job: a service, or another merger."""

import concurrent.futures
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..blocks import hashing
from ..blocks.box import Box
from ..blocks.dtypes import dtype_of
from ..blocks.layout import Layout
from ..server.summing import Summed
from ..wire.calls import Channel
from ..wire.coordinators import Caller
from ..wire.errors import Busy
from ..wire.sums import Key

CALL_SECONDS = 20.0
Block = tuple[np.ndarray, ...]  # its slabs


class Upstream:
    """Pushes, pulls and contributes.

    Args:
      caller: of what is above.
      connect: makes a channel to a server, given its address.
      spec: of the job, as a learner sends it.
    """

    def __init__(
        self,
        caller: Caller,
        connect: Callable[[str], Channel],
        spec: Mapping[str, Any],
        layout: Layout,
    ):
        self._caller, self._connect = caller, connect
        self._spec, self._layout = dict(spec), layout
        self._job = str(spec["job"])
        self._lock = threading.Lock()
        self._channels: dict[str, Channel] = {}  # by address, until the end
        self._servers: dict[str, str] = {}
        self._place: Any = None
        self._threads = concurrent.futures.ThreadPoolExecutor(8, "upstream")

    def open(self) -> None:
        """Opens the job above, and finds the servers there; may be repeated."""
        self.use(self._caller.call("OpenJob", self._spec, CALL_SECONDS))

    def use(self, opened: Mapping[str, Any]) -> None:
        """Uses the servers that OpenJob was answered with."""
        with self._lock:
            self._servers, self._place = opened["servers"], opened.get("place")

    def push(
        self,
        key: Key,
        blocks: Sequence[int],
        pieces: Callable[[Sequence[int]], Iterator[Summed]],
    ) -> None:
        """Sends the pieces of blocks, to all servers at once.

        Args:
          pieces: makes those of some blocks.
        """
        learner, incarnation, round = key

        def send(server: tuple[Channel, list[int]]) -> None:
            channel, own = server
            channel.push(self._job, learner, incarnation, round, pieces(own))

        self._at_all(send, blocks)

    def contribute(
        self, tree: Mapping[str, Any], parts: Sequence[Mapping[str, Any]], wait: float
    ) -> dict[str, Any]:
        """Tells that a sum is there; the answer may be to wait, that is, ask again."""
        with self._lock:
            place = self._place
        message = {"job": self._job, "tree": tree, "parts": list(parts)}
        message |= {"place": place, "seconds": wait}
        try:
            return self._caller.call("ContributeSum", message, wait + CALL_SECONDS)
        except Busy:
            return {"state": "wait"}

    def pull(self, version: int, blocks: Sequence[int]) -> dict[int, Block]:
        """Returns blocks of a version."""
        found: dict[int, Block] = {}

        def receive(server: tuple[Channel, list[int]]) -> None:
            channel, own = server
            into: dict[tuple[int, Box], np.ndarray] = {}
            for block in own:
                arrays = []
                for slab in self._layout.blocks[block].slabs:
                    dtype = dtype_of(self._layout.leaves[slab.leaf].dtype)
                    arrays.append(np.empty(slab.box.shape, dtype))
                    if slab.box.size:
                        into[slab.leaf, slab.box] = arrays[-1]
                found[block] = tuple(arrays)
            channel.pull(self._job, version, list(into), into)

        self._at_all(receive, blocks)
        return found

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            for channel in self._channels.values():
                channel.close()

    def _at_all(
        self,
        work: Callable[[tuple[Channel, list[int]]], None],
        blocks: Sequence[int],
    ) -> None:
        """Does something at each server with those of the blocks that it has."""
        with self._lock:
            names = sorted(self._servers)
            owners = hashing.owners(self._layout, self._job, names)
            owned: dict[str, list[int]] = {}
            for block in blocks:
                owned.setdefault(self._servers[owners[block]], []).append(block)
            for address in owned:
                if address not in self._channels:
                    self._channels[address] = self._connect(address)
            parts = [(self._channels[address], own) for address, own in owned.items()]
        futures = [self._threads.submit(work, part) for part in parts]
        concurrent.futures.wait(futures)
        for future in futures:
            future.result()
