"""Planted users who choose items, and click on what they are shown.

Each user likes some items more than others, by products of planted factors, and some
items are more popular with all. What the best possible model and the best one that
ignores users would score is known, and part of `describe`.
"""

import dataclasses
from typing import Any

import numpy as np

from . import shuffle
from .documents import Split
from .images import Arrays
from .planted import factors, share, symmetric
from .splits import check_positive, check_split

SPLITS = ("train", "eval", "test")
HOURS, DENSE = 24, 4
CHUNK = 1024  # examples whose scores of all items are in memory at once


@dataclasses.dataclass(frozen=True, kw_only=True)
class Population:
    """Users, items, and how much each user likes each item.

    Attributes:
      width: of the planted factors.
      taste: how much a user's own likings count, beside popularity.
      num_examples, num_eval_examples: of the training split, and of each of the others.
    """

    num_users: int = 1000
    num_items: int = 512
    width: int = 4
    taste: float = 2.0
    num_examples: int = 65536
    num_eval_examples: int = 8192
    seed: int = 0

    def __post_init__(self):
        names = ("num_users", "num_items", "width", "num_examples")
        for name in (*names, "num_eval_examples"):
            check_positive(self, name)
        if not self.taste >= 0:
            raise ValueError(
                f"{type(self).__name__}: taste is {self.taste}; it must be >= 0."
            )

    def popularity(self) -> np.ndarray:
        """Returns the share of each item in what is shown, like 1 / (10 + rank)."""
        weights = 1 / (10 + np.arange(self.num_items))
        return weights / weights.sum()

    def likings(self) -> np.ndarray:
        """Returns [users, items], with variance taste^2."""
        users = factors(self.seed, 0, np.arange(self.num_users), self.width)
        items = factors(self.seed, 1, np.arange(self.num_items), self.width)
        return self.taste * (users @ items.T).astype(np.float64)

    def draws(self, split: Split, kind: int) -> np.ndarray:
        """Returns 64 random bits for each example of a split, others for each kind."""
        size = self.num_examples if split == "train" else self.num_eval_examples
        stream = 3 * kind + SPLITS.index(split)
        return shuffle.keys(self.seed, np.arange(size) + (stream << 40))

    def users(self, split: Split) -> np.ndarray:
        return (self.draws(split, 0) % np.uint64(self.num_users)).astype(np.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlantedChoices(Population):
    """Each example is the item that a user chose among all, in some situation.

    `situation` are numbers that describe it, which changes what a user likes.
    `popularity_recall_at_10` is how often the item is one of the ten that are chosen
    most, `best_recall_at_10` how often one of the ten that were likeliest.
    """

    def open(self, split: Split) -> Arrays:
        check_split(self, split)
        users, at = self.users(split), share(self.draws(split, 1))
        situation = self.situation(split)
        items, hits = [], 0
        for start in range(0, len(users), CHUNK):
            part = slice(start, start + CHUNK)
            weights = self.weights(users[part], situation[part])
            ends = np.cumsum(weights, axis=1)
            found = (ends < at[part, None] * ends[:, -1:]).sum(axis=1)
            best = np.argsort(-weights, axis=1)[:, :10]
            hits += int((best == found[:, None]).sum())
            items.append(found)
        item = np.concatenate(items).astype(np.int32)
        shares = self.shares()
        most = np.argsort(-shares)[:10]
        about: dict[str, Any] = {
            "source": "PlantedChoices",
            "split": split,
            "num_users": self.num_users,
            "num_items": self.num_items,
            "popularity_recall_at_10": float(np.isin(item, most).mean()),
            "best_recall_at_10": hits / len(item),
        }
        log_share = np.log(shares[item]).astype(np.float32)
        arrays = {"user": users, "situation": situation, "item": item}
        return Arrays({**arrays, "log_share": log_share}, about, unit="choices")

    def situation(self, split: Split) -> np.ndarray:
        """Returns [examples, width] numbers, as large as the factors of users."""
        words = np.stack([self.draws(split, 4 + i) for i in range(self.width)], axis=1)
        scale = np.sqrt(3) / self.width**0.25
        return (scale * symmetric(words)).astype(np.float32)

    def weights(self, users: np.ndarray, situation: np.ndarray) -> np.ndarray:
        """Returns [examples, items]: how likely each item is, up to a factor."""
        user = factors(self.seed, 0, users, self.width)
        item = factors(self.seed, 1, np.arange(self.num_items), self.width)
        likings = (0.8 * user + 0.6 * situation) @ item.T
        return self.popularity() * np.exp(self.taste * likings.astype(np.float64))

    def shares(self) -> np.ndarray:
        """Returns the share of each item in the choices of all users."""
        situation = self.situation("train")[: self.num_users]
        users = np.arange(len(situation))
        weights = self.weights(users, situation)
        return (weights / weights.sum(axis=1, keepdims=True)).mean(axis=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlantedClicks(Population):
    """Each example is an item that a user was shown, and whether it was clicked.

    `ids` are user, item and hour of the day, `dense` are four numbers. Neither the hour
    nor the last two numbers have anything to do with clicks.
    `popularity_auc` is the area under the ROC curve of the items' own click rates,
    `best_auc` that of the true probabilities.
    """

    def open(self, split: Split) -> Arrays:
        check_split(self, split)
        users = self.users(split)
        ends, at = np.cumsum(self.popularity()), share(self.draws(split, 1))
        items = np.minimum(np.searchsorted(ends, at), self.num_items - 1)
        likings = self.likings()
        charm = np.sqrt(3) * symmetric(
            shuffle.keys(self.seed, np.arange(self.num_items))
        )
        dense = np.stack(
            [symmetric(self.draws(split, 4 + i)) for i in range(DENSE)], axis=1
        )
        score = likings[users, items] + charm[items] + dense[:, 0] - dense[:, 1] - 1
        probability = 1 / (1 + np.exp(-score))
        label = (share(self.draws(split, 2)) < probability).astype(np.int32)
        hour = (self.draws(split, 3) % np.uint64(HOURS)).astype(np.int64)
        rates = (1 / (1 + np.exp(-likings - charm))).mean(axis=0)
        arrays = {
            "dense": dense.astype(np.float32),
            "ids": np.stack([users, items, hour], axis=1).astype(np.int32),
            "label": label,
        }
        about: dict[str, Any] = {
            "source": "PlantedClicks",
            "split": split,
            "table_rows": (self.num_users, self.num_items, HOURS),
            "click_rate": float(label.mean()),
            "popularity_auc": auc(rates[items], label),
            "best_auc": auc(score, label),
        }
        return Arrays(arrays, about, unit="clicks")


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """Returns how often a click scores higher than what was not clicked on.

    The area under the ROC curve; equal scores count half.
    """
    values, which = np.unique(scores, return_inverse=True)
    clicks = np.bincount(which, labels, len(values))
    others = np.bincount(which, 1 - labels, len(values))
    below = np.cumsum(others) - others
    pairs = clicks.sum() * others.sum()
    return (
        float((clicks * (below + others / 2)).sum() / pairs) if pairs else float("nan")
    )
