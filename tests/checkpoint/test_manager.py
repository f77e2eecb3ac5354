"""Checkpoints: bit-equal on any mesh, and invisible until they are committed."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshloom.sharding import MeshSpec, parse_plan
from meshloom.trainer.checkpoint import manifest
from meshloom.trainer.checkpoint.manager import (
    Checkpoints,
    committed_steps,
    latest_step,
    restore_part,
)
from meshloom.trainer.job.group import Group
from meshloom.trainer.program.optimizers import Adafactor, AdamW, Muon
from meshloom.trainer.program.state import State, make_layout, placed

RULES = parse_plan("data+fsdp+tensor")


class Small:
    """A few parameters; nothing computes with them."""

    def axes(self):
        return {
            "table": ("vocab", "embed"),
            "blocks": {"up": ("layer", "embed", "mlp"), "scale": ("layer", "norm")},
        }

    def init(self, key):
        del key

        def numbers(*shape):
            return jnp.sin(jnp.arange(np.prod(shape), dtype=jnp.float32)).reshape(shape)

        return {
            "table": numbers(16, 8),
            "blocks": {"up": numbers(2, 8, 16), "scale": numbers(2, 8)},
        }


def plan(mesh, optimizer=AdamW()):  # noqa: B008
    tx = optimizer.make(optax.constant_schedule(0.1), Small().axes())
    return make_layout(Small(), tx, RULES, mesh)


def make_mesh(**sizes):
    spec = MeshSpec(**sizes)
    return spec.make(jax.devices()[: spec.abstract().size])


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(fsdp=4, tensor=2)


def trained(layout, mesh, step=3):
    """Returns a state whose numbers are all different, as after some updates."""
    state = layout.create(jax.random.key(0), mesh)
    change = jax.jit(
        lambda tree: jax.tree.map(
            lambda x: (x + 1 + jnp.arange(x.size).reshape(x.shape)).astype(x.dtype),
            tree,
        ),
        out_shardings=layout.shardings(mesh),
    )
    return change(state)._replace(step=jnp.asarray(step, jnp.int32))


def assert_equal(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        assert np.array_equal(a, b)


@pytest.fixture(scope="module")
def saved(mesh, tmp_path_factory):
    """(folder, state) with steps 1 to 3 saved; the state is that of step 3."""
    folder = tmp_path_factory.mktemp("checkpoints")
    layout = plan(mesh)
    checkpoints = Checkpoints(folder, keep=2)
    for step in (1, 2, 3):
        state = trained(layout, mesh, step)
        checkpoints.save(step, state)
    checkpoints.close()
    return folder, state


def test_only_the_newest_are_kept(saved):
    assert committed_steps(saved[0]) == [2, 3]
    assert latest_step(saved[0]) == 3


@pytest.mark.parametrize(
    "sizes",
    [dict(fsdp=4, tensor=2), dict(fsdp=2, data=2), dict(data=8), dict(tensor=2), {}],
    ids=str,
)
def test_restores_bit_equal_into_the_shardings_of_any_mesh(saved, sizes):
    folder, state = saved
    mesh = make_mesh(**sizes)
    layout = plan(mesh)
    checkpoints = Checkpoints(folder, keep=2)
    found, _ = checkpoints.restore(3, layout, mesh)
    checkpoints.close()
    assert isinstance(found, State)
    assert_equal(found, state)
    for x, sharding in zip(
        jax.tree.leaves(found), jax.tree.leaves(layout.shardings(mesh)), strict=True
    ):
        assert x.sharding == sharding
    shard = found.params["blocks"]["up"].addressable_shards[0].data
    assert shard.shape == (2, 8 // sizes.get("fsdp", 1), 16 // sizes.get("tensor", 1))


def test_a_model_without_variables_keeps_the_older_format(saved):
    """Names, digests and files: checkpoints without variables can be restored."""
    folder, state = saved
    assert set(state.to_tree()) == {"step", "params", "opt_state"}
    names = {path.split("/")[0] for path in manifest.read(folder, 3)["arrays"]}
    assert names == {"step", "params", "opt_state"}
    metadata = json.loads((folder / "3" / "state" / "_METADATA").read_text())
    assert {key.split("'")[1] for key in metadata["tree_metadata"]} == names


def test_parameters_alone(saved):
    folder, state = saved
    mesh = make_mesh(tensor=4)
    layout = plan(mesh)
    target = placed(layout.abstract.params, layout.params.shardings(mesh))
    params = restore_part(folder, 3, {"params": target}, Group())["params"]
    assert_equal(params, state.params)
    assert params["table"].sharding == layout.params.shardings(mesh)["table"]
    assert params["table"].sharding.shard_shape((16, 8)) == (4, 8)


@pytest.mark.parametrize("optimizer", [Muon(), Adafactor(min_dim_size_to_factor=8)])
def test_states_of_other_optimizers(tmp_path, mesh, optimizer):
    layout = plan(mesh, optimizer)
    state = trained(layout, mesh)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, state)
    checkpoints.wait()
    assert_equal(checkpoints.restore(3, layout, mesh)[0], state)
    checkpoints.close()


def test_a_save_does_not_see_the_steps_after_it(tmp_path, mesh):
    """The next step overwrites the buffers it donates while the save still runs."""
    layout = plan(mesh)
    state = trained(layout, mesh)
    expected = jax.tree.map(np.array, state)
    step = jax.jit(
        lambda s: jax.tree.map(lambda x: x + 1, s),
        donate_argnums=0,
        out_shardings=layout.shardings(mesh),
    )
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, state)
    for _ in range(20):
        state = step(state)
    jax.block_until_ready(state)
    checkpoints.wait()
    assert_equal(checkpoints.restore(3, layout, mesh)[0], expected)
    checkpoints.close()


def test_saving_a_step_again_is_refused(tmp_path, mesh):
    layout = plan(mesh)
    first = trained(layout, mesh)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, first)
    checkpoints.wait()
    with pytest.raises(ValueError, match="step 3 is already saved in .* --workdir"):
        checkpoints.save(3, layout.create(jax.random.key(1), mesh))
    assert_equal(checkpoints.restore(3, layout, mesh)[0], first)
    checkpoints.close()


def test_no_folder_and_no_checkpoint(tmp_path):
    assert latest_step(tmp_path / "absent") is None
    assert latest_step(tmp_path) is None


def test_what_is_not_committed_is_invisible(saved, tmp_path):
    """Folders as a killed save leaves them, and files that are not checkpoints."""
    for step in (2, 3):
        shutil.copytree(saved[0] / str(step), tmp_path / str(step))
    # While orbax writes, the folder's name says so.
    shutil.copytree(saved[0] / "3", tmp_path / "7.orbax-checkpoint-tmp")
    # Partly written in place: arrays, but no commit.
    for step in (6, 8):
        shutil.copytree(saved[0] / "3", tmp_path / str(step))
    (tmp_path / "8" / "_CHECKPOINT_METADATA").unlink()
    metadata = tmp_path / "6" / "_CHECKPOINT_METADATA"
    begun = json.loads(metadata.read_text()) | {"commit_timestamp_nsecs": None}
    metadata.write_text(json.dumps(begun))
    (tmp_path / "9").mkdir()
    (tmp_path / "10").write_text("a file")
    (tmp_path / "notes").mkdir()
    assert committed_steps(tmp_path) == [2, 3]
    assert latest_step(tmp_path) == 3
