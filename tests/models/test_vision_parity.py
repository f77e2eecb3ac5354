"""The vision models as shipped: 20 steps with the same losses on every mesh.

At small constant learning rates: on another mesh the input of some ReLU of the residual
network is on the other side of zero by its last bits, which changes the gradient of one
pixel, and AdamW amplifies that (docs/vision.md).
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import short_runs

from meshloom.trainer.config import files as config_files
from meshloom.trainer.program.schedules import Constant
from meshloom.trainer.run import train

NUM_STEPS = 20
RATES = {"digits_resnet": 3e-5, "digits_vit": 1e-3}

# (config, mesh): how many ways some of its arrays are sharded, parameters and variables
CASES = {
    ("digits_resnet", "data=8"): {"block_0/conv_1": 1, "block_0/norm_1/mean": 1},
    ("digits_resnet", "fsdp=8"): {
        "block_0/conv_1": 8,
        "block_1/shortcut": 8,
        "block_0/norm_1/mean": 1,
        "block_0/norm_2/mean": 8,
        "block_0/norm_2/variance": 8,
    },
    ("digits_resnet", "data=2,tensor=4"): {
        "block_1/conv_1": 4,
        "block_1/conv_2": 4,
        "block_1/norm_1/scale": 4,
        "block_1/norm_1/variance": 4,
        "block_1/norm_2/variance": 1,
    },
    ("digits_resnet", "data=2,fsdp=2,tensor=2"): {
        "block_1/conv_1": 4,
        "block_1/norm_1/variance": 2,
        "block_1/norm_2/variance": 2,
        "stem_norm/mean": 2,
        "head": 2,
    },
    ("digits_vit", "fsdp=8"): {"blocks/attention/qkv": 8, "patch": 8, "position": 8},
    ("digits_vit", "data=2,tensor=4"): {
        "blocks/attention/qkv": 4,
        "blocks/attention/out": 4,
        "blocks/mlp/down": 4,
        "patch": 1,
    },
    ("digits_vit", "data=2,fsdp=2,tensor=2"): {"blocks/mlp/up": 4, "head": 2},
}


@functools.cache
def config(name: str) -> train.Config:
    loaded = config_files.load([name], root=train.Config).config
    return dataclasses.replace(
        loaded, num_steps=NUM_STEPS, schedule=Constant(value=RATES[name])
    )


@functools.cache
def reference(name: str):
    prepared = short_runs.prepare(config(name), "data=1")
    return short_runs.run(prepared, prepared.program.step)


@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_training_is_the_same_on_every_mesh(name, mesh):
    prepared = short_runs.prepare(config(name), mesh)
    layout = prepared.layout
    arrays = (*layout.params.arrays, *layout.variables.arrays)
    found = {array.path: array.ways for array in arrays}
    ways = CASES[name, mesh]
    assert {path: found[path] for path in ways} == ways
    # This also checks that each array is sharded as planned, before and after.
    initial, losses, state = short_runs.run(prepared, prepared.program.step)
    jax.tree.map(np.testing.assert_array_equal, initial, reference(name)[0])
    np.testing.assert_allclose(losses, reference(name)[1], rtol=1e-5)
    assert losses[-1] < losses[0]
    for a, b in zip(
        jax.tree.leaves(jax.device_get(state.variables)),
        jax.tree.leaves(jax.device_get(reference(name)[2].variables)),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * np.abs(b).max())
