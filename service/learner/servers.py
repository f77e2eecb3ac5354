"""Where the blocks of a job are, as one process of a learner knows it."""

import contextlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

from ..blocks.layout import Layout
from ..blocks.placement import Placement
from ..wire.calls import Channel
from ..wire.errors import Unavailable

Described = Mapping[str, Any]  # what the coordinator says: see ServerGroup.describe


class Servers:
    """The servers of a job, kept up with by asking the coordinator.

    Args:
      described: what it said when the job was opened.
      connect: makes a channel, from an address.
      ask: returns what it says now.

    Attributes:
      placement: which servers have which block.
    """

    def __init__(
        self,
        job: str,
        layout: Layout,
        described: Described,
        connect: Callable[[str], Channel],
        ask: Callable[[], Described],
    ):
        self._job, self._layout = job, layout
        self._connect, self._ask = connect, ask
        self._lock = threading.Lock()
        self._channels: dict[str, Channel] = {}
        self._addresses: dict[str, str] = {}
        self.placement = Placement(copies=1, epoch=-1, before=(), members=())
        self._targets: dict[int, tuple[str, ...]] = {}
        self._take(described)

    @property
    def may_move(self) -> bool:
        """Whether blocks have copies, so that they may come to be elsewhere."""
        return self.placement.copies > 1

    def where(self) -> tuple[Placement, Mapping[int, tuple[str, ...]]]:
        """Returns a placement, and the servers of each block then.

        A block is sent to all of them, and read from the first that has it.
        """
        with self._lock:
            return self.placement, self._targets

    def channel(self, name: str) -> Channel:
        with self._lock:
            if name not in self._channels:
                raise Unavailable(f"server {name} no longer serves this job")
            return self._channels[name]

    def refresh(self) -> None:
        """Asks the coordinator. Calls to servers that are lost end with Unavailable."""
        self._take(self._ask())

    def look(self) -> None:
        """Asks the coordinator, if it answers."""
        with contextlib.suppress(Unavailable):
            self.refresh()

    def close(self) -> None:
        with self._lock:
            for channel in self._channels.values():
                channel.close()

    def _take(self, described: Described) -> None:
        placement = Placement.from_json(described["placement"])
        with self._lock:
            if placement.epoch <= self.placement.epoch:
                return
            addresses: Mapping[str, str] = described["servers"]
            # A server that was started again may have its name, and another address.
            gone = [n for n, at in self._addresses.items() if addresses.get(n) != at]
            closing = [self._channels.pop(name) for name in gone]
            for name, address in addresses.items():
                if name not in self._channels:
                    self._channels[name] = self._connect(address)
            self._addresses = dict(addresses)
            self.placement = placement
            self._targets = placement.targets(self._layout, self._job)
        for channel in closing:
            channel.close()
