"""Rotary frequencies for sequences longer than those of the first training."""

import dataclasses
import math
from typing import Literal, get_args

import jax
import jax.numpy as jnp

Kind = Literal["linear", "llama3"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Divides frequencies by a factor: all ("linear"), or only the low ones ("llama3").

    With "llama3", a frequency that turns more than `high` times in `original_length`
    positions stays, one that turns less than `low` times is divided by `factor`, and
    those between are interpolated.

    Attributes:
      factor: of the lengthening.
      low, high, original_length: for "llama3" only.
    """

    kind: Kind
    factor: float
    low: float = 1.0
    high: float = 4.0
    original_length: int = 8192

    def __post_init__(self):
        if self.kind not in get_args(Kind):
            raise ValueError(
                f"rope_scaling: kind must be one of {', '.join(get_args(Kind))}, got "
                f"{self.kind!r}"
            )
        if not self.factor >= 1:
            raise ValueError(f"rope_scaling: factor must be >= 1, got {self.factor}")
        if not 0 < self.low < self.high:
            raise ValueError(
                f"rope_scaling: expected 0 < low < high, got low {self.low} and high "
                f"{self.high}"
            )
        if self.original_length < 1:
            raise ValueError(
                "rope_scaling: original_length must be positive, got "
                f"{self.original_length}"
            )

    def scale(self, frequency: jax.Array) -> jax.Array:
        """Returns the scaled frequencies, in radians per position."""
        scaled = frequency / self.factor
        if self.kind == "linear":
            return scaled
        turns = self.original_length * frequency / (2 * math.pi)
        share = jnp.clip((turns - self.low) / (self.high - self.low), 0.0, 1.0)
        return share * frequency + (1 - share) * scaled
