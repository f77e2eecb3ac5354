"""The parameters of one learner as of the versions that it has merged.

A learner may hold parts of several versions: with fragments, each round merges one of
them. What it contributes is the change of a fragment since it was merged last.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from ..blocks.layout import Layout
from ..blocks.pieces import pieces
from . import shards
from .shards import Arrays, Host

# Fills buffers with a version, of one fragment or (None) of all; returns the bytes.
# The last argument is every element as it was read last.
Read = Callable[[int, Host, int | None, Host], int]


class Parameters(Protocol):
    """The exchanged parameters of a state, canonical, by their leaf in the layout."""

    like: Mapping[int, Any]  # shapes, dtypes and shardings

    def of(self, tree: Any) -> Arrays:
        """Returns the exchanged arrays of a tree like the parameters."""
        ...

    def put(self, state: Any, arrays: Arrays) -> Any:
        """Returns the state with these arrays instead of its own."""
        ...


class Merging:
    """Merges versions into the state of a learner.

    Args:
      mix: the share of a merged fragment; the rest is the learner's own value.
    """

    def __init__(
        self, parameters: Parameters, layout: Layout, read: Read, mix: float = 1.0
    ):
        self._parameters, self._layout = parameters, layout
        self._read, self._mix = read, np.float32(mix)
        self._base: Host = {}  # every element as of its last merge

    def fetch(self, version: int, fragment: int | None) -> tuple[Host, int]:
        """Reads a version, and returns it with the number of bytes read.

        It must be merged before another one is read.
        """
        buffers = self._buffers(fragment)
        return buffers, self._read(version, buffers, fragment, self._base)

    def replace(self, state: Any, fetched: Host) -> Any:
        """Returns the state with all parameters of a version that was fetched."""
        self._base = fetched
        arrays = shards.to_devices(fetched, self._parameters.like)
        return self._parameters.put(state, arrays)

    def merge(self, state: Any, fetched: Host, fragment: int | None) -> Any:
        """Returns the state with a fragment merged into it."""
        if fragment is None and self._mix == 1:
            return self.replace(state, fetched)
        leaves = {leaf for leaf, _ in fetched}
        arrays = dict(self._parameters.of(state.params))
        now = shards.to_host({leaf: arrays[leaf] for leaf in leaves}, replicas=True)
        for (leaf, box), merged in fetched.items():
            own, base = now[leaf, box], self._base[leaf, box]
            for block, _, part in pieces(self._layout, leaf, box):
                if fragment in (None, self._layout.fragment_of(block)):
                    index = part.slices(box)
                    base[index] = merged[index]
                    own[index] += self._mix * (merged[index] - own[index])
        like = {leaf: self._parameters.like[leaf] for leaf in leaves}
        return self._parameters.put(state, arrays | shards.to_devices(now, like))

    @property
    def base(self) -> Host:
        """What the parameters were when they were merged last.

        A learner sends base - now, which acts like a gradient.
        """
        return self._base

    def _buffers(self, fragment: int | None) -> Host:
        like = self._parameters.like
        if fragment is not None:
            leaves = {
                slab.leaf
                for block in self._layout.blocks
                if self._layout.fragment_of(block.index) == fragment
                for slab in block.slabs
            }
            like = {leaf: like[leaf] for leaf in leaves}
        return shards.wanted(
            {leaf: x.shape for leaf, x in like.items()},
            {leaf: x.sharding for leaf, x in like.items()},
        )
