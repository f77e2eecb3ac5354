"""A run continues from its newest valid checkpoint."""

import json
import os
from pathlib import Path

import pytest
from tiny_runs import command, main, sets_of, train

from meshloom.trainer.checkpoint import manager, manifest, reading
from meshloom.trainer.program import state
from meshloom.trainer.record import metrics
from meshloom.trainer.verify import checkpoint_faults


@pytest.fixture
def folder(tmp_path, capfd):
    """A run of 8 steps, saved at 4 and 8."""
    assert main([*train(tmp_path / "run"), "--steps", "8"]) == 0
    capfd.readouterr()
    return tmp_path / "run"


def tear_manifest(step: Path) -> None:
    file = step / "manifest" / "metadata"
    os.truncate(file, file.stat().st_size // 2)


def empty_commit_record(step: Path) -> None:
    (step / reading.COMMIT_RECORD).write_bytes(b"")


DAMAGES = {
    "a flipped bit": checkpoint_faults.flip_a_bit,
    "a torn file": checkpoint_faults.tear_a_file,
    "a missing file": checkpoint_faults.lose_a_file,
    "a torn manifest": tear_manifest,
    "a torn commit record": checkpoint_faults.tear_the_commit_record,
    "an empty commit record": empty_commit_record,
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_restored(name, folder):
    DAMAGES[name](folder / "checkpoints" / "8")
    # In a process: reads that tensorstore's threads abandon print tracebacks.
    argv = [*train(folder), "--steps", "12", "--insist", "--cpu-devices", "8"]
    found = command(*argv)
    assert found.returncode == 0, found.stderr
    output = found.stdout
    assert f"Set aside as {folder}/checkpoints/corrupt-8." in output
    assert "Resuming from step 4" in output
    assert manager.committed_steps(folder / "checkpoints") == [8, 12]
    rows = metrics.read(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 13))


def test_a_manifest_describes_its_checkpoint(folder):
    found = manifest.read(folder / "checkpoints", 8)
    assert (found["step"], found["data"]["next_example"]) == (8, 8 * 16)
    config = json.loads((folder / "config.json").read_text())
    assert found["config_digest"] == config["digest"]
    assert found["environment"]["num_processes"] == 1
    array = found["arrays"]["params/embedding"]
    assert (array["shape"], array["dtype"]) == ([64, 32], "float32")
    assert found["arrays"].keys() > {"step", "params/blocks/mlp/down"}


def test_the_state_of_another_model_is_refused_leaf_by_leaf(folder, capfd):
    argv = [*train(folder), "--steps", "12", "--insist", *sets_of("model.d_ff=48")]
    capfd.readouterr()
    assert main(argv) == 2
    error = capfd.readouterr().err
    assert "does not fit this config" in error
    assert (
        "params/blocks/mlp/down: saved as float32[2,64,32], expected float32[2,48,32]"
        in error
    )
    assert manager.committed_steps(folder / "checkpoints") == [4, 8]


def test_a_restore_records_the_state_that_training_continues_with(folder, monkeypatch):
    """Not the manifest's digest: a state that changed in between would show."""
    saved = manifest.state_digest(manifest.read(folder / "checkpoints", 8))
    assert main([*train(folder), "--steps", "8"]) == 0

    def changed(layout, restored, mesh):
        params = dict(restored.params, embedding=-restored.params["embedding"])
        return restored._replace(params=params)

    monkeypatch.setattr(state.Layout, "arranged", changed)
    assert main([*train(folder), "--steps", "8"]) == 0
    rows = metrics.read(folder / "ledger.jsonl")
    unchanged, other = (row["state"] for row in rows if row["event"] == "restore")
    assert unchanged == saved != other
