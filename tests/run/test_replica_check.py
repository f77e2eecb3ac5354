"""Replicas on several devices are equal bit for bit, or the run stops."""

import json
import re
import sys

import flipping
import jax
import jax.numpy as jnp
import job_runs
import numpy as np
import pytest
from flipping import flipped
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_manager import make_mesh
from tiny_runs import TINY, main, refused, sets_of, train

from meshloom.trainer.checkpoint.manager import committed_steps
from meshloom.trainer.program.state import State
from meshloom.trainer.run import replica_check
from meshloom.trainer.run import train as train_lib

SPECS = {
    "replicated": P(),
    "one axis": P("fsdp", None),
    "two axes": P(None, ("tensor", "fsdp")),
    "all axes": P(("data", "fsdp", "tensor"), None),
}


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(data=2, fsdp=2, tensor=2)


def placed(mesh, spec, dtype=jnp.float32):
    x = jnp.arange(8 * 16).reshape(8, 16).astype(dtype)
    return jax.device_put(x, NamedSharding(mesh, spec))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_equal_replicas_have_no_difference(mesh, dtype):
    tree = {name: placed(mesh, spec, dtype) for name, spec in SPECS.items()}
    assert replica_check.differences(tree) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "holders"),
    [("replicated", range(8)), ("one axis", {4, 5, 0, 1}), ("two axes", {1, 5})],
)
def test_one_bit_of_one_replica_is_found(mesh, name, holders, dtype):
    """Only in that array, among the devices that hold the same shard as device 5."""
    assert [d.id for d in mesh.devices.flat] == list(range(8))
    tree = {name: placed(mesh, spec, dtype) for name, spec in SPECS.items()}
    tree[name] = flipped(tree[name], 5)
    (found,) = replica_check.differences(tree)
    assert found.path == name
    assert {device.id for device in found.digests} == set(holders)
    odd = {d.id for _, devices in found.groups[1:] for d in devices}
    if len(holders) > 2:
        assert odd == {5}
        assert str(found).startswith(f"{name}: device 5 (process 0) has ")
    else:
        assert str(found).endswith("; there is no majority")
        assert "device 1 (process 0) has " in str(found)
        assert "device 5 (process 0) has " in str(found)


def test_every_shard_is_checked(mesh):
    tree = {"two axes": flipped(placed(mesh, SPECS["two axes"]), 0, 3)}
    found = replica_check.differences(tree)
    assert [{d.id for d in one.digests} for one in found] == [{0, 4}, {3, 7}]


def test_arrays_without_replicas_are_not_digested(mesh, monkeypatch):
    """An array sharded over all devices, and any array on one device."""
    monkeypatch.setattr(replica_check, "_on_each_device", None)
    alone = make_mesh()
    tree = {"a": placed(mesh, SPECS["all axes"]), "b": placed(alone, P())}
    assert replica_check.differences(tree) == []


def test_the_run_stops_and_leaves_evidence(mesh, tmp_path):
    x = placed(mesh, P("fsdp", None), "bfloat16")
    check = replica_check.CheckReplicas(10, tmp_path, process=0, last_equal=3)
    check(10, State(placed(mesh, P()), {"w": x}, {}))
    bad = State(placed(mesh, P()), {"w": flipped(x, 6)}, {})
    with pytest.raises(replica_check.ReplicasDiffer) as error:
        check(20, bad)
    first, line = str(error.value).splitlines()
    assert first == (
        "at step 20 replicas that must be equal differ between devices, in 1 shards. "
        "They were equal at step 10; a checkpoint saved since may be wrong. Replace or "
        "exclude the faulty devices, remove those checkpoints and run the same command "
        f"again. Evidence: {tmp_path}/replicas-20.json and, for each process, "
        "replicas-20-0.npz:"
    )
    assert re.fullmatch(
        r"params/w: device 6 \(process 0\) has (\w{16}); devices 2 \(process 0\), "
        r"3 \(process 0\), 7 \(process 0\) agree on (\w{16})",
        line,
    )
    found = json.loads((tmp_path / "replicas-20.json").read_text())
    (piece,) = found["pieces"]
    assert piece["array"] == "params/w" and len(piece["copies"]) == 4
    assert len({copy["digest"] for copy in piece["copies"]}) == 2
    with np.load(tmp_path / "replicas-20-0.npz") as copies:
        assert set(copies) == {f"params/w|{device}" for device in (2, 3, 6, 7)}
        changed = copies["params/w|6"] ^ copies["params/w|2"]
    assert np.flatnonzero(changed).tolist() == [2]
    # The error is raised even if no evidence can be written.
    check.folder = tmp_path / "absent"
    with pytest.raises(
        replica_check.ReplicasDiffer, match="could not be written .*No such"
    ):
        check(30, bad)


def test_a_run_checks_and_does_not_save_what_differs(tmp_path, monkeypatch, capfd):
    """A bit of a weight flips in one device's replica after step 6."""
    assert train_lib.Config.check_replicas_every == 100
    fault = flipping.at_step(6, lambda: jax.devices()[2])
    monkeypatch.setattr(replica_check.CheckReplicas, "__call__", fault)
    argv = ["train", "--config", TINY, "--workdir", str(tmp_path)]
    flags = ["save_every=3", "eval_batches=0"]
    assert main([*argv, *sets_of("check_replicas_every=3", *flags)]) == 2
    error = capfd.readouterr().err
    assert "at step 6 " in error and "equal at step 3;" in error
    assert "\nparams/embedding: device 2 (process 0) has " in error
    assert committed_steps(tmp_path / "checkpoints") == [3]
    assert (tmp_path / "replicas-6.json").exists()
    # Without the check nothing is detected; the setting may change.
    assert main([*argv, *sets_of("check_replicas_every=0", *flags)]) == 0


@pytest.mark.processes
def test_replicas_of_several_processes(tmp_path):
    """Equal at steps 5 and 10, then a bit flips in the last process."""
    config = job_runs.write_config(tmp_path)
    settings = ("eval_batches=0", "sample_prompt=None", "save_every=5")
    settings += ("check_replicas_every=5",)
    layout = job_runs.Layout(2, 2, "data=4", job_runs.HALVES, 1, settings)
    program = (sys.executable, flipping.__file__)
    run = job_runs.start(layout, config, tmp_path / "run", program)
    for process in run.processes:
        assert process.status == 2, process.stdout + process.stderr
        assert "at step 15 replicas that must be equal" in process.stderr
        assert "They were equal at step 10;" in process.stderr
        line = next(x for x in process.stderr.splitlines() if x.startswith("params/"))
        assert re.match(r"params/embedding: device \d+ \(process 1\) has ", line)
        assert line.count("(process 0)") == 2 and line.count("(process 1)") == 2
    for process in (0, 1):
        with np.load(run.workdir / f"replicas-15-{process}.npz") as copies:
            assert len(copies) == 2
    assert committed_steps(run.workdir / "checkpoints") == [5, 10]


def test_bad_settings(tmp_path, capfd):
    argv = [*train(tmp_path), *sets_of("check_replicas_every=-1")]
    assert "check_replicas_every must be >= 0, got -1" in refused(capfd, argv)
