"""Tests that keys, modes, variables and epochs are the same on every mesh and split.

Equal to float32 rounding means: the sums of a batch are added in another order on each
mesh, and nothing else differs. Keys, masks and augmented rows are equal bit for bit, as
they are computed from (seed, step, row) and (seed, sample, epoch) alone.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import short_runs
from noisy import (
    BATCH,
    CONFIG,
    CONFIG_TEXT,
    MOMENTUM,
    NUM_EXAMPLES,
    Noisy,
    Rows,
)
from rich.console import Console

from meshloom.models.dropout import dropout
from meshloom.sharding import MeshSpec
from meshloom.trainer.checkpoint.manager import Checkpoints
from meshloom.trainer.cli import main
from meshloom.trainer.commands.forecast_observer import ForecastObserver
from meshloom.trainer.commands.train import with_fewer_processes
from meshloom.trainer.config import files as config_files
from meshloom.trainer.data import Order
from meshloom.trainer.data.batches import Batches, device_batches
from meshloom.trainer.program import contract
from meshloom.trainer.program.schedules import Constant
from meshloom.trainer.run.train import train

ODD = "fsdp=3,tensor=2"
TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}  # a few sums of 24 rows a step, 8 steps


@functools.cache
def prepare(mesh, **changes):
    """With the programs that were compiled for it, for the tests of this file."""
    return short_runs.prepare(CONFIG, mesh, **changes)


@functools.cache
def trained(mesh, **changes):
    """Returns (losses, last state on the host) after 8 steps."""
    prepared = prepare(mesh, **changes)
    _, losses, state = short_runs.run(prepared, prepared.program.step)
    return losses, jax.device_get(state)


def assert_close(found, expected):
    np.testing.assert_allclose(found[0], expected[0], **TOLERANCE)
    for name in ("params", "variables"):
        leaves = (jax.tree.leaves(getattr(x[1], name)) for x in (found, expected))
        for a, b in zip(*leaves, strict=True):
            np.testing.assert_allclose(a, b, **TOLERANCE)


@pytest.mark.parametrize("mesh", [ODD, "data=2,fsdp=2,tensor=2", "data=3"])
def test_trains_alike_on_every_mesh(mesh):
    assert_close(trained(mesh), trained("data=1"))


@pytest.mark.parametrize("mesh", [ODD, "data=4"])
def test_trains_alike_on_every_mesh_with_microbatches(mesh):
    """Batch norm normalizes each microbatch, whose rows do not depend on the mesh."""
    expected = trained("data=1", num_microbatches=2)
    assert_close(trained(mesh, num_microbatches=2), expected)


@pytest.mark.parametrize(("mesh", "num"), [("data=1", 2), ("data=1", 4), (ODD, 2)])
def test_a_sum_over_examples_is_the_same_for_every_split(mesh, num):
    model = Noisy(by_batch=False)
    expected = trained("data=1", model=model)
    assert_close(trained(mesh, model=model, num_microbatches=num), expected)


@pytest.mark.parametrize("num", [1, 2])
@pytest.mark.parametrize("mesh", ["data=1", ODD])
def test_running_averages_are_those_of_the_global_batch(mesh, num):
    prepared = prepare(mesh, **({"num_microbatches": num} if num > 1 else {}))
    *_, state = short_runs.run(prepared, prepared.program.step, num_steps=4)
    mean, variance = 0.0, 1.0
    batches = Batches(Rows().open("train"), Order(NUM_EXAMPLES, CONFIG.seed), BATCH)
    for step in range(4):
        x = batches[step]["x"].astype(np.float64)
        mean = MOMENTUM * mean + (1 - MOMENTUM) * x.mean(0)
        variance = MOMENTUM * variance + (1 - MOMENTUM) * x.var(0)
    found = jax.device_get(state.variables["input"])
    np.testing.assert_allclose(found["mean"], mean, rtol=1e-5)
    np.testing.assert_allclose(found["variance"], variance, rtol=1e-4)  # a difference


def test_variables_are_sharded_by_the_rules():
    prepared = prepare(ODD)
    state = prepared.layout.create(jax.random.key(0), prepared.mesh)
    batch = next(iter(batches_of(prepared)))
    state, _ = prepared.program.step(state, batch)
    piece = {
        name: state.variables[name]["mean"].addressable_shards[0].data.shape
        for name in ("input", "hidden")
    }
    assert piece == {"input": (4,), "hidden": (12,)}  # 12 over fsdp=3, 24 over tensor=2
    assert state.params["bias"].addressable_shards[0].data.shape == (3,)  # 6 classes
    held = prepared.layout.variables
    assert held.bytes_per_device == 2 * 4 * (4 + 12)


def batches_of(prepared, start=0, stop=1):
    return device_batches(
        prepared.train_data,
        Order(len(prepared.train_data), CONFIG.seed),
        batch_size=BATCH,
        shardings=prepared.program.batch_shardings,
        start=start,
        stop=stop,
    )


@pytest.mark.parametrize("num", [1, 2])
def test_a_skipped_step_leaves_variables_alone(num):
    prepared = prepare(ODD, **({"num_microbatches": num} if num > 1 else {}))
    before = prepared.layout.create(jax.random.key(0), prepared.mesh)
    expected = jax.device_get(before)
    (batch,) = batches_of(prepared)
    bad = batch | {"x": batch["x"].at[5, 3].set(jnp.inf)}
    bad = jax.device_put(bad, prepared.program.batch_shardings)
    after, figures = prepared.program.step(before, bad)
    assert figures["skipped"] == 1 and after.step == 1
    for a, b in zip(
        jax.tree.leaves(after.variables),
        jax.tree.leaves(expected.variables),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


def test_evaluation_uses_running_averages_and_no_noise():
    """Compared with a computation by hand on the held-out rows."""
    _, state = trained("data=1")
    data = prepare("data=1").held_out["eval"].data
    p, v = state.params, state.variables
    x = (data.x - v["input"]["mean"]) / np.sqrt(v["input"]["variance"] + 1e-3)
    x = (x @ p["up"] - v["hidden"]["mean"]) / np.sqrt(v["hidden"]["variance"] + 1e-3)
    logits = np.maximum(x, 0) @ p["down"] + p["bias"]
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    rows = np.arange(BATCH)
    expected = -log_p[rows, data.labels[:BATCH]].sum()
    for mesh in ("data=1", ODD):
        prepared = prepare(mesh)
        with device_batches(
            prepared.held_out["eval"].data,
            Order(NUM_EXAMPLES, shuffle=False),
            batch_size=BATCH,
            shardings=prepared.program.batch_shardings,
            start=0,
            stop=1,
            training=False,
        ) as batches:
            placed = jax.device_put(state, prepared.layout.shardings(prepared.mesh))
            sums = prepared.program.evaluate(placed, next(batches))
        np.testing.assert_allclose(sums["loss"], expected, rtol=1e-5)


def test_dropout_has_the_same_bits_on_every_mesh_and_split():
    x = jnp.ones((BATCH, 24))

    def masks(mesh, rows):
        sharding = jax.NamedSharding(mesh, jax.P("fsdp", "tensor"))

        def draw(rows):
            keys = contract.row_keys(7, contract.TRAINING, 3, rows)
            return dropout(x[: len(rows)], keys, 0.5)

        return jax.jit(draw, out_shardings=sharding)(rows)

    rows = jnp.arange(BATCH, dtype=jnp.uint32)
    expected = np.asarray(masks(MeshSpec().make(jax.devices()[:1]), rows))
    mesh = MeshSpec(fsdp=3, tensor=2).make(jax.devices()[:6])
    found = masks(mesh, rows)
    assert found.addressable_shards[0].data.shape == (8, 12)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(masks(mesh, rows[::2]), expected[::2])
    assert 0.4 < (expected > 0).mean() < 0.6
    assert len({row.tobytes() for row in expected}) == BATCH


def test_dropout_differs_by_step_but_not_between_evaluations():
    """On one batch, with a learning rate of 0."""
    still = Constant(value=0.0)
    prepared = short_runs.prepare(CONFIG, ODD, schedule=still)
    state = prepared.layout.create(jax.random.key(0), prepared.mesh)
    with batches_of(prepared) as batches:
        batch = next(batches)
    losses = []
    for _ in range(3):
        state, figures = prepared.program.step(state, batch)
        losses.append(float(figures["loss"]))
    assert len(set(losses)) == 3
    state = state._replace(step=state.step - 2)
    _, figures = prepared.program.step(state, batch)
    assert float(figures["loss"]) == losses[1]

    class Sampled(Noisy):
        def loss(self, params, batch, shard, *, key, variables, train):
            draws = jax.vmap(jax.random.uniform)(key)
            total, weight, _, sums = super().loss(
                params, batch, shard, key=key, variables=variables, train=train
            )
            return total, weight, {"draws": jnp.sum(draws)}, sums

    prepared = short_runs.prepare(CONFIG, ODD, model=Sampled())
    state = prepared.layout.create(jax.random.key(0), prepared.mesh)
    draws = [
        float(prepared.program.evaluate(state._replace(step=step), batch)["draws"])
        for step in (state.step, state.step + 5)
    ]
    assert draws[0] == draws[1]


def test_keys_differ_by_seed_step_and_kind_and_from_those_of_init():
    rows = jnp.arange(4, dtype=jnp.uint32)
    found = [
        contract.row_keys(seed, kind, step, rows)
        for seed in (0, 1)
        for step in (0, 1)
        for kind in (contract.TRAINING, contract.EVALUATION)
    ]
    found += [jax.random.split(jax.random.key(seed), 64) for seed in (0, 1)]
    data = np.concatenate([jax.random.key_data(keys) for keys in found])
    assert len({tuple(row) for row in data.tolist()}) == len(data)


def test_rows_differ_by_epoch_and_not_by_process():
    data = Rows().open("train")
    order = Order(NUM_EXAMPLES, seed=1)
    batches = Batches(data, order, BATCH)
    seen = {}
    for step in range(5):  # two epochs: 60 examples, 24 a step
        epochs, ids = order.index(step * BATCH + np.arange(BATCH))
        for epoch, i, row in zip(epochs, ids, batches[step]["x"], strict=True):
            seen[int(epoch), int(i)] = row
    assert len(seen) == 2 * NUM_EXAMPLES
    for i in range(NUM_EXAMPLES):
        assert (seen[0, i] != seen[1, i]).all() and (seen[0, i] != data.x[i]).all()
    part = Batches(data, order, BATCH, rows=[3, 17])[4]["x"]
    np.testing.assert_array_equal(part, batches[4]["x"][[3, 17]])
    plain = Batches(data, order, BATCH, training=False)[4]["x"]
    ids = order.index(4 * BATCH + np.arange(BATCH))[1]
    np.testing.assert_array_equal(plain, data.x[ids])


def run(workdir, hooks=(), **changes):
    config = dataclasses.replace(CONFIG, **changes)
    with open(workdir.parent / "screen.txt", "a") as screen:
        console = Console(file=screen, width=200)
        return train(
            config,
            workdir=workdir,
            console=console,
            hooks=hooks,
            observer=ForecastObserver(),
        )


def test_resumes_to_the_same_bits(tmp_path):
    """Killed after step 5 and resumed from 4, in another epoch of the data."""
    mesh = MeshSpec(data=2, fsdp=2, tensor=2)
    expected = run(tmp_path / "uninterrupted", mesh=mesh)

    def fail(step, state):
        raise OSError("the machine is gone")

    fail.every = 5
    with pytest.raises(OSError, match="gone"):
        run(tmp_path / "run", mesh=mesh, hooks=[fail])
    state = run(tmp_path / "run", mesh=mesh)
    found = jax.tree.leaves(state)
    for a, b in zip(found, jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)
    assert len(found) == 1 + 3 + 8 + 4  # step, params, AdamW's and variables
    begun = run(tmp_path / "begun", init_from=str(tmp_path / "run"), num_steps=1)
    assert begun.step == 1
    screen = (tmp_path / "screen.txt").read_text()
    assert "3 arrays of parameters and 4 arrays of variables, digests veri" in screen
    assert "Noisy has no method model_flops: the share of the devices' peak" in screen
    assert "No forecast: model Noisy has no method `costs`" in screen


def test_microbatches_of_a_batch_norm_are_never_changed_in_silence(
    tmp_path, monkeypatch
):
    """They change the result, so neither a resume nor a plan may change them."""
    mesh = MeshSpec(data=4, fsdp=2)
    run(tmp_path / "run", mesh=mesh, num_steps=1)
    with pytest.raises(ValueError, match="num_microbatches"):
        run(tmp_path / "run", mesh=mesh, num_steps=1, num_microbatches=3)
    monkeypatch.setenv("MESHLOOM_FULL_PROCESSES", "4")
    loaded = config_files.Loaded(CONFIG, {}, "", ())
    assert with_fewer_processes(loaded, 2) is loaded


def test_explain_shows_variables(tmp_path, capsys):
    file = tmp_path / "noisy.gin"
    file.write_text(CONFIG_TEXT)
    assert main(["explain", "--config", str(file), "--mesh", ODD]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = lines[lines.index("variables (not trained):") + 1 :]
    (found,) = (row for row in rows if row.startswith("hidden/mean"))
    assert found.split()[1:5] == ["24", "mlp", "(tensor)", "48"]


def test_a_checkpoint_is_restored_onto_another_mesh(tmp_path):
    prepared = prepare(ODD)
    *_, state = short_runs.run(prepared, prepared.program.step)
    checkpoints = Checkpoints(tmp_path / "saved")
    checkpoints.save(8, state, {})
    checkpoints.wait()
    other = prepare("data=2,tensor=2")
    found, _ = checkpoints.restore(8, other.layout, other.mesh)
    checkpoints.close()
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(a, b)
    assert found.variables["hidden"]["mean"].addressable_shards[0].data.shape == (12,)
    assert jax.tree.structure(found) == jax.tree.structure(trained("data=1")[1])
