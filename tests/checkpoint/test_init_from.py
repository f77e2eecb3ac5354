"""A run initialized from another takes its parameters, and nothing else."""

import json
import shutil

import jax
import numpy as np
import pytest
from tiny_runs import TINY, digest, main, refused, sets_of, train

from meshloom.sharding.logical_axes import path_name
from meshloom.trainer.checkpoint import init_from
from meshloom.trainer.checkpoint.inspect import Stored
from meshloom.trainer.config import files as config_files
from meshloom.trainer.job.group import Group
from meshloom.trainer.record import metrics
from meshloom.trainer.record.failures import CorruptCheckpoint
from meshloom.trainer.run.prepare import prepare
from meshloom.trainer.run.train import Config


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A run of 8 steps, saved at 4 and 8."""
    folder = tmp_path_factory.mktemp("runs") / "other"
    assert main([*train(folder), "--steps", "8", "--mesh", "data=4,fsdp=2"]) == 0
    return folder


def prepared_of(*values):
    return prepare(config_files.load([TINY], list(values), root=Config).config)


@pytest.mark.parametrize(
    "values",
    [
        ["sharding.MeshSpec.data=2", "sharding.MeshSpec.tensor=4"],
        [
            *["sharding.MeshSpec.pipe=2", "transformer.Config.num_layers=4"],
            *["pipeline.schedule='interleaved'", "pipeline.num_chunks=2"],
        ],
    ],
    ids=["another-mesh", "layers-in-another-order"],
)
def test_parameters_are_restored_and_the_rest_is_initialized(values, tmp_path):
    """Also if a pipeline holds layers in another order than the one on disk."""
    layers = [v.replace("transformer.Config", "model") for v in values if "layers" in v]
    assert main([*train(tmp_path), *sets_of("eval_batches=0", *layers)]) == 0
    prepared = prepared_of(*values)
    source = init_from.find(str(tmp_path), prepared.program)
    state, message = init_from.initialize(source, prepared.program, Group())
    assert f"weights of {tmp_path}/checkpoints/4: 10 arrays of parameters" in message
    saved = dict(Stored.find(tmp_path).arrays())
    canonical = prepared.layout.canonical(state, prepared.mesh)
    for path, x in jax.tree_util.tree_leaves_with_path({"params": canonical.params}):
        np.testing.assert_array_equal(saved[path_name(path)], x)
    if prepared.layout.order is not None:
        moved = state.params["blocks"]["mlp"]["down"]
        assert not np.array_equal(saved["params/blocks/mlp/down"], moved)
    assert state.step == 0
    for x in jax.tree.leaves(state.opt_state):
        assert not np.any(x)
    leaves = (
        jax.tree.leaves(state),
        jax.tree.leaves(prepared.layout.shardings(prepared.mesh)),
    )
    for x, sharding in zip(*leaves, strict=True):
        assert x.sharding == sharding


def test_weights_are_taken_once(other, tmp_path, capfd):
    gone = tmp_path / "gone"
    shutil.copytree(other, gone)
    source = f'init_from="{gone}/checkpoints/4"'
    folder = tmp_path / "run"
    flags = sets_of(source, "seed=5", "schedule.peak=0.02")
    assert main([*train(folder), *flags]) == 0
    output = capfd.readouterr().out
    assert f"Starting with the weights of {gone}/checkpoints/4: 10 arrays" in output
    first = metrics.read(folder / "metrics.jsonl")[0]["loss"]
    assert first < metrics.read(other / "metrics.jsonl")[0]["loss"] - 0.05
    # With a checkpoint of its own the run no longer needs them.
    shutil.rmtree(gone)
    assert main([*train(folder, "--steps", "8"), *flags, "--insist"]) == 0
    output = capfd.readouterr().out
    assert "Resuming from step 4" in output and "Starting with" not in output
    # They are part of what defines the run.
    assert main([*train(folder, "--steps", "8"), *flags[2:]]) == 2
    assert "init_from " in capfd.readouterr().err


def test_another_model_is_refused_leaf_by_leaf(other, tmp_path, capfd):
    flags = sets_of(f'init_from="{other}"', "model.d_ff=48")
    argv = [*train(tmp_path / "run"), *flags]
    for extra in ([], ["--dry-run"]):
        assert main([*argv, *extra]) == 2
        error = capfd.readouterr().err
        assert "init_from: the weights of checkpoint" in error
        assert f"{other}/checkpoints/8 do not fit this config, in " in error
        assert (
            "params/blocks/mlp/down: saved as float32[2,64,32], expected "
            "float32[2,48,32]" in error
        )
        assert "opt_state" not in error
    assert not (tmp_path / "run").exists()


def test_damaged_and_missing_weights_are_refused(other, tmp_path, monkeypatch, capfd):
    copy = tmp_path / "copy"
    shutil.copytree(other, copy)
    file = copy / "checkpoints" / "8" / "manifest" / "metadata"
    saved = json.loads(file.read_text())
    saved["arrays"]["params/embedding"]["digest"] = "0" * 16
    file.write_text(json.dumps(saved))
    before = digest(copy)
    argv = train(tmp_path / "run")
    line = refused(capfd, [*argv, *sets_of(f'init_from="{copy}"')])
    assert line == (
        f"init_from: checkpoint {copy}/checkpoints/8 is not what was saved: the "
        "digests of 1 arrays differ, first params/embedding. Choose another."
    )
    assert digest(copy) == before

    def torn(*args):
        raise CorruptCheckpoint(f"checkpoint {copy}/checkpoints/4 cannot be read: torn")

    # A real read that tensorstore's threads abandon prints tracebacks.
    monkeypatch.setattr(init_from, "restore_part", torn)
    argv = [*argv, *sets_of(f'init_from="{copy}/checkpoints/4"'), "--insist"]
    line = refused(capfd, argv)
    assert line == (
        f"init_from: checkpoint {copy}/checkpoints/4 cannot be read: torn. "
        "Choose another."
    )
    argv = [*train(tmp_path / "new"), *sets_of(f'init_from="{tmp_path}/none"')]
    line = refused(capfd, argv)
    assert line.startswith(f"init_from: {tmp_path}/none holds no committed checkpoint")
