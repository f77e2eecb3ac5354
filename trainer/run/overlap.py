"""Whether held-out data was trained on: equal documents of text, else equal examples.

Only equal contents are found, wherever they are stored and whatever they are called. A
paragraph of a document, or an image at another brightness, is not.
"""

import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..data import Dataset
from ..data.batches import WEIGHTS

_PRINT_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class Overlap:
    """The contents of a split that are also in the training split.

    Attributes:
      unit: what was compared, "documents" or "examples".
      compared: how many of them the split and the training split have.
      count: how many of the split are in the training split.
      first: the names of one pair; empty if there is none.
    """

    unit: str
    compared: tuple[int, int]
    count: int = 0
    first: tuple[str, ...] = ()

    def describe(self) -> str:
        size, train = self.compared
        return (
            f"{self.count or 'None'} of its {size:,} {self.unit} "
            f"{'is' if self.count == 1 else 'are'} among the {train:,} of the training "
            "split"
        )

    def to_json(self) -> dict[str, Any]:
        size, train = self.compared
        return {"unit": self.unit, "in_both": self.count, "of": size, "train": train}


def find(train: Dataset, other: Dataset, log: Callable[[str], None]) -> Overlap:
    """Compares the digests of the contents of a split with those of the train split."""
    is_text = hasattr(train, "contents") and hasattr(other, "contents")
    contents = _documents if is_text else _examples
    names: dict[bytes, str] = {}
    size = 0
    for name, digest in contents(other):
        names.setdefault(digest, name)
        size += 1
    found: dict[bytes, str] = {}
    number, since = 0, time.monotonic()
    for name, digest in contents(train):
        number += 1
        if digest in names:
            found.setdefault(digest, name)
        if time.monotonic() - since > _PRINT_SECONDS:
            since = time.monotonic()
            log(f"Compared with {number:,} {_unit(is_text)} of the training split ...")
    count = sum(digest in found for _, digest in contents(other)) if found else 0
    first = next(((names[digest], name) for digest, name in found.items()), ())
    return Overlap(_unit(is_text), (size, number), count, first)


def _unit(is_text: bool) -> str:
    return "documents" if is_text else "examples"


def _documents(data: Any) -> Iterator[tuple[str, bytes]]:
    for name, tokens in data.contents():
        # Of any integer dtype: readers of text give bytes, corpora give tokens.
        array = np.ascontiguousarray(tokens, np.int64)
        yield name, hashlib.sha256(array.tobytes()).digest()


def _examples(data: Dataset) -> Iterator[tuple[str, bytes]]:
    for i in range(len(data)):
        digest = hashlib.sha256()
        for name, x in sorted(data[i].items()):
            if name != WEIGHTS:
                array = np.asarray(x)
                digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
                digest.update(np.ascontiguousarray(array).tobytes())
        yield f"example {i}", digest.digest()
