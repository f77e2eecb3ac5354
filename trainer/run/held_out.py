"""Splits that are evaluated and never trained on: how much of each, and how.

The last batch of a split may lack rows. They are filled with the first example, at a
weight of 0, which takes a model that knows an array `weights`. For another model whole
batches are evaluated, and what they leave out is said.
"""

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..data import Dataset
from ..data.batches import WEIGHTS

if TYPE_CHECKING:
    from .train import Config

Name = Literal["eval", "test"]
# What settings and lines call the splits.
SETTINGS: dict[Name, str] = {"eval": "eval_batches", "test": "test_batches"}
WORDS: dict[Name, str] = {"eval": "held-out", "test": "test"}

_ONE: Any = {WEIGHTS: np.float32(1)}


class Weighted:
    """A dataset whose examples get a weight of 1, for a model that asks for one."""

    def __init__(self, dataset: Dataset):
        self._dataset = dataset
        if hasattr(dataset, "example"):
            self.example = self._example

    def _example(self, i: int, epoch: int) -> dict[str, np.ndarray]:
        return self._dataset.example(i, epoch) | _ONE  # type: ignore

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        return self._dataset[i] | _ONE


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """An opened split, and what an evaluation takes of it.

    Attributes:
      num_batches: of config.batch_size; the last may be padded.
      num_examples: that they hold.
      asked: the setting; None for all batches.
    """

    name: Name
    data: Dataset
    num_batches: int
    num_examples: int
    asked: int | None = None

    def describe(self) -> str:
        covered = f"{self.num_examples:,} of its {len(self.data):,} examples"
        if self.num_examples == len(self.data):
            covered = f"all of its {len(self.data):,} examples"
        when = "Each evaluation" if self.name == "eval" else "The test after training"
        fewer = self.asked is not None and self.num_batches < self.asked
        return (
            f"{when} takes {covered} ({self.num_batches:,} batches of the "
            f"{WORDS[self.name]} split"
            + (f", not {SETTINGS[self.name]}={self.asked})" if fewer else ")")
        )


def with_weights(config: "Config", data: Dataset) -> Dataset:
    """The dataset with weights, where the model asks for them and it has none."""
    wanted = WEIGHTS in config.model.batch_axes()
    return Weighted(data) if wanted and WEIGHTS not in data[0] else data  # type: ignore


def open_split(config: "Config", name: Name) -> HeldOut | None:
    """The split, opened, with as many batches as are asked for and there are."""
    setting = SETTINGS[name]
    asked: int | None = getattr(config, setting)
    if asked == 0:
        return None
    data = with_weights(config, config.data.open(name))
    size = config.batch_size
    whole, rest = divmod(len(data), size)
    if rest and WEIGHTS in data[0]:
        whole += 1
    elif rest and (asked is None or not whole):
        raise ValueError(
            f"{setting}={asked}: the {WORDS[name]} split has {len(data)} examples, "
            f"{rest} more than {whole} batches of {size}, and a batch can be padded "
            f"only for a model that takes an array {WEIGHTS!r} (docs/data.md). Let "
            "the model name it in batch_axes(), choose a batch_size that divides the "
            f"split, or set {setting} to a number"
            + (", or to 0 for none." if whole == 0 else ".")
        )
    num_batches = whole if asked is None else min(asked, whole)
    num_examples = min(num_batches * size, len(data))
    return HeldOut(name, data, num_batches, num_examples, asked)
