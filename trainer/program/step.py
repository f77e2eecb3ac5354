"""The train step and the evaluation step: pure functions, jitted in build.py.

`state.step` is the only counter: learning rate and random keys are functions of it,
whether or not a step was skipped.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ...sharding import Sharder
from ...sharding.pipeline import Pipeline
from ..data.batches import SAMPLE_IDS
from . import contract
from .digest import array_digest
from .state import Model, State

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]

# Metrics with the two lanes of the digest of a batch's samples.
SAMPLE_DIGEST = ("samples_0", "samples_1")

# The metric with the weight that the means of a step were divided by.
WEIGHT = "weight"

# Inside a step, the batch array of row indices, from which the rows' keys are made.
ROWS = "rows"

MakeTx = Callable[[optax.Schedule], optax.GradientTransformation]


class Gradients(NamedTuple):
    """The result of a backward pass: sums, not yet divided by the weight.

    The Gradients of the microbatches of a batch add up to those of the batch.

    Attributes:
      sums: of the loss and the other metrics, and their `weight`.
      params: gradients of the summed loss, a tree like the parameters.
      statistics: sums that update the variables.
      samples: digest of the sample ids of the batch.
    """

    sums: Metrics
    params: Any
    statistics: Any
    samples: Metrics


def gradients(
    state: State,
    batch: Batch,
    *,
    model: Model,
    shard: Sharder,
    seed: int = 0,
    num_microbatches: int = 1,
    first_row: int = 0,
    pipeline: Pipeline | None = None,
) -> Gradients:
    """Computes the gradients of a batch.

    Args:
      seed: for the keys of models that take one.
      first_row: number of the first row, if the batch is a part of a larger one.
      pipeline: computes the gradients in stages, with its own microbatches.
    """
    samples, batch = _without_ids(batch)
    if pipeline is not None:
        sums, grads = pipeline.value_and_grad(state.params, batch)
        return Gradients(sums, grads, {}, samples)
    sums, grads, statistics = _gradients(
        state, batch, model, shard, seed, num_microbatches, first_row
    )
    return Gradients(sums, grads, statistics, samples)


def apply(
    state: State,
    grads: Gradients,
    *,
    model: Model,
    make_tx: MakeTx,
    learning_rate: optax.Schedule,
    max_grad_norm: float | None = None,
    skip_grad_norm: float | None = None,
) -> tuple[State, Metrics]:
    """Updates the state. The mean loss is the same for any split of the batch.

    A non-finite update is skipped on all devices: the step counter advances, while
    parameters, optimizer state and variables stay unchanged, and the metric `skipped`
    is 1.

    Args:
      grads: sums, divided here by their weight.
      make_tx: makes the optimizer for a learning rate.
      skip_grad_norm: an update with a larger gradient norm is skipped too.
    """
    weight = _divisor(grads.sums)
    mean = jax.tree.map(lambda g: g.astype(jnp.float32) / weight, grads.params)
    norm = optax.tree_utils.tree_norm(mean)
    if max_grad_norm is not None:
        scale = jnp.minimum(1.0, max_grad_norm / jnp.maximum(norm, 1e-12))
        mean = jax.tree.map(lambda g: g * scale, mean)
    mean = jax.tree.map(lambda g, p: g.astype(p.dtype), mean, state.params)
    rate = learning_rate(state.step)
    # optax's own schedule count does not advance when a step is skipped.
    tx = make_tx(lambda count: rate)
    updates, opt_state = tx.update(mean, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    variables = contract.update_variables(model, state.variables, grads.statistics)
    means = _means(grads.sums)
    is_valid = jnp.isfinite(means["loss"]) & jnp.isfinite(norm)
    for variable in jax.tree.leaves(variables):
        is_valid &= jnp.isfinite(variable).all()
    if skip_grad_norm is not None:
        is_valid &= norm <= skip_grad_norm
    new = State(state.step + 1, params, opt_state, variables)
    kept = jax.tree.map(lambda new, old: jnp.where(is_valid, new, old), new, state)
    metrics = means | {
        "grad_norm": norm,
        "learning_rate": jnp.asarray(rate, jnp.float32),
        "skipped": 1 - is_valid,
        WEIGHT: grads.sums["weight"],
        **grads.samples,
    }
    return kept._replace(step=new.step), metrics


def train_step(
    state: State,
    batch: Batch,
    *,
    compute: Callable[[State, Batch], Gradients],
    update: Callable[[State, Gradients], tuple[State, Metrics]],
) -> tuple[State, Metrics]:
    """Runs one update, bit-identical to `gradients` followed by `apply`.

    Args:
      compute: `gradients` with all but its first two arguments bound.
      update: `apply` with all but its first two arguments bound.
    """
    grads = compute(state, batch)
    # Without it the compiler would fuse across the two, and round differently.
    return update(state, jax.lax.optimization_barrier(grads))


def eval_step(
    state: State,
    batch: Batch,
    *,
    model: Model,
    shard: Sharder,
    seed: int = 0,
    pipeline: Pipeline | None = None,
) -> Metrics:
    """Returns sums over a batch, to be added over batches before the division.

    A sample has the same key in every evaluation.
    """
    ids = batch.get(SAMPLE_IDS)
    _, batch = _without_ids(batch)
    if pipeline is not None:
        return pipeline.sums(state.params, batch)
    key = None
    if "key" in contract.extras(model):
        if ids is None:
            raise ValueError(
                f"{type(model).__name__}.loss takes a key, which evaluation derives "
                f"from the sample ids: add an array {SAMPLE_IDS!r} to the batch"
            )
        key = contract.row_keys(seed, contract.EVALUATION, 0, ids)
    sums, _ = contract.call(
        model,
        state.params,
        batch,
        shard,
        variables=state.variables,
        key=key,
        train=False,
    )
    return sums


def _gradients(
    state: State,
    batch: Batch,
    model: Model,
    shard: Sharder,
    seed: int,
    num_microbatches: int,
    first_row: int,
) -> tuple[Metrics, Any, Any]:
    """Returns sums, their gradients, and the statistics that update the variables.

    Microbatches run sequentially and are accumulated in float32. All of them see the
    variables from the beginning of the step.
    """
    params, is_random = state.params, "key" in contract.extras(model)
    if is_random:
        num_rows = next(iter(batch.values())).shape[0]
        rows = jnp.arange(first_row, first_row + num_rows, dtype=jnp.uint32)
        batch = batch | {ROWS: shard(rows, ("batch",))}

    def loss(params, batch):
        key = None
        if is_random:
            rows = batch[ROWS]
            batch = {name: x for name, x in batch.items() if name != ROWS}
            key = contract.row_keys(seed, contract.TRAINING, state.step, rows)
        sums, statistics = contract.call(
            model, params, batch, shard, variables=state.variables, key=key, train=True
        )
        return sums["loss"], (sums, statistics)

    grad = jax.grad(loss, has_aux=True)
    if num_microbatches == 1:
        grads, (sums, statistics) = grad(params, batch)
        return sums, grads, statistics

    def add(carry, microbatch):
        # The float32 carry makes the addition float32, whatever the gradient's dtype.
        return jax.tree.map(jnp.add, carry, grad(params, microbatch)), None

    microbatches = _split(batch, model, shard, num_microbatches)
    first = jax.tree.map(lambda x: x[0], microbatches)
    zeros = jax.tree.map(
        lambda x: jnp.zeros(x.shape, jnp.float32), jax.eval_shape(grad, params, first)
    )
    (grads, (sums, statistics)), _ = jax.lax.scan(add, zeros, microbatches)
    return sums, grads, statistics


def _without_ids(batch: Batch) -> tuple[Metrics, Batch]:
    """Returns the digest of the sample ids, for the ledger, and the other arrays."""
    if SAMPLE_IDS not in batch:
        return {}, batch
    rest = {name: x for name, x in batch.items() if name != SAMPLE_IDS}
    digest = array_digest(batch[SAMPLE_IDS])
    return dict(zip(SAMPLE_DIGEST, digest, strict=True)), rest


def _split(batch: Batch, model: Model, shard: Sharder, num: int) -> Batch:
    """Reshapes [B, ...] to [num, B / num, ...] without moving rows between devices.

    Microbatch m has rows m, m + num, ... Contiguous rows would move between devices,
    because each device holds a contiguous range of rows.
    """
    axes = {**model.batch_axes(), ROWS: ("batch",)}

    def one(name, x):
        x = x.reshape(x.shape[0] // num, num, *x.shape[1:])
        return shard(x.swapaxes(0, 1), (None, *axes[name]))

    return {name: one(name, x) for name, x in batch.items()}


def _means(sums: Metrics) -> Metrics:
    weight = _divisor(sums)
    return {k: v / weight for k, v in sums.items() if k != "weight"}


def _divisor(sums: Metrics) -> jax.Array:
    """Returns the weight, or 1 if it is 0, in which case every sum is 0."""
    return jnp.where(sums["weight"] > 0, sums["weight"], 1.0)
