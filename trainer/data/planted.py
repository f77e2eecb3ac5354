"""A planted matrix: data whose answer is known, so that one can see it recovered."""

import dataclasses
import math
from typing import Any, Literal

import numpy as np

from . import shuffle
from .documents import Split
from .images import Arrays
from .splits import check_positive, check_split


def factors(seed: int, table: int, ids: np.ndarray, width: int) -> np.ndarray:
    """Returns [len(ids), width] of a table; a row is a function of seed and id.

    Products of rows of two tables have variance 1.
    """
    with np.errstate(over="ignore"):
        at = ids.astype(np.int64)[:, None] * width + np.arange(width)
        number = (seed * 2 + table) << 40
        words = shuffle.mix(at.astype(np.uint64) + np.uint64(number) + shuffle.STEP)
    return (symmetric(words) * np.sqrt(3) / width**0.25).astype(np.float32)


def symmetric(words: np.ndarray) -> np.ndarray:
    """Returns a number in [-1, 1) for 64 random bits."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1


def share(words: np.ndarray) -> np.ndarray:
    """Returns a number in [0, 1) for 64 random bits."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


class Entries(Arrays):
    """Entries of a matrix, whose loss is a mean squared error."""

    def loss_units(self, loss: float) -> dict[str, float]:
        return {"rmse": math.sqrt(loss)} if loss >= 0 else {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlantedMatrix:
    """A matrix of users and items that is a product of two factors, plus noise.

    Entries of the product have variance 1. Held-out and test entries have no noise:
    their `rmse` is the distance to the planted matrix, relative to its entries.

    Attributes:
      width: of the factors; the rank of the matrix.
      form: "entries" for the loss of entries: each is an example, and those trained on,
        held out and tested are different ones. "rows" for the loss of rows: each user
        is an example with all entries. The held-out and test splits are the users with
        even and odd numbers.
      observed: share of the entries that are trained on, of which the held-out and the
        test split have a tenth each, with form "entries".
      noise: standard deviation of what is added to the entries trained on.
    """

    num_users: int
    num_items: int
    width: int
    form: Literal["entries", "rows"] = "entries"
    observed: float = 0.5
    noise: float = 0.05
    seed: int = 0

    def __post_init__(self):
        for name in ("num_users", "num_items", "width"):
            check_positive(self, name)
        if self.form not in ("entries", "rows"):
            raise ValueError(
                f"PlantedMatrix: form is {self.form!r}; expected 'entries' or 'rows'."
            )
        if not 0 < self.observed <= 0.8:
            raise ValueError(
                f"PlantedMatrix: observed is {self.observed}; expected a share of the "
                "entries, > 0 and <= 0.8, so that some are left to evaluate on."
            )
        if not self.noise > 0:
            raise ValueError(
                f"PlantedMatrix: noise is {self.noise}; it must be > 0, for held-out "
                "entries to differ from those trained on."
            )

    def planted(self) -> np.ndarray:
        """Returns the matrix [users, items] without noise."""
        users = factors(self.seed, 0, np.arange(self.num_users), self.width)
        items = factors(self.seed, 1, np.arange(self.num_items), self.width)
        return users @ items.T

    def open(self, split: Split) -> Entries:
        check_split(self, split)
        matrix = self.planted()
        if split == "train":
            # A number that is no table of factors; uniform, with this deviation.
            words = shuffle.keys(self.seed + 2, np.arange(matrix.size))
            noise = symmetric(words) * np.sqrt(3) * self.noise
            matrix += noise.reshape(matrix.shape).astype(np.float32)
        arrays = self._rows(matrix, split)
        if self.form == "entries":
            arrays = self._entries(matrix, split)
        about: dict[str, Any] = {"source": "PlantedMatrix", "split": split}
        sizes = {"num_users": self.num_users, "num_items": self.num_items}
        return Entries(arrays, about | sizes, unit=self.form)

    def _rows(self, matrix: np.ndarray, split: Split) -> dict[str, np.ndarray]:
        users = np.arange(self.num_users, dtype=np.int32)
        if split != "train":
            users = users[("eval", "test").index(split) :: 2]
        return {"user": users, "values": matrix[users]}

    def _entries(self, matrix: np.ndarray, split: Split) -> dict[str, np.ndarray]:
        numbers = np.arange(matrix.size)
        key = shuffle.keys(self.seed, numbers * 0)
        order = shuffle.permute(numbers, matrix.size, key).astype(np.int64)
        first = int(self.observed * matrix.size)
        tenth = max(first // 10, 1)
        start, stop = {
            "train": (0, first),
            "eval": (first, first + tenth),
            "test": (first + tenth, first + 2 * tenth),
        }[split]
        user, item = np.divmod(order[start:stop], self.num_items)
        ids = {"user": user.astype(np.int32), "item": item.astype(np.int32)}
        return {**ids, "value": matrix[user, item]}
