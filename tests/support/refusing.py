"""A user's own classes, which refuse what they are given."""

import dataclasses

from meshloom.models import transformer
from meshloom.trainer import data
from meshloom.trainer.program import optimizers, schedules


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model(transformer.Config):
    def check_batch(self, batch, facts):
        raise ValueError("tokens of 3 letters only. Choose other data.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Words(data.Synthetic):
    def open(self, split):
        raise ValueError(f"no split {split!r}. Write one.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adam(optimizers.AdamW):
    def make(self, learning_rate, axes):
        raise ValueError("b1 is too large. Lower it.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cosine(schedules.WarmupCosine):
    def make(self, num_steps):
        raise ValueError(f"{num_steps} steps are too few. Train longer.")
