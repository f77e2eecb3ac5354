"""What one server holds of a job: blocks of the parameters, and rows of tables.

A commit is one for both: the same contributions, the same divisor, and one norm.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..blocks.tables import Table
from ..wire import rows as rows_wire
from ..wire.errors import Refused
from .row_store import RowStore
from .store import BlockStore
from .update import MakeUpdate, no_optimizers


class JobStore(BlockStore):
    """A store of blocks, with the tables of the job if it has any.

    Attributes:
      tables: what is held here of each table that has a block here, by name.
    """

    def __init__(
        self,
        spec: Mapping[str, Any],
        owned: Iterable[int] | None = None,
        tables: Mapping[str, Sequence[int]] | None = None,
        *,
        make_update: MakeUpdate = no_optimizers,
        version: int | None = None,
    ):
        """Args:
        tables: the blocks of each table that are held here; all by default.
        """
        super().__init__(spec, owned, make_update=make_update, version=version)
        self.tables: dict[str, RowStore] = {}
        for table in map(Table.from_json, spec.get("tables", ())):
            own = None if tables is None else tables.get(table.name, ())
            if own is None or own:
                self.tables[table.name] = RowStore(self._name, table, own)

    def holds(self, owned: Iterable[int], tables: Mapping[str, Sequence[int]]) -> bool:
        """Returns whether just these blocks are held here."""
        found = {name: list(store.owned) for name, store in self.tables.items()}
        expected = {name: sorted(own) for name, own in tables.items() if own}
        return self.owned == tuple(sorted(owned)) and found == expected

    def push_rows(self, messages: Iterator[bytes]) -> dict[str, Any]:
        """Stages the rows of one contribution, after their header."""
        about, ids, values = rows_wire.decode(messages)
        names = ("learner", "incarnation", "round")
        key = tuple(about.get(name) for name in names)
        if not all(type(number) is int for number in key):
            raise Refused(f"push of rows: {dict(zip(names, key, strict=True))}")
        self._table(about).stage(key, ids, values)  # type: ignore[arg-type]
        return {"bytes": ids.nbytes + values.nbytes}

    def pull_rows(self, message: Mapping[str, Any]) -> Iterator[bytes]:
        """Sends rows of a version."""
        version, since = message.get("version"), message.get("since")
        if type(version) is not int or not isinstance(since, int | None):
            raise Refused(f"pull of rows: version is {version!r}, since is {since!r}")
        ids = rows_wire.asked_for(message)
        at, values = self._table(message).read(version, ids, since)
        return rows_wire.encode({}, at, values)

    def merge(
        self,
        version: int,
        fragment: int,
        contributions: Sequence[Mapping[str, Any]],
        divisor: float,
    ) -> dict[str, Any]:
        parts = [super().merge(version, fragment, contributions, divisor)]
        for store in self.tables.values():
            parts.append(store.merge(version, contributions, divisor))
        total = sum(part["sum_of_squares"] for part in parts)
        return {"sum_of_squares": total, "finite": math.isfinite(total)}

    def apply(
        self,
        version: int,
        scale: float,
        step: int,
        share: float,
        keep: Iterable[int] = (),
        drop: Iterable[Sequence[int | None]] = (),
    ) -> dict[str, Any]:
        keep, drop = list(keep), list(drop)
        answer = super().apply(version, scale, step, share, keep, drop)
        for store in self.tables.values():
            store.apply(version, scale, share, keep, drop)
        return answer

    def drop(self, keys: Iterable[Sequence[Any]]) -> int:
        keys = list(keys)
        nbytes = super().drop(keys)
        return nbytes + sum(store.drop(keys) for store in self.tables.values())

    def digest_lanes(self, version: int) -> dict[str, list[int]]:
        found = {n: store.digest_lanes(version) for n, store in self.tables.items()}
        return super().digest_lanes(version) | found

    def save(self, folder: str | Path, version: int) -> dict[str, Any]:
        answer = super().save(folder, version)
        for store in self.tables.values():
            store.save(folder, version)
        return answer

    def load(self, folder: str | Path, version: int) -> None:
        super().load(folder, version)
        for name in self.tables:
            self.tables[name].load(folder, version)

    def status(self) -> dict[str, Any]:
        found = super().status()
        staged = {tuple(key) for key in found["staged"]}
        staged.update(*(store.staged() for store in self.tables.values()))
        return {
            **found,
            "blocks": found["blocks"] + sum(len(s.owned) for s in self.tables.values()),
            "bytes": found["bytes"] + sum(s.nbytes for s in self.tables.values()),
            "staged": [list(key) for key in sorted(staged)],
        }

    def _table(self, message: Mapping[str, Any]) -> RowStore:
        name = message.get("table")
        if name not in self.tables:
            raise Refused(
                f"job {self._name!r}: no rows of table {name!r} are here, but of "
                f"{sorted(self.tables)}; ask the coordinator for the servers"
            )
        return self.tables[name]  # type: ignore[index]
