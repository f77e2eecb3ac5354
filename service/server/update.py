"""From the mean of a commit to new parameters: optax on CPU jax.

Programs are compiled once for all blocks of the same shapes.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

Params = dict[str, Any]
Axes = dict[str, tuple[str | None, ...]]


class Update(Protocol):
    """Updates the parameters of a block; both methods are pure and are jitted.

    Parameters are {path of the leaf: slab}, and `axes` has the logical axes of each.
    """

    def init(self, params: Params, axes: Axes) -> Any:
        """Returns the optimizer state."""
        ...

    def update(
        self,
        grads: Params,
        opt_state: Any,
        params: Params,
        axes: Axes,
        step: jax.Array,
        share: jax.Array,
    ) -> tuple[Params, Any]:
        """Returns the new parameters and the new optimizer state.

        Args:
          grads: the scaled mean, in float32.
          step: index for the learning-rate schedule.
          share: of a full update; scales the learning rate.
        """
        ...


MakeUpdate = Callable[[dict[str, Any]], Update]


class OptaxUpdate:
    """Runs a trainer's own optimizer, with the arithmetic of its train step."""

    def __init__(
        self,
        make: Callable[[optax.Schedule, Axes], Any],
        learning_rate: optax.Schedule,
    ):
        """Args:
        make: makes the optax transformation for a learning rate and logical axes.
        """
        self._make = make
        self._learning_rate = learning_rate

    def init(self, params: Params, axes: Axes) -> Any:
        return self._make(self._learning_rate, axes).init(params)

    def update(self, grads, opt_state, params, axes, step, share):
        rate = self._learning_rate(step) * share
        tx = self._make(lambda count: rate, axes)
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state


class OuterUpdate:
    """SGD on the mean change of the parameters, with momentum kept in float32.

    Shares of an update that add up to 1 change and decay the momentum as one whole
    update does, and not once each: m <- decay**share * m + gain(share) * d.
    """

    def __init__(
        self, learning_rate: float, momentum: float = 0.0, nesterov: bool = False
    ):
        self._learning_rate = np.float32(learning_rate)
        self._decay = np.float32(momentum)
        self._nesterov = nesterov

    def init(self, params: Params, axes: Axes) -> Any:
        del axes
        if not self._decay:
            return optax.EmptyState()
        wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)
        return optax.trace(1.0).init(wide)

    def update(self, grads, opt_state, params, axes, step, share):
        del axes, step
        directions = grads
        if self._decay:
            decay = jnp.float32(self._decay) ** share
            gain = (1 - decay) / (1 - self._decay)
            scaled = jax.tree.map(lambda g: gain * g, grads)
            directions, opt_state = optax.trace(decay).update(scaled, opt_state)
            if self._nesterov:
                directions = jax.tree.map(
                    lambda g, m: g + self._decay * m, grads, directions
                )
        rate = self._learning_rate * share
        new = jax.tree.map(
            lambda p, d: (p.astype(jnp.float32) - rate * d).astype(p.dtype),
            params,
            directions,
        )
        return new, opt_state


def no_optimizers(spec: dict[str, Any]) -> Update:
    """Refuses: a server that was given no optimizers can run outer updates only."""
    raise ValueError(
        f"update of kind {spec.get('kind')!r}: this server has no optimizers of a "
        "trainer; start it by `meshloom serve`, or use a policy with an outer optimizer"
    )


def update_of(spec: Mapping[str, Any], make_update: MakeUpdate) -> Update:
    """Returns the update that the spec of a job asks for."""
    kind = spec["update"].get("kind")
    if kind == "outer":
        outer = spec["policy"].get("outer")
        if outer is None:
            raise ValueError(
                f"job {spec['job']!r}: update of kind 'outer', but its policy has no "
                "outer optimizer; set policy.outer"
            )
        return OuterUpdate(
            outer["learning_rate"],
            outer.get("momentum", 0.0),
            outer.get("nesterov", False),
        )
    if kind == "optimizer":
        return make_update(spec["update"])
    raise ValueError(
        f"job {spec['job']!r}: unknown kind of update {kind!r}; expected 'outer' or "
        "'optimizer'"
    )


class Compiled:
    """An update, jitted on the CPU; blocks of the same shapes share a program."""

    def __init__(self, update: Update):
        def init(axes, params):
            return update.init(params, dict(axes))

        def step_fn(axes, mean, opt_state, params, scale, step, share):
            grads = {path: x * scale for path, x in mean.items()}
            return update.update(grads, opt_state, params, dict(axes), step, share)

        self._init = jax.jit(init, static_argnums=0)
        self._step = jax.jit(step_fn, static_argnums=0)
        self._cpu = jax.local_devices(backend="cpu")[0]

    def init(self, params: Params, axes: Axes) -> Any:
        with jax.default_device(self._cpu):
            return self._init(tuple(axes.items()), params)

    def update(
        self,
        mean: Params,
        opt_state: Any,
        params: Params,
        axes: Axes,
        *,
        scale: float,
        step: int,
        share: float,
    ) -> tuple[Params, Any]:
        """Dispatches an update. `mean` must not change until the results are ready."""
        numbers = np.float32(scale), np.int32(step), np.float32(share)
        with jax.default_device(self._cpu):
            return self._step(tuple(axes.items()), mean, opt_state, params, *numbers)
