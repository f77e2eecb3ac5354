"""What learners see of the parameters: a chain of published versions.

    published(n) = published(n - 1) + unpack(pack(exact(n) - published(n - 1)))

The optimizer works on exact parameters, which only the server has. Who has one version
of the chain gets the next by the packed changes in between, the same bits whenever it
asks. What packing rounds away is a part of the next change, so it never adds up. With
the plain codec nothing is packed, and what is published is exact.
"""

import collections
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..blocks.box import Box
from ..blocks.layout import Layout
from ..wire.changes import advanced
from ..wire.codecs import Codec
from ..wire.tensors import Packed
from .versions import read_only

Slabs = tuple[np.ndarray, ...]  # of a block


class Kept(NamedTuple):
    """The state of a block in a checkpoint, beside what is published."""

    optimizer: Any
    exact: Slabs


class Change(NamedTuple):
    """The packed arrays of each slab of a block, which led to a version."""

    version: int
    slabs: list[list[np.ndarray]]


class Chain:
    """The exact parameters of the newest version, and the changes up to it.

    Args:
      codec: how changes are packed; top-k is not supported.
    """

    def __init__(self, codec: Codec, layout: Layout):
        if codec.share is not None:
            raise ValueError(
                f"compression of pulls {codec}: expected float32, bfloat16 or int8"
            )
        self._codec, self._layout = codec, layout
        self._lock = threading.Lock()
        self.begin(0, {})

    def begin(self, version: int, states: Mapping[int, Any]) -> dict[int, Any]:
        """Begins anew at a version; returns the optimizer states.

        Args:
          states: of blocks, as a checkpoint has them.
        """
        is_plain = self._codec.is_plain
        exact = {} if is_plain else {b: state.exact for b, state in states.items()}
        with self._lock:
            self._exact: dict[int, Slabs] = {
                block: tuple(read_only(np.asarray(x)) for x in slabs)
                for block, slabs in exact.items()
            }
            # Changes of each block, and the version that they begin at.
            self._changes = collections.defaultdict[int, list[Change]](list)
            self._since = collections.defaultdict[int, int](lambda: version)
        return {b: x if is_plain else x.optimizer for b, x in states.items()}

    def exact(self, block: int, published: Slabs) -> Slabs:
        """Returns the exact parameters; `published` are those of the same version."""
        return self._exact.get(block, published)

    def publish(self, version: int, block: int, before: Slabs, exact: Slabs) -> Slabs:
        """Returns what is published of new parameters.

        Args:
          before: what was published of them last.
        """
        if self._codec.is_plain:
            return exact
        published, packed = [], []
        slabs = self._layout.blocks[block].slabs
        for slab, old, new in zip(slabs, before, exact, strict=True):
            parts, now = self._step(slab.box, old, new) if slab.box.size else ([], old)
            published.append(read_only(now))
            packed.append(parts)
        with self._lock:
            self._exact[block] = exact
            self._changes[block].append(Change(version, packed))
            while len(self._changes[block]) > self._limit(block):
                self._since[block] = self._changes[block].pop(0).version
        return tuple(published)

    def since(
        self, have: int | None, version: int, block: int, slab: int, box: Box
    ) -> list[Packed] | None:
        """Returns the changes of a box from one version to another, the oldest first.

        None if they are not here: the codec is plain, or they would be more than the
        elements.
        """
        if have is None or self._codec.is_plain:
            return None
        with self._lock:
            if not self._since[block] <= have <= version:
                return None
            changes = [c for c in self._changes[block] if have < c.version <= version]
        inside = self._layout.blocks[block].slabs[slab].box
        parts = (self._codec.part(c.slabs[slab], inside, box) for c in changes)
        return [
            Packed(self._codec, box.shape, self._codec.to_bytes(part)) for part in parts
        ]

    def add_block(self, version: int, block: int, exact: Slabs) -> None:
        """Adds a block of another server; its changes begin at this version.

        Args:
          exact: none if they are what was published.
        """
        with self._lock:
            if exact:
                self._exact[block] = exact
            self._changes[block], self._since[block] = [], version

    def remove_blocks(self, blocks: Iterable[int]) -> None:
        with self._lock:
            for block in blocks:
                for table in (self._exact, self._changes, self._since):
                    table.pop(block, None)

    def states(
        self, published: Mapping[int, Slabs], opt_states: Mapping[int, Any]
    ) -> dict[int, Any]:
        """Returns what a checkpoint has of each block, beside what is published."""
        if self._codec.is_plain:
            return dict(opt_states)
        return {
            block: Kept(state, self.exact(block, published[block]))
            for block, state in opt_states.items()
        }

    def template(
        self, init: Callable[[dict[str, Any]], Any]
    ) -> Callable[[dict[str, Any]], Any]:
        """Returns `init` of optimizer states for states of a checkpoint."""
        if self._codec.is_plain:
            return init
        return lambda params: Kept(init(params), tuple(params.values()))

    def _step(
        self, box: Box, old: np.ndarray, new: np.ndarray
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """Returns the packed change of a slab, and the elements after it."""
        with np.errstate(all="ignore"):  # what is not finite stays visible
            difference = new.astype(np.float32) - old.astype(np.float32)
            parts = self._codec.pack(difference, box)
            change = self._codec.unpack(parts, box)
        return parts, advanced(old, change, old.dtype)

    def _limit(self, block: int) -> int:
        """Returns how many changes of a block are less than its elements."""
        slabs = self._layout.blocks[block].slabs
        each = sum(self._codec.nbytes(slab.box) for slab in slabs)
        return (self._layout.block_bytes(block) - 1) // each if each else 0
