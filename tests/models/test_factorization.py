"""Matrix factorization: its losses, a planted matrix, and what it refuses."""

import dataclasses

import jax
import numpy as np
import pytest
import short_runs

from meshloom.models import factorization
from meshloom.sharding import MeshSpec, Sharder
from meshloom.trainer import data
from meshloom.trainer.program.optimizers import AdamW
from meshloom.trainer.program.schedules import WarmupCosine
from meshloom.trainer.run.train import Config

SMALL = factorization.Config(num_users=6, num_items=5, width=3, regularization=0.1)
PARAMS = jax.tree.map(np.asarray, SMALL.init(jax.random.key(0)))
MATRIX = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
USERS = np.array([4, 0, 4, 1], np.int32)
WEIGHTS = np.array([1, 1, 1, 0], np.float32)  # the last one is padding


def test_both_losses_are_that_of_the_entries():
    users, items = (PARAMS[name].astype(np.float64) for name in ("users", "items"))
    errors = np.square(users @ items.T - MATRIX)
    squares = np.square(users).sum(1)[:, None] + np.square(items).sum(1)[None]
    rows = {"user": USERS, "values": MATRIX[USERS], "weights": WEIGHTS}
    total, weight, others = SMALL.loss(PARAMS, rows, Sharder())
    kept = USERS[:3]
    assert weight == 15
    assert others["penalty"] == pytest.approx(0.1 * squares[kept].sum(), rel=1e-5)
    assert total - others["penalty"] == pytest.approx(errors[kept].sum(), rel=1e-5)
    # Each entry of these rows as an example of its own.
    user, item = np.repeat(USERS, 5), np.tile(np.arange(5, dtype=np.int32), 4)
    entries = {"user": user, "item": item, "value": MATRIX[user, item]}
    entries["weights"] = np.repeat(WEIGHTS, 5)
    found, weight, _ = SMALL.loss(PARAMS, entries, Sharder())
    assert weight == 15 and found == pytest.approx(float(total), rel=1e-5)


def test_it_predicts_entries_and_rows():
    rows = SMALL.predict(PARAMS, {"user": USERS}, Sharder())["values"]
    batch = {"user": USERS, "item": np.array([1, 4, 0, 2], np.int32)}
    found = SMALL.predict(PARAMS, batch, Sharder())["value"]
    np.testing.assert_allclose(found, rows[np.arange(4), batch["item"]], rtol=1e-5)
    np.testing.assert_allclose(
        rows, PARAMS["users"][USERS] @ PARAMS["items"].T, rtol=1e-4
    )


@pytest.mark.parametrize("form", ["entries", "rows"])
def test_a_planted_matrix_is_recovered_to_1_percent(form):
    """On blocks of it: the norm of the difference, relative to that of the matrix.

    Of entries, three of five are trained on, with a noise of 1 %.
    """
    planted = data.PlantedMatrix(
        num_users=64, num_items=48, width=2, form=form, observed=0.6, noise=0.01
    )
    config = Config(
        model=factorization.Config(num_users=64, num_items=48, width=2),
        data=planted,
        optimizer=AdamW(),
        schedule=WarmupCosine(peak=0.05, final_share=0.01),
        rules={"users": "data", "items": "tensor"},
        batch_size=64 if form == "rows" else 256,
        num_steps=200,
        mesh=MeshSpec(data=2, tensor=4),
        eval_batches=0,
    )
    prepared = short_runs.prepare(config, "data=2,tensor=4")
    _, _, state = short_runs.run(prepared, prepared.program.step)
    users, items = (jax.device_get(state.params[name]) for name in ("users", "items"))
    matrix = planted.planted()
    error = np.linalg.norm(users @ items.T - matrix) / np.linalg.norm(matrix)
    assert error < 0.01
    assert np.std(matrix) > 0.5  # and it is a matrix worth recovering


@pytest.mark.parametrize(
    "arrays, facts, message",
    [
        (
            ("user", "item"),
            {},
            "needs arrays 'user', 'item' and 'value'.*only|has user",
        ),
        (("user", "value", "item", "values"), {}, "or 'user' and 'values'"),
        (("user", "values"), {}, r"rows have shape \(7,\), but the model's num_items"),
        (("user", "item", "value"), {"num_users": 9}, "Raise num_users to 9"),
    ],
)
def test_data_that_does_not_fit_is_refused(arrays, facts, message):
    shapes = {name: jax.ShapeDtypeStruct((4,), "int32") for name in arrays}
    if "values" in shapes:
        shapes["values"] = jax.ShapeDtypeStruct((4, 7), "float32")
    with pytest.raises(ValueError, match=message):
        SMALL.check_batch(shapes, facts)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"width": 0}, "width must be >= 1, got 0"),
        ({"scale": 0.0}, "scale must be > 0, got 0.0; factors of 0"),
        ({"regularization": -1.0}, "regularization must be >= 0, got -1.0"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **changes)
