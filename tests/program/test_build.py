"""Tests of Program: on any mesh, next to other Programs, and without leaks."""

import functools
import gc
import math
import os
import subprocess
import sys
import threading

import jax
import numpy as np
import optax
import pytest
from paths import ROOT

from meshloom.models import transformer
from meshloom.sharding import MeshSpec, parse_plan
from meshloom.trainer.data.batches import SAMPLE_IDS
from meshloom.trainer.program import optimizers, schedules
from meshloom.trainer.program.build import build
from meshloom.trainer.program.pipelining import Pipelining

pytestmark = pytest.mark.compiles_anew

BATCH, LENGTH = 24, 16
MODEL = transformer.Config(
    vocab_size=64,
    num_layers=4,
    d_model=24,
    num_heads=6,
    d_ff=48,
    max_length=LENGTH,
    compute_dtype="float32",
)
PLAN = "data+fsdp+tensor+pipeline"
# mesh, plan, microbatches
CASES = {
    "one device": ("data=1", PLAN, 1),
    "accumulated": ("data=2,fsdp=2", PLAN, 3),
    "three ways": ("fsdp=3,tensor=2", PLAN, 1),
    "zero1": ("fsdp=4", "data+zero1", 1),
    "sequence": ("data=2,tensor=2", "data+tensor+sequence", 2),
    "pipeline": ("pipe=2,fsdp=2", PLAN, 4),
}


def batches(num, seed=0):
    random = np.random.default_rng(seed)
    for number in range(num):
        rows = random.integers(0, 64, (BATCH, LENGTH + 1)).astype(np.int32)
        weights = (random.random((BATCH, LENGTH)) < 0.8).astype(np.float32)
        ids = np.arange(number * BATCH, (number + 1) * BATCH, dtype=np.uint32)
        arrays = {"inputs": rows[:, :-1], "targets": rows[:, 1:], "weights": weights}
        yield arrays | {SAMPLE_IDS: ids}


def make(mesh, plan=PLAN, num=1, *, devices=None, optimizer=None, **options):
    spec = MeshSpec.parse(mesh)
    devices = devices or jax.devices()[: math.prod(spec.abstract().axis_sizes)]
    return build(
        MODEL,
        optimizer or optimizers.AdamW(),
        spec.make(devices),
        parse_plan(plan),
        next(batches(1)),
        learning_rate=schedules.WarmupCosine(peak=1e-2).make(8),
        num_microbatches=num,
        pipeline=Pipelining(schedule="1f1b"),
        max_grad_norm=1.0,
        **options,
    )


def train(program, num=3, state=None):
    """Returns losses and the last state, with layers in model order, on the host."""
    state, losses = state or program.init(jax.random.key(1)), []
    for batch in batches(num):
        batch = jax.device_put(batch, program.batch_shardings)
        state, metrics = program.step(state, batch)
        losses.append(float(metrics["loss"]))
    canonical = program.layout.canonical(state, program.mesh)
    return losses, jax.device_get(canonical), state


@functools.cache
def built(name):
    """The Program of a case, compiled once; it leaves the states it is given alone."""
    return make(*CASES[name], donate=False)


@functools.cache
def begun(name):
    """Its state of step 0."""
    return built(name).init(jax.random.key(1))


@functools.cache
def reference():
    return train(built("one device"), state=begun("one device"))[0]


def assert_bit_equal(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.mark.parametrize("name", CASES)
def test_gradients_and_apply_are_the_step_bit_for_bit(name):
    program, state = built(name), begun(name)
    for batch in batches(2):
        batch = jax.device_put(batch, program.batch_shardings)
        at_once = program.step(state, batch)
        found = program.gradients(state, batch)
        assert_bit_equal(program.apply(state, found), at_once)
        state = at_once[0]


@pytest.mark.parametrize("name", CASES)
def test_the_losses_of_one_device_and_arrays_that_are_sharded(name):
    program = built(name)
    losses, _, state = train(program, state=begun(name))
    np.testing.assert_allclose(losses, reference(), rtol=1e-5)
    for x, sharding in zip(
        jax.tree.leaves(state), jax.tree.leaves(program.shardings), strict=True
    ):
        assert x.sharding == sharding
    if program.mesh.size > 1:
        arrays = jax.tree.leaves(state.params) + jax.tree.leaves(state.opt_state)
        sizes = [x.addressable_shards[0].data.size < x.size for x in arrays]
        assert any(sizes)


def test_gradients_of_parts_add_up():
    program, state = built("accumulated"), begun("accumulated")
    first, second = (
        program.gradients(state, jax.device_put(batch, program.batch_shardings))
        for batch in batches(2)
    )
    both = jax.tree.map(lambda a, b: a + b, first, second)
    weights = [float(found.sums["weight"]) for found in (first, second, both)]
    assert weights[0] + weights[1] == weights[2]
    state, metrics = program.apply(state, both)
    losses = [float(found.sums["loss"]) for found in (first, second)]
    np.testing.assert_allclose(float(metrics["loss"]), sum(losses) / weights[2], 1e-6)


def test_two_programs_train_at_the_same_time_on_other_devices():
    devices = jax.devices()
    programs = [
        built("accumulated"),
        make("fsdp=3", devices=devices[4:7], num=2),
    ]
    alone = [train(program) for program in programs]
    together: dict[int, tuple] = {}
    threads = [
        threading.Thread(target=lambda i=i, p=p: together.update({i: train(p, 3)}))
        for i, p in enumerate(programs)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for i, (losses, state, _) in enumerate(alone):
        assert together[i][0] == losses
        assert_bit_equal(together[i][1], state)
    assert {d.id for d in programs[0].mesh.devices.flat}.isdisjoint(
        d.id for d in programs[1].mesh.devices.flat
    )


def num_executables():
    gc.collect()
    return len(jax.devices()[0].client.live_executables())


def test_a_program_that_is_dropped_leaves_nothing():
    def train_each():
        for mesh in ("fsdp=3,tensor=2", "pipe=2,data=2"):
            train(make(mesh, num=2), 1)

    train_each()
    before, arrays = num_executables(), len(jax.live_arrays())
    train_each()
    assert num_executables() <= before
    assert len(jax.live_arrays()) <= arrays


def test_a_program_changes_no_setting_and_reads_no_environment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = dict(jax.config.values)
    environment = dict(os.environ)
    train(make("pipe=2,fsdp=2", num=4), 1)
    assert dict(jax.config.values) == settings
    assert dict(os.environ) == environment and not list(tmp_path.iterdir())


def test_an_optimizer_of_optax_and_donation_that_is_a_choice():
    donating = make("fsdp=2", optimizer=optax.adam(1e-2))
    for program, first, donates in (
        (donating, donating.init(jax.random.key(1)), True),
        (built("one device"), begun("one device"), False),
    ):
        losses, state = [], first
        for batch in batches(3):
            batch = jax.device_put(batch, program.batch_shardings)
            state, metrics = program.step(state, batch)
            losses.append(float(metrics["loss"]))
        assert jax.tree.leaves(first.params)[0].is_deleted() == donates
        assert losses[-1] != losses[0] and np.isfinite(losses).all()


def test_what_does_not_fit_is_named():
    def refused(match, **changes):
        with pytest.raises(ValueError, match=match):
            build(
                **{
                    "model": MODEL,
                    "optimizer": optimizers.AdamW(),
                    "mesh": MeshSpec(data=5).make(jax.devices()[:5]),
                    "rules": parse_plan("data"),
                    "batch": next(batches(1)),
                }
                | changes
            )

    refused("batch_size 24.* cannot be sharded 5 ways")
    batch = next(batches(1))
    refused("an array 'labels', which the model does", batch=batch | {"labels": 0})
    refused("no array that the model takes; it takes inputs", batch={})
    short = {name: x[:8] if name == "targets" else x for name, x in batch.items()}
    refused("different numbers of rows: .*'targets': 8", batch=short)
    one = MeshSpec(data=1).make(jax.devices()[:1])
    message = "batch_size 24 is not divisible by num_microbatches 5; 25 would be"
    refused(message, mesh=one, num_microbatches=5)
    refused("num_microbatches must be >= 1, got 0", mesh=one, num_microbatches=0)
    mesh = MeshSpec(tensor=2).make(jax.devices()[:2])
    refused("mesh axis tensor=2.*the rules use", mesh=mesh)
    without = {name: x for name, x in batch.items() if name != "weights"}
    mesh = MeshSpec(data=2).make(jax.devices()[:2])
    refused(
        "needs an array 'weights', but the batch has only", batch=without, mesh=mesh
    )


def test_the_example_trains():
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    result = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "own_loop.py"), "data=2,fsdp=2"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == 20 and lines[-1].startswith("step 20: loss ")
    first, last = (float(line.split()[-1]) for line in (lines[0], lines[-1]))
    assert last < 0.9 * first
