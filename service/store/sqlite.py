"""The embedded store: one SQLite file, for one process at a time.

Write-ahead log and `synchronous = FULL`: a transaction is on disk when it returns. A
lock (flock) on a file beside it keeps others out; the system releases it when the
process dies, but not while it is stopped. So a lease lasts as long as its process, and
the next process that opens the file finds no key that was bound to one.
"""

import collections
import fcntl
import logging
import math
import sqlite3
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from .store import Condition, Delete, Item, Lease, Listing, Put, check_changes

SCHEMA = """
CREATE TABLE IF NOT EXISTS items (
  key TEXT PRIMARY KEY,
  value TEXT NOT NULL,
  created INTEGER NOT NULL,
  modified INTEGER NOT NULL,
  lease INTEGER
);
-- The revision that deleted something last. That of a put is with its key.
CREATE TABLE IF NOT EXISTS newest (revision INTEGER NOT NULL);
"""
PUT = """
INSERT INTO items (key, value, created, modified, lease) VALUES (?, ?, ?, ?, ?)
ON CONFLICT (key) DO UPDATE
SET value = excluded.value, modified = excluded.modified, lease = excluded.lease
"""
AFTER_ALL = "\U0010ffff"  # sorts after every character that a key has
_LOG = logging.getLogger(__name__)
REMEMBERED = 1024  # changes, for `watch`


class SqliteStore:
    """A store in a file; a second process that opens it gets an error.

    Attributes:
      name: of the file.
      max_bytes: none.
    """

    def __init__(
        self, path: Path, upgrade: Callable[[sqlite3.Connection], None] | None = None
    ):
        """Args:
        upgrade: brings a file of an older version up to date, within a transaction.
        """
        self.path, self.max_bytes = Path(path), None
        self.name = str(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # A file of its own: closing any descriptor of the database would release the
        # locks that SQLite holds on it.
        self._flock = open(self.path.with_name(f"{self.path.name}.lock"), "w")
        try:
            fcntl.flock(self._flock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._flock.close()
            raise ValueError(
                f"{self.path}: another coordinator is writing this log. End it first, "
                "or choose another --folder."
            ) from None
        self._changed = threading.Condition()  # guards what follows
        self._recent: collections.deque[tuple[int, str]] = collections.deque()
        self._num_leases = 0
        self._revisions: dict[str, tuple[int, int]] = {}  # of keys in conditions
        try:
            self._connection = _connect(self.path, upgrade)
            self._revision = _begin(self._connection)
            self._forgotten = self._revision  # what changed up to it is not remembered
        except BaseException:
            self._flock.close()
            raise

    def range(
        self, prefix: str, *, limit: int | None = None, reverse: bool = False
    ) -> Listing:
        query = (
            "SELECT key, value, created, modified FROM items WHERE key >= ? AND key < ?"
            f" ORDER BY key {'DESC' if reverse else 'ASC'} LIMIT ?"
        )
        row = (prefix, prefix + AFTER_ALL, -1 if limit is None else limit)
        with self._changed:
            rows = self._connection.execute(query, row).fetchall()
            return Listing([Item(*row) for row in rows], self._revision)

    def transact(
        self, conditions: Sequence[Condition], changes: Sequence[Put | Delete]
    ) -> int | None:
        check_changes(changes, self.max_bytes)
        with self._changed:
            if not all(map(self._holds, conditions)):
                return None
            revision = self._revision + 1
            with self._connection:
                for change in changes:
                    self._make(change, revision)
            self._revision = revision
            self._note(change.key for change in changes)
        return revision

    def lease(self, seconds: float) -> Lease:
        del seconds  # it ends with this process
        with self._changed:
            self._num_leases += 1
            return _ProcessLease(self, self._num_leases)

    def watch(self, prefix: str, revision: int, seconds: float) -> bool:
        def has_changed() -> bool:
            if revision < self._forgotten:
                return True
            return any(n > revision and k.startswith(prefix) for n, k in self._recent)

        with self._changed:
            return self._changed.wait_for(has_changed, seconds)

    def close(self) -> None:
        with self._changed:
            self._connection.close()
        self._flock.close()  # releases the lock

    def revoke(self, lease: int) -> None:
        """Deletes the keys of a lease."""
        try:
            with self._changed:
                query = "SELECT key FROM items WHERE lease = ?"
                rows = self._connection.execute(query, (lease,)).fetchall()
            if rows:
                self.transact([], [Delete(key) for (key,) in rows])
        except (sqlite3.ProgrammingError, sqlite3.OperationalError) as error:
            # Closed, or the disk is full: whoever opens it next deletes them first.
            _LOG.debug("%s: lease %d was not ended: %s", self.name, lease, error)

    def _holds(self, condition: Condition) -> bool:
        key = condition.key
        if (found := self._revisions.get(key)) is None:
            query = "SELECT created, modified FROM items WHERE key = ?"
            found = self._connection.execute(query, (key,)).fetchone() or (0, 0)
            self._revisions[key] = found
        return found[condition.what == "modified"] == condition.revision

    def _make(self, change: Put | Delete, revision: int) -> None:
        """Makes a change; the next revision must be known from what is left."""
        execute = self._connection.execute
        if isinstance(change, Put):
            row = (change.key, change.value, revision, revision, change.lease)
            execute(PUT, row)
        else:
            execute("DELETE FROM items WHERE key = ?", (change.key,))
            execute("UPDATE newest SET revision = ?", (revision,))

    def _note(self, keys: Iterable[str]) -> None:
        """Records what has changed, and wakes up who waits for it."""
        for key in keys:
            self._recent.append((self._revision, key))
            self._revisions.pop(key, None)
        while len(self._recent) > REMEMBERED:
            self._forgotten = self._recent.popleft()[0]
        self._changed.notify_all()


class _ProcessLease:
    """A lease of the process that has the file open."""

    def __init__(self, store: SqliteStore, id: int):
        self.id = id
        self._store, self._is_revoked = store, False

    def remaining(self) -> float:
        return 0.0 if self._is_revoked else math.inf

    def revoke(self) -> None:
        self._is_revoked = True
        self._store.revoke(self.id)


def _begin(connection: sqlite3.Connection) -> int:
    """Ends the leases of earlier processes; returns the newest revision."""
    query = "SELECT MAX(revision, (SELECT IFNULL(MAX(modified), 0) FROM items))"
    with connection:
        (revision,) = connection.execute(f"{query} FROM newest").fetchone()
        connection.execute("DELETE FROM items WHERE lease IS NOT NULL")
        connection.execute("UPDATE newest SET revision = ?", (revision,))
    return revision


def _connect(
    path: Path, upgrade: Callable[[sqlite3.Connection], None] | None
) -> sqlite3.Connection:
    connection = sqlite3.connect(path, check_same_thread=False)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.executescript(SCHEMA)
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            if connection.execute("SELECT revision FROM newest").fetchone() is None:
                connection.execute("INSERT INTO newest VALUES (0)")
            if upgrade is not None:
                upgrade(connection)
    except sqlite3.DatabaseError as error:
        connection.close()
        raise ValueError(
            f"{path}: cannot be used as the log of a coordinator ({error}). Restore "
            "the file, or choose another --folder."
        ) from error
    except BaseException:
        connection.close()
        raise
    return connection
