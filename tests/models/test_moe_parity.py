"""Tests that a mixture of experts has the same losses on every mesh, sharded experts,
and all-to-alls of tokens in place of gathers.
"""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest
import short_runs
from packed_rows import Packed

from meshloom.models import moe
from meshloom.sharding.audit import audit
from meshloom.trainer import data
from meshloom.trainer.program import optimizers, schedules
from meshloom.trainer.run import train

pytestmark = pytest.mark.compiles_anew

LAYERS, WIDTH, HIDDEN, EXPERTS, CHOSEN, BATCH, LENGTH = 2, 32, 48, 8, 2, 16, 16
NUM_STEPS = 20
FLOAT = 4

MODEL = moe.Config(
    vocab_size=64,
    num_layers=LAYERS,
    d_model=WIDTH,
    num_heads=4,
    num_kv_heads=2,
    d_ff=HIDDEN,
    max_length=LENGTH,
    compute_dtype="float32",
    num_experts=EXPERTS,
    experts_per_token=CHOSEN,
    balance_loss=0.01,
    router_z_loss=0.001,
)
CONFIG = train.Config(
    model=MODEL,
    data=data.Synthetic(vocab_size=64, length=LENGTH, num_examples=512),
    optimizer=optimizers.AdamW(),
    schedule=schedules.WarmupCosine(peak=1e-2, warmup_share=0.25),
    batch_size=BATCH,
    num_steps=NUM_STEPS,
    eval_batches=0,
)
# Every kind of layer and of routing that the first model lacks.
DEEP = dict(
    num_layers=5,
    first_dense=1,
    moe_every=2,
    num_shared_experts=1,
    d_expert=24,
    scores="sigmoid",
    weight_scale=2.0,
)
MODELS = {
    "dropless": MODEL,
    "capacity": dataclasses.replace(MODEL, capacity_factor=1.0),
    "deep": dataclasses.replace(MODEL, **DEEP),
    "bias": dataclasses.replace(MODEL, balance_loss=0.0, bias_rate=0.01),
    "packed": dataclasses.replace(MODEL, context_attention="ring"),
}
DATA = {"packed": Packed(vocab_size=64, length=LENGTH, num_examples=512)}


def slow(*layout):
    return pytest.param(layout, marks=pytest.mark.slow)


# model, mesh and number of microbatches
LAYOUTS = [
    ("dropless", "expert=4", 1),
    ("dropless", "expert=2,fsdp=2,tensor=2", 1),
    ("dropless", "expert=2,pipe=2", 4),
    ("packed", "expert=2,context=2", 1),
    slow("capacity", "expert=2,fsdp=2,tensor=2", 1),
    slow("deep", "expert=2,pipe=2,tensor=2", 2),
    slow("bias", "expert=2,fsdp=2", 2),
]


def prepare(name: str, mesh: str, num_microbatches: int):
    rows = DATA.get(name, CONFIG.data)
    config = dataclasses.replace(CONFIG, model=MODELS[name], data=rows)
    return short_runs.prepare(config, mesh, num_microbatches=num_microbatches)


@functools.cache
def compiled(name: str, mesh: str, num_microbatches: int):
    prepared = prepare(name, mesh, num_microbatches)
    return prepared, prepared.compile()


@functools.cache
def one_device(name: str):
    prepared, step_fn = compiled(name, "data=1", 1)
    return short_runs.run(prepared, step_fn)


@pytest.mark.parametrize(
    "layout", LAYOUTS, ids=lambda layout: "-".join(map(str, layout))
)
def test_training_is_the_same_on_every_mesh(layout):
    prepared, step_fn = compiled(*layout)
    reference = one_device(layout[0])
    initial, losses, last = short_runs.run(prepared, step_fn)
    jax.tree.map(np.testing.assert_array_equal, initial, reference[0])
    np.testing.assert_allclose(losses, reference[1], rtol=1e-5)
    assert losses[-1] < 0.95 * losses[0]
    # Tokens of each expert are whole numbers, so the biases are equal to the bit.
    jax.tree.map(
        np.testing.assert_array_equal,
        *(jax.device_get(state.variables) for state in (last, reference[2])),
    )
    ways = {array.path: array.ways for array in prepared.layout.params.arrays}
    sizes = prepared.mesh.shape
    experts = "blocks/last/mlp/up" if layout[0] == "deep" else "blocks/mlp/up"
    shards = [sizes[axis] for axis in ("pipe", "fsdp", "expert", "tensor")]
    assert ways[experts] == math.prod(shards)
    check_traffic(layout[0], prepared, audit(step_fn, prepared.mesh))


def check_traffic(name: str, prepared, found) -> None:
    """Tokens travel by all-to-all over `expert`, and nothing is gathered over it."""
    sizes, num = prepared.mesh.shape, prepared.program.staging
    assert not found.total("all-gather", "expert")[0]
    assert found.total("all-to-all", "expert")[0]
    if num is not None or name == "bias":
        return  # how often, depends on the ticks and microbatches
    ways, config = sizes["expert"], prepared.config.model
    tokens = BATCH // (ways * sizes["fsdp"]) * LENGTH // sizes["context"]
    if name == "capacity":
        rows = BATCH // (ways * sizes["fsdp"]) * EXPERTS * config.capacity(LENGTH)
    else:
        rows = ways * tokens * min(CHOSEN, EXPERTS // ways)
    # There and back, forward, recomputed (only there: the results are not needed) and
    # backward (there and back).
    runs = [c for c in found.collectives if c.kind == "all-to-all"]
    large = [c for c in runs if c.bytes >= c.count * rows * WIDTH * FLOAT]
    moved = sum(c.bytes for c in large if c.axes == ("expert",))
    assert moved == LAYERS * 6 * rows * WIDTH * FLOAT
