"""One of several processes leads: who, since which term, and for how long.

The leader's key is bound to its lease and created only where there is none. The same
transaction raises the term. Whatever the leader writes later is conditional on its key
being the one that it created (its fence), and it stops acting before its lease can run
out (`check`).
"""

import json
import uuid
from typing import NamedTuple

from .store import Condition, Deposed, Lease, Put, Store, get

LEADER, TERM = "leader", "term"
LEASE_SECONDS = 6.0


class Leadership:
    """That this process leads.

    Attributes:
      term: every leader has a higher one than all before.
      fence: the condition that makes the store refuse what a deposed leader writes.
    """

    def __init__(self, term: int, created: int, lease: Lease):
        self.term = term
        self.fence = Condition(LEADER, "created", created)
        self._lease = lease
        self._is_deposed = False

    def check(self) -> None:
        """Raises Deposed unless this process surely leads at this moment."""
        if self._is_deposed or self._lease.remaining() <= 0:
            self.depose()

    def depose(self) -> None:
        """Raises Deposed, now and from now on."""
        self._is_deposed = True
        raise Deposed(
            f"this coordinator (term {self.term}) is no longer the leader: its lease "
            "was not renewed in time, or another one was elected. Start it again to "
            "stand by"
        )

    def resign(self) -> None:
        """Lets another process lead at once."""
        self._is_deposed = True
        self._lease.revoke()


def try_to_lead(store: Store, address: str, seconds: float) -> Leadership | None:
    """Makes this process the leader if there is none.

    Args:
      address: under which others reach this process.
      seconds: of the lease, which is revoked if this process does not lead.
    """
    if get(store, LEADER) is not None:
        return None
    lease = store.lease(seconds)
    try:
        before = get(store, TERM)
        term = 1 + (0 if before is None else int(before.value))
        # An answer may get lost and the attempt be repeated: we know our own key.
        value = json.dumps({"address": address, "id": uuid.uuid4().hex})
        revision = store.transact(
            [
                Condition(LEADER, "created", 0),
                Condition(TERM, "modified", 0 if before is None else before.modified),
            ],
            [Put(LEADER, value, lease.id), Put(TERM, str(term))],
        )
        if revision is None:
            found = get(store, LEADER)
            if found is None or found.value != value:
                lease.revoke()
                return None
            revision = found.created
    except BaseException:
        lease.revoke()
        raise
    return Leadership(term, revision, lease)


class Seen(NamedTuple):
    """Who led at a revision of the store; None: nobody."""

    address: str | None
    revision: int


def look(store: Store) -> Seen:
    """Returns who leads."""
    listing = store.range(LEADER)
    addresses = [json.loads(item.value)["address"] for item in listing.items]
    return Seen(addresses[0] if addresses else None, listing.revision)


def await_change(store: Store, seen: Seen, seconds: float) -> None:
    """Returns once somebody else may lead, and after so many seconds at the latest."""
    if seen.address is not None:
        store.watch(LEADER, seen.revision, seconds)
