"""Splits that are evaluated and never trained on, and how much of each is used.

The last batch of a split may be short. It is padded with the first example at a weight
of 0, if the model takes an array `weights`. For another model only full batches are
evaluated, and the log says how many examples they cover.
"""

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..data import Dataset, Source, open_source
from ..data.batches import WEIGHTS

if TYPE_CHECKING:
    from .train import Config

Name = Literal["eval", "test"]
# The names of the splits in settings and in the log.
SETTINGS: dict[Name, str] = {"eval": "eval_batches", "test": "test_batches"}
TITLES: dict[Name, str] = {"eval": "held-out", "test": "test"}

_ONE: Any = {WEIGHTS: np.float32(1)}


class Weighted:
    """A dataset whose examples get a weight of 1, for a model that takes weights."""

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
    """An open split, and how much of it an evaluation uses.

    Attributes:
      num_batches: batches of config.batch_size; the last may be padded.
      num_examples: examples in these batches, without padding.
      requested: the value of the setting; None for all batches.
    """

    name: Name
    data: Dataset
    num_batches: int
    num_examples: int
    requested: int | None = None

    def describe(self) -> str:
        covered = f"{self.num_examples:,} of the {len(self.data):,} examples"
        if self.num_examples == len(self.data):
            covered = f"all {len(self.data):,} examples"
        when = "Each evaluation" if self.name == "eval" else "The test after training"
        count = f"{self.num_batches:,} batch{'es' if self.num_batches != 1 else ''}"
        if self.requested is not None and self.num_batches < self.requested:
            count += f", not {SETTINGS[self.name]}={self.requested}"
        return f"{when} uses {covered} of the {TITLES[self.name]} split ({count})"


def with_weights(config: "Config", data: Dataset) -> Dataset:
    """Returns the dataset, with weights if the model takes them and it has none."""
    takes_weights = WEIGHTS in config.model.batch_axes()
    if takes_weights and WEIGHTS not in data[0]:
        return Weighted(data)  # type: ignore
    return data


def open_split(config: "Config", name: Name, source: Source) -> HeldOut | None:
    """Opens a split with at most as many batches as are requested; None for 0."""
    setting = SETTINGS[name]
    requested: int | None = getattr(config, setting)
    if requested == 0:
        return None
    data = with_weights(config, open_source(source, name))
    size = config.exchange.share.size(config.batch_size)
    available, rest = divmod(len(data), size)
    if rest and WEIGHTS in data[0]:
        available += 1
    elif rest and (requested is None or not available):
        raise ValueError(
            f"{setting}={requested}: the {TITLES[name]} split has {len(data)} "
            f"examples, {rest} more than {available} batches of {size}, and a batch "
            f"can only be padded for a model that takes an array {WEIGHTS!r} "
            "(docs/data.md). Add it to the model's batch_axes(), choose a batch_size "
            f"that divides the split, or set {setting} to a number"
            + (", or to 0 for none." if available == 0 else ".")
        )
    num_batches = available if requested is None else min(requested, available)
    num_examples = min(num_batches * size, len(data))
    return HeldOut(name, data, num_batches, num_examples, requested)
