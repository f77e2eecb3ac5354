"""RowAdaGrad: that of the tables of a service for tables, AdamW for everything else."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshloom.service.blocks.tables import Table
from meshloom.service.server import row_updates
from meshloom.trainer.program.optimizers import AdamW, RowAdaGrad

AXES = {"table": ("rows", None), "layer": {"w": ("embed", "mlp"), "b": ("mlp",)}}
DRAW = np.random.default_rng(0)


def drawn():
    shapes = {"table": (5, 3), "layer": {"w": (3, 4), "b": (4,)}}
    return jax.tree.map(
        lambda shape: jnp.asarray(DRAW.normal(size=shape), jnp.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def test_each_parameter_has_its_optimizer():
    ours = RowAdaGrad(table_rate=4.0).make(optax.constant_schedule(0.1), AXES)
    theirs = AdamW().make(optax.constant_schedule(0.1), AXES["layer"])
    params = drawn()
    states = ours.init(params), theirs.init(params["layer"])
    table = Table(name="t", rows=5, width=3, learning_rate=0.4, optimizer="adagrad")
    squares = row_updates.initial_state(table, 5)
    for _ in range(3):
        grads = drawn()
        grads["table"] = grads["table"].at[2].set(0.0)
        changes, ours_state = ours.update(grads, states[0], params)
        others, theirs_state = theirs.update(grads["layer"], states[1], params["layer"])
        states = ours_state, theirs_state
        expected, squares = row_updates.updated(
            table, np.asarray(params["table"]), np.asarray(grads["table"]), squares, 1.0
        )
        new = optax.apply_updates(params, changes)
        np.testing.assert_allclose(new["table"], expected, rtol=1e-5)
        assert np.array_equal(new["table"][2], params["table"][2])
        jax.tree.map(np.testing.assert_array_equal, changes["layer"], others)
        params = new


def test_a_model_without_tables_is_refused():
    with pytest.raises(ValueError, match="begins with a logical axis rows or users or"):
        RowAdaGrad().make(optax.constant_schedule(0.1), AXES["layer"])
