"""Training with any schedule equals training without a pipeline."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import short_runs
from test_parity import CONFIG as WITHOUT

from meshloom.sharding import MeshSpec
from meshloom.trainer.checkpoint import manager
from meshloom.trainer.data import batches
from meshloom.trainer.program import optimizers, schedules
from meshloom.trainer.program.pipelining import Pipelining
from meshloom.trainer.record import metrics
from meshloom.trainer.run import train

pytestmark = pytest.mark.compiles_anew

slow = pytest.mark.slow
NUM_STEPS = 20
MODEL = dataclasses.replace(
    WITHOUT.model, num_layers=8, d_model=32, d_ff=64, num_heads=4, num_kv_heads=2
)
CONFIG = dataclasses.replace(
    WITHOUT,
    model=MODEL,
    schedule=schedules.WarmupCosine(peak=6e-3, warmup_share=0.25),
    num_steps=NUM_STEPS,
)

# For each mesh, the microbatches of 16 examples for gpipe, 1f1b and interleaved: fewer
# than the stages, equal to them, more. A test below has one that is not a multiple.
MESHES = {
    "pipe=2": (2, 4, 8),
    "pipe=4": (8, 4, 16),
    "pipe=2,data=2,tensor=2": (4, 2, 4),
    "pipe=2,fsdp=2,tensor=2": (8, 8, 2),
    "pipe=4,fsdp=2": (2, 8, 4),
}
SCHEDULES = ("gpipe", "1f1b", "interleaved")
# test_pipeline compares the gradients of every schedule on every mesh. Here each mesh
# always trains with one schedule, and with the others in the slow tests.
ALWAYS = {
    ("pipe=2", "gpipe"),
    ("pipe=4", "1f1b"),
    ("pipe=2,data=2,tensor=2", "interleaved"),
    ("pipe=2,fsdp=2,tensor=2", "1f1b"),
    ("pipe=4,fsdp=2", "interleaved"),
}
LAYOUTS = [
    pytest.param(mesh, schedule, num, marks=[] if (mesh, schedule) in ALWAYS else slow)
    for mesh, nums in MESHES.items()
    for schedule, num in zip(SCHEDULES, nums, strict=True)
]


def prepare(mesh, schedule="1f1b", num=None, config=CONFIG, **settings):
    pipeline = Pipelining(schedule=schedule, **settings)
    return short_runs.prepare(config, mesh, pipeline=pipeline, num_microbatches=num)


@functools.cache
def alone(batch_size=16, optimizer=CONFIG.optimizer, num=None):
    """Prepared on one device, once for the tests of this file."""
    return short_runs.prepare(
        CONFIG,
        "data=1",
        batch_size=batch_size,
        optimizer=optimizer,
        num_microbatches=num,
    )


@functools.cache
def reference(batch_size: int):
    prepared = alone(batch_size)
    return short_runs.run(prepared, prepared.compile())


def check(prepared):
    initial, losses, _ = short_runs.run(prepared, prepared.compile())
    expected, expected_losses, _ = reference(prepared.config.batch_size)
    jax.tree.map(np.testing.assert_array_equal, initial, expected)
    # Sums in a different order differ in the last bits, which 20 steps may amplify.
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    assert len(losses) == NUM_STEPS and losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("mesh, schedule, num", LAYOUTS)
def test_training_is_the_same_with_every_schedule(mesh, schedule, num):
    prepared = prepare(mesh, schedule, num)
    result = {array.path: array for array in prepared.layout.params.arrays}
    sizes = MeshSpec.parse(mesh)
    blocks = result["blocks/mlp/down"]
    assert blocks.spec[0] == "pipe"
    assert blocks.ways == sizes.pipe * sizes.fsdp * sizes.tensor
    assert result["embedding"].ways == blocks.ways
    check(prepared)


@pytest.mark.parametrize(
    "schedule", [*SCHEDULES[2:], *(pytest.param(s, marks=slow) for s in SCHEDULES[:2])]
)
def test_microbatches_need_not_be_a_multiple_of_the_stages(schedule):
    config = dataclasses.replace(CONFIG, batch_size=24)
    check(prepare("pipe=4", schedule, 6, config))


@pytest.mark.parametrize(
    "remat, gather",
    [
        ("none", "microbatch"),
        pytest.param("none", "step", marks=slow),
        pytest.param("full", "microbatch", marks=slow),
        pytest.param("full", "step", marks=slow),
    ],
)
def test_remat_and_gather_do_not_change_training(remat, gather):
    model = dataclasses.replace(MODEL, remat=remat)
    config = dataclasses.replace(CONFIG, model=model)
    check(prepare("pipe=2,fsdp=2", "1f1b", 4, config, gather=gather))


def test_evaluation_in_a_pipeline_is_the_same():
    result = {}
    staged = prepare("pipe=2,data=2", "interleaved")
    for mesh, prepared in [("data=1", alone()), ("pipe=2,data=2", staged)]:
        state = prepared.layout.create(jax.random.key(0), prepared.mesh)
        rows = [prepared.train_data[i] for i in range(CONFIG.batch_size)]
        arrays = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        arrays[batches.SAMPLE_IDS] = np.arange(len(rows), dtype=np.uint32)
        batch = jax.device_put(arrays, prepared.program.batch_shardings)
        result[mesh] = jax.device_get(prepared.program.evaluate(state, batch))
    one, staged = result.values()
    assert one.keys() == staged.keys()
    for name in one:
        np.testing.assert_allclose(staged[name], one[name], rtol=1e-6)


OPTIMIZERS = {
    "muon": optimizers.Muon(),
    "adafactor": optimizers.Adafactor(),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_on_disk_does_not_depend_on_the_pipeline(name, tmp_path):
    """Every array of the state, with layers in their natural order."""
    config = dataclasses.replace(CONFIG, optimizer=OPTIMIZERS[name])
    states, plain = {}, alone(optimizer=config.optimizer, num=4)
    piped = prepare("pipe=2,tensor=2", "interleaved", 4, config)
    for mesh, prepared in [("data=1", plain), ("pipe=2,tensor=2", piped)]:
        order = prepared.layout.order
        assert (order is None) == (mesh == "data=1")
        _, _, state = short_runs.run(prepared, prepared.compile(), num_steps=3)
        arranged = prepared.layout.arranged(state, prepared.mesh)
        blocks = [s.params["blocks"]["mlp"]["down"] for s in (arranged, state)]
        if order is not None:  # stage 0 holds layers 0, 1, 4, 5
            assert order.tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
            np.testing.assert_array_equal(blocks[0], np.asarray(blocks[1])[order])
            # Reordered twice each way by now, but compiled only once.
            compiled = prepared.layout._reorderings.values()
            assert [f._cache_size() for f in compiled] == [1, 1]  # type: ignore
        saved = manager.Checkpoints(tmp_path / mesh)
        saved.save(3, state)
        saved.close()
        again = manager.Checkpoints(tmp_path / mesh)
        states[mesh] = again.restore(3, plain.layout, plain.mesh)[0]
        again.close()
    one, staged = (jax.device_get(s) for s in states.values())

    def same(path, a, b):
        scale = max(np.abs(b).max(), 1e-6)
        np.testing.assert_allclose(a / scale, b / scale, atol=2e-4, err_msg=str(path))

    jax.tree_util.tree_map_with_path(same, staged, one)


def test_a_run_continues_with_another_pipeline_or_none(tmp_path):
    """Saved with pipe=4 interleaved, continued with pipe=2 1f1b, then without."""
    config = dataclasses.replace(CONFIG, save_every=2, log_every=1)
    parts = [
        (2, MeshSpec(pipe=4, data=2), "interleaved"),
        (4, MeshSpec(pipe=2, fsdp=2, tensor=2), "1f1b"),
        (6, MeshSpec(data=8), "1f1b"),
    ]
    for stop, mesh, schedule in parts:
        part = dataclasses.replace(
            config, mesh=mesh, pipeline=Pipelining(schedule=schedule)
        )
        with pytest.raises(Stopped):
            train.train(part, workdir=tmp_path, hooks=[StopAt(stop)])
        assert manager.latest_step(tmp_path / "checkpoints") == stop
    losses = [row["loss"] for row in metrics.read(tmp_path / "metrics.jsonl")]
    assert len(losses) == 6
    np.testing.assert_allclose(losses, reference(16)[1][:6], rtol=1e-5)


class Stopped(Exception):
    pass


@dataclasses.dataclass
class StopAt:
    """Ends a run as if it were killed, after the other hooks of that step."""

    step: int
    every: int = 1

    def __call__(self, step: int, state) -> None:
        if step == self.step:
            raise Stopped
