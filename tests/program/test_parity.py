"""Tests that a config has the same losses on every mesh, sharded arrays, and only the
collectives that the plan needs.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import short_runs
from short_runs import check_sharded, run

from meshloom.models import transformer
from meshloom.sharding.audit import audit
from meshloom.trainer import data
from meshloom.trainer.program import optimizers, schedules
from meshloom.trainer.run import prepare as prepare_lib
from meshloom.trainer.run import train

LAYERS, WIDTH, HIDDEN, VOCAB, BATCH, LENGTH = 3, 64, 128, 320, 16, 32
NUM_STEPS = 20
FLOAT = 4

CONFIG = train.Config(
    model=transformer.Config(
        vocab_size=257,
        pad_vocab_to=64,
        num_layers=LAYERS,
        d_model=WIDTH,
        num_heads=8,
        num_kv_heads=4,
        d_ff=HIDDEN,
        max_length=LENGTH,
        compute_dtype="float32",
    ),
    data=data.Synthetic(vocab_size=257, length=LENGTH, num_examples=512),
    optimizer=optimizers.AdamW(),
    schedule=schedules.WarmupCosine(peak=3e-3, warmup_share=0.25),
    batch_size=BATCH,
    num_steps=NUM_STEPS,
    eval_batches=0,
)

# name: (mesh, plan, microbatches)
LAYOUTS = {
    "data": ("data=8", "data", 1),
    "fsdp": ("fsdp=8", "data+fsdp", 1),
    "zero1": ("data=2,fsdp=4", "data+zero1", 1),
    "tensor": ("data=2,tensor=4", "data+tensor", 1),
    "all": ("data=2,fsdp=2,tensor=2", "data+fsdp+tensor", 1),
    "tensor2d": ("fsdp=2,tensor=4", "data+tensor2d", 1),
    "sequence": ("data=2,tensor=4", "data+tensor+sequence", 1),
    "accumulate": ("data=2,fsdp=2,tensor=1", "data+fsdp", 4),
    "accumulate-one": ("data=1", "data", 4),
}

# Collectives of at least 1 KiB; smaller ones sum scalars (loss, norms).
EXPECTED = {
    "data": {("all-reduce", ("data",))},
    "fsdp": {
        ("all-gather", ("fsdp",)),
        ("all-reduce", ("fsdp",)),
        ("all-to-all", ("fsdp",)),
    },
    # Each gradient is reduce-scattered for the optimizer, then weights are gathered.
    "zero1": {
        ("all-gather", ("fsdp",)),
        ("all-reduce", ("fsdp",)),
        ("all-reduce", ("data",)),
        ("all-to-all", ("fsdp",)),
    },
    "tensor": {("all-reduce", ("tensor",)), ("all-reduce", ("data",))},
    "all": {
        ("all-gather", ("fsdp",)),
        ("all-reduce", ("fsdp",)),
        ("all-to-all", ("fsdp",)),
        ("all-reduce", ("data",)),
        ("all-reduce", ("tensor",)),
    },
    "tensor2d": {("all-reduce", ("tensor",)), ("all-reduce", ("fsdp",))},
    "sequence": {
        ("all-gather", ("tensor",)),
        ("all-reduce", ("tensor",)),
        ("all-reduce", ("data",)),
    },
    "accumulate": {
        ("all-gather", ("fsdp",)),
        ("all-reduce", ("fsdp",)),
        ("all-to-all", ("fsdp",)),
        ("all-reduce", ("data",)),
    },
    "accumulate-one": set(),
}


@functools.cache
def compiled(name: str):
    prepared = prepare(*LAYOUTS[name])
    return prepared, prepared.compile()


def prepare(mesh: str, plan: str, num_microbatches: int) -> prepare_lib.Prepared:
    return short_runs.prepare(
        CONFIG, mesh, plan=plan, num_microbatches=num_microbatches
    )


@pytest.fixture(scope="module")
def reference():
    prepared = prepare("data=1", "data", 1)
    return run(prepared, prepared.compile())


@pytest.mark.parametrize("name", LAYOUTS)
def test_training_is_the_same_on_every_mesh(name, reference):
    prepared, step_fn = compiled(name)
    initial, losses, _ = run(prepared, step_fn)
    jax.tree.map(np.testing.assert_array_equal, initial, reference[0])
    # Sums in a different order differ in the last bits, which 20 steps may amplify.
    np.testing.assert_allclose(losses, reference[1], rtol=1e-5)
    assert losses[-1] < 0.9 * losses[0]
    found = audit(step_fn, prepared.mesh)
    found.expect(dict.fromkeys(EXPECTED[name]), small=1024)


@pytest.mark.parametrize(
    "name, ways",
    {
        "data": {"embedding": 1, "blocks/mlp/down": 1},
        "fsdp": {"embedding": 8, "blocks/mlp/down": 8, "blocks/attention/qkv": 8},
        "tensor": {"embedding": 4, "blocks/mlp/down": 4, "blocks/attention/qkv": 4},
        "all": {"embedding": 4, "blocks/mlp/down": 4, "head": 4},
        "tensor2d": {"embedding": 8, "blocks/mlp/gate": 8, "head": 8},
    }.items(),
)
def test_parameters_are_sharded_as_planned(name, ways):
    prepared = prepare(*LAYOUTS[name])
    found = {array.path: array.ways for array in prepared.layout.params.arrays}
    assert {path: found[path] for path in ways} == ways


def blocks_bytes(prepared) -> int:
    return sum(
        array.bytes
        for array in prepared.layout.params.arrays
        if array.path.startswith("blocks") and "norm" not in array.path
    )


def test_data_parallel_moves_one_gradient_and_nothing_else():
    prepared, step_fn = compiled("data")
    found = audit(step_fn, prepared.mesh)
    _, num_bytes = found.total("all-reduce", "data")
    scalars = num_bytes - prepared.layout.params.bytes
    # The loss, its weight, and replicas; the two lanes of the samples' digest.
    assert 4 * FLOAT <= scalars <= 6 * FLOAT
    assert set(found.by_kind_and_axes()) == {("all-reduce", ("data",))}


def test_fsdp_gathers_each_weight_once_forward_and_once_backward():
    prepared, step_fn = compiled("fsdp")
    found = audit(step_fn, prepared.mesh)
    head = VOCAB * WIDTH * FLOAT  # needed once
    indices = BATCH * LENGTH * 4
    _, gathered = found.total("all-gather", "fsdp")
    assert gathered == 2 * blocks_bytes(prepared) + head + indices
    # Looked-up rows are resharded from width to examples, their gradients back.
    _, turned = found.total("all-to-all", "fsdp")
    assert turned == 2 * BATCH * LENGTH * WIDTH * FLOAT // 8


def test_tensor_parallel_never_gathers_logits_and_sums_twice_a_block_each_way():
    prepared, step_fn = compiled("tensor")
    found = audit(step_fn, prepared.mesh)
    activation = BATCH // 2 * LENGTH * WIDTH * FLOAT  # of one data-parallel shard
    logits = BATCH // 2 * LENGTH * VOCAB * FLOAT
    sums = [c for c in found.collectives if c.axes == ("tensor",)]
    assert not found.total("all-gather")[0]
    large = [c for c in sums if c.bytes >= activation * c.count]
    # Two per block forward and two backward, plus the lookup and the head's input.
    assert sum(c.count for c in large) == 4 * LAYERS + 2
    # The compiler may merge a small sum into the same collective. The CPU compiler
    # reduces the gradients from gate and up before it adds them, both in one.
    assert sum(c.bytes for c in large) < 1.05 * activation * (5 * LAYERS + 2)
    assert all(c.bytes < logits * c.count for c in sums)


def test_a_layout_that_is_not_sharded_as_planned_fails():
    """The check above can fail: it rejects replicated parameters."""
    sharded = prepare(*LAYOUTS["fsdp"])
    replicated = prepare("fsdp=8", "data", 1)
    state = replicated.layout.create(jax.random.key(0), replicated.mesh)
    with pytest.raises(AssertionError):
        check_sharded(sharded, state)


def test_fewer_evaluation_batches_than_asked_for_is_reported():
    few = dataclasses.replace(CONFIG.data, num_eval_examples=3 * BATCH)
    config = dataclasses.replace(CONFIG, data=few, eval_batches=5)
    short = prepare_lib.prepare(config, jax.devices()[:1])
    assert short.held_out["eval"].num_batches == 3
    note = "held-out split (3 batches, not eval_batches=5)"
    assert any(note in line for line in short.describe())
    enough = dataclasses.replace(config, eval_batches=3)
    full = prepare_lib.prepare(enough, jax.devices()[:1])
    assert not any("not eval_batches" in line for line in full.describe())
