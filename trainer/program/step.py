"""The train step and the evaluation step: pure, and jitted elsewhere.

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

# The two words of the digest of a batch's samples, as metrics.
SAMPLE_DIGEST = ("samples_0", "samples_1")

# The array of a batch, inside a step, that holds the number each row's key is made of.
ROWS = "rows"

MakeTx = Callable[[optax.Schedule], optax.GradientTransformation]


class Gradients(NamedTuple):
    """What a batch says of how to change the state: sums, divided by nothing yet.

    The Gradients of parts of a batch add up to those of the whole.

    Attributes:
      sums: of the loss and the other figures, and their `weight`.
      params: of the summed loss, in the form of the parameters.
      statistics: the sums that variables are updated by.
      samples: a digest of which samples the batch holds.
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
    pipeline: Pipeline | None = None,
) -> Gradients:
    """Computes the gradients of a batch.

    Args:
      seed: of the keys of models that take one.
      pipeline: computes the gradients by stages, with microbatches of its own.
    """
    samples, batch = _without_ids(batch)
    if pipeline is not None:
        sums, grads = pipeline.value_and_grad(state.params, batch)
        return Gradients(sums, grads, {}, samples)
    sums, grads, statistics = _gradients(
        state, batch, model, shard, seed, num_microbatches
    )
    return Gradients(sums, grads, statistics, samples)


def apply(
    state: State,
    found: Gradients,
    *,
    model: Model,
    make_tx: MakeTx,
    learning_rate: optax.Schedule,
    max_grad_norm: float | None = None,
    skip_grad_norm: float | None = None,
) -> tuple[State, Metrics]:
    """Updates the state. The loss is a sum over a weight, so any split gives one mean.

    An update that is not finite is left out, on all devices alike: the step counts, and
    parameters, optimizer state and variables stay as they were (`skipped` is 1 then).

    Args:
      make_tx: makes the optimizer for a learning rate.
      skip_grad_norm: a larger norm of the gradient is taken for a failed step too.
    """
    weight = _divisor(found.sums)
    grads = jax.tree.map(lambda g: g.astype(jnp.float32) / weight, found.params)
    norm = optax.tree_utils.tree_norm(grads)
    if max_grad_norm is not None:
        scale = jnp.minimum(1.0, max_grad_norm / jnp.maximum(norm, 1e-12))
        grads = jax.tree.map(lambda g: g * scale, grads)
    grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, state.params)
    rate = learning_rate(state.step)
    # The count that optax keeps for schedules stands still where a step is skipped.
    tx = make_tx(lambda count: rate)
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    variables = contract.update_variables(model, state.variables, found.statistics)
    means = _means(found.sums)
    is_good = jnp.isfinite(means["loss"]) & jnp.isfinite(norm)
    for variable in jax.tree.leaves(variables):
        is_good &= jnp.isfinite(variable).all()
    if skip_grad_norm is not None:
        is_good &= norm <= skip_grad_norm
    new = State(state.step + 1, params, opt_state, variables)
    kept = jax.tree.map(lambda new, old: jnp.where(is_good, new, old), new, state)
    metrics = means | {
        "grad_norm": norm,
        "learning_rate": jnp.asarray(rate, jnp.float32),
        "skipped": 1 - is_good,
        **found.samples,
    }
    return kept._replace(step=new.step), metrics


def train_step(
    state: State,
    batch: Batch,
    *,
    compute: Callable[[State, Batch], Gradients],
    update: Callable[[State, Gradients], tuple[State, Metrics]],
) -> tuple[State, Metrics]:
    """One update, bit for bit what `gradients` and `apply` give one after the other.

    Args:
      compute: `gradients`, with all but its first two arguments bound.
      update: `apply`, likewise.
    """
    found = compute(state, batch)
    # Or the compiler would fuse the two, and round otherwise than it does for each.
    return update(state, jax.lax.optimization_barrier(found))


def eval_step(
    state: State,
    batch: Batch,
    *,
    model: Model,
    shard: Sharder,
    seed: int = 0,
    pipeline: Pipeline | None = None,
) -> Metrics:
    """Sums over a batch, to be added over batches before they are divided.

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
                f"{type(model).__name__}.loss takes a key, which evaluation makes of "
                f"each sample's number: the batch needs an array {SAMPLE_IDS!r}"
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
) -> tuple[Metrics, Any, Any]:
    """Sums, their gradients, and the sums that variables are updated by.

    Over microbatches one after the other, in float32. All of them see the variables of
    the step's beginning.
    """
    params, is_random = state.params, "key" in contract.extras(model)
    if is_random:
        num_rows = next(iter(batch.values())).shape[0]
        rows = jnp.arange(num_rows, dtype=jnp.uint32)
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
        # A float32 carry makes the addition float32, whatever the gradient's type.
        return jax.tree.map(jnp.add, carry, grad(params, microbatch)), None

    microbatches = _split(batch, model, shard, num_microbatches)
    first = jax.tree.map(lambda x: x[0], microbatches)
    zeros = jax.tree.map(
        lambda x: jnp.zeros(x.shape, jnp.float32), jax.eval_shape(grad, params, first)
    )
    (grads, (sums, statistics)), _ = jax.lax.scan(add, zeros, microbatches)
    return sums, grads, statistics


def _without_ids(batch: Batch) -> tuple[Metrics, Batch]:
    """A digest of which samples a batch holds, for the ledger, and the rest of it."""
    if SAMPLE_IDS not in batch:
        return {}, batch
    rest = {name: x for name, x in batch.items() if name != SAMPLE_IDS}
    digest = array_digest(batch[SAMPLE_IDS])
    return dict(zip(SAMPLE_DIGEST, digest, strict=True)), rest


def _split(batch: Batch, model: Model, shard: Sharder, num: int) -> Batch:
    """[B, ...] as [num, B / num, ...], each device keeping the rows it has.

    Microbatch m takes rows m, m + num, ...: contiguous rows would move between devices,
    since each device holds a contiguous part of the batch.
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
    """The weight, or 1 where there is none: then every sum is 0."""
    return jnp.where(sums["weight"] > 0, sums["weight"], 1.0)
