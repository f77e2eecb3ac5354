"""Rows of tables as a learner reads and sends them: only those of its batches.

Rows of the next batch can be read ahead, while a step runs: what others have changed
since is read once more, so that every step begins at the rows of its version.
"""

import concurrent.futures
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..blocks import hashing
from ..blocks.tables import Table, check_ids
from ..wire import rows as rows_wire
from ..wire.calls import Channel
from .mover import retried

Sent = tuple[np.ndarray, np.ndarray]  # numbers of rows, ascending, and their values
Ahead = tuple[int, np.ndarray, np.ndarray]  # version, numbers of rows, rows


class TableRows:
    """The tables of a job.

    Args:
      connect: makes a channel to a server, given its address.

    Attributes:
      pulled: bytes of rows that were read since the start.
    """

    def __init__(
        self, job: str, tables: Sequence[Table], connect: Callable[[str], Channel]
    ):
        self._job, self._connect = job, connect
        self._tables = {table.name: table for table in tables}
        self._channels: dict[str, Channel] = {}
        self._owners: dict[str, np.ndarray] = {}  # of each block: place in _names
        self._names: list[str] = []
        self._threads = concurrent.futures.ThreadPoolExecutor(8, "rows")
        self._reader = concurrent.futures.ThreadPoolExecutor(1, "rows ahead")
        self._ahead: dict[str, concurrent.futures.Future[Ahead]] = {}
        self.pulled = 0

    def use(self, servers: Mapping[str, str]) -> None:
        """Uses these servers (addresses by name); nothing read ahead is kept."""
        self._close_channels()
        self._names = sorted(servers)
        self._channels = {name: self._connect(a) for name, a in servers.items()}
        for table in self._tables.values():
            owners = hashing.table_owners(table, self._job, self._names)
            places = [self._names.index(owners[b]) for b in range(len(owners))]
            self._owners[table.name] = np.array(places, np.int64)

    def read(
        self, version: int, wanted: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Returns rows of a version.

        Args:
          wanted: numbers of rows of each table, ascending.
        """
        found = {}
        for name, ids in wanted.items():
            ahead = self._ahead.pop(name, None)
            if ahead is None:
                found[name] = self._pull(name, version, ids)
            else:
                found[name] = self._brought_up_to(version, name, ids, ahead.result())
        return found

    def read_ahead(self, version: int, wanted: Mapping[str, np.ndarray]) -> None:
        """Starts to read rows that the next `read` will ask for, at a later version."""
        for name, ids in wanted.items():
            self._ahead[name] = self._reader.submit(self._read_one, name, version, ids)

    def push(
        self,
        sent: Mapping[str, Sent],
        learner: int,
        incarnation: int,
        round: int,
    ) -> int:
        """Sends values of rows as a part of a contribution; returns their bytes.

        Every server with rows of a table gets something, if only the word that there is
        nothing.
        """
        work = []
        for name, table in self._tables.items():
            empty = np.empty(0, np.int64), np.empty((0, table.width), np.float32)
            ids, values = sent.get(name, empty)
            about = {"job": self._job, "table": name, "learner": learner}
            about |= {"incarnation": incarnation, "round": round}
            for server, at in self._divided(name, ids):
                part = about, ids[at], values[at]
                work.append((server, part))

        def send(server: str, part: Any) -> int:
            return retried(lambda s: rows_wire.push(self._channels[s], *part), server)

        futures = [self._threads.submit(send, *item) for item in work]
        return sum(future.result() for future in futures)

    def close(self) -> None:
        self._reader.shutdown(cancel_futures=True)
        self._threads.shutdown()
        self._close_channels()

    def _close_channels(self) -> None:
        for ahead in self._ahead.values():
            concurrent.futures.wait([ahead])
        self._ahead = {}
        for channel in self._channels.values():
            channel.close()

    def _read_one(self, name: str, version: int, ids: np.ndarray) -> Ahead:
        return version, ids, self._pull(name, version, ids)

    def _brought_up_to(
        self, version: int, name: str, ids: np.ndarray, ahead: Ahead
    ) -> np.ndarray:
        since, had, rows = ahead
        at = np.minimum(np.searchsorted(had, ids), max(had.size - 1, 0))
        is_known = had[at] == ids if had.size else np.zeros(ids.size, bool)
        found = np.empty((ids.size, rows.shape[1]), np.float32)
        found[is_known] = rows[at[is_known]]
        self._pull(name, version, ids, np.flatnonzero(is_known), found, since)
        self._pull(name, version, ids, np.flatnonzero(~is_known), found)
        return found

    def _pull(
        self,
        name: str,
        version: int,
        ids: np.ndarray,
        places: np.ndarray | None = None,
        into: np.ndarray | None = None,
        since: int | None = None,
    ) -> np.ndarray:
        """Reads rows into an array that has one for each of `ids`.

        Args:
          places: of those that are read; all by default.
          since: reads only those that have changed after this version.
        """
        table = self._tables[name]
        check_ids(table, ids, f"read of table {name!r}")
        if into is None:
            into = np.empty((ids.size, table.width), np.float32)
        places = np.arange(ids.size) if places is None else places
        parts = self._divided(name, ids[places]) if places.size else []

        def receive(server: str, at: np.ndarray) -> int:
            own = places[at]

            def pull(server: str) -> int:
                found, rows = rows_wire.pull(
                    self._channels[server], self._job, name, version, ids[own], since
                )
                into[own[found]] = rows
                return rows.nbytes

            return retried(pull, server) if own.size else 0

        futures = [self._threads.submit(receive, *part) for part in parts]
        self.pulled += sum(future.result() for future in futures)
        return into

    def _divided(self, name: str, ids: np.ndarray) -> list[tuple[str, np.ndarray]]:
        """Returns (server, positions of its rows) for all with blocks of a table."""
        owners = self._owners[name]
        by_row = owners[self._tables[name].block_of(ids)]
        return [
            (self._names[place], np.flatnonzero(by_row == place))
            for place in np.unique(owners)
        ]
