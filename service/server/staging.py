"""Staging: contributions that have arrived, in whole or in part, until a commit.

Pieces come from several processes at once and in any order. They go to float32 buffers,
one for each slab, that are used again once a contribution is dropped. A piece is copied
there when it is known to be right; or it is received there, and counts from the moment
at which it is known to be right.
"""

import enum
import math
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..blocks.box import Box
from ..blocks.dtypes import NAMES
from ..blocks.layout import Layout
from ..wire.errors import NotHere, Refused

Key = tuple[int, int, int]  # learner, incarnation, round


def key_of(contribution: Mapping[str, Any]) -> Key:
    return (
        contribution["learner"],
        contribution["incarnation"],
        contribution["round"],
    )


class _State(enum.Enum):
    """What is known of a piece: it is arriving, right but being copied, or there."""

    ARRIVING, COPIED, THERE = range(3)


class Pool:
    """Float32 buffers that are used again: as many as were ever in use at once.

    Attributes:
      num_made: buffers that were allocated so far.
    """

    def __init__(self):
        self.num_made = 0
        self._free: dict[int, list[np.ndarray]] = defaultdict(list)
        self._lock = threading.Lock()

    def take(self, shape: Sequence[int]) -> np.ndarray:
        """Returns a buffer with any content."""
        size = int(np.prod(shape, dtype=np.int64))
        with self._lock:
            free = self._free[size]
            self.num_made += not free
            flat = free.pop() if free else np.empty(size, np.float32)
        return flat.reshape(shape)

    def give(self, array: np.ndarray) -> None:
        """Takes a buffer back, which nobody may use from then on."""
        with self._lock:
            self._free[array.size].append(array.reshape(-1))


class Staged:
    """The pieces of one contribution.

    The lock guards which pieces there are. Bytes are copied without it: no two pieces
    overlap, and a block is read only once all of its pieces are there.
    """

    def __init__(self, name: str, layout: Layout, accepted: set[int], pool: Pool):
        self._name = name
        self._layout = layout
        self._accepted = accepted
        self._pool = pool
        self._lock = threading.Lock()
        self._buffers: dict[int, list[np.ndarray]] = {}
        # The boxes of each slab.
        self._boxes: dict[tuple[int, int], dict[Box, _State]] = defaultdict(dict)

    def stage(
        self, block: int, slab: int, start: Sequence[int], array: np.ndarray
    ) -> None:
        """Adds a piece. The same piece again changes nothing.

        Args:
          start: of the piece in the coordinates of its leaf.
        """
        box = Box.at(start, array.shape)
        inside = check_piece(
            self._name, self._layout, self._accepted, block, slab, box, array.dtype
        )
        with self._lock:
            boxes = self._boxes[block, slab]
            if boxes.get(box) is _State.THERE:
                return
            self._check_overlap(block, slab, box)
            buffers = self._buffers_of(block)
            if boxes.get(box) is _State.ARRIVING:
                # The other stream may be dead, and may still write what is not right:
                # it keeps the buffer, and what counts moves to another one.
                buffers[slab] = buffers[slab].copy()
            boxes[box] = _State.COPIED
            target = buffers[slab][(*box.slices(inside=inside), ...)]
        target[...] = array
        with self._lock:
            self._settle(block, slab, box, target)

    def open(self, block: int, slab: int, box: Box) -> np.ndarray | None:
        """Returns where the bytes of a piece can be received; `close` must follow.

        None: they must be received elsewhere and staged. The piece is there already, or
        arrives in another stream, or its place is not contiguous.
        """
        inside = self._layout.blocks[block].slabs[slab].box
        with self._lock:
            if box in self._boxes[block, slab]:
                return None
            self._check_overlap(block, slab, box)
            index = (*box.slices(inside=inside), ...)
            target = self._buffers_of(block)[slab][index]
            if not target.flags.c_contiguous:
                return None
            self._boxes[block, slab][box] = _State.ARRIVING
            return target

    def close(
        self, block: int, slab: int, box: Box, target: np.ndarray, is_right: bool
    ) -> None:
        """Ends what `open` began: the piece counts if its bytes are right."""
        with self._lock:
            if self._boxes[block, slab].get(box) is not _State.ARRIVING:
                return  # it has come in another stream
            if is_right:
                self._settle(block, slab, box, target)
            else:
                del self._boxes[block, slab][box]

    def missing(self, blocks: Iterable[int]) -> str | None:
        """Returns the first slab of these blocks that is not complete, if any."""
        with self._lock:
            for block in blocks:
                for i, slab in enumerate(self._layout.blocks[block].slabs):
                    boxes = self._boxes.get((block, i), {})
                    there = (box for box, x in boxes.items() if x is _State.THERE)
                    size = sum(box.size for box in there)
                    if size < slab.box.size:
                        path = self._layout.leaves[slab.leaf].path
                        return (
                            f"{path}{slab.box} (block {block}): {size} of "
                            f"{slab.box.size} elements"
                        )
        return None

    def arrays(self, block: int) -> list[np.ndarray]:
        """Returns the buffers of a block's slabs."""
        with self._lock:
            if block in self._buffers:
                return self._buffers[block]
        # Slabs without elements have no pieces.
        return [self._pool.take(s.box.shape) for s in self._layout.blocks[block].slabs]

    def pieces_of(self, block: int) -> list[tuple[int, tuple[int, ...], np.ndarray]]:
        """Returns copies of the pieces of a block: (slab, start, array)."""
        found = []
        with self._lock:
            for i, slab in enumerate(self._layout.blocks[block].slabs):
                for box in self._boxes.get((block, i), {}):
                    index = (*box.slices(inside=slab.box), ...)
                    array = self._buffers[block][i][index].copy()
                    found.append((i, box.start, array))
        return found

    def release(self) -> int:
        """Gives the buffers back to the pool; pieces must not be added afterwards.

        Returns:
          The bytes of the buffers.
        """
        with self._lock:
            is_written = any(
                state is not _State.THERE
                for boxes in self._boxes.values()
                for state in boxes.values()
            )
            buffers, self._buffers = self._buffers, {}
        # A buffer that a late piece is still being copied into is left to that thread.
        arrays = [array for parts in buffers.values() for array in parts]
        for array in arrays if not is_written else ():
            self._pool.give(array)
        return sum(array.nbytes for array in arrays)

    def _buffers_of(self, block: int) -> list[np.ndarray]:
        if block not in self._buffers:
            slabs = self._layout.blocks[block].slabs
            self._buffers[block] = [self._pool.take(s.box.shape) for s in slabs]
        return self._buffers[block]

    def _settle(self, block: int, slab: int, box: Box, target: np.ndarray) -> None:
        """Counts a piece whose bytes are in `target`."""
        buffers = self._buffers.get(block)  # None: all of it was dropped meanwhile
        if buffers is not None and not np.may_share_memory(buffers[slab], target):
            inside = self._layout.blocks[block].slabs[slab].box
            buffers[slab][box.slices(inside=inside)] = target
        self._boxes[block, slab][box] = _State.THERE

    def _check_overlap(self, block: int, slab: int, box: Box) -> None:
        for other in self._boxes[block, slab]:
            if other != box and other.intersect(box) is not None:
                raise Refused(
                    f"{self._piece(block, slab, box)} overlaps the piece {other} that "
                    "arrived before; two processes of a learner must not send the same "
                    "elements"
                )

    def _piece(self, block: int, slab: int, box: Box) -> str:
        leaf = self._layout.leaves[self._layout.blocks[block].slabs[slab].leaf]
        return f"{self._name}: piece {leaf.path}{box} (block {block}, slab {slab})"


def check_piece(
    name: str,
    layout: Layout,
    accepted: set[int],
    block: int,
    slab: int,
    box: Box,
    dtype: np.dtype,
) -> Box:
    """Returns the box of the slab that a piece belongs to; refuses one from elsewhere.

    Args:
      name: of the contribution, for messages.
      box: of the piece, in the coordinates of its leaf.
    """
    if block not in accepted:
        raise NotHere(
            f"{name}: block {block} is not held by this server; ask the coordinator "
            "for the servers of the job again"
        )
    slabs = layout.blocks[block].slabs
    if not 0 <= slab < len(slabs):
        raise Refused(f"{name}: block {block} has {len(slabs)} slabs, not slab {slab}")
    if dtype.name not in NAMES:
        raise Refused(
            f"{name}: block {block} slab {slab} is of dtype {dtype.name}; expected one "
            f"of {', '.join(NAMES)}"
        )
    inside = slabs[slab].box
    if not inside.contains(box) or box.size == 0:
        path = layout.leaves[slabs[slab].leaf].path
        raise Refused(
            f"{name}: piece {path}{box} (block {block}, slab {slab}) is empty or "
            f"outside of its slab {inside}; do learner and server have the same layout?"
        )
    return inside


class Staging:
    """The staged contributions of a job.

    The contributions of an incarnation are dropped in the order of their rounds, so a
    piece of a round up to the last dropped one is a repeated message, and is ignored.
    """

    def __init__(self, job: str, layout: Layout, accepted: set[int], pool: Pool):
        """Args:
        accepted: the blocks of which pieces may come; whoever made it may change it.
        """
        self._job = job
        self._layout = layout
        self._accepted = accepted
        self._pool = pool
        self._lock = threading.Lock()
        self._staged: dict[Key, Staged] = {}
        self._dropped: dict[tuple[int, int], float] = {}  # the last round dropped

    def add(
        self,
        key: Key,
        block: int,
        slab: int,
        start: Sequence[int],
        array: np.ndarray,
    ) -> None:
        """Adds a piece of a contribution."""
        staged = self.made(key)
        if staged is not None:
            staged.stage(block, slab, start, array)

    def made(self, key: Key) -> Staged | None:
        """Returns a contribution, made if it is new; None if it was dropped.

        New initial parameters (round 0) replace others, which whoever sends them did
        not complete.
        """
        with self._lock:
            if key[2] <= self._dropped.get(key[:2], -1):
                return None
            if key not in self._staged:
                gone = [k for k in self._staged if key[2] == k[2] == 0]
                self._staged[key] = Staged(
                    self.describe(key), self._layout, self._accepted, self._pool
                )
                for old in gone:
                    self._staged.pop(old).release()
            return self._staged[key]

    def check(self, key: Key, block: int, slab: int, box: Box, dtype: np.dtype) -> None:
        """Refuses a piece that does not belong here, before its bytes are received."""
        name = self.describe(key)
        check_piece(name, self._layout, self._accepted, block, slab, box, dtype)

    def get(self, key: Key) -> Staged | None:
        with self._lock:
            return self._staged.get(key)

    def keys(self) -> list[Key]:
        with self._lock:
            return sorted(self._staged)

    def complete(self, key: Key, blocks: Sequence[int]) -> Staged:
        """Returns a contribution; refuses one that has not arrived for these blocks."""
        staged = self.get(key)
        if staged is None:
            raise Refused(f"{self.describe(key)}: nothing of it is staged here")
        missing = staged.missing(blocks)
        if missing is not None:
            raise Refused(f"{self.describe(key)} is not complete: {missing}")
        return staged

    def drop(self, learner: int, incarnation: int, round: int | None) -> int:
        """Forgets a contribution; None: all of an incarnation, also those to come.

        Returns:
          The bytes of the buffers that are not needed any more.
        """
        owner = (learner, incarnation)
        with self._lock:
            last = math.inf if round is None else round
            self._dropped[owner] = max(last, self._dropped.get(owner, -1))
            keys = [k for k in self._staged if k[:2] == owner and round in (None, k[2])]
            found = [self._staged.pop(key) for key in keys]
        return sum(staged.release() for staged in found)

    def clear(self, *, round: int | None = None) -> None:
        """Forgets all contributions (of one round), as if nothing had arrived."""
        with self._lock:
            keys = [key for key in self._staged if round in (None, key[2])]
            found = [self._staged.pop(key) for key in keys]
            if round is None:
                self._dropped = {}
        for staged in found:
            staged.release()

    def dropped(self) -> list[tuple[int, int, int | None]]:
        """Returns (learner, incarnation, last round that was dropped; None: all)."""
        with self._lock:
            rounds = list(self._dropped.items())
        return [(*who, int(x) if x < math.inf else None) for who, x in rounds]

    def note_dropped(self, rows: Iterable[Sequence[int | None]]) -> None:
        """Takes over what `dropped` of another server returned."""
        with self._lock:
            for learner, incarnation, round in rows:
                assert learner is not None and incarnation is not None
                last = math.inf if round is None else round
                owner = learner, incarnation
                self._dropped[owner] = max(last, self._dropped.get(owner, -1))

    def describe(self, key: Key) -> str:
        learner, incarnation, round = key
        return (
            f"job {self._job!r}, learner {learner} (incarnation {incarnation}), "
            f"round {round}"
        )
