"""The durable log of a coordinator: entries of all of its jobs, in a store.

An entry has a job, a kind, a JSON body and a number that only ever grows. `append`
returns once the entry is on disk, so whoever acts on an entry may be killed at any time
and finds it again. Entries are never changed: what a restart takes back is abandoned by
a later entry (see history.py). `compact` removes the oldest, and leaves a snapshot: an
entry of that kind says what all up to its number amount to.

Entries that are appended together are one value of the store, and only the coordinator
that leads can write one: its transactions are conditional on its term.

    entries/JOB/NUMBER   [[kind, body], ...]; the first has this number
    jobs/NUMBER          the job whose first entry has this number
    snapshots/JOB        [number, body] of its newest snapshot
"""

import dataclasses
import json
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from ..store.election import LEASE_SECONDS, Leadership, try_to_lead
from ..store.sqlite import SqliteStore
from ..store.store import Delete, Deposed, Item, Put, Store, StoreUnavailable, get
from ..wire.errors import NotLeader
from ..wire.messages import Message

RETRY_SECONDS = 0.2  # between attempts, while a store does not answer
MAX_DELETES = 100  # in one transaction; etcd takes 128 operations
SNAPSHOT = "snapshot"  # the kind of an entry
Answer = TypeVar("Answer")
_LOG = logging.getLogger(__name__)

# Files that were written before there were other stores have a table of entries.
OLD_TABLE = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'entries'"
UPGRADE = (
    """
    INSERT INTO items (key, value, created, modified)
    SELECT 'entries/' || job || '/' || printf('%016d', seq),
      '[["' || kind || '", ' || body || ']]', 1, 1 FROM entries
    """,
    """
    INSERT INTO items (key, value, created, modified)
    SELECT 'jobs/' || printf('%016d', MIN(seq)), job, 1, 1 FROM entries GROUP BY job
    """,
    "DROP TABLE entries",
)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One entry of the log; `seq` orders the entries of all jobs."""

    seq: int
    kind: str
    body: dict[str, Any]


class Log:
    """The log of the coordinator that leads. Threads may share it.

    Attributes:
      name: of the store, for messages.
      term: of this leader; higher than that of any before.
    """

    def __init__(self, store: Store, leadership: Leadership):
        self._store, self._leadership = store, leadership
        self.name, self.term = store.name, leadership.term
        self._lock = threading.Lock()
        self._known = set(self.jobs())
        self._next = 1 + max(map(self._last, self._known), default=0)

    @classmethod
    def embedded(cls, path: Path) -> Self:
        """Opens the log in a file; an error if another coordinator has it open."""
        store = SqliteStore(path, _upgrade)
        try:
            leadership = try_to_lead(store, "", LEASE_SECONDS)
            assert leadership is not None, "the lock was taken"
            return cls(store, leadership)
        except BaseException:
            store.close()
            raise

    def check(self) -> None:
        """Raises Deposed unless this coordinator surely leads at this moment."""
        self._leadership.check()

    def leading(
        self, handler: Callable[[Message], Message]
    ) -> Callable[[Message], Message]:
        """Returns a handler that answers only while this coordinator leads."""

        def handle(message: Message) -> Message:
            try:
                self.check()
                answer = handler(message)
                self.check()
            except Deposed as error:
                raise NotLeader(str(error)) from error
            return answer

        return handle

    def append(self, job: str, kind: str, body: dict[str, Any]) -> int:
        """Appends one entry; returns its number once it is durable."""
        return self.append_all(job, [(kind, body)])[0]

    def append_all(
        self, job: str, entries: Iterable[tuple[str, dict[str, Any]]]
    ) -> list[int]:
        """Appends all of the entries or none, and waits for the disk once.

        Raises Deposed if another coordinator leads.
        """
        rows = [[kind, body] for kind, body in entries]
        text = json.dumps(rows, allow_nan=False)
        with self._lock:
            first = self._next
            puts: list[Put | Delete] = [Put(f"{_folder(job)}{first:016d}", text)]
            if job not in self._known:
                puts.append(Put(f"jobs/{first:016d}", job))
            self._write(puts)
            self._known.add(job)
            self._next = first + len(rows)
        return list(range(first, first + len(rows)))

    def read(self, job: str) -> list[Entry]:
        """Returns the entries of a job, oldest first.

        Of a log that was compacted these are the first, which has the spec, the
        snapshot, and those after it.
        """
        found = [entry for item in self._items(job) for entry in _entries(item)]
        snapshot = self._snapshot(job)
        if snapshot is None:
            return found
        return [found[0], snapshot, *(e for e in found[1:] if e.seq > snapshot.seq)]

    def compact(self, job: str, snapshot: Entry) -> tuple[int, int]:
        """Lets a snapshot take the place of the entries up to its number.

        It is durable before they are removed: what a killed process leaves of them is
        not read any more, and removed by the next call. Returns what `size` does.
        """
        value = json.dumps([snapshot.seq, snapshot.body], allow_nan=False)
        self._write([Put(f"snapshots/{job}", value)])
        old = self._before(job, snapshot.seq)
        for begin in range(0, len(old), MAX_DELETES):
            part = old[begin : begin + MAX_DELETES]
            self._write([Delete(item.key) for item in part])
        return _size(old)

    def size(self, job: str, until: int) -> tuple[int, int]:
        """Returns how many entries `compact` would remove, and their bytes."""
        return _size(self._before(job, until))

    def jobs(self) -> list[str]:
        """Returns the names of all jobs, in the order in which they were opened."""
        listing = self._patiently(lambda: self._store.range("jobs/"))
        return [item.value for item in listing.items]

    def close(self) -> None:
        """Lets another coordinator lead."""
        self._leadership.resign()
        self._store.close()

    def _write(self, changes: Sequence[Put | Delete]) -> None:
        """Writes if this coordinator leads; the same again changes nothing."""
        fence = [self._leadership.fence]
        if self._patiently(lambda: self._store.transact(fence, changes)) is None:
            self._leadership.depose()

    def _patiently(self, call: Callable[[], Answer]) -> Answer:
        """Tries again while the store does not answer, as long as this one leads."""
        while True:
            self.check()
            try:
                return call()
            except StoreUnavailable as error:
                _LOG.warning("%s; trying again", error)
                time.sleep(RETRY_SECONDS)

    def _last(self, job: str) -> int:
        """Returns the number of the last entry of a job."""
        folder = _folder(job)
        found = self._patiently(
            lambda: self._store.range(folder, limit=1, reverse=True)
        )
        (item,) = found.items
        snapshot = self._snapshot(job)
        # All after the snapshot may be gone, and its number is never given again.
        return max(_entries(item)[-1].seq, 0 if snapshot is None else snapshot.seq)

    def _items(self, job: str) -> list[Item]:
        return self._patiently(lambda: self._store.range(_folder(job))).items

    def _before(self, job: str, seq: int) -> list[Item]:
        """Returns what has no entry after this number; the first entry stays."""
        return [i for i in self._items(job)[1:] if _entries(i)[-1].seq <= seq]

    def _snapshot(self, job: str) -> Entry | None:
        found = self._patiently(lambda: get(self._store, f"snapshots/{job}"))
        if found is None:
            return None
        seq, body = json.loads(found.value)
        return Entry(seq, SNAPSHOT, body)


def _folder(job: str) -> str:
    return f"entries/{job}/"


def _size(items: list[Item]) -> tuple[int, int]:
    count = sum(len(_entries(item)) for item in items)
    return count, sum(len(item.value) for item in items)


def _entries(item: Item) -> list[Entry]:
    """Returns the entries that were appended together."""
    rows = enumerate(json.loads(item.value), int(item.key.rpartition("/")[2]))
    return [Entry(seq, kind, body) for seq, (kind, body) in rows]


def _upgrade(connection: sqlite3.Connection) -> None:
    """Takes over the entries of a file of an older version."""
    if connection.execute(OLD_TABLE).fetchone() is not None:
        for statement in UPGRADE:
            connection.execute(statement)
