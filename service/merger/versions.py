"""The versions that a merger has pulled once, for all learners below it."""

import threading
from collections.abc import Iterator, Sequence

from ..blocks.box import Box
from ..blocks.layout import Layout
from ..blocks.pieces import pieces
from ..wire import tensors
from ..wire.errors import Refused
from .upstream import Block, Upstream

KEPT = 2  # who is slow still reads the version before


class Versions:
    """Blocks of the newest versions that somebody asked for."""

    def __init__(self, layout: Layout, upstream: Upstream):
        self._layout, self._upstream = layout, upstream
        self._fetching = threading.Lock()  # so that each block is pulled once
        self._lock = threading.Lock()
        self._blocks: dict[int, dict[int, Block]] = {}  # by version
        self._clears = 0
        self._history = ""  # of the job, which all versions are of

    def read(
        self, version: int, boxes: Sequence[tuple[int, Box]]
    ) -> Iterator[tuple[tensors.Place, Sequence[int], tensors.Sent]]:
        """Returns boxes of a version, as they are sent."""
        places = [self._place_of(leaf, box) for leaf, box in boxes]
        blocks = self._fetched(version, sorted({block for block, _ in places}))

        def found() -> Iterator[tuple[tensors.Place, Sequence[int], tensors.Sent]]:
            for (leaf, box), (block, slab) in zip(boxes, places, strict=True):
                inside = self._layout.blocks[block].slabs[slab].box
                array = blocks[block][slab][(*box.slices(inside=inside), ...)]
                yield {"leaf": leaf}, box.start, array

        return found()

    def keep_to(self, history: str) -> None:
        """Forgets everything if it is of another history of the job."""
        with self._lock:
            is_same, self._history = history == self._history, history
        if not is_same:
            self.clear()

    def clear(self) -> None:
        """Forgets everything, also what is being pulled; it can be pulled again."""
        with self._lock:
            self._blocks = {}
            self._clears += 1

    def _place_of(self, leaf: int, box: Box) -> tuple[int, int]:
        """Returns the block and the slab that a box lies in."""
        if not 0 <= leaf < len(self._layout.leaves):
            raise Refused(f"the job has {len(self._layout.leaves)} leaves, not {leaf}")
        found = pieces(self._layout, leaf, box)
        if len(found) != 1:
            path = self._layout.leaves[leaf].path
            raise Refused(
                f"{path}{box} is in {len(found)} blocks; a merger sends boxes that are "
                "in one"
            )
        return found[0][0], found[0][1]

    def _fetched(self, version: int, wanted: Sequence[int]) -> dict[int, Block]:
        with self._lock:
            there = self._blocks.get(version, {})
        if not there.keys() >= set(wanted):
            with self._fetching:
                with self._lock:
                    there = dict(self._blocks.get(version, {}))
                    clears = self._clears
                if missing := [block for block in wanted if block not in there]:
                    there |= self._upstream.pull(version, missing)
                    with self._lock:
                        if clears == self._clears:
                            self._blocks[version] = there
                        for old in sorted(self._blocks)[:-KEPT]:
                            del self._blocks[old]
        return there
