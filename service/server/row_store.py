"""The rows of one table that one server holds, without any network.

Commit n changes the rows that its contributions name, in place, and keeps what they
were before as long as somebody reads an older version: the cost of a commit does not
grow with the table.
"""

import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..blocks import digest
from ..blocks.box import Box
from ..blocks.tables import Table, check_ids
from ..wire.errors import Refused
from . import block_files, row_updates
from .staging import Key, key_of

Facts = Mapping[str, Any]


class Rows(NamedTuple):
    """Rows of a table: their places here, ascending, and a value for each."""

    places: np.ndarray
    values: np.ndarray


class Before(NamedTuple):
    """What rows were before a commit changed them."""

    places: np.ndarray
    values: np.ndarray
    state: np.ndarray


class RowStore:
    """Blocks of a table with their optimizer state and staged contributions.

    Attributes:
      owned: indices of the blocks that are held here; all by default.
      newest: number of the newest version.
    """

    def __init__(self, job: str, table: Table, owned: Iterable[int] | None = None):
        self.table, self._job = table, job
        everything = range(len(table.layout.blocks))
        self.owned = tuple(sorted(everything if owned is None else set(owned)))
        self.newest = self._oldest = 0  # the newest version, and what can be read
        bounds = [table.bounds(block) for block in self.owned]
        sizes = [stop - first for first, stop in bounds]
        # Rows lie here one block after the other: row i of block b is at i + shift[b].
        offsets = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        self._offsets = offsets.astype(np.int64)
        self._shift = np.full(len(everything), -1 << 62, np.int64)
        for block, (first, _), offset in zip(
            self.owned, bounds, self._offsets, strict=False
        ):
            self._shift[block] = offset - first
        num = int(self._offsets[-1])
        self._values = np.empty((num, table.width), np.float32)
        for i, block in enumerate(self.owned):
            self._values[self._slice(i)] = table.initial(block)
        self._state = row_updates.initial_state(table, num)
        self._changed = np.zeros(num, np.int32)  # the version that changed it last
        self._lock = threading.RLock()
        self._before: dict[int, Before] = {}  # by the version that changed them
        self._staged: dict[Key, Rows] = {}
        self._dropped: dict[tuple[int, int], float] = {}  # the last round dropped
        self._merged: tuple[int, Rows] | None = None

    def stage(self, key: Key, ids: np.ndarray, values: np.ndarray) -> None:
        """Adds a contribution: a value for each of some rows, ascending.

        The same again changes nothing. One without rows must be added too: a commit
        knows by it that nothing is missing.
        """
        what = self._describe(key)
        check_ids(self.table, ids, what)
        if values.shape != (ids.size, self.table.width) or values.dtype != np.float32:
            raise Refused(
                f"{what}: values are {values.dtype.name}{list(values.shape)}, expected "
                f"float32{[ids.size, self.table.width]}"
            )
        rows = Rows(self._places(ids, what), values)
        with self._lock:
            if key[2] > self._dropped.get(key[:2], -1):
                self._staged.setdefault(key, rows)

    def merge(
        self, version: int, contributions: Sequence[Facts], divisor: float
    ) -> dict[str, Any]:
        """Computes the mean for the commit that makes `version`; see BlockStore."""
        with self._lock:
            self._check_next(version, "merge")
            parts = []
            for facts in sorted(contributions, key=key_of):
                key = key_of(facts)
                if key not in self._staged:
                    raise Refused(
                        f"{self._describe(key)}: nothing of it is staged here"
                    )
                parts.append((self._staged[key], np.float32(facts["coefficient"])))
            found = [rows.places for rows, _ in parts]
            places = np.unique(np.concatenate([np.empty(0, np.int64), *found]))
            mean = np.zeros((places.size, self.table.width), np.float32)
            with np.errstate(all="ignore"):  # what is not finite is found below
                for rows, coefficient in parts:
                    # A contribution has each row once, so nothing is lost here.
                    at = np.searchsorted(places, rows.places)
                    mean[at] += rows.values * coefficient
                mean /= np.float32(divisor if divisor > 0 else 1.0)
                squares = np.square(mean, dtype=np.float64).sum(axis=1)
            total = float(squares.sum())
            if math.isfinite(total):
                total = math.fsum(squares)
            self._merged = version, Rows(places, mean)
        return {"sum_of_squares": total, "finite": math.isfinite(total)}

    def apply(
        self,
        version: int,
        scale: float,
        share: float,
        keep: Iterable[int] = (),
        drop: Iterable[Sequence[int | None]] = (),
    ) -> None:
        """Makes `version` from the merged mean; again, it changes nothing.

        Args: see BlockStore.apply.
        """
        with self._lock:
            if version > self.newest:
                self._check_next(version, "apply")
                if scale != 0:
                    self._update(version, scale, share)
                self._merged, self.newest = None, version
            self._oldest = min({self.newest, *keep})
            for made in [v for v in self._before if v <= self._oldest]:
                del self._before[made]
            self.drop(drop)

    def drop(self, keys: Iterable[Sequence[Any]]) -> int:
        """Forgets staged contributions, as BlockStore does; returns their bytes."""
        nbytes = 0
        with self._lock:
            for learner, incarnation, round in keys:
                owner = (learner, incarnation)
                last = float("inf") if round is None else round
                self._dropped[owner] = max(last, self._dropped.get(owner, -1))
                for key in [k for k in self._staged if k[:2] == owner]:
                    if round in (None, key[2]):
                        nbytes += self._staged.pop(key).values.nbytes
        return nbytes

    def read(
        self, version: int, ids: np.ndarray, since: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns rows of a version, and which of `ids` (positions) they are.

        Args:
          since: an older version; only the rows that have changed after it are read.
        """
        what = f"job {self._job!r}, read of table {self.table.name!r}"
        check_ids(self.table, ids, what)
        places = self._places(ids, what)
        with self._lock:
            self._check_kept(version)
            at = np.arange(ids.size)
            if since is not None:
                at = np.flatnonzero(self._changed[places] > since)
            values, _ = self._as_of(version, places[at])
        return at, values

    def digest_lanes(self, version: int) -> list[int]:
        """Returns the sums over the elements held here; see blocks/digest."""
        sums, shape = (0, 0), (self.table.rows, self.table.width)
        for i, block in enumerate(self.owned):
            values, _ = self._block(version, i)
            first, stop = self.table.bounds(block)
            box = Box((first, 0), (stop, self.table.width))
            sums = digest.add(sums, digest.lanes(values, box, shape))
        return list(sums)

    def save(self, folder: str | Path, version: int) -> None:
        """Writes a version with its optimizer state, one file for each block."""
        folder = Path(folder) / self.table.name
        folder.mkdir(parents=True, exist_ok=True)
        for i, block in enumerate(self.owned):
            values, state = self._block(version, i)
            arrays = {"rows": values, "state": state}
            block_files.write(folder, block, self._facts(version), arrays)

    def load(self, folder: str | Path, version: int) -> None:
        """Reads what servers saved, however many; forgets what was here before."""
        folder, num = Path(folder) / self.table.name, int(self._offsets[-1])
        values, state = np.empty_like(self._values), np.empty_like(self._state)
        for i, block in enumerate(self.owned):
            found = block_files.read(folder, block, self._facts(version))
            values[self._slice(i)], state[self._slice(i)] = (
                found["rows"],
                found["state"],
            )
        with self._lock:
            self._values, self._state = values, state
            self.newest = self._oldest = version
            # Who has older rows may have some of a history that was taken back.
            self._changed = np.full(num, version, np.int32)
            self._before, self._staged, self._merged = {}, {}, None
            self._dropped = {}

    def staged(self) -> list[Key]:
        with self._lock:
            return sorted(self._staged)

    @property
    def nbytes(self) -> int:
        return self._values.nbytes + self._state.nbytes

    def _update(self, version: int, scale: float, share: float) -> None:
        if self._merged is None or self._merged[0] != version:
            raise Refused(
                f"apply of version {version} of table {self.table.name!r}: its "
                "contributions are not merged here; merge first"
            )
        places, mean = self._merged[1]
        values, state = self._values[places], self._state[places]
        grads = mean * np.float32(scale)
        new = row_updates.updated(self.table, values, grads, state, share)
        self._values[places], self._state[places] = new
        self._before[version] = Before(places, values, state)
        self._changed[places] = version

    def _as_of(self, version: int, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns rows of a version and their state; the lock is held."""
        values, state = self._values[places], self._state[places]
        for made in sorted((v for v in self._before if v > version), reverse=True):
            before = self._before[made]
            at = np.searchsorted(before.places, places)
            at[at == before.places.size] = 0
            if before.places.size:
                is_changed = before.places[at] == places
                values[is_changed] = before.values[at[is_changed]]
                state[is_changed] = before.state[at[is_changed]]
        return values, state

    def _block(self, version: int, i: int) -> tuple[np.ndarray, np.ndarray]:
        with self._lock:
            self._check_kept(version)
            return self._as_of(version, np.arange(*self._offsets[i : i + 2]))

    def _slice(self, i: int) -> slice:
        return slice(int(self._offsets[i]), int(self._offsets[i + 1]))

    def _places(self, ids: np.ndarray, what: str) -> np.ndarray:
        blocks = self.table.block_of(ids)
        places = ids + self._shift[blocks]
        if (places < 0).any():
            wrong = int(np.flatnonzero(places < 0)[0])
            raise Refused(
                f"{what}: row {ids[wrong]} is in block {blocks[wrong]}, which is not "
                "held by this server; ask the coordinator for the servers"
            )
        return places

    def _facts(self, version: int) -> dict[str, Any]:
        return {"version": version, "table": self.table.to_json()}

    def _check_next(self, version: int, verb: str) -> None:
        if version != self.newest + 1:
            raise Refused(
                f"{verb} of version {version} of table {self.table.name!r}: the newest "
                f"here is {self.newest}, so only {self.newest + 1} can follow"
            )

    def _check_kept(self, version: int) -> None:
        """Refuses a version that cannot be read any more."""
        if not self._oldest <= version <= self.newest:
            raise Refused(
                f"version {version} of table {self.table.name!r} is not here; the "
                f"newest is {self.newest}"
            )

    def _describe(self, key: Key) -> str:
        learner, incarnation, round = key
        return (
            f"job {self._job!r}, table {self.table.name!r}, learner {learner} "
            f"(incarnation {incarnation}), round {round}"
        )
