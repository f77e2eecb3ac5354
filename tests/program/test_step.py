"""Tests of the train step with numbers computed by hand, for any split of a batch."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import short_runs
from tiny_runs import TINY

from meshloom.sharding import MeshSpec, Sharder, parse_plan
from meshloom.trainer.config import files as config_files
from meshloom.trainer.program.optimizers import Adafactor, AdamW, Lion, Muon
from meshloom.trainer.program.state import State
from meshloom.trainer.program.step import apply, eval_step, gradients, train_step
from meshloom.trainer.run.train import Config

RATE = 0.1


class Line:
    """Weighted least squares of y = w * x + b; no layers, no tokens."""

    def batch_axes(self):
        return dict.fromkeys(("x", "y", "weights"), ("batch",))

    def loss(self, params, batch, shard):
        error = params["w"] * batch["x"] + params["b"] - batch["y"]
        error = shard(error, ("batch",))
        weights = batch["weights"]
        total = jnp.sum(weights * error**2)
        return total, jnp.sum(weights), {"offset": jnp.sum(weights * error)}


def new_state(dtype=jnp.float32):
    params = {"w": jnp.asarray(1.0, dtype), "b": jnp.asarray(0.0, dtype)}
    return State(jnp.zeros((), jnp.int32), params, optax.sgd(RATE).init(params))


def step(*, shard=None, num_microbatches=1, **options):
    compute = functools.partial(
        gradients,
        model=Line(),
        shard=shard or Sharder(),
        num_microbatches=num_microbatches,
    )
    settings = dict(
        model=Line(),
        make_tx=lambda rate: optax.sgd(RATE),
        learning_rate=optax.linear_schedule(1.0, 0.0, 4),
    )
    update = functools.partial(apply, **(settings | options))
    return jax.jit(functools.partial(train_step, compute=compute, update=update))


def batch_of(num=16, seed=0):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(2, num)).astype(np.float32)
    # Very unequal, and all zero in some microbatches of two or four.
    weights = (rng.uniform(size=num) * np.arange(num) % 5).astype(np.float32)
    weights[::4] = 0.0
    return {"x": jnp.asarray(x), "y": jnp.asarray(y), "weights": jnp.asarray(weights)}


def test_one_update_by_hand():
    batch = {
        "x": jnp.array([1.0, 2.0]),
        "y": jnp.array([0.0, 4.0]),
        "weights": jnp.array([3.0, 1.0]),
    }
    state, metrics = step()(new_state(), batch)
    # Errors 1 and -2: loss (3 * 1 + 1 * 4) / 4, gradients (2 * 3 * 1 * 1 +
    # 2 * 1 * -2 * 2) / 4 for w and (2 * 3 * 1 + 2 * 1 * -2) / 4 for b.
    assert metrics["loss"] == 7 / 4
    assert metrics["offset"] == 1 / 4
    np.testing.assert_allclose(metrics["grad_norm"], np.hypot(-0.5, 0.5), rtol=1e-6)
    np.testing.assert_allclose(state.params["w"], 1 + RATE * 0.5, rtol=1e-6)
    np.testing.assert_allclose(state.params["b"], -RATE * 0.5, rtol=1e-6)
    assert state.step == 1 and metrics["learning_rate"] == 1.0
    assert metrics["skipped"] == 0
    names = {"loss", "offset", "grad_norm", "learning_rate", "skipped", "weight"}
    assert set(metrics) == names
    _, metrics = step()(state, batch)
    assert metrics["learning_rate"] == 0.75


@pytest.mark.parametrize("num_microbatches", [2, 4, 16])
def test_microbatches_give_the_same_update(num_microbatches):
    batch = batch_of()
    expected, expected_metrics = step()(new_state(), batch)
    found, metrics = step(num_microbatches=num_microbatches)(new_state(), batch)
    # Sixteen numbers added in a different order.
    for name in metrics:
        np.testing.assert_allclose(metrics[name], expected_metrics[name], rtol=1e-5)
    for name in ("w", "b"):
        np.testing.assert_allclose(found.params[name], expected.params[name], rtol=1e-5)


def test_microbatches_on_a_mesh_move_no_rows():
    mesh = MeshSpec(data=4, fsdp=2).make()
    rules = parse_plan("data+fsdp")
    shard = Sharder(mesh, rules)
    batch = shard.place(batch_of(32))
    run = step(shard=shard, num_microbatches=4)
    text = run.lower(new_state(), batch).compile().as_text()
    assert "all-reduce" in text
    for kind in ("all-gather", "all-to-all", "collective-permute"):
        assert kind not in text
    expected, _ = step()(new_state(), batch_of(32))
    np.testing.assert_allclose(
        run(new_state(), batch)[0].params["w"], expected.params["w"], rtol=1e-5
    )


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_clipping_scales_to_the_norm(num_microbatches):
    batch = batch_of()
    free, metrics = step()(new_state(), batch)
    norm = float(metrics["grad_norm"])
    run = step(max_grad_norm=norm / 2, num_microbatches=num_microbatches)
    clipped, clipped_metrics = run(new_state(), batch)
    # The reported norm is that before clipping.
    np.testing.assert_allclose(clipped_metrics["grad_norm"], norm, rtol=1e-5)
    for name, start in new_state().params.items():
        np.testing.assert_allclose(
            clipped.params[name] - start,
            (free.params[name] - start) / 2,
            rtol=1e-4,  # differences of numbers around 1
        )
    unclipped, _ = step(max_grad_norm=2 * norm)(new_state(), batch)
    assert unclipped.params == free.params


def test_a_batch_without_weight_changes_nothing():
    batch = batch_of() | {"weights": jnp.zeros(16)}
    state, metrics = step(max_grad_norm=1.0)(new_state(), batch)
    assert state.params == new_state().params and metrics["loss"] == 0


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_weights_may_sum_to_less_than_one(num_microbatches):
    batch = batch_of()
    small = batch | {"weights": batch["weights"] / 1024}
    run = step(num_microbatches=num_microbatches)
    expected, expected_metrics = run(new_state(), batch)
    found, metrics = run(new_state(), small)
    # A power of two changes no mantissa bits.
    assert found.params == expected.params
    assert metrics["loss"] == expected_metrics["loss"]


def test_bfloat16_parameters_accumulate_in_float32():
    """Adds 512 gradients of 1; in bfloat16 their sum would stop at 256."""
    num = 512
    batch = {
        "x": jnp.zeros(num),
        "y": jnp.full(num, -0.5),
        "weights": jnp.ones(num),
    }
    run = step(num_microbatches=num, make_tx=lambda rate: optax.sgd(1.0))
    state, metrics = run(new_state(jnp.bfloat16), batch)
    assert state.params["b"].dtype == jnp.bfloat16
    assert state.params["b"] == -1.0
    np.testing.assert_allclose(metrics["grad_norm"], 1.0, rtol=1e-6)


@pytest.mark.parametrize(
    "optimizer", [AdamW(), Lion(), Adafactor(), Muon()], ids=lambda o: type(o).__name__
)
def test_the_learning_rate_follows_the_step_and_no_other_counter(optimizer):
    """Step 6 uses its own rate, no matter how many earlier steps were skipped."""
    found, tiny = [], config_files.load([TINY], root=Config).config
    for schedule, step in ((Rising(1), 5), (Rising(6), 0)):
        config = dataclasses.replace(tiny, optimizer=optimizer, schedule=schedule)
        prepared = short_runs.prepare(config, "data=1")
        layout, mesh = prepared.layout, prepared.mesh
        state = layout.create(jax.random.key(0), mesh)
        state = state._replace(
            step=jax.device_put(jnp.int32(step), layout.shardings(mesh).step)
        )
        rows = {
            name: jnp.ones(x.shape, x.dtype, device=x.sharding)
            for name, x in prepared.program.batch.items()
        }
        state, figures = prepared.program.step(state, rows)
        np.testing.assert_allclose(figures["learning_rate"], 0.06, rtol=1e-6)
        found.append(jax.device_get(state.params))
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_array_equal(a, b)


@dataclasses.dataclass(frozen=True)
class Rising:
    """A rate that is the same, to the bit, where it has risen to the same multiple."""

    first: int

    def make(self, num_steps):
        return lambda count: jnp.float32(0.01) * (count + self.first)


def test_a_schedule_finishes_though_steps_are_skipped():
    rates = optax.linear_schedule(1.0, 0.0, 4)
    run = step(make_tx=optax.sgd, learning_rate=rates)
    state, good = new_state(), batch_of()
    bad = good | {"y": good["y"].at[1].set(jnp.nan)}
    state = state._replace(opt_state=optax.sgd(rates).init(state.params))
    for number, batch in enumerate([good, bad, bad, good, good]):
        before = state.params
        state, figures = run(state, batch)
        assert state.step == number + 1 and figures["skipped"] == (batch is bad)
        moved = jnp.hypot(*(state.params[k] - before[k] for k in ("w", "b")))
        rate = max(1 - number / 4, 0.0)
        np.testing.assert_allclose(figures["learning_rate"], rate)
        if batch is good:
            # A difference of numbers around 1.
            expected = rate * figures["grad_norm"]
            np.testing.assert_allclose(moved, expected, rtol=1e-5, atol=1e-6)


def test_evaluation_gives_sums():
    batch = batch_of()
    sums = eval_step(new_state(), batch, model=Line(), shard=Sharder())
    error = np.asarray(batch["x"] - batch["y"])
    np.testing.assert_allclose(sums["weight"], batch["weights"].sum(), rtol=1e-6)
    np.testing.assert_allclose(
        sums["loss"], (np.asarray(batch["weights"]) * error**2).sum(), rtol=1e-5
    )
    assert set(sums) == {"loss", "weight", "offset"}
