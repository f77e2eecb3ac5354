"""Optimizers as config nodes. Each makes an optax transformation.

The logical axes of a parameter determine whether it is a matrix and whether it decays:
a parameter that is not a matrix (norms, biases) never does. Weight decay is decoupled:
each step subtracts learning rate * weight_decay * parameter.
"""

import dataclasses
from collections.abc import Hashable
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from ...sharding.resolve import Axes
from ..data.refusals import refusals_of


class Optimizer(Protocol):
    """Makes an optax transformation.

    The arrays of its state are sharded like the parameters they belong to. For state of
    other shapes it may have an attribute `state_axes`: {path pattern: logical axes}.
    Servers (docs/service.md) run it on parts of the parameters if it has an attribute
    `granularity`, the smallest part that may be updated on its own: "element",
    "matrix" (one matrix of a stack) or "leaf" (a whole array).
    """

    def make(self, learning_rate: optax.Schedule, axes: Any) -> Any:
        """Returns the optax transformation for parameters with these logical axes."""
        ...


def make_tx(optimizer: Optimizer, axes: Any, learning_rate: optax.Schedule) -> Any:
    """Makes the transformation; an error of the user's own class names the class."""
    with refusals_of(optimizer, "make"):
        return optimizer.make(learning_rate, axes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW:
    granularity: ClassVar[str] = "element"

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
    granularity: ClassVar[str] = "element"

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
    """Factored second moments: row and column statistics instead of a full matrix."""

    granularity: ClassVar[str] = "leaf"

    min_dim_size_to_factor: int = 128
    decay_rate: float = 0.8
    weight_decay: float = 0.0

    def make(self, learning_rate: optax.Schedule, axes: Any):
        # Like optax.adafactor, whose decay does not scale with the learning rate.
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
    """Orthogonalized momentum for matrices; AdamW for all others and the vocabulary."""

    granularity: ClassVar[str] = "matrix"

    beta: float = 0.95
    weight_decay: float = 0.1
    adam_b1: float = 0.9
    adam_b2: float = 0.95
    consistent_rms: float = 0.2

    def make(self, learning_rate: optax.Schedule, axes: Any):
        # The decay of optax.contrib.muon has no mask for the parameters it passes to
        # Adam, so it only computes directions here (a rate of -1 keeps their sign).
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowAdaGrad:
    """AdaGrad with one accumulator for each row of a table; AdamW for all others.

    Rows without a gradient, and their accumulators, keep their bits: AdamW would go on
    moving them by their momentum. A gradient of 0 is none. The update still reads and
    writes every row of a table.

    Attributes:
      tables: logical axes. Parameters whose first dimension has one of them are tables.
      table_rate: factor on the learning rate of tables.
      weight_decay: of matrices; tables have none.
    """

    tables: tuple[str, ...] = ("rows", "users", "items")
    table_rate: float = 10.0
    b1: float = 0.9
    b2: float = 0.95
    weight_decay: float = 0.1

    def make(self, learning_rate: optax.Schedule, axes: Any):
        others = AdamW(b1=self.b1, b2=self.b2, weight_decay=self.weight_decay)
        labels = _by_axes(self._label, axes)
        if "table" not in jax.tree.leaves(labels):
            raise ValueError(
                "RowAdaGrad: no parameter begins with a logical axis "
                f"{' or '.join(self.tables)}. Name those of the model's tables in "
                "`tables`, or use AdamW."
            )
        each: dict[Hashable, optax.GradientTransformation] = {
            "table": optax.chain(
                _scale_by_row_squares(),
                optax.scale_by_learning_rate(
                    lambda count: self.table_rate * learning_rate(count)
                ),
            ),
            "other": others.make(learning_rate, _masked(axes, labels, "other")),
        }
        return optax.partition(each, labels)

    def _label(self, axes: Axes) -> str:
        return "table" if axes and axes[0] in self.tables else "other"


class RowSquares(NamedTuple):
    """For each row, the sum over steps of its mean squared gradient."""

    squares: Any


def _scale_by_row_squares(eps: float = 1e-10) -> optax.GradientTransformation:
    """Divides each row by the root of its accumulator, which begins at 0."""

    def init(params):
        return RowSquares(
            jax.tree.map(lambda p: jnp.zeros(p.shape[0], p.dtype), params)
        )

    def update(updates, state, params=None):
        del params
        squares = jax.tree.map(
            lambda s, g: s + jnp.mean(jnp.square(g), axis=range(1, g.ndim)),
            state.squares,
            updates,
        )
        scaled = jax.tree.map(
            lambda g, s: g / jnp.sqrt(s + eps).reshape(-1, *(1,) * (g.ndim - 1)),
            updates,
            squares,
        )
        return scaled, RowSquares(squares)

    return optax.GradientTransformation(init, update)


# Dimensions that stack separate parameters: layers, and dimensions without a name.
STACKED = ("layer", None)


def is_matrix(axes: Axes) -> bool:
    """Returns whether a parameter is a matrix; heads and head_dim count as one side."""
    return sum(name not in (*STACKED, "head_dim") for name in axes) >= 2


def matrix_dimensions(axes: Axes) -> contrib.MuonDimensionNumbers | None:
    """Returns which dimensions are rows and which are columns; None if not a matrix.

    The residual width `embed` is one side and everything else the other, so
    [embed, heads, head_dim] is one matrix. Each layer of a stack is a separate matrix.
    Vocabulary and position tables are lookups, not matrices.
    """
    if not is_matrix(axes) or {"vocab", "position"} & set(axes):
        return None
    dims = [i for i, name in enumerate(axes) if name not in STACKED]
    split = len(dims) - 1 if axes[-1] == "embed" else 1
    return contrib.MuonDimensionNumbers(tuple(dims[:split]), tuple(dims[split:]))


def _by_axes(function, axes: Any) -> Any:
    return jax.tree.map(function, axes, is_leaf=lambda x: isinstance(x, tuple))


def _masked(axes: Any, labels: Any, label: str) -> Any:
    """Returns the axes of parameters with this label; optax masks all others."""
    return jax.tree.map(
        lambda one, its: one if its == label else optax.MaskedNode(),
        axes,
        labels,
        is_leaf=lambda x: isinstance(x, tuple),
    )
