"""Training with positions sharded over devices equals training on one device."""

import functools

import jax
import numpy as np
import pytest
import short_runs
from packed_rows import Packed
from short_runs import run

from meshloom.models import transformer
from meshloom.sharding import Sharder, hlo
from meshloom.sharding.audit import audit
from meshloom.trainer.program import optimizers, schedules
from meshloom.trainer.run import train

LAYERS, WIDTH, LENGTH, BATCH = 2, 32, 64, 8
HEADS, KV_HEADS = 8, 4
FLOAT = 4

# name: (mesh, form of attention)
LAYOUTS = {
    "ring": ("context=4", "ring"),
    "ulysses": ("context=4", "ulysses"),
    "gather": ("context=4", "gather"),
    "ring-all": ("context=2,fsdp=2,tensor=2", "ring"),
}
# Collectives of at least 1 KiB.
SUMS = {("all-reduce", ("context",)): None}
SEGMENTS = BATCH * LENGTH * 4
EXPECTED = {
    "ring": SUMS | {("collective-permute", ("context",)): None},
    "ulysses": SUMS
    | {("all-to-all", ("context",)): None, ("all-gather", ("context",)): (1, SEGMENTS)},
    # Gradients of keys are added up where their positions are.
    "gather": SUMS
    | {("all-gather", ("context",)): None, ("reduce-scatter", ("context",)): None},
}


def config(form: str) -> train.Config:
    return train.Config(
        model=transformer.Config(
            vocab_size=60,
            pad_vocab_to=64,
            num_layers=LAYERS,
            d_model=WIDTH,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            d_ff=64,
            max_length=LENGTH,
            compute_dtype="float32",
            context_attention=form,
        ),
        data=Packed(vocab_size=60, length=LENGTH, num_examples=256),
        optimizer=optimizers.AdamW(),
        schedule=schedules.WarmupCosine(peak=3e-3, warmup_share=0.25),
        batch_size=BATCH,
        num_steps=20,
        eval_batches=0,
    )


@functools.cache
def compiled(name: str):
    mesh, form = LAYOUTS[name]
    prepared = short_runs.prepare(config(form), mesh)
    return prepared, prepared.compile()


@pytest.fixture(scope="module")
def reference():
    prepared = short_runs.prepare(config("auto"), "data=1")
    return run(prepared, prepared.compile())


@pytest.mark.parametrize("name", LAYOUTS)
def test_training_is_the_same_with_positions_sharded(name, reference):
    prepared, step_fn = compiled(name)
    initial, losses, _ = run(prepared, step_fn)
    jax.tree.map(np.testing.assert_array_equal, initial, reference[0])
    np.testing.assert_allclose(losses, reference[1], rtol=1e-5)
    assert losses[-1] < 0.95 * losses[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_device_has_its_share_of_every_array_of_the_batch(name):
    prepared, _ = compiled(name)
    sizes = dict(prepared.mesh.shape)
    rows, positions = BATCH // sizes["fsdp"], LENGTH // sizes["context"]
    batch = dict(prepared.program.batch)
    assert batch.pop("sample_ids").shape == (BATCH,)
    assert batch.keys() == {"inputs", "targets", "weights", "positions", "segments"}
    for x in batch.values():
        assert x.sharding.shard_shape(x.shape) == (rows, positions)


@pytest.mark.parametrize("name", EXPECTED)
def test_attention_exchanges_only_what_its_form_needs(name):
    prepared, step_fn = compiled(name)
    found = audit(step_fn, prepared.mesh)
    found.expect(EXPECTED[name], small=1024)


def test_a_ring_moves_each_block_once_around_forward_and_backward():
    prepared, step_fn = compiled("ring")
    found = audit(step_fn, prepared.mesh)
    keys = 2 * BATCH * LENGTH // 4 * KV_HEADS * (WIDTH // HEADS) * FLOAT
    moved = [c.bytes for c in found.collectives if c.kind == "collective-permute"]
    large = sum(size for size in moved if size >= keys // 2)
    # Forward and backward, keys go to the three other devices; gradients come home.
    assert large == LAYERS * (2 * 3 + 4) * keys
    # Beside them only segments travel, and the batch into zig-zag order.
    assert sum(moved) - large <= (LAYERS * 2 * 3 + 5) * SEGMENTS // 4


def test_a_ring_multiplies_little_more_than_half_the_square():
    """The compiled step runs the products that the model counts, and no others."""
    prepared, step_fn = compiled("ring")
    model, shard = prepared.config.model, Sharder(prepared.mesh, prepared.program.rules)
    costs = model.costs(BATCH, LENGTH, platform="cpu", shard=shard)
    blocks = sum(LAYERS * (1 + p.backward) * p.flops for p in costs.products)
    expected = (blocks + 3 * costs.head.flops) / 4
    # Products with one row are not counted in compiled programs.
    assert hlo.flops(step_fn.as_text()) == pytest.approx(expected, rel=1e-3)
    (scores,) = (p for p in costs.products if p.name == "scores")
    assert 0.5 < scores.share < 0.55


def test_the_run_says_which_form_it_chose():
    prepared, _ = compiled("ring-all")
    lines = "\n".join(prepared.describe())
    assert "plan data+fsdp+tensor+context+pipeline" in lines
    assert "Attention over context: ring, zig-zag order of positions (as set)" in lines
