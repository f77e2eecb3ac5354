"""When a step on many devices is that of one device but for rounding.

Both start from the same bits. The sums that optimizers keep of gradients are compared
as wholes (in norm), and updates one by one where the gradient is more than rounding.
"""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from fuzz_cases import Case

from meshloom.trainer.program.state import State

# Half the spacing of bfloat16 below 2: what one rounding is off, relatively.
ROUNDING = 2.0**-8


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """Relative differences from one device that are rounding.

    Attributes:
      loss: of losses and other means.
      sums: of an array of sums of gradients, in norm.
      update: of an update where the gradient is well above its rounding, to the size
        of updates; None where so much is rounding that the sums must do.
    """

    loss: float
    sums: float
    update: float | None


def tolerance(case: Case) -> Tolerance:
    types = (case.model.get("param_dtype"), case.model.get("compute_dtype"))
    if "bfloat16" in types:
        # Products of a few tens of terms are rounded at every layer, and each way of
        # summing them over devices once more.
        return Tolerance(ROUNDING, 16 * ROUNDING, None)
    # Adam and Lion divide by the gradient's size; Muon's matrix iteration and
    # Adafactor's means mix well-known elements with those that are rounding.
    update = 1e-3 if case.optimizer in ("AdamW", "Lion") else 1e-2
    return Tolerance(1e-5, 2e-5, update)


@dataclasses.dataclass(frozen=True)
class Taken:
    """A step of the reference: gradients, the state after it, its metrics."""

    grads: Any
    state: State
    metrics: dict[str, Any]


def same_bits(found: Any, expected: Any, what: str) -> None:
    for path, x, y in _pairs(found, expected):
        assert x.dtype == y.dtype and x.shape == y.shape, f"{what}: {path}"
        assert x.tobytes() == y.tobytes(), f"{what}: {path} is not the same bits"


def close(found: dict, expected: dict, limit: float, what: str) -> None:
    assert set(found) == set(expected), (what, set(found) ^ set(expected))
    for name, value in expected.items():
        x, y = float(found[name]), float(value)
        same = x == y or (math.isnan(x) and math.isnan(y))
        # Norms are sums of squares of gradients, which are known less well than losses.
        times = 10 if name == "grad_norm" else 1
        assert same or abs(x - y) <= times * limit * abs(y), (
            f"{what}: {name} {x}, not {y}"
        )


def close_states(
    found: State, first: State, wanted: Taken, limits: Tolerance, what: str
) -> None:
    kept = (found.opt_state, found.variables)
    for path, x, y in _pairs(kept, (wanted.state.opt_state, wanted.state.variables)):
        off = _distance(x, y)
        assert off <= limits.sums, f"{what}: {path} is off by {off:.2g} of its norm"
    if limits.update is None:
        return
    moved = (
        _pairs(found.params, first.params),
        _pairs(wanted.state.params, first.params),
        _pairs(wanted.grads, first.params),
    )
    for (path, new, old), (_, other, _), (_, grad, _) in zip(*moved, strict=True):
        known = np.abs(grad) > 1e-2 * np.abs(grad).max()
        size = limits.update * np.sqrt(np.mean(np.square(other - old)))
        wrong = known & (np.abs(new - other) > size)
        # Lion's sign of a sum that cancels is anybody's guess.
        assert wrong.sum() <= 1 + known.sum() // 100, (
            f"{what}: {wrong.sum()} of {known.sum()} updates of {path} are off by more "
            f"than {size:.2g}"
        )


def _distance(x: np.ndarray, y: np.ndarray) -> float:
    """The norm of the difference, relative to that of y."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    off = np.linalg.norm((x - y).ravel())
    return off / np.linalg.norm(y.ravel()) if off else 0.0


def _pairs(found: Any, expected: Any) -> list[tuple[str, np.ndarray, np.ndarray]]:
    xs, form = jax.tree_util.tree_flatten_with_path(found)
    ys, other = jax.tree_util.tree_flatten_with_path(expected)
    assert form == other, "the two are not trees of the same form"
    return [
        (jax.tree_util.keystr(path), np.asarray(x), np.asarray(y))
        for (path, x), (_, y) in zip(xs, ys, strict=True)
    ]
