"""Which documents of a corpus, or which part of its only one, belong to a split."""

import dataclasses
from typing import Literal

import numpy as np

from ...sharding.text import counted
from . import documents

Split = Literal["train", "eval", "test"]
DEFAULT_HOLDOUT = 0.05


@dataclasses.dataclass(frozen=True)
class Piece:
    """The tokens [start, stop) of a document, which is known by its number."""

    document: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclasses.dataclass(frozen=True)
class Shares:
    """How much of a corpus is held out for evaluation, and how much for a test."""

    eval: float
    test: float

    def choose(
        self, keys: list[int], lengths: np.ndarray, split: Split, what: str
    ) -> list[Piece]:
        """Returns the pieces of the split; never none.

        A hash of its name decides about each of several documents, so that adding files
        moves no others. Of a single document the end is held out.

        Args:
            keys, lengths: of each document, see documents.split_key.
        """
        if len(keys) == 1:
            chosen = self._part(int(lengths[0]), split)
        else:
            chosen = [
                Piece(i, 0, int(lengths[i]))
                for i, key in enumerate(keys)
                if self._split_of(key) == split
            ]
        if not chosen:
            raise ValueError(self._empty(len(keys), split, what))
        return chosen

    def _split_of(self, key: int) -> Split:
        if documents.is_held_out(key, self.eval):
            return "eval"
        return "test" if documents.is_held_out(key, self.eval + self.test) else "train"

    def _part(self, length: int, split: Split) -> list[Piece]:
        """Train, evaluation and test data follow one another."""
        test = length - round(length * self.test)
        end = test - round(length * self.eval)
        start, stop = {
            "train": (0, end),
            "eval": (end, test),
            "test": (test, length),
        }[split]
        return [Piece(0, start, stop)] if stop > start else []

    def _empty(self, count: int, split: Split, what: str) -> str:
        if split == "train":
            shares = f"holdout={self.eval}"
            if self.test:
                shares += f" and test_holdout={self.test}"
            return (
                f"{what}: split 'train' is empty: {shares} of "
                f"{counted(count, 'document')} leaves none for it. Lower "
                "holdout, or add documents."
            )
        name = "holdout" if split == "eval" else "test_holdout"
        share = self.eval if split == "eval" else self.test
        return (
            f"{what}: split '{split}' is empty: {name}={share} of "
            f"{counted(count, 'document')} leaves none for it. Name its files as "
            f"{split}_path, raise {name}, or add documents."
        )
