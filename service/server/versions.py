"""The versions of the blocks that one server holds, and what can be read of them.

A version never changes, and can be read as long as it is kept. For each block that is
held here there are all versions that are kept.
"""

import threading
from collections.abc import Iterable, Mapping

import numpy as np

from ..blocks import digest
from ..blocks.box import Box
from ..blocks.dtypes import dtype_of
from ..blocks.layout import Layout
from ..blocks.pieces import pieces
from ..wire.errors import NotHere, Refused

Version = dict[int, tuple[np.ndarray, ...]]  # the slabs of every block


class Versions:
    """A table of versions; the lock guards it for moments only.

    Attributes:
      newest: None until the initial parameters have arrived.
    """

    def __init__(self, job: str, layout: Layout):
        self._job, self._layout = job, layout
        self._lock = threading.RLock()
        self._table: dict[int, Version] = {}
        self.newest: int | None = None

    def __getitem__(self, version: int) -> Version:
        with self._lock:
            if version not in self._table:
                raise Refused(
                    f"version {version} of job {self._job!r} is not here; the newest "
                    f"is {self.newest}"
                )
            return self._table[version]

    def numbers(self) -> list[int]:
        with self._lock:
            return sorted(self._table)

    def add(self, version: int, blocks: Version) -> None:
        """Makes a version the newest."""
        with self._lock:
            self._table[version] = blocks
            self.newest = version

    def reset(self, version: int, blocks: Version) -> None:
        """Makes a version the only one."""
        with self._lock:
            self._table, self.newest = {version: blocks}, version

    def add_block(
        self, block: int, arrays: Mapping[int, tuple[np.ndarray, ...]]
    ) -> None:
        """Adds a block of another server, with its versions."""
        with self._lock:
            for version, slabs in arrays.items():
                old = self._table.get(version, {})
                self._table[version] = {**old, block: slabs}

    def remove_blocks(self, blocks: Iterable[int]) -> None:
        gone = set(blocks)
        with self._lock:
            self._table = {
                version: {b: x for b, x in old.items() if b not in gone}
                for version, old in self._table.items()
            }

    def forget_except(self, keep: Iterable[int]) -> None:
        """Forgets versions; never the newest."""
        wanted = {self.newest, *keep}
        with self._lock:
            for version in [v for v in self._table if v not in wanted]:
                del self._table[version]

    def read(self, version: int, leaf: int, box: Box) -> np.ndarray:
        """Returns the elements of a box, read-only."""
        leaves = self._layout.leaves
        if not 0 <= leaf < len(leaves):
            raise Refused(f"job {self._job!r} has {len(leaves)} leaves, not {leaf}")
        blocks = self[version]
        found = pieces(self._layout, leaf, box)
        for block, _, part in found:
            if block not in blocks:
                raise NotHere(
                    f"{leaves[leaf].path}{part} is in block {block}, which is not held "
                    "by this server; ask the coordinator for the servers"
                )
        views = []
        for block, slab, part in found:
            inside = self._layout.blocks[block].slabs[slab].box
            # The dots keep an array without dimensions an array.
            index = (*part.slices(inside=inside), ...)
            views.append((part, blocks[block][slab][index]))
        if len(views) == 1:
            return views[0][1]
        whole = np.empty(box.shape, dtype_of(leaves[leaf].dtype))
        for part, view in views:
            whole[part.slices(inside=box)] = view
        return whole

    def digest_lanes(self, version: int, blocks: Iterable[int]) -> dict[str, list[int]]:
        """Returns {path: [sum, sum]} over the elements of blocks; see blocks/digest."""
        sums: dict[str, tuple[int, int]] = {}
        held = self[version]
        for block in blocks:
            slabs = self._layout.blocks[block].slabs
            for slab, array in zip(slabs, held[block], strict=True):
                leaf = self._layout.leaves[slab.leaf]
                part = digest.lanes(array, slab.box, leaf.shape)
                sums[leaf.path] = digest.add(sums.get(leaf.path, (0, 0)), part)
        return {path: list(lanes) for path, lanes in sums.items()}


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array
