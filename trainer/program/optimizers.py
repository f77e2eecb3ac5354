"""Optimizers by config. Each makes an optax transformation for a tree of parameters.

Which parameters decay, and which are matrices, is read from their logical axes: a
parameter that is no matrix (norms, biases) never decays. Decay is decoupled: each step
takes learning rate * weight_decay off the parameter.
"""

import dataclasses
from typing import Any, Protocol

import jax
import optax
from optax import contrib

from ...sharding.resolve import Axes


class Optimizer(Protocol):
    """Makes an optax transformation.

    The arrays of its state are sharded like the parameters that they belong to. For
    state of another form it may have an attribute `state_axes`: {path pattern: logical
    axes}.
    """

    def make(self, learning_rate: optax.Schedule, axes: Any) -> Any:
        """The optax transformation, for parameters with these logical axes."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW:
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1

    def make(self, learning_rate: optax.Schedule, axes: Any):
        return optax.adamw(
            learning_rate,
            b1=self.b1,
            b2=self.b2,
            eps=self.eps,
            weight_decay=self.weight_decay,
            mask=_by_axes(is_matrix, axes),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lion:
    b1: float = 0.9
    b2: float = 0.99
    weight_decay: float = 0.1

    def make(self, learning_rate: optax.Schedule, axes: Any):
        return optax.lion(
            learning_rate,
            b1=self.b1,
            b2=self.b2,
            weight_decay=self.weight_decay,
            mask=_by_axes(is_matrix, axes),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adafactor:
    """Factored second moments: rows and columns instead of a whole matrix."""

    min_dim_size_to_factor: int = 128
    decay_rate: float = 0.8
    weight_decay: float = 0.0

    def make(self, learning_rate: optax.Schedule, axes: Any):
        # As optax.adafactor, except that its decay would not follow the learning rate.
        return optax.chain(
            optax.scale_by_factored_rms(
                decay_rate=self.decay_rate,
                min_dim_size_to_factor=self.min_dim_size_to_factor,
            ),
            optax.clip_by_block_rms(1.0),
            optax.scale_by_param_block_rms(),
            optax.add_decayed_weights(
                self.weight_decay, mask=_by_axes(is_matrix, axes)
            ),
            optax.scale_by_learning_rate(learning_rate),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Muon:
    """Orthogonalized momentum for matrices; AdamW for the rest and the vocabulary's."""

    beta: float = 0.95
    weight_decay: float = 0.1
    adam_b1: float = 0.9
    adam_b2: float = 0.95
    consistent_rms: float = 0.2

    def make(self, learning_rate: optax.Schedule, axes: Any):
        # optax.contrib's own decay has no mask for the parameters it gives to Adam, so
        # it only finds directions here (a rate of -1 leaves their sign alone).
        return optax.chain(
            contrib.muon(
                -1.0,
                beta=self.beta,
                weight_decay=0.0,
                adam_b1=self.adam_b1,
                adam_b2=self.adam_b2,
                adam_weight_decay=0.0,
                consistent_rms=self.consistent_rms,
                muon_weight_dimension_numbers=_by_axes(matrix_dimensions, axes),
            ),
            optax.add_decayed_weights(
                self.weight_decay, mask=_by_axes(is_matrix, axes)
            ),
            optax.scale_by_learning_rate(learning_rate),
        )


# Dimensions that number equal parts: the stack of blocks, and those without a name.
PARTS = ("layer", None)


def is_matrix(axes: Axes) -> bool:
    """At least two sides; a head's width belongs to the side of its heads."""
    return sum(name not in (*PARTS, "head_dim") for name in axes) >= 2


def matrix_dimensions(axes: Axes) -> contrib.MuonDimensionNumbers | None:
    """Which dimensions of a weight are its rows and which its columns; None: neither.

    The residual width `embed` is one side and everything else the other, so
    [embed, heads, head_dim] is one matrix, and each part a matrix of its own.
    Vocabulary and position tables are look-ups, not matrices.
    """
    if not is_matrix(axes) or {"vocab", "position"} & set(axes):
        return None
    dims = [i for i, name in enumerate(axes) if name not in PARTS]
    split = len(dims) - 1 if axes[-1] == "embed" else 1
    return contrib.MuonDimensionNumbers(tuple(dims[:split]), tuple(dims[split:]))


def _by_axes(function, axes: Any) -> Any:
    return jax.tree.map(function, axes, is_leaf=lambda x: isinstance(x, tuple))
