"""Calls whichever of several coordinators leads."""

import threading
from collections.abc import Sequence
from typing import Protocol

from .calls import Channel
from .credentials import Tls
from .errors import Busy, NotLeader, NoUpstream, Refused, Unavailable
from .messages import Message


class Caller(Protocol):
    """What calls a coordinator: a Channel to the only one, or Coordinators."""

    def call(self, name: str, message: Message, seconds: float = 30.0) -> Message: ...

    def close(self) -> None: ...


class Coordinators:
    """Several coordinators, of which one leads. Threads may share it.

    A call goes to the one that answered last. If that one does not lead, the call goes
    where it points to; if it gives no answer, to the next one, and so do all calls that
    wait for it. So every call must be one that can be repeated.
    """

    def __init__(
        self, addresses: Sequence[str], token: str | None = None, tls: Tls | None = None
    ):
        self.addresses = tuple(addresses)
        self._token, self._tls = token, tls
        self._lock = threading.Lock()  # guards what follows
        self._place = 0
        self._channel = self._connect(self.addresses[0])
        self._is_closed = False

    def call(self, name: str, message: Message, seconds: float = 30.0) -> Message:
        """Sends a message and returns the answer, as a Channel does."""
        error: Unavailable | None = None
        # Each of them, and once more where one of them pointed to.
        for _ in range(len(self.addresses) + 1):
            channel = self._channel
            try:
                return channel.call(name, message, seconds)
            except Refused:
                raise
            except (NoUpstream, Busy):
                raise
            except NotLeader as found:
                error = found
                self._leave(channel, found.leader)
            except Unavailable as found:
                error = found
                self._leave(channel, None)
            except ValueError:  # closed by another thread, which went elsewhere
                if channel is self._channel or self._is_closed:
                    raise
        raise error or Unavailable(f"no coordinator answered {name}; try again")

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._channel.close()

    def _leave(self, channel: Channel, leader: str | None) -> None:
        """Goes to another coordinator, if no other thread has done so."""
        with self._lock:
            if channel is not self._channel or self._is_closed:
                return
            if leader is None or leader == channel.address:
                self._place = (self._place + 1) % len(self.addresses)
                leader = self.addresses[self._place]
            elif leader in self.addresses:
                self._place = self.addresses.index(leader)
            self._channel = self._connect(leader)
        channel.close()  # ends the calls that wait for it

    def _connect(self, address: str) -> Channel:
        return Channel(address, self._token, self._tls)


def reach(address: str, token: str | None = None, tls: Tls | None = None) -> Caller:
    """Returns what calls the coordinator at HOST:PORT, or at one of several with
    commas between them."""
    addresses = address.split(",")
    if len(addresses) == 1:
        return Channel(address, token, tls)
    if not all(addresses):
        raise ValueError(
            f"coordinators {address!r}: expected HOST:PORT, or several with commas "
            "between them"
        )
    return Coordinators(addresses, token, tls)
