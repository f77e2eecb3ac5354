"""The train step and the evaluation step: pure, and jitted elsewhere."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from ..sharding import Sharder
from ..sharding.pipeline import Pipeline
from .data import SAMPLE_IDS
from .digest import array_digest
from .state import Model, State

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]

# The two words of the digest of a batch's samples, as metrics.
SAMPLE_DIGEST = ("samples_0", "samples_1")


def train_step(
    state: State,
    batch: Batch,
    *,
    model: Model,
    tx: optax.GradientTransformation,
    learning_rate: optax.Schedule,
    shard: Sharder,
    num_microbatches: int = 1,
    pipeline: Pipeline | None = None,
    max_grad_norm: float | None = None,
    skip_grad_norm: float | None = None,
) -> tuple[State, Metrics]:
    """One update. The loss is a sum over a weight, so any split gives one mean.

    An update that is not finite is left out, on all devices alike: the step counts, and
    parameters and optimizer state stay as they were (`skipped` is 1 then).

    Args:
      pipeline: computes the gradients by stages, with microbatches of its own.
      skip_grad_norm: a larger norm of the gradient is taken for a failed step too.
    """
    samples, batch = _without_ids(batch)
    if pipeline is not None:
        sums, grads = pipeline.value_and_grad(state.params, batch)
    else:
        sums, grads = gradients(state.params, batch, model, shard, num_microbatches)
    weight = _divisor(sums)
    grads = jax.tree.map(lambda g: g.astype(jnp.float32) / weight, grads)
    norm = optax.tree_utils.tree_norm(grads)
    if max_grad_norm is not None:
        scale = jnp.minimum(1.0, max_grad_norm / jnp.maximum(norm, 1e-12))
        grads = jax.tree.map(lambda g: g * scale, grads)
    grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, state.params)
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    means = _means(sums)
    is_good = jnp.isfinite(means["loss"]) & jnp.isfinite(norm)
    if skip_grad_norm is not None:
        is_good &= norm <= skip_grad_norm
    params, opt_state = jax.tree.map(
        lambda new, old: jnp.where(is_good, new, old),
        (params, opt_state),
        (state.params, state.opt_state),
    )
    metrics = means | {
        "grad_norm": norm,
        "learning_rate": jnp.asarray(learning_rate(state.step), jnp.float32),
        "skipped": 1 - is_good,
        **samples,
    }
    return State(state.step + 1, params, opt_state), metrics


def eval_step(
    state: State,
    batch: Batch,
    *,
    model: Model,
    shard: Sharder,
    pipeline: Pipeline | None = None,
) -> Metrics:
    """Sums over a batch, to be added over batches before they are divided."""
    _, batch = _without_ids(batch)
    if pipeline is not None:
        return pipeline.sums(state.params, batch)
    return _sums(model.loss(state.params, batch, shard))


def gradients(
    params: Any, batch: Batch, model: Model, shard: Sharder, num_microbatches: int
) -> tuple[Metrics, Any]:
    """Sums and their gradients, over microbatches one after the other, in float32."""

    def loss(params, batch):
        result = model.loss(params, batch, shard)
        return result[0], _sums(result)

    grad = jax.grad(loss, has_aux=True)
    if num_microbatches == 1:
        grads, sums = grad(params, batch)
        return sums, grads

    def add(carry, microbatch):
        # A float32 carry makes the addition float32, whatever the gradient's type.
        return jax.tree.map(jnp.add, carry, grad(params, microbatch)), None

    microbatches = _split(batch, model, shard, num_microbatches)
    first = jax.tree.map(lambda x: x[0], microbatches)
    zeros = jax.tree.map(
        lambda x: jnp.zeros(x.shape, jnp.float32), jax.eval_shape(grad, params, first)
    )
    (grads, sums), _ = jax.lax.scan(add, zeros, microbatches)
    return sums, grads


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
    axes = model.batch_axes()

    def one(name, x):
        x = x.reshape(x.shape[0] // num, num, *x.shape[1:])
        return shard(x.swapaxes(0, 1), (None, *axes[name]))

    return {name: one(name, x) for name, x in batch.items()}


def _sums(result) -> Metrics:
    total, weight, others = result
    return {"loss": total, "weight": weight, **others}


def _means(sums: Metrics) -> Metrics:
    weight = _divisor(sums)
    return {k: v / weight for k, v in sums.items() if k != "weight"}


def _divisor(sums: Metrics) -> jax.Array:
    """The weight, or 1 where there is none: then every sum is 0."""
    return jnp.where(sums["weight"] > 0, sums["weight"], 1.0)
