"""Pushes and pulls the shards of this process, to and from all servers at once."""

import concurrent.futures
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..blocks.dtypes import dtype_of
from ..blocks.layout import Layout
from ..blocks.pieces import pieces
from ..wire.calls import Channel
from ..wire.changes import Wanted
from ..wire.errors import Unavailable
from . import shards
from .shards import Host, Piece

# A stream that breaks is repeated: pieces and reads are idempotent.
ATTEMPTS, PAUSE_SECONDS = 4, 0.5


class Mover:
    """The servers of a job, and which of them owns which block.

    Args:
      owners: the name of the server of each block.
      channels: of each server, by name.
      reached: called with "push" before a contribution is sent to each server; a drill
        may kill this process there.
    """

    def __init__(
        self,
        job: str,
        layout: Layout,
        owners: Mapping[int, str],
        channels: Mapping[str, Channel],
        reached: Callable[[str], None] = lambda point: None,
    ):
        self._job, self._layout = job, layout
        self._owners, self._channels, self._reached = owners, channels, reached
        self._pulled: dict[int, int] = {}  # the version of each block
        self._threads = concurrent.futures.ThreadPoolExecutor(
            max(len(channels), 1), thread_name_prefix="mover"
        )

    def push(
        self,
        sent_pieces: Iterable[Piece],
        learner: int,
        incarnation: int,
        round: int,
    ) -> int:
        """Sends pieces of a contribution; returns the bytes sent."""
        parts = shards.by_owner(sent_pieces, self._owners)

        def send(server: str) -> int:
            sent = (
                (p.block, p.slab, p.start, p.array) for p in parts[server]
            )  # made anew for every attempt
            channel = self._channels[server]
            self._reached("push")
            return channel.push(self._job, learner, incarnation, round, sent)["bytes"]

        return self._at_all(send, parts)

    def pull(
        self,
        version: int,
        buffers: Host,
        fragment: int | None = None,
        base: Host | None = None,
    ) -> int:
        """Fills the buffers with a version; returns the bytes received.

        Args:
          fragment: only the blocks of this fragment; None for all.
          base: everything as it was pulled last, to receive what has changed since;
            None or empty to receive all elements.
        """
        wanted: dict[str, list[Wanted]] = {}
        blocks: set[int] = set()
        for (leaf, box), buffer in buffers.items():
            dtype = dtype_of(self._layout.leaves[leaf].dtype)
            for block, _, part in pieces(self._layout, leaf, box):
                if fragment not in (None, self._layout.fragment_of(block)):
                    continue
                # The dots keep an array without dimensions an array.
                index = (*part.slices(box), ...)
                want = Wanted(leaf, part, dtype, buffer[index])
                if base:
                    old, have = base[leaf, box][index], self._pulled[block]
                    want = want._replace(old=old, have=have)
                wanted.setdefault(self._owners[block], []).append(want)
                blocks.add(block)

        def receive(server: str) -> int:
            channel, parts = self._channels[server], wanted[server]
            if base:
                return channel.pull_changes(self._job, version, parts)
            into = {(w.leaf, w.box): w.into for w in parts}
            return channel.pull(self._job, version, list(into), into)

        nbytes = self._at_all(receive, wanted)
        self._pulled |= dict.fromkeys(blocks, version)
        return nbytes

    def _at_all(self, work: Callable[[str], int], servers: Mapping[str, Any]) -> int:
        futures = [self._threads.submit(retried, work, name) for name in servers]
        return sum(future.result() for future in futures)

    def close(self) -> None:
        self._threads.shutdown()
        for channel in self._channels.values():
            channel.close()


def retried(work: Callable[[str], int], server: str) -> int:
    """Returns what some work at a server returns; tries again if it breaks off."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return work(server)
        except Unavailable:
            if attempt == ATTEMPTS:
                raise
            time.sleep(PAUSE_SECONDS * attempt)
    raise AssertionError("unreachable")
