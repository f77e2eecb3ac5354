"""The durable log of a coordinator: one SQLite file for all of its jobs.

An entry has a job, a kind, a JSON body and a number that only ever grows. `append`
returns once the entry is on disk, so whoever acts on an entry may be killed at any time
and finds it again. Entries are never changed: what a restart takes back is abandoned by
a later entry (see history.py).
"""

import dataclasses
import fcntl
import json
import sqlite3
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
  seq INTEGER PRIMARY KEY AUTOINCREMENT,
  job TEXT NOT NULL,
  kind TEXT NOT NULL,
  body TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS entries_of_job ON entries (job, seq);
"""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One entry of the log; `seq` orders the entries of all jobs."""

    seq: int
    kind: str
    body: dict[str, Any]


class Log:
    """The log, locked: a second coordinator of the same file gets an error.

    Threads may share it; each call is one transaction.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
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
        self._lock = threading.Lock()
        try:
            self._connection = _connect(self.path)
        except BaseException:
            self._flock.close()
            raise

    def append(self, job: str, kind: str, body: dict[str, Any]) -> int:
        """Appends one entry; returns its number once it is durable."""
        return self.append_all(job, [(kind, body)])[0]

    def append_all(
        self, job: str, entries: Iterable[tuple[str, dict[str, Any]]]
    ) -> list[int]:
        """Appends all of the entries or none, and waits for the disk once."""
        rows = [
            (job, kind, json.dumps(body, allow_nan=False)) for kind, body in entries
        ]
        insert = "INSERT INTO entries (job, kind, body) VALUES (?, ?, ?)"
        numbers: list[int] = []
        with self._lock, self._connection:
            for row in rows:
                number = self._connection.execute(insert, row).lastrowid
                assert number is not None
                numbers.append(number)
        return numbers

    def read(self, job: str) -> list[Entry]:
        """Returns the entries of a job, oldest first."""
        query = "SELECT seq, kind, body FROM entries WHERE job = ? ORDER BY seq"
        with self._lock:
            rows = self._connection.execute(query, (job,)).fetchall()
        return [Entry(seq, kind, json.loads(body)) for seq, kind, body in rows]

    def jobs(self) -> list[str]:
        """Returns the names of all jobs, in the order in which they were opened."""
        query = "SELECT job FROM entries GROUP BY job ORDER BY MIN(seq)"
        with self._lock:
            return [name for (name,) in self._connection.execute(query)]

    def close(self) -> None:
        with self._lock:
            self._connection.close()
        self._flock.close()  # releases the lock


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, check_same_thread=False)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.executescript(SCHEMA)
    except sqlite3.DatabaseError as error:
        connection.close()
        raise ValueError(
            f"{path}: cannot be used as the log of a coordinator ({error}). Restore "
            "the file, or choose another --folder."
        ) from error
    return connection
