"""When a step on many devices is that of one device but for rounding.

Both start from the same bits. The sums that optimizers keep of gradients are compared
as wholes (in norm), and updates one by one where the gradient is more than rounding.

Rounding is relative to the terms of a sum, and a sum may be much smaller than they are:
a momentum that changes its sign, or the gradient of the keys' bias, which is 0 because
softmax ignores it. Adafactor scales the latter up to the size of any other, and then
clips the array by its RMS, so all of its updates depend on that rounding. What is off
by more than its own size allows is therefore compared with its noise: how far the step
of one device moves when each parameter moves by one rounding.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from fuzz_cases import Case

from meshloom.trainer.program.state import State

# Half the spacing of bfloat16 below 2: what one rounding is off, relatively.
ROUNDING = 2.0**-8
# Two computations that round differently may be off by this many times the noise, the
# largest of NUM_NUDGES differences of the same kind. If these are normal, one in a
# million is further off: E|d/8|^8 * (2 / sqrt(2 pi))^8. Up to 4.2 was measured.
NOISES = 8
NUM_NUDGES = 8


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
    if "bfloat16" in _dtypes(case):
        # Products of a few tens of terms are rounded at every layer, and each way of
        # summing them over devices once more.
        return Tolerance(ROUNDING, 16 * ROUNDING, None)
    # Adam and Lion divide by the gradient's size; Muon's matrix iteration and
    # Adafactor's means mix well-known elements with those that are rounding.
    update = 1e-3 if case.optimizer in ("AdamW", "Lion") else 1e-2
    return Tolerance(1e-5, 2e-5, update)


@dataclasses.dataclass(frozen=True)
class Taken:
    """A step of the reference.

    Attributes:
      grads, state, metrics: the gradients, and state and metrics after the step.
      nudged: returns the states after the same step with nudged parameters, see
        `nudge`; only the gradients are computed with them.
    """

    grads: Any
    state: State
    metrics: dict[str, Any]
    nudged: Callable[[], list[State]]

    def noise(self) -> State:
        """How far off rounding alone may be: the largest difference of each element."""

        def largest(x, *others):
            x = np.asarray(x, np.float64)
            return np.max([np.abs(np.asarray(y, np.float64) - x) for y in others], 0)

        return jax.tree.map(largest, self.state, *self.nudged())


def nudge(params: Any, seed: int, case: Case) -> Any:
    """The parameters, each one rounding of the case's coarser dtype up or down."""
    random = np.random.default_rng(seed)
    eps = max(float(jnp.finfo(dtype).eps) for dtype in _dtypes(case))

    def one(x):
        signs = random.choice([-1.0, 1.0], x.shape)
        return (x.astype(np.float64) * (1 + eps * signs)).astype(x.dtype)

    return jax.tree.map(one, params)


def _dtypes(case: Case) -> list[str]:
    return [case.model.get(f"{x}_dtype", "float32") for x in ("param", "compute")]


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
    none = jax.tree.map(lambda x: 0.0, wanted.state)
    if _first_wrong(found, first, wanted, limits, none) is None:
        return
    wrong = _first_wrong(found, first, wanted, limits, wanted.noise())
    assert wrong is None, f"{what}: {wrong}"


def _first_wrong(
    found: State, first: State, wanted: Taken, limits: Tolerance, noise: State
) -> str | None:
    kept, noises = ((x.opt_state, x.variables) for x in (found, noise))
    expected = (wanted.state.opt_state, wanted.state.variables)
    for (path, x, y), z in zip(
        _pairs(kept, expected), jax.tree.leaves(noises), strict=True
    ):
        off, norm = _norm(x.astype(np.float64) - y.astype(np.float64)), _norm(y)
        if not off <= limits.sums * norm + NOISES * _norm(z):
            return (
                f"{path} is off by {off / norm if norm else math.inf:.2g} of its norm"
            )
    if limits.update is None:
        return None
    moved = (
        _pairs(found.params, first.params),
        _pairs(wanted.state.params, wanted.grads),
        jax.tree.leaves(noise.params),
    )
    for (path, new, old), (_, other, grad), z in zip(*moved, strict=True):
        known = np.abs(grad) > 1e-2 * np.abs(grad).max()
        size = limits.update * np.sqrt(np.mean(np.square(other - old)))
        wrong = known & (np.abs(new - other) > size + NOISES * z)
        # Lion's sign of a sum that cancels is anybody's guess.
        if wrong.sum() > 1 + known.sum() // 100:
            return (
                f"{wrong.sum()} of {known.sum()} updates of {path} are off by more "
                f"than {size:.2g}"
            )
    return None


def _norm(x: np.ndarray | float) -> float:
    return float(np.linalg.norm(np.ravel(x).astype(np.float64)))


def _pairs(found: Any, expected: Any) -> list[tuple[str, np.ndarray, np.ndarray]]:
    xs, form = jax.tree_util.tree_flatten_with_path(found)
    ys, other = jax.tree_util.tree_flatten_with_path(expected)
    assert form == other, "the two are not trees of the same form"
    return [
        (jax.tree_util.keystr(path), np.asarray(x), np.asarray(y))
        for (path, x), (_, y) in zip(xs, ys, strict=True)
    ]
