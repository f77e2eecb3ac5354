"""The interface of a store: keys with values, transactions, leases, and waiting.

A store has revisions: every transaction that changes something gets a number of its
own, higher than all before. The words used here:

- *created* and *modified*: of a key, the revisions that created it and that wrote it
  last. A key that is deleted and written again is created anew.
- *condition*: on these revisions; 0 means that there is no such key. A transaction
  happens whole if all of its conditions hold, and not at all otherwise.
- *lease*: keys may be bound to one. They vanish when it is revoked, and some seconds
  after the process that holds it was killed, paused or cut off.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol


class StoreUnavailable(ConnectionError):
    """The store gave no answer in time. A transaction may have happened all the same:
    only what can be repeated may be tried again."""


class Deposed(Exception):
    """This process is no longer the leader, so it must not act."""


class Item(NamedTuple):
    """A key with its value."""

    key: str
    value: str
    created: int
    modified: int


class Listing(NamedTuple):
    """The items under a prefix at one revision of the store, in order of keys."""

    items: list[Item]
    revision: int


@dataclasses.dataclass(frozen=True)
class Condition:
    """That the key was created, or modified last, by this revision."""

    key: str
    what: Literal["created", "modified"]
    revision: int


@dataclasses.dataclass(frozen=True)
class Put:
    """Writes a key; with a lease, it vanishes with it."""

    key: str
    value: str
    lease: int | None = None


@dataclasses.dataclass(frozen=True)
class Delete:
    """Deletes a key, if there is one."""

    key: str


class Lease(Protocol):
    """A lease that is renewed in the background until it is revoked."""

    @property
    def id(self) -> int: ...

    def remaining(self) -> float:
        """Returns for how many seconds it surely lasts; 0 or less once in doubt."""
        ...

    def revoke(self) -> None:
        """Ends it, and with it its keys; does not fail."""
        ...


class Store(Protocol):
    """Any store. Threads may share it; keys are printable and have no NUL."""

    @property
    def name(self) -> str:
        """What messages call it."""
        ...

    @property
    def max_bytes(self) -> int | None:
        """The largest value that can be written; None for no limit."""
        ...

    def range(
        self, prefix: str, *, limit: int | None = None, reverse: bool = False
    ) -> Listing:
        """Returns the items whose keys start with the prefix.

        Args:
          limit: at most so many, the first in this order.
          reverse: the last key first.
        """
        ...

    def transact(
        self, conditions: Sequence[Condition], changes: Sequence[Put | Delete]
    ) -> int | None:
        """Makes all changes durable and returns the revision; None if a condition
        does not hold. No two changes may be of the same key."""
        ...

    def lease(self, seconds: float) -> Lease:
        """Returns a new lease whose keys vanish about so long after its holder."""
        ...

    def watch(self, prefix: str, revision: int, seconds: float) -> bool:
        """Waits until a key with this prefix has changed after `revision`.

        Returns:
          False if nothing has changed for so many seconds. True means to list again:
          what changed is not said, and it may be that nothing did.
        """
        ...

    def close(self) -> None: ...


def get(store: Store, key: str) -> Item | None:
    """Returns one item."""
    for item in store.range(key, limit=1).items:  # a key comes before its extensions
        if item.key == key:
            return item
    return None


def check_changes(changes: Sequence[Put | Delete], max_bytes: int | None) -> None:
    """Refuses keys twice and values that are too large."""
    keys = [change.key for change in changes]
    if len(set(keys)) < len(keys):
        raise ValueError(f"a transaction with a key twice: {keys}")
    if max_bytes is None:
        return
    for change in changes:
        if isinstance(change, Put) and (size := len(change.value.encode())) > max_bytes:
            raise ValueError(
                f"{change.key} has {size} bytes, and this store takes at most "
                f"{max_bytes} for one value. Use the embedded store (no --store) for "
                "this job."
            )
