"""A coordinator's address while it may lead or stand by, and how it comes to lead."""

import functools
import logging
import time
from collections.abc import Callable
from typing import Any

from ..store.election import Leadership, Seen, await_change, look, try_to_lead
from ..store.store import Store, StoreUnavailable
from ..wire.errors import NotLeader
from .coordinator import Coordinator

Message = dict[str, Any]

METHODS = (
    *("RegisterServer", "Beat", "LeaveServer", "OpenJob", "Initialized", "Join"),
    *("Alive", "Next", "Contribute", "ContributeSum", "Leave", "Report", "Save"),
    *("Clean", "Servers", "Status"),
)
RETRY_SECONDS = 0.5  # while the store does not answer
# A watch is renewed so often; the end of a leader is seen at once, not after this.
WATCH_SECONDS = 2.0
_LOG = logging.getLogger(__name__)


class Front:
    """Answers calls, or says who leads.

    Attributes:
      methods: those of a coordinator.
      leader: the address of the one that leads, if it is known.
      coordinator: ours, if it leads.
    """

    def __init__(self):
        self.leader: str | None = None
        self.coordinator: Coordinator | None = None
        self.methods: dict[str, Callable[[Message], Message]] = {
            name: functools.partial(self._call, name) for name in METHODS
        }

    def _call(self, name: str, message: Message) -> Message:
        if (coordinator := self.coordinator) is not None:
            return coordinator.methods[name](message)
        if (leader := self.leader) is not None:
            raise NotLeader(f"this coordinator stands by; {leader} leads", leader)
        raise NotLeader("this coordinator stands by, and none leads; try again")


def stand_by(
    store: Store,
    address: str,
    seconds: float,
    front: Front,
    *,
    is_told: Callable[[], bool],
    say: Callable[[str], None],
) -> Leadership | None:
    """Waits until this coordinator leads; None if it is told to end before.

    Args:
      address: of this coordinator.
      seconds: of its lease once it leads.
    """
    said = ""
    while not is_told():
        about = ""
        try:
            leadership = try_to_lead(store, address, seconds)
            if leadership is not None:
                return leadership
            seen = look(store)
            front.leader = seen.address
            if seen.address is not None:
                about = f"{seen.address} leads"
        except StoreUnavailable as error:
            front.leader, seen = None, None
            about = f"trying again, because {error}"
        if about and about != said:
            said = about
            say(f"standing by at {address}; {about}")
        _wait(store, seen)
    return None


def _wait(store: Store, seen: Seen | None) -> None:
    """Waits until it is time to look again."""
    try:
        if seen is not None:
            return await_change(store, seen, WATCH_SECONDS)
    except StoreUnavailable as error:
        _LOG.info("%s", error)
    time.sleep(RETRY_SECONDS)
