"""The durable log of a coordinator: entries of all of its jobs, in a store.

An entry has a job, a kind, a JSON body and a number that only ever grows. `append`
returns once the entry is on disk, so whoever acts on an entry may be killed at any time
and finds it again. Entries are never changed: what a restart takes back is abandoned by
a later entry (see history.py).

Entries that are appended together are one value of the store, and only the coordinator
that leads can write one: its transactions are conditional on its term.

    entries/JOB/NUMBER   [[kind, body], ...]; the first has this number
    jobs/NUMBER          the job whose first entry has this number
"""

import dataclasses
import json
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self, TypeVar

from ..store.election import LEASE_SECONDS, Leadership, try_to_lead
from ..store.sqlite import SqliteStore
from ..store.store import Put, Store, StoreUnavailable

RETRY_SECONDS = 0.2  # between attempts, while a store does not answer
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
            puts = [Put(f"{_folder(job)}{first:016d}", text)]
            if job not in self._known:
                puts.append(Put(f"jobs/{first:016d}", job))
            self._write(puts)
            self._known.add(job)
            self._next = first + len(rows)
        return list(range(first, first + len(rows)))

    def read(self, job: str) -> list[Entry]:
        """Returns the entries of a job, oldest first."""
        found: list[Entry] = []
        for item in self._patiently(lambda: self._store.range(_folder(job))).items:
            first = _number(item.key)
            rows = enumerate(json.loads(item.value), first)
            found.extend(Entry(seq, kind, body) for seq, (kind, body) in rows)
        return found

    def jobs(self) -> list[str]:
        """Returns the names of all jobs, in the order in which they were opened."""
        listing = self._patiently(lambda: self._store.range("jobs/"))
        return [item.value for item in listing.items]

    def close(self) -> None:
        """Lets another coordinator lead."""
        self._leadership.resign()
        self._store.close()

    def _write(self, puts: list[Put]) -> None:
        """Writes if this coordinator leads; the same again changes nothing."""
        fence = [self._leadership.fence]
        if self._patiently(lambda: self._store.transact(fence, puts)) is None:
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
        return _number(item.key) + len(json.loads(item.value)) - 1


def _folder(job: str) -> str:
    return f"entries/{job}/"


def _number(key: str) -> int:
    return int(key.rpartition("/")[2])


def _upgrade(connection: sqlite3.Connection) -> None:
    """Takes over the entries of a file of an older version."""
    if connection.execute(OLD_TABLE).fetchone() is not None:
        for statement in UPGRADE:
            connection.execute(statement)
