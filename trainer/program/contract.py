"""The contract between a model and the trainer, and its checks.

Every model has `loss(params, batch, shard)`. A loss that needs more takes it as a
keyword argument:

  key         random keys [B], one per row of the batch: a function of (seed, step, row)
              in training and of (seed, sample) in evaluation. A row has the same key
              on every mesh and in every microbatch.
  train       True in training, False in evaluation.
  variables   model state that is not differentiated, such as the running averages of a
              batch norm.

A model with variables has three more methods, `init_variables(key)`, `variable_axes()`
and `update_variables(variables, sums)`, and its loss returns a fourth value, a tree of
sums over the batch. They are accumulated over microbatches like all sums, and the step
calls `update_variables` with them once, so the variables do not depend on how the batch
was split.

A model with variables may have an attribute `base`, another model whose parameters they
are. Its runs may then start from a checkpoint of that model (`init_from`).

A model may have a method `predict(params, batch, shard)`, which `meshloom predict`
calls, with the keyword argument `variables` if it names it. It returns a dict of arrays
[B, ...], such as a class and its probability.

A model may have a method `notes(batch, shard)`, which returns lines about what it
chooses for the shapes of a batch on a mesh. A run prints them before it starts.
"""

import inspect
from typing import Any

import jax
import jax.numpy as jnp

from ...sharding import Sharder
from ...sharding.logical_axes import is_named, path_name

PREDICT = "predict(params, batch, shard)"
SIGNATURE = "loss(params, batch, shard, *, variables, key, train)"
EXTRAS = ("variables", "key", "train")
METHODS = ("init", "axes", "batch_axes", "check_batch", "loss")
VARIABLE_METHODS = ("init_variables", "variable_axes", "update_variables")
RESULT = (
    "(sum, weight, {name: other sum of the same weight}), all scalars, and with "
    "variables a fourth value, a tree of sums for update_variables"
)

# Folded into the key of the seed, which alone initializes the model. They differ from
# what a model folds into its own key: fold_in(key, 0), fold_in(key, 1), ...
TRAINING, EVALUATION = 2**32 - 1, 2**32 - 2

Sums = dict[str, jax.Array]


def extras(model: Any) -> tuple[str, ...]:
    """Returns the keyword arguments among EXTRAS that the model's loss takes."""
    parameters = list(inspect.signature(model.loss).parameters.values())
    positional = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
    first = [p for p in parameters if p.kind in positional][:3]
    taken = [p for p in parameters if p.name in EXTRAS and p not in first]
    unknown = [
        p
        for p in parameters
        if p not in (*first, *taken)
        and (p.kind is p.VAR_KEYWORD or p.default is p.empty)
    ]
    if len(first) < 3 or unknown:
        names = ", ".join(str(p).split(":")[0] for p in parameters)
        raise ValueError(
            f"{type(model).__name__}.loss({names}): the trainer calls {SIGNATURE} and "
            "passes each of the last three only if loss names it. Change the signature."
        )
    return tuple(p.name for p in taken)


def init_variables(model: Any, key: jax.Array) -> Any:
    """Returns the variables of step 0, {} if the model has none."""
    return model.init_variables(key) if has_variables(model) else {}


def variable_axes(model: Any) -> Any:
    return model.variable_axes() if has_variables(model) else {}


def has_variables(model: Any) -> bool:
    return hasattr(model, VARIABLE_METHODS[0])


def check(model: Any) -> None:
    """Raises if the model lacks a method or its loss has an unknown argument."""
    name = type(model).__name__
    if missing := [method for method in METHODS if not hasattr(model, method)]:
        raise ValueError(
            f"model {name} has no method {missing[0]}. A model has "
            f"{', '.join(METHODS)}; see docs/models.md."
        )
    takes_variables = "variables" in extras(model)
    missing = [method for method in VARIABLE_METHODS if not hasattr(model, method)]
    if missing and (takes_variables or len(missing) < len(VARIABLE_METHODS)):
        raise ValueError(
            f"model {name} has no method {missing[0]}. A model with variables has "
            f"{', '.join(VARIABLE_METHODS)}, and {SIGNATURE}."
        )
    if not missing and not takes_variables:
        raise ValueError(
            f"model {name} has {VARIABLE_METHODS[0]}, but its loss does not take "
            f"variables. Write {SIGNATURE}, or remove the method."
        )
    if "key" in extras(model) and not jax.config.values["jax_threefry_partitionable"]:
        raise ValueError(
            f"{name}.loss takes a key, but jax_threefry_partitionable is off: random "
            "numbers would depend on the mesh. Turn it on."
        )


def row_keys(seed: int, kind: int, step: Any, rows: jax.Array) -> jax.Array:
    """Returns one random key per row.

    Args:
      kind: TRAINING or EVALUATION.
      step: number of updates done, or 0 for keys that are the same at every step.
      rows: the index of each row.
    """
    # Not jax's default implementation: the bits of this one never depend on the mesh.
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), kind)
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(key, step), rows)


def call(
    model: Any,
    params: Any,
    batch: dict[str, jax.Array],
    shard: Sharder,
    *,
    variables: Any,
    key: Any,
    train: bool,
) -> tuple[Sums, Any]:
    """Returns the sums of a batch, and the statistics that update the variables."""
    available = {"variables": variables, "key": key, "train": train}
    result = model.loss(
        params, batch, shard, **{name: available[name] for name in extras(model)}
    )
    count = 4 if has_variables(model) else 3
    if not _fits(result, count):
        raise ValueError(
            f"{type(model).__name__}.loss returned {_describe(result)}; expected "
            f"{RESULT}"
        )
    total, weight, others = result[:3]
    for name in ("loss", "weight"):
        if name in others:
            raise ValueError(
                f"{type(model).__name__}.loss returned another sum named {name!r}, a "
                "name that is reserved for one of its first two. Rename it."
            )
    statistics = jax.tree.map(
        lambda x: jnp.asarray(x, jnp.float32), result[3] if count == 4 else {}
    )
    return {"loss": total, "weight": weight, **others}, statistics


def check_predicts(model: Any) -> None:
    if not hasattr(model, "predict"):
        raise ValueError(
            f"model {type(model).__name__} makes no predictions: it has no method "
            f"{PREDICT}, which returns {{name: array [B, ...]}} for a batch of B rows. "
            "Add one (docs/predict.md)."
        )


def predict(
    model: Any, params: Any, batch: dict[str, jax.Array], shard: Sharder, variables: Any
) -> dict[str, jax.Array]:
    """Returns the predictions of a batch: arrays with a row for each of its rows."""
    names = inspect.signature(model.predict).parameters
    options = {"variables": variables} if "variables" in names else {}
    found = model.predict(params, batch, shard, **options)
    num_rows = next(iter(batch.values())).shape[0]
    is_valid = isinstance(found, dict) and all(
        jnp.ndim(x) > 0 and jnp.shape(x)[0] == num_rows for x in found.values()
    )
    if not found or not is_valid:
        raise ValueError(
            f"{type(model).__name__}.predict returned {_describe(found)} for a batch "
            f"of {num_rows} rows; expected {{name: array [{num_rows}, ...]}}"
        )
    return found


def update_variables(model: Any, variables: Any, statistics: Any) -> Any:
    """Returns the variables after a step; raises if shapes or dtypes would change."""
    if not has_variables(model):
        return variables
    new = model.update_variables(variables, statistics)
    before, after = _shapes(variables), _shapes(new)
    if before != after:
        different = (p for p in {**before, **after} if before.get(p) != after.get(p))
        path = next(different)
        raise ValueError(
            f"{type(model).__name__}.update_variables returned "
            f"{after.get(path, 'nothing')} for {path!r}, but the variables have "
            f"{before.get(path, 'nothing')}. It must return variables with the same "
            "names, shapes and dtypes."
        )
    return new


def check_axes(model: Any, method: str, arrays: Any, axes: Any) -> None:
    """Raises unless `axes` names every dimension of every array."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(arrays, is_leaf=is_named)
    shapes = {path_name(path): tuple(leaf.shape) for path, leaf in leaves}
    names, _ = jax.tree_util.tree_flatten_with_path(axes, is_leaf=_is_names)
    named = {path_name(path): value for path, value in names}
    where = f"{type(model).__name__}.{method}()"
    for path, shape in shapes.items():
        example = (None,) * len(shape)
        if path not in named:
            raise ValueError(
                f"{where} lacks {path!r}, an array of shape {shape}. Add a tuple with "
                f"a logical name for each dimension; {example} never shards it."
            )
        if not _is_names(named[path]) or len(named[path]) != len(shape):
            raise ValueError(
                f"{where} has {named[path]!r} for {path!r}, an array of shape {shape}. "
                f"Expected a tuple of {len(shape)} logical names; {example} never "
                "shards it."
            )
    if unknown := [path for path in named if path not in shapes]:
        raise ValueError(
            f"{where} names {unknown[0]!r}, but there is no such array. The arrays are "
            f"{', '.join(list(shapes)[:8])}."
        )


def _is_names(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(x, str | None) for x in value)


def _fits(result: Any, count: int) -> bool:
    if not isinstance(result, tuple | list) or len(result) != count:
        return False
    if not isinstance(result[2], dict):
        return False
    return all(jnp.shape(x) == () for x in (*result[:2], *result[2].values()))


def _describe(result: Any) -> str:
    if isinstance(result, tuple | list):
        return f"({', '.join(map(_describe, result))})"
    if isinstance(result, dict):
        items = (f"{name}: {_describe(x)}" for name, x in result.items())
        return f"{{{', '.join(items)}}}"
    if not hasattr(result, "shape"):
        return repr(result)
    return f"an array of shape {result.shape}" if result.shape else "a scalar"


def _shapes(tree: Any) -> dict[str, str]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        path_name(path): f"{jnp.result_type(x)}{list(jnp.shape(x))}"
        for path, x in leaves
    }
