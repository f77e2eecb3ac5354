"""The training state and its layout: resolved first, then born cut."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..sharding import Resolved, Rules, Sharder, axes_for_state, resolve
from ..sharding.pipeline import reorder


class State(NamedTuple):
    step: Any  # int32 scalar, the number of updates done
    params: Any
    opt_state: Any


class Model(Protocol):
    """What the trainer asks of a model, whatever its family."""

    def init(self, key: jax.Array) -> Any:
        """Parameters as a tree of arrays. Pure."""
        ...

    def axes(self) -> Any:
        """A tuple of logical names for each parameter, in the parameters' form."""
        ...

    def batch_axes(self) -> dict[str, tuple[str, ...]]:
        """Logical names for each array a batch may hold."""
        ...

    def check_batch(self, batch: dict[str, Any], facts: dict[str, Any]) -> None:
        """Raises ValueError for data that the model cannot take.

        Args:
          batch: shapes and types of a batch.
          facts: what the dataset says of itself, for instance its vocab_size.
        """
        ...

    def loss(self, params: Any, batch: dict[str, jax.Array], shard: Sharder) -> Any:
        """(sum, weight, {name: other sum of the same weight}), all scalars.

        A sum named `penalty` is the part of the loss that only guides training;
        evaluation leaves it out.
        """
        ...

    def model_flops(self, batch: dict[str, Any]) -> float:
        """FLOPs of one update on a batch of these shapes, none counted twice."""
        ...


@dataclasses.dataclass(frozen=True)
class Layout:
    """How parameters and optimizer state are cut: shapes only, no device needed.

    Attributes:
      axes: logical names of each array of the state.
      begin: the state of step 0 with these parameters, layers in their own order.
      order: the layer that stands at each place of the stack, where an interleaved
        pipeline wants them in another order than their own; None otherwise.
    """

    params: Resolved
    opt_state: Resolved
    abstract: State
    axes: State
    init: Callable[[jax.Array], State]
    begin: Callable[[Any], State]
    order: np.ndarray | None = None

    def shardings(self, mesh: Mesh) -> State:
        return State(
            NamedSharding(mesh, P()),
            self.params.shardings(mesh),
            self.opt_state.shardings(mesh),
        )

    def create(self, key: jax.Array, mesh: Mesh) -> State:
        """A new state. No array is ever whole on one device unless planned so."""
        options = {}
        if mesh.devices.flat[0].platform == "cpu":
            # Random numbers take seconds to compile at full optimization, and run once.
            options = {"xla_backend_optimization_level": 1}
        return jax.jit(
            self.init, out_shardings=self.shardings(mesh), compiler_options=options
        )(key)

    def create_from(self, params: Any, mesh: Mesh) -> State:
        """A new state with parameters that are there, layers in their own order."""
        return jax.jit(self.begin, out_shardings=self.shardings(mesh))(params)

    def canonical(self, state: State, mesh: Mesh) -> State:
        """The state with layers in their own order, as it is on disk."""
        return self._reordered(state, mesh, np.argsort)

    def arranged(self, state: State, mesh: Mesh) -> State:
        """A canonical state with layers in the order of this layout."""
        return self._reordered(state, mesh, np.asarray)

    def _reordered(self, state: State, mesh: Mesh, of_order: Callable) -> State:
        if self.order is None:
            return state
        key = (mesh, of_order)
        if key not in self._reorderings:
            order = of_order(self.order)
            self._reorderings[key] = jax.jit(
                lambda state: reorder(state, self.axes, order),
                out_shardings=self.shardings(mesh),
            )
        return self._reorderings[key](state)

    @functools.cached_property
    def _reorderings(self) -> dict[Any, Callable[[State], State]]:
        """Jitted, to compile once and not at every save."""
        return {}

    def placed(self, mesh: Mesh) -> State:
        """The state as shapes with shardings, to compile for or restore into."""
        return placed(self.abstract, self.shardings(mesh))

    @property
    def bytes_per_device(self) -> int:
        return self.params.bytes_per_device + self.opt_state.bytes_per_device


def placed(tree: Any, shardings: Any) -> Any:
    """Shapes with shardings, from a tree of each."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings
    )


def plan_layout(
    model: Model,
    tx: optax.GradientTransformation,
    rules: Rules,
    mesh: Mesh | AbstractMesh,
    order: np.ndarray | None = None,
) -> Layout:
    """Resolves the whole state by shapes alone.

    Args:
      order: where layers do not stand in their own order, see Layout.
    """
    axes = model.axes()
    if order is not None and np.array_equal(order, np.arange(len(order))):
        order = None

    def begin(params):
        if order is not None:
            params = reorder(params, axes, order)
        return State(jnp.zeros((), jnp.int32), params, tx.init(params))

    def init(key):
        return begin(model.init(key))

    # The key is made inside, so that a plan asks for no device.
    abstract = jax.eval_shape(lambda: init(jax.random.key(0)))
    params = resolve(abstract.params, rules, mesh, axes=axes)
    opt_axes = axes_for_state(abstract.opt_state, abstract.params, axes)
    opt_state = resolve(
        abstract.opt_state, rules, mesh, axes=opt_axes, role="optimizer"
    )
    state_axes = State((), axes, opt_axes)
    return Layout(params, opt_state, abstract, state_axes, init, begin, order)
