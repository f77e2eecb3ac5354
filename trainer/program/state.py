"""The training state and its layout: resolved first, then created sharded."""

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
    variables: Any = {}  # not differentiated, see contract.py; most models have none

    def to_tree(self) -> dict[str, Any]:
        """Returns the state as it is saved: by name, without empty variables."""
        tree = self._asdict()
        if not jax.tree.leaves(self.variables):
            del tree["variables"]
        return tree


class Model(Protocol):
    """What the trainer requires of a model.

    A loss may take more arguments than these, and a model may have variables besides
    its parameters: see contract.py. Optional methods: `model_flops(batch)`, the FLOPs
    of one update on a batch of these shapes, without recomputation, to compare with the
    devices' peak; `costs`, see models/costs.py, for plans and forecasts; `stack`, see
    sharding/pipeline, for a mesh with a pipe axis; `predict`, see contract.py.
    """

    def init(self, key: jax.Array) -> Any:
        """Returns the parameters as a tree of arrays. Must be pure."""
        ...

    def axes(self) -> Any:
        """Returns a tree like the parameters with a tuple of logical names for each."""
        ...

    def batch_axes(self) -> dict[str, tuple[str, ...]]:
        """Returns the logical names of each array that a batch may have."""
        ...

    def check_batch(self, batch: dict[str, Any], facts: dict[str, Any]) -> None:
        """Raises ValueError for data that the model cannot use.

        Args:
          batch: shapes and dtypes of a batch.
          facts: properties of the dataset, for instance its vocab_size.
        """
        ...

    @property
    def loss(self) -> Callable[..., Any]:
        """loss(params, batch, shard), plus the keyword arguments of contract.py.

        Returns (sum, weight, {name: other sum of the same weight}), all scalars. A sum
        named `penalty` is a regularization term of the loss, which evaluation excludes.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Layout:
    """How every array of the state is sharded; shapes only, no devices needed.

    Attributes:
      axes: logical names of each array of the state.
      init: key -> state of step 0.
      begin: (parameters, variables) -> state of step 0; layers are in model order.
      order: the layer at each index of the stack, if an interleaved pipeline needs
        another order than the model's; None otherwise.
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
        """Creates a state directly in its shardings, without replicating it first."""
        options = {}
        if mesh.devices.flat[0].platform == "cpu":
            # Random numbers take seconds to compile at full optimization, but run once.
            options = {"xla_backend_optimization_level": 1}
        return jax.jit(
            self.init, out_shardings=self.shardings(mesh), compiler_options=options
        )(key)

    def create_from(self, params: Any, variables: Any, mesh: Mesh) -> State:
        """Initializes the state from existing parameters, layers in model order."""
        begin = jax.jit(self.begin, out_shardings=self.shardings(mesh))
        return begin(params, variables)

    def canonical(self, state: State, mesh: Mesh) -> State:
        """Returns the state with layers in model order, as it is stored on disk."""
        return self._reordered(state, mesh, np.argsort)

    def arranged(self, state: State, mesh: Mesh) -> State:
        """Returns a canonical state with layers in the order of this layout."""
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
        """Holds jitted functions, so that they compile once and not at every save."""
        return {}

    def placed(self, mesh: Mesh) -> State:
        """Returns shapes, dtypes and shardings, to compile for or restore into."""
        return placed(self.abstract, self.shardings(mesh))

    @property
    def bytes_per_device(self) -> int:
        parts = (self.params, self.opt_state, self.variables)
        return sum(part.bytes_per_device for part in parts)


def placed(tree: Any, shardings: Any) -> Any:
    """Returns a tree of shapes and dtypes with these shardings."""
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
    """Resolves the shardings of the state from its shapes.

    Args:
      order: if the layers are not in model order, see `Layout`.
      state_axes: of the optimizer, see `optimizers.Optimizer`.
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

    # The key is created inside eval_shape, so that a forecast needs no device.
    shapes = jax.eval_shape(lambda: weights(jax.random.key(0)))
    contract.check_axes(model, "axes", shapes[0], axes)
    variable_axes = contract.variable_axes(model)
    contract.check_axes(model, "variable_axes", shapes[1], variable_axes)
    abstract = jax.eval_shape(begin, *shapes)
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
