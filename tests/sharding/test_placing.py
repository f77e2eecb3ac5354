"""Batches of host arrays on a mesh, in one process and in several."""

import json
import sys

import jax
import jax.numpy as jnp
import jobs
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshloom.sharding import MeshSpec, Rules, Sharder, data, fsdp, tensor

MESH = MeshSpec(data=2, fsdp=2, tensor=2).make()
RULES = data() + fsdp() + tensor() + Rules.of({"length": "tensor"})
SHARD = Sharder(MESH, RULES)
ROWS = ("data", "fsdp")
BATCH = {
    "tokens": np.arange(32).reshape(8, 4),
    "weights": np.arange(8.0, dtype=np.float32),
    "scale": np.float32(3),
}


def test_a_batch_is_sharded_along_rows_by_default():
    # By default the first dimension of each array is `batch`, and no other is sharded.
    assert SHARD.shardings(BATCH) == {
        "tokens": NamedSharding(MESH, P(ROWS, None)),
        "weights": NamedSharding(MESH, P(ROWS)),
        "scale": NamedSharding(MESH, P()),
    }
    shapes = {"tokens": jax.ShapeDtypeStruct((8, 4), "int32")}
    axes = {"tokens": ("batch", "length")}
    assert SHARD.shardings(shapes, axes)["tokens"].spec == P(ROWS, "tensor")
    stored = SHARD.shardings(
        {"w": BATCH["tokens"]}, {"w": ("embed", None)}, role="param"
    )
    assert stored["w"].spec == P("fsdp", None)


def test_shardings_need_devices():
    for shard in (Sharder(), Sharder(MeshSpec(data=2).abstract(), RULES)):
        with pytest.raises(ValueError, match="shardings need a mesh with devices, but"):
            shard.shardings(BATCH)


@pytest.mark.parametrize("local", [False, True])
def test_a_batch_is_placed_with_its_shardings(local):
    axes = {"tokens": ("batch", "length"), "weights": ("batch",), "scale": ()}
    placed = SHARD.place(BATCH, axes, local=local)
    jax.tree.map(np.testing.assert_array_equal, placed, BATCH)
    assert {s.data.shape for s in placed["tokens"].addressable_shards} == {(2, 2)}
    assert {s.data.shape for s in placed["weights"].addressable_shards} == {(2,)}
    assert placed["tokens"].sharding == SHARD.shardings(BATCH, axes)["tokens"]


def test_without_a_mesh_arrays_are_only_converted():
    placed = Sharder().place(BATCH)
    assert isinstance(placed["tokens"], jax.Array)
    assert placed["tokens"].dtype == jnp.int32


def test_errors_name_the_batch_array():
    with pytest.raises(
        ValueError, match="^batch array inputs/tokens: dimension 'batch' of size 6 can"
    ):
        SHARD.place({"inputs": {"tokens": np.ones((6, 4))}})
    with pytest.raises(
        ValueError, match="^batch array tokens: logical axes .* name 1 d"
    ):
        SHARD.place({"tokens": np.ones((8, 4))}, {"tokens": ("batch",)})


JOB = """
import json, os, sys
import jax, numpy as np
from meshloom.sharding import MeshSpec, Rules, Sharder, data, fsdp, tensor

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
number = int(os.environ["MESHLOOM_PROCESS_ID"])
jax.distributed.initialize(os.environ["MESHLOOM_COORDINATOR"], 2, number)
batch = np.arange(32).reshape(8, 4)
for spec, own in json.loads(sys.argv[1]):
    rules = data() + fsdp() + tensor() + Rules.of({"length": "tensor"})
    shard = Sharder(MeshSpec.parse(spec).make(), rules)
    axes = ("batch", "length")
    for placed in (
        shard.place(batch, axes),
        shard.place(batch[slice(*own[number])], axes, local=True),
    ):
        assert placed.shape == batch.shape, placed.shape
        for part in placed.addressable_shards:
            np.testing.assert_array_equal(part.data, batch[part.index])
            assert part.data.size == 8, part.data.shape
        weighted = jax.jit(lambda x: (x * np.arange(32).reshape(8, 4)).sum())(placed)
        assert int(weighted) == (batch * batch).sum(), int(weighted)
if number:
    try:
        shard.place(np.ones((3, 4)), axes, local=True)
    except ValueError as error:
        print(error)
print("placed")
"""


@pytest.mark.processes
def test_a_batch_is_placed_by_several_processes():
    """2 processes with 2 devices each; rows or columns are sharded over processes."""
    cases = [
        ("fsdp=2,tensor=2", [(0, 4), (4, 8)]),
        # Columns are sharded over processes, so each process holds all rows.
        ("tensor=4", [(0, 8), (0, 8)]),
        ("data=4", [(0, 4), (4, 8)]),
    ]
    ended = jobs.run_job(2, 2, [sys.executable, "-c", JOB, json.dumps(cases)], 120)
    assert [e.status for e in ended] == [0, 0], ended
    assert all(e.stdout.endswith("placed\n") for e in ended)
    assert "batch: dimension 'batch' of size 3 cannot be" in ended[1].stdout
