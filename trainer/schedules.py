"""Learning rates over a run: constant, warm-up and cosine, warm-up-stable-decay."""

import dataclasses
from typing import Protocol

import optax


class Schedule(Protocol):
    """A learning rate as a function of the number of updates done."""

    def make(self, num_steps: int) -> optax.Schedule: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constant:
    value: float

    def make(self, num_steps: int) -> optax.Schedule:
        return optax.constant_schedule(self.value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmupCosine:
    """Linear to the peak in `warmup_steps`, then a cosine to `final_share` of it."""

    peak: float
    warmup_steps: int = 0
    final_share: float = 0.1

    def make(self, num_steps: int) -> optax.Schedule:
        _check_warmup(self.warmup_steps + 1, num_steps)  # a step of cosine at least
        return optax.warmup_cosine_decay_schedule(
            0.0, self.peak, self.warmup_steps, num_steps, self.peak * self.final_share
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmupStableDecay:
    """Linear to the peak, constant, then linear to `final_share` in `decay_steps`."""

    peak: float
    decay_steps: int
    warmup_steps: int = 0
    final_share: float = 0.0

    def make(self, num_steps: int) -> optax.Schedule:
        _check_warmup(self.warmup_steps + self.decay_steps, num_steps)
        return optax.join_schedules(
            [
                optax.linear_schedule(0.0, self.peak, self.warmup_steps),
                optax.constant_schedule(self.peak),
                optax.linear_schedule(
                    self.peak, self.peak * self.final_share, self.decay_steps
                ),
            ],
            [self.warmup_steps, num_steps - self.decay_steps],
        )


def _check_warmup(num_changing: int, num_steps: int) -> None:
    if num_changing > num_steps:
        raise ValueError(
            f"the schedule's warm-up and decay take {num_changing} steps, but the run "
            f"has {num_steps}. Shorten them, or raise num_steps."
        )
