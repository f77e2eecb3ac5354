"""NNX modules as pure functions of a nested dict of arrays.

The trainer keeps parameters as plain nested dicts, which optax, orbax and the sharding
rules accept without adapters. A module is built from them for each call.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from flax import nnx

from ..sharding import axes_of

Module = TypeVar("Module", bound=nnx.Module)
Make = Callable[[nnx.Rngs], Module]
Params = dict[str, Any]


Kind = type[nnx.Variable]


def init(make: Make, key: jax.Array, kind: Kind = nnx.Param) -> Params:
    """Returns the parameters of a new module. Call it under jit with out_shardings.

    Args:
      kind: which variables to return instead, such as nnx.BatchStat.
    """
    return nnx.to_pure_dict(nnx.state(make(nnx.Rngs(params=key)), kind))


def axes(make: Make, kind: Kind = nnx.Param) -> Params:
    """Returns the logical axes of the parameters, in the same structure."""
    return nnx.to_pure_dict(axes_of(nnx.state(_abstract(make), kind)))


def bind(make: Make[Module], params: Params, variables: Params | None = None) -> Module:
    """Returns the module with these parameters, and other variables if it has some."""
    graphdef, state, others = nnx.split(_abstract(make), nnx.Param, ...)
    nnx.replace_by_pure_dict(state, params)
    nnx.replace_by_pure_dict(others, variables or {})
    return nnx.merge(graphdef, state, others)


def stack(
    make: Make, num: int, rngs: nnx.Rngs, name: str | None = "layer"
) -> nnx.Module:
    """Returns `num` equal modules as one, with a leading dimension `name`."""
    create = nnx.vmap(make, in_axes=0, out_axes=0)
    stacked = nnx.split_rngs(splits=num)(create)(rngs)
    for _, variable in nnx.iter_graph(stacked):
        if isinstance(variable, nnx.Variable) and "axes" in variable.get_metadata():
            variable.set_metadata(axes=(name, *variable.get_metadata()["axes"]))
    return stacked


def _abstract(make: Make[Module]) -> Module:
    return nnx.eval_shape(lambda: make(nnx.Rngs(params=0)))
