"""Padded evaluation in a pipeline equals that on one device."""

import dataclasses
import functools

import jax
import pytest
from paths import TINY
from test_evaluation import evaluate

from meshloom.sharding import MeshSpec
from meshloom.trainer.config import files as config_files
from meshloom.trainer.run import train
from meshloom.trainer.run.prepare import prepare

pytestmark = pytest.mark.compiles_anew


@functools.cache
def figures(mesh: str, num_devices: int) -> dict[str, float]:
    config = config_files.load([TINY], root=train.Config).config
    source = dataclasses.replace(config.data, num_eval_examples=37)  # 2 1/3 batches
    config = dataclasses.replace(
        config, data=source, mesh=MeshSpec.parse(mesh), eval_batches=None
    )
    prepared = prepare(config, jax.devices()[:num_devices])
    split = prepared.held_out["eval"]
    assert (split.num_batches, split.num_examples) == (3, 37)
    state = prepared.layout.create(jax.random.key(3), prepared.mesh)
    rows: list = []
    evaluate(prepared, split, rows)(1, state)
    return rows[0]


@pytest.mark.parametrize("mesh, num_devices", [("pipe=2", 2), ("pipe=2,fsdp=2", 4)])
def test_padded_evaluation_equals_that_on_one_device(mesh, num_devices):
    one, piped = figures("data=1", 1), figures(mesh, num_devices)
    assert piped.keys() == one.keys()
    assert piped["loss"] == pytest.approx(one["loss"], rel=1e-6)
