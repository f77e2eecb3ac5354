"""Learning-rate schedules: constant, warmup-cosine, warmup-stable-decay.

Warmup and decay are fractions of the run, so a schedule fits a run of any length. The
rate of the first update is not 0: it is the peak / number of warmup steps.
"""

import dataclasses
from typing import Protocol

import jax.numpy as jnp
import optax

from ..data.refusals import refusals_of


class Schedule(Protocol):
    """A learning rate as a function of the number of updates done."""

    def make(self, num_steps: int) -> optax.Schedule: ...


def make_rate(schedule: Schedule, num_steps: int) -> optax.Schedule:
    """Makes the rates of a run; an error of the user's own class names the class."""
    with refusals_of(schedule, "make"):
        return schedule.make(num_steps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constant:
    value: float

    def make(self, num_steps: int) -> optax.Schedule:
        return optax.constant_schedule(self.value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmupCosine:
    """Linear warmup to the peak, then cosine decay to `final_share` of it.

    Attributes:
      warmup_share: fraction of the run's steps.
      final_share: fraction of the peak, reached after the last step.
    """

    peak: float
    warmup_share: float = 0.0
    final_share: float = 0.1

    def __post_init__(self):
        _check_shares(self, "warmup_share")

    def make(self, num_steps: int) -> optax.Schedule:
        num_warmup = round(self.warmup_share * num_steps)
        cosine = optax.cosine_decay_schedule(
            self.peak, max(num_steps - num_warmup, 1), self.final_share
        )
        return _with_warmup(self.peak, num_warmup, cosine)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmupStableDecay:
    """Linear warmup to the peak, constant, then linear decay to `final_share` of it.

    Attributes:
      decay_share: fraction of the run's steps.
      warmup_share: fraction of the run's steps.
      final_share: fraction of the peak, reached after the last step.
    """

    peak: float
    decay_share: float
    warmup_share: float = 0.0
    final_share: float = 0.0

    def __post_init__(self):
        _check_shares(self, "warmup_share", "decay_share")

    def make(self, num_steps: int) -> optax.Schedule:
        num_warmup = round(self.warmup_share * num_steps)
        num_decay = min(round(self.decay_share * num_steps), num_steps - num_warmup)
        decay = optax.linear_schedule(
            self.peak,
            self.peak * self.final_share,
            max(num_decay, 1),
            transition_begin=num_steps - num_decay - num_warmup,
        )
        return _with_warmup(self.peak, num_warmup, decay)


def _with_warmup(peak: float, num_warmup: int, then: optax.Schedule) -> optax.Schedule:
    def schedule(count):
        rising = peak * (count + 1) / max(num_warmup, 1)
        return jnp.where(count < num_warmup, rising, then(count - num_warmup))

    return schedule


def _check_shares(schedule, *names: str) -> None:
    shares = {name: getattr(schedule, name) for name in names}
    if min(shares.values()) < 0 or sum(shares.values()) > 1:
        values = ", ".join(f"{name}={value}" for name, value in shares.items())
        raise ValueError(
            f"{type(schedule).__name__}: {values}; fractions of the run's steps must "
            "be >= 0, with a sum <= 1"
        )
