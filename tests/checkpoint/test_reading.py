"""Checkpoints that cannot be read: corrupt ones, and storage that fails."""

import errno
import shutil
import sys

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from jax.sharding import PartitionSpec as P
from tiny_runs import main, sets_of, train

from meshloom.launch.exit_codes import DONE, UNREACHABLE
from meshloom.sharding import MeshSpec
from meshloom.trainer.checkpoint import reading
from meshloom.trainer.checkpoint.manager import STATE, committed_steps
from meshloom.trainer.job import fault_points
from meshloom.trainer.job.group import Group
from meshloom.trainer.program.state import placed
from meshloom.trainer.record import ledger
from meshloom.trainer.record.failures import CorruptCheckpoint, Unreadable
from meshloom.trainer.verify import checkpoint_faults


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Returns the folder of a step with a sharded array, its tree, and a target."""
    mesh = MeshSpec(fsdp=8).make()
    sharding = jax.sharding.NamedSharding(mesh, P("fsdp"))
    values = jax.random.normal(jax.random.key(0), (64, 1024))
    tree = {"params": {"table": jax.device_put(values, sharding)}}
    path = tmp_path_factory.mktemp("saved") / "3"
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / STATE, tree)
    return path, tree, placed(tree, jax.tree.map(lambda x: x.sharding, tree))


def test_each_process_reads_its_own_shards_alone(saved):
    path, tree, target = saved
    found = reading.read_tree(path / STATE, target, Group())["params"]["table"]
    assert jnp.array_equal(found, tree["params"]["table"])
    assert found.sharding.shard_shape(found.shape) == (8, 1024)


def lose_the_state(step):
    shutil.rmtree(step / STATE)


def empty_the_index(step):
    (step / STATE / "manifest.ocdbt").write_bytes(b"")


def tear_the_metadata(step):
    (step / STATE / "_METADATA").write_text("{")


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (checkpoint_faults.tear_a_file, CorruptCheckpoint),
        (checkpoint_faults.lose_a_file, CorruptCheckpoint),
        (lose_the_state, CorruptCheckpoint),
        (empty_the_index, CorruptCheckpoint),
        (tear_the_metadata, CorruptCheckpoint),
        (checkpoint_faults.make_unreadable, Unreadable),
        (shutil.rmtree, Unreadable),  # another process has seen it as committed
    ],
)
def test_only_what_was_read_and_is_wrong_is_corrupt(
    saved, tmp_path, capfd, damage, error
):
    path, _, target = saved
    copy = tmp_path / "3"
    shutil.copytree(path, copy)
    damage(copy)
    with pytest.raises(error, match=f"checkpoint {copy}"):
        reading.read_tree(copy / STATE, target, Group())
    assert capfd.readouterr().err == ""  # no tracebacks of orbax's other reads


def test_hooks_do_not_pile_up_and_pass_on_all_else(saved, tmp_path, monkeypatch):
    path, _, target = saved
    seen = []
    monkeypatch.setattr(sys, "excepthook", lambda *args: seen.append(str(args[1])))
    hooks = []
    for number in range(2):
        copy = tmp_path / str(number) / "3"
        shutil.copytree(path, copy)
        checkpoint_faults.lose_a_file(copy)
        with pytest.raises(CorruptCheckpoint):
            reading.read_tree(copy / STATE, target, Group())
        hooks.append((sys.excepthook, sys.unraisablehook))
    assert hooks[0] == hooks[1]
    for message in ("Event loop is closed", "another error"):
        sys.excepthook(RuntimeError, RuntimeError(message), None)
    assert seen == ["another error"]


@pytest.mark.parametrize("code", [errno.EIO, errno.ECONNRESET, errno.ESTALE])
def test_an_os_error_proves_nothing(saved, tmp_path, code):
    path, _, target = saved
    hold = fault_points.Hold("read", 3, 0, 1, str(tmp_path / "held"), errno=code)
    with pytest.raises(Unreadable) as error:
        reading.read_tree(path / STATE, target, Group(hold=hold))
    assert error.value.errno == code


def events(folder, kind):
    rows = ledger.Ledger(folder, is_writer=False).read()
    return [row["step"] for row in rows if row["event"] == kind]


def test_storage_that_fails_is_retried_before_an_older_step_is_restored(
    tmp_path, capfd
):
    run = [*train(tmp_path), *sets_of("save_every=4", "eval_batches=0")]
    assert main([*run, "--steps", "8"]) == DONE
    resume = [*run, "--steps", "12", "--insist"]
    checkpoints = tmp_path / "checkpoints"
    checkpoint_faults.make_unreadable(checkpoints / "8")
    assert main(resume) == UNREACHABLE
    (line,) = capfd.readouterr().err.splitlines()
    assert f"checkpoint {checkpoints / '8'} could not be read by process 0" in line
    assert "Nothing was changed. Run the same command again" in line
    assert committed_steps(checkpoints) == [4, 8]
    assert main(resume) == DONE
    out = capfd.readouterr().out
    assert f"Set aside as {checkpoints / 'unreadable-8'}" in out
    assert "Resuming from step 4" in out
    assert events(tmp_path, "unreadable") == events(tmp_path, "set_aside") == [8]
    assert committed_steps(checkpoints) == [8, 12]  # two are kept


def test_if_nothing_can_be_read_nothing_is_set_aside(tmp_path, capfd):
    run = [*train(tmp_path), *sets_of("save_every=4", "eval_batches=0")]
    assert main([*run, "--steps", "8"]) == DONE
    checkpoints = tmp_path / "checkpoints"
    for step in (4, 8):
        checkpoint_faults.make_unreadable(checkpoints / str(step))
    resume = [*run, "--steps", "12", "--insist"]
    assert [main(resume) for _ in range(4)] == [UNREACHABLE] * 4
    assert "No older checkpoint can be read either" in capfd.readouterr().err
    assert committed_steps(checkpoints) == [4, 8]
