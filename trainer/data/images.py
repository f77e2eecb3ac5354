"""Images with labels: arrays in memory, and scikit-learn's handwritten digits."""

import dataclasses
import functools
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from . import shuffle
from .documents import Split
from .optional import library
from .splits import check_split


class Arrays:
    """A dataset whose examples are the rows of arrays of the same length.

    Args:
      about: further entries of `describe`.
      unit: what throughput is counted in, a plural noun.
    """

    def __init__(
        self,
        arrays: Mapping[str, np.ndarray],
        about: Mapping[str, Any],
        *,
        unit: str = "examples",
    ):
        self._arrays, self._about, self.unit = dict(arrays), dict(about), unit
        lengths = {name: len(array) for name, array in self._arrays.items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"arrays must have the same length, got {lengths}")
        self._length = lengths.popitem()[1]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        if not 0 <= i < len(self):
            raise IndexError(f"example {i} of a dataset of {len(self)} examples")
        return {name: array[i] for name, array in self._arrays.items()}

    def describe(self) -> dict[str, Any]:
        return {**self._about, "examples": len(self), "digest": self._digest}

    def loss_units(self, loss: float) -> dict[str, float]:
        del loss
        return {}

    @functools.cached_property
    def _digest(self) -> str:
        content = hashlib.sha256()
        for name, array in sorted(self._arrays.items()):
            content.update(f"{name} {array.dtype} {array.shape} ".encode())
            content.update(np.ascontiguousarray(array).tobytes())
        return content.hexdigest()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Digits:
    """Scikit-learn's 1797 images of handwritten digits, 8 x 8 pixels from 0 to 1.

    They come with the package, so nothing is downloaded. Of the images, in an order
    that is always the same, the first sixth is the eval split, the second sixth the
    test split, and the rest is trained on.
    """

    def open(self, split: Split) -> Arrays:
        check_split(self, split)
        images, labels = _digits()
        num, held_out = len(labels), len(labels) // 6
        order = np.argsort(shuffle.keys(0, np.arange(num)))
        parts = {
            "eval": order[:held_out],
            "test": order[held_out : 2 * held_out],
            "train": order[2 * held_out :],
        }
        chosen = np.sort(parts[split])
        arrays = {"image": images[chosen], "label": labels[chosen]}
        about = {"source": "Digits", "split": split, "num_classes": 10}
        return Arrays(arrays, about, unit="images")


@functools.cache
def _digits() -> tuple[np.ndarray, np.ndarray]:
    """Returns the images [N, 8, 8, 1] and their labels [N]."""
    sklearn = library("sklearn.datasets", what="Digits", extra="digits")
    pixels, labels = sklearn.load_digits(return_X_y=True)
    images = (pixels / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    return images, labels.astype(np.int32)
