"""The training state and its layout: resolved first, then born sharded."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ...sharding import Resolved, Rules, axes_for_state, resolve
from ...sharding.pipeline import reorder
from ...sharding.resolve import Axes
from . import contract


class State(NamedTuple):
    step: Any  # int32 scalar, the number of updates done
    params: Any
    opt_state: Any
    variables: Any = {}  # not trained, see contract.py; most models have none

    def to_tree(self) -> dict[str, Any]:
        """The state as it is saved: by name, without variables where there are none."""
        tree = self._asdict()
        if not jax.tree.leaves(self.variables):
            del tree["variables"]
        return tree


class Model(Protocol):
    """What the trainer asks of a model, whatever its family.

    A loss may take more than these three, and a model may keep variables beside its
    parameters: see contract.py. Optional methods: `model_flops(batch)`, the FLOPs of
    one update on a batch of these shapes, none counted twice, for the share of the
    devices' peak; `costs`, see models/costs.py, for plans and forecasts; `stack`, see
    sharding/pipeline, for a mesh with a pipe axis.
    """

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

    @property
    def loss(self) -> Callable[..., Any]:
        """loss(params, batch, shard), and by name what else it wants of contract.py.

        Returns (sum, weight, {name: other sum of the same weight}), all scalars. A sum
        named `penalty` is the part of the loss that only guides training; evaluation
        leaves it out.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Layout:
    """How every array of the state is sharded: shapes only, no device needed.

    Attributes:
      axes: logical names of each array of the state.
      begin: the state of step 0 with these parameters, layers in their own order, and
        these variables.
      order: the layer that stands at each place of the stack, where an interleaved
        pipeline wants them in another order than their own; None otherwise.
    """

    params: Resolved
    opt_state: Resolved
    variables: Resolved
    abstract: State
    axes: State
    init: Callable[[jax.Array], State]
    begin: Callable[[Any, Any], State]
    order: np.ndarray | None = None

    def shardings(self, mesh: Mesh) -> State:
        return State(
            NamedSharding(mesh, P()),
            self.params.shardings(mesh),
            self.opt_state.shardings(mesh),
            self.variables.shardings(mesh),
        )

    def create(self, key: jax.Array, mesh: Mesh) -> State:
        """A new state. No array is replicated, even for a moment, unless planned so."""
        options = {}
        if mesh.devices.flat[0].platform == "cpu":
            # Random numbers take seconds to compile at full optimization, and run once.
            options = {"xla_backend_optimization_level": 1}
        return jax.jit(
            self.init, out_shardings=self.shardings(mesh), compiler_options=options
        )(key)

    def create_from(self, params: Any, variables: Any, mesh: Mesh) -> State:
        """Initializes the state from existing weights, layers in their own order."""
        begin = jax.jit(self.begin, out_shardings=self.shardings(mesh))
        return begin(params, variables)

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
        parts = (self.params, self.opt_state, self.variables)
        return sum(part.bytes_per_device for part in parts)


def placed(tree: Any, shardings: Any) -> Any:
    """Shapes with shardings, from a tree of each."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings
    )


def make_layout(
    model: Model,
    tx: optax.GradientTransformation,
    rules: Rules,
    mesh: Mesh | AbstractMesh,
    order: np.ndarray | None = None,
    *,
    state_axes: Mapping[str, Axes] | None = None,
) -> Layout:
    """Resolves the whole state by shapes alone.

    Args:
      order: where layers do not stand in their own order, see Layout.
      state_axes: an optimizer's own, see optimizers.Optimizer.
    """
    axes = model.axes()
    if order is not None and np.array_equal(order, np.arange(len(order))):
        order = None

    def begin(params, variables):
        if order is not None:
            params = reorder(params, axes, order)
        return State(jnp.zeros((), jnp.int32), params, tx.init(params), variables)

    def weights(key):
        return model.init(key), contract.init_variables(model, key)

    def init(key):
        return begin(*weights(key))

    # The key is made inside, so that a plan asks for no device.
    found = jax.eval_shape(lambda: weights(jax.random.key(0)))
    contract.check_axes(model, "axes", found[0], axes)
    variable_axes = contract.variable_axes(model)
    contract.check_axes(model, "variable_axes", found[1], variable_axes)
    abstract = jax.eval_shape(begin, *found)
    params = resolve(abstract.params, rules, mesh, axes=axes)
    opt_axes = axes_for_state(
        abstract.opt_state, abstract.params, axes, others=state_axes
    )
    opt_state = resolve(
        abstract.opt_state, rules, mesh, axes=opt_axes, role="optimizer"
    )
    variables = resolve(abstract.variables, rules, mesh, axes=variable_axes)
    all_axes = State((), axes, opt_axes, variable_axes)
    return Layout(params, opt_state, variables, abstract, all_axes, init, begin, order)
