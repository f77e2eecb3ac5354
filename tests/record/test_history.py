"""Tests that a run whose checkpoints are gone starts over and keeps its history."""

import contextlib
import dataclasses
import io
import os
import shutil

import npz_rows
import pytest
from rich.console import Console

from meshloom.sharding import MeshSpec
from meshloom.trainer.checkpoint import manager
from meshloom.trainer.record import ledger_audit, metrics
from meshloom.trainer.run import train


@pytest.fixture
def config(tmp_path):
    path = npz_rows.write(tmp_path / "rows.npz")
    return npz_rows.config(path, mesh=MeshSpec(fsdp=8))


def run(config, folder, **settings):
    console = Console(file=io.StringIO(), width=400)
    with contextlib.suppress(Killed):
        train.train(config, workdir=folder, console=console, **settings)
    return console.file.getvalue()  # type: ignore


class Killed(BaseException):
    pass


@dataclasses.dataclass
class Kill:
    every: int

    def __call__(self, step, state):
        raise Killed


def steps(path):
    return [row["step"] for row in metrics.read(path)]


def test_checkpoints_that_were_deleted(config, tmp_path):
    folder = tmp_path / "run"
    run(config, folder, hooks=[Kill(6)])
    figures = (folder / "metrics.jsonl").read_text()
    shutil.rmtree(folder / "checkpoints" / "4")
    output = run(config, folder)
    aside = folder / "earlier-1"
    assert (
        "This run had checkpoints up to step 4, but none is left to resume from: it "
        "starts over at step 0. Its history so far (metrics.jsonl, eval.jsonl, "
        f"ledger.jsonl) is in {aside}."
    ) in output
    assert (aside / "metrics.jsonl").read_text() == figures
    assert steps(aside / "eval.jsonl") == [4]
    assert steps(folder / "metrics.jsonl") == list(range(1, 9))
    for each in (folder, aside):
        assert ledger_audit.audit(each).faults == []
    (event,) = (
        row for row in metrics.read(folder / "ledger.jsonl") if row["event"] == "anew"
    )
    assert event["history"] == "earlier-1"
    assert event["reason"] == "its checkpoints were removed"
    assert ledger_audit.audit(folder).repeated == 0

    shutil.rmtree(folder / "checkpoints")
    assert f"is in {folder / 'earlier-2'}." in run(config, folder)


def test_checkpoints_that_cannot_be_restored(config, tmp_path):
    folder = tmp_path / "run"
    run(config, folder, hooks=[Kill(6)])
    file = folder / "checkpoints" / "4" / "manifest" / "metadata"
    os.truncate(file, file.stat().st_size // 2)
    output = run(config, folder)
    assert "Set aside as" in output and "it starts over at step 0" in output
    assert manager.committed_steps(folder / "checkpoints") == [4, 8]


def test_a_run_that_died_before_its_first_checkpoint(config, tmp_path):
    folder = tmp_path / "run"
    run(config, folder, hooks=[Kill(3)])
    output = run(config, folder)
    assert "No checkpoint was saved: steps 1 to 3 will be repeated." in output
    assert not (folder / "earlier-1").exists()
    assert ledger_audit.audit(folder).repeated == 3


def test_a_new_run_says_nothing_of_it(config, tmp_path):
    output = run(config, tmp_path / "run")
    assert "starts over" not in output and "repeated" not in output
