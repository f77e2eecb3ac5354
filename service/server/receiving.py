"""Receives the pieces of one stream into the staging buffers of a store.

In place where that is possible: a piece that breaks off, or is damaged, does not count,
and its place is free for whoever sends it again.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from ..blocks.box import Box
from ..wire import tensors
from ..wire.codecs import PLAIN, Codec
from ..wire.errors import Refused
from ..wire.sums import is_sum
from .staging import Key, Staged, Staging


class Store(Protocol):
    """What contributions are received for: a BlockStore, or a merger's job."""

    @property
    def staging(self) -> Staging: ...

    @property
    def push_codec(self) -> Codec: ...

    @property
    def newest(self) -> int | None: ...

    def stage(
        self,
        learner: int,
        incarnation: int,
        round: int,
        block: int,
        slab: int,
        start: Sequence[int],
        array: np.ndarray,
    ) -> None: ...


class _Open(NamedTuple):
    """A piece that is being received in place."""

    staged: Staged
    block: int
    slab: int
    box: Box
    array: np.ndarray


class Receiving:
    """Receives pieces of one contribution, one after the other."""

    def __init__(self, store: Store, key: Key):
        self._store, self._key = store, key
        self._scratch = tensors.Scratch()
        self._open: _Open | None = None

    def target(self, header: tensors.Header) -> np.ndarray:
        """Returns where to write a piece; refuses one that does not belong here."""
        block, slab = header.place["block"], header.place["slab"]
        staging = self._store.staging
        staging.check(self._key, block, slab, header.box, header.dtype)
        self._check_codec(header)
        is_known = self._key[2] == 0 and self._store.newest is not None
        is_alike = header.dtype == np.float32 and header.codec is None
        if is_alike and not is_known:
            staged = staging.made(self._key)
            array = None if staged is None else staged.open(block, slab, header.box)
            if staged is not None and array is not None:
                self._open = _Open(staged, block, slab, header.box, array)
                return array
        return self._scratch(header)

    def done(self, header: tensors.Header, array: np.ndarray) -> None:
        """Stages a piece whose bytes are right."""
        if self._open is not None:
            self._end(is_right=True)  # nothing is left to copy for `stage`
        if header.codec is not None:
            array = header.codec.from_bytes(array, header.box)
        place = header.place["block"], header.place["slab"]
        self._store.stage(*self._key, *place, header.box.start, array)

    def close(self) -> None:
        """Gives up a piece that was not received to its end."""
        if self._open is not None:
            self._end(is_right=False)

    def _check_codec(self, header: tensors.Header) -> None:
        """Refuses a piece that is not packed as the job says.

        Parameters and sums never are.
        """
        is_plain = self._key[2] == 0 or is_sum(self._key[0])
        expected = PLAIN if is_plain else self._store.push_codec
        found = header.codec or PLAIN
        if found != expected:
            raise Refused(
                f"{self._store.staging.describe(self._key)}: {header} is packed as "
                f"{found}, in this job it must be {expected}"
            )

    def _end(self, *, is_right: bool) -> None:
        assert self._open is not None
        opened, self._open = self._open, None
        opened.staged.close(
            opened.block, opened.slab, opened.box, opened.array, is_right
        )
