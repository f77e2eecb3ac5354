"""Factors and recommenders as shipped: the same losses on every mesh, and no gather.

The batches are smaller than those of the configs, so that tests are short.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import short_runs

from meshloom.sharding import audit
from meshloom.trainer.config import files as config_files
from meshloom.trainer.run import train

NUM_STEPS = 20
BATCH = {"factors": 256, "rows": 32, "two_towers": 64, "dlrm": 64}

# (config, mesh): how many ways some of its arrays are sharded, parameters and state
CASES = {
    ("factors", "data=2,tensor=4"): {"users": 2, "items": 4},
    ("factors", "data=2,fsdp=2,tensor=2"): {"users": 4, "items": 2},
    ("factors", "fsdp=8"): {"users": 8, "items": 1},
    ("rows", "data=2,tensor=4"): {"users": 2, "items": 4},
    ("rows", "fsdp=4,tensor=2"): {"users": 4, "items": 2},
    ("rows", "data=8"): {"users": 8, "items": 1},
    ("two_towers", "data=4"): {
        "users/embedding": 4,
        "items/embedding": 4,
        "item_tower/layer_0": 1,
    },
    ("two_towers", "fsdp=4,tensor=2"): {
        "users/embedding": 8,
        "items/embedding": 8,
        "user_tower/layer_0": 4,
    },
    ("two_towers", "data=2,tensor=4"): {"users/embedding": 8, "items/embedding": 8},
    ("dlrm", "data=4"): {"table_0/embedding": 4, "table_2/embedding": 4},
    ("dlrm", "fsdp=4,tensor=2"): {
        "table_0/embedding": 8,
        "table_2/embedding": 8,
        "top/layer_1": 8,
    },
    ("dlrm", "data=2,fsdp=2,tensor=2"): {"table_1/embedding": 8, "top/layer_1": 4},
}


@functools.cache
def config(name: str) -> train.Config:
    shipped = "factors" if name == "rows" else name
    loaded = config_files.load([shipped], root=train.Config).config
    changes = {"num_steps": NUM_STEPS, "batch_size": BATCH[name]}
    if name == "rows":
        changes["data"] = dataclasses.replace(loaded.data, form="rows")
    return dataclasses.replace(loaded, **changes)


@functools.cache
def reference(name: str):
    prepared = short_runs.prepare(config(name), "data=1")
    return short_runs.run(prepared, prepared.program.step)


@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_training_is_the_same_on_every_mesh(name, mesh):
    prepared = short_runs.prepare(config(name), mesh)
    arrays = prepared.layout.params.arrays
    found = {array.path: array.ways for array in arrays}
    ways = CASES[name, mesh]
    assert {path: found[path] for path in ways} == ways
    # This also checks that each array is sharded as planned, before and after.
    initial, losses, state = short_runs.run(prepared, prepared.compile())
    jax.tree.map(np.testing.assert_array_equal, initial, reference(name)[0])
    np.testing.assert_allclose(losses, reference(name)[1], rtol=1e-5)
    for before, after in zip(
        jax.tree.leaves(initial), jax.tree.leaves(state.params), strict=True
    ):
        assert np.abs(after - before).max() > 1e-5


def grown(name: str) -> train.Config:
    """Returns the config with tables of eight times as many rows, which are not used.

    The dense loss needs items that are those of the data.
    """
    model = config(name).model
    if name == "dlrm":
        changes = {"table_rows": tuple(8 * rows for rows in model.table_rows)}
    else:
        changes = {"num_users": 8 * model.num_users}
    if name in ("factors", "two_towers"):
        changes["num_items"] = 8 * model.num_items
    model = dataclasses.replace(model, **changes)
    return dataclasses.replace(config(name), model=model)


def collectives(config, mesh) -> dict:
    prepared = short_runs.prepare(config, mesh)
    return audit(prepared.compile(), prepared.mesh).by_kind_and_axes()


@pytest.mark.parametrize("name", BATCH)
def test_no_collective_grows_with_a_table(name):
    """So neither a table nor its gradient nor its optimizer state is gathered."""
    mesh = [mesh for other, mesh in CASES if other == name][-2]
    assert "tensor" in mesh
    moved = collectives(config(name), mesh)
    assert any(kind == "all-gather" for kind, _ in moved)
    assert collectives(grown(name), mesh) == moved


def test_the_dense_loss_gathers_no_block_of_a_factor_or_of_the_matrix():
    moved = collectives(config("rows"), "data=2,tensor=4")
    users, width, items = BATCH["rows"], 4, 768
    gathered = {key: n for key, n in moved.items() if key[0] == "all-gather"}
    # The numbers of the users, forward and backward, and gradients of their rows.
    numbers = 2 * users * 4
    assert {key: n[1] for key, n in gathered.items()} == {
        ("all-gather", ("data",)): numbers + users * width * 4
    }
    # Gradients of the items of a column of the mesh are added up over its users.
    assert moved["all-reduce", ("data",)][1] >= items // 4 * width * 4
