"""Data that grows: the order of what was there stays, and new examples follow.

A *part* is the files that arrived together: those that a run began with, or those
that were found when it had read everything before. Its examples are shuffled among
themselves, so the order of a run follows from its seed and its parts alone.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from . import shuffle
from .documents import Document, Split
from .sources import Dataset

_SALT = np.uint64(0xA24BAED4963EE407)


class GrowingSource(Protocol):
    """A source of files, to which more may be added."""

    def open(self, split: Split) -> Dataset: ...

    def documents(self, split: Split) -> list[Document]:
        """Returns the files of a split, sorted by name."""
        ...

    def open_documents(self, split: Split, files: Sequence[Document]) -> Dataset:
        """Opens a split with these files in this order.

        With more files at the end it has more examples at the end, and the others stay.
        """
        ...

    def check_growing(self) -> None:
        """Raises ValueError if the settings exclude that files are added."""
        ...


def growing(source: Any) -> GrowingSource:
    """Returns the source, or raises ValueError if it cannot grow."""
    check = getattr(source, "check_growing", None)
    if check is None:
        raise ValueError(
            f"follow: data {type(source).__name__} cannot grow. Use files that are "
            "added to a folder, such as Text or ArrayFiles (docs/growing.md)."
        )
    check()
    return source


@dataclasses.dataclass(frozen=True)
class Part:
    """Examples first to stop - 1 of the dataset, from a position of the run on."""

    start: int
    first: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.first


@dataclasses.dataclass(frozen=True)
class GrownOrder:
    """Maps example k of the run to an example of a dataset that has grown.

    A part is repeated, epoch after epoch, until the position where the next begins. The
    first part alone has the order that the dataset would have if it never grew.
    """

    parts: tuple[Part, ...]
    seed: int = 0

    @property
    def num_examples(self) -> int:
        return self.parts[-1].stop

    def facts(self) -> dict[str, Any]:
        """Returns what `order_from` needs besides number of examples and seed."""
        return {"parts": [dataclasses.astuple(part) for part in self.parts]}

    def index(self, k: Any) -> tuple[Any, Any]:
        """Returns (epoch of its part, index in the dataset) of example k of the run.

        Two integers if k is an integer, and two int64 arrays if k is an array.
        """
        numbers = np.asarray(k, dtype=np.int64)
        if (numbers < 0).any():
            raise ValueError(f"GrownOrder: example number is {k}; it must be >= 0.")
        flat = np.atleast_1d(numbers)
        epochs, indices = np.zeros_like(flat), np.zeros_like(flat)
        starts = np.array([part.start for part in self.parts])
        owners = np.searchsorted(starts, flat, side="right") - 1
        for number in np.unique(owners).tolist():
            part, here = self.parts[number], owners == number
            epoch, place = np.divmod(flat[here] - part.start, len(part))
            salt = np.array([number], np.uint64) * _SALT
            keys = shuffle.keys(self.seed, epoch) + salt
            place = shuffle.permute(place, len(part), keys).astype(np.int64)
            epochs[here], indices[here] = epoch, part.first + place
        if numbers.ndim == 0:
            return int(epochs[0]), int(indices[0])
        return epochs, indices
