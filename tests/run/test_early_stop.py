"""A run that ends when its held-out loss no longer falls, also after restarts."""

import dataclasses
import io
import threading

import jax
import npz_rows
import numpy as np
import pytest
from memory_store import MemoryStore
from rich.console import Console

from meshloom.service.rounds.plateau import StopRule
from meshloom.trainer.checkpoint import manifest
from meshloom.trainer.checkpoint.manager import latest_step
from meshloom.trainer.job.group import Group
from meshloom.trainer.program.schedules import Constant
from meshloom.trainer.record import ledger_audit, metrics
from meshloom.trainer.record.ledger import Ledger
from meshloom.trainer.report.writing import write_report
from meshloom.trainer.run.early_stop import EarlyStop
from meshloom.trainer.run.train import train

EVERY, PATIENCE = 2, 3


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> str:
    """Rows with labels that have nothing to do with them: soon, no loss falls."""
    labels = np.random.default_rng(1).integers(0, 4, 96).astype(np.int32)
    path = tmp_path_factory.mktemp("data") / "rows.npz"
    return npz_rows.write(path, train_label=labels)


def config(rows, **changes):
    values = {
        "schedule": Constant(value=0.2),
        "num_steps": 60,
        "eval_every": EVERY,
        "eval_batches": None,
        "test_batches": None,
        "save_every": 3,
        "stop_patience": PATIENCE,
    }
    return npz_rows.config(rows, **values | changes)


def run(config, folder, **options):
    console = Console(file=io.StringIO(), width=300)
    state = train(config, workdir=folder, console=console, **options)
    return state, console.file.getvalue()  # type: ignore


def losses(folder, name="eval.jsonl"):
    return [(row["step"], row["loss"]) for row in metrics.read(folder / name)]


def events(folder, kind):
    found = Ledger(folder, is_writer=False).read()
    return [row for row in found if row["event"] == kind]


def expected_end(found) -> int:
    """Returns the first step with PATIENCE evaluations since the lowest loss."""
    for number, (step, _) in enumerate(found, start=1):
        best = int(np.argmin([loss for _, loss in found[:number]]))
        if number - 1 - best >= PATIENCE:
            return step
    raise AssertionError(f"the loss never stopped falling: {found}")


@pytest.fixture(scope="module")
def finished(rows, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    state, output = run(config(rows), folder)
    return folder, state, output


def test_it_ends_by_its_evaluations_and_is_complete(finished):
    folder, state, output = finished
    found = losses(folder)
    end = expected_end(found)
    assert state.step == end == found[-1][0] < 60
    assert latest_step(folder / "checkpoints") == end
    assert [step for step, _ in losses(folder, "test.jsonl")] == [end]
    assert [row["step"] for row in metrics.read(folder / "metrics.jsonl")] == list(
        range(1, end + 1)
    )
    (stopped,) = events(folder, "stopped")
    lowest = min(loss for _, loss in found)
    reason = (
        f"in {PATIENCE} evaluations the held-out loss did not fall below {lowest:.4f}"
    )
    assert stopped["step"] == end and stopped["reason"].startswith(reason)
    assert f"Stopped at step {end} of 60: {reason}" in output
    assert events(folder, "done")[-1]["step"] == end
    assert not ledger_audit.audit(folder).faults
    text = write_report(folder).read_text()
    assert f"<b>Complete</b>: stopped at step {end} of 60, because in 3 evalu" in text


def test_the_same_command_again_changes_nothing(finished, rows):
    folder, state, _ = finished
    before = (folder / "metrics.jsonl").read_text()
    again, output = run(config(rows), folder)
    assert again.step == state.step
    assert np.array_equal(again.params["w"], state.params["w"])
    assert f"complete at step {state.step}: in 3 evaluations the held-out" in output
    assert "To continue, raise stop_patience." in output
    assert (folder / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize("fails_at", [1, 4, 5, 8])
def test_a_run_that_was_restarted_ends_at_the_same_step(
    finished, rows, tmp_path, fails_at
):
    folder, state, _ = finished

    def fail(step, state):
        if step == fails_at and not (tmp_path / "failed").exists():
            (tmp_path / "failed").touch()
            raise OSError("the machine is gone")

    fail.every = 1
    with pytest.raises(OSError, match="gone"):
        run(config(rows), tmp_path / "run", hooks=[fail])
    again, _ = run(config(rows), tmp_path / "run", hooks=[fail])
    assert again.step == state.step
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True):
        assert np.array_equal(a, b)
    assert losses(tmp_path / "run") == losses(folder)


def test_more_patience_continues_it(finished, rows, tmp_path):
    _, state, _ = finished
    run(config(rows), tmp_path / "run")
    patient = config(rows, stop_patience=PATIENCE + 2)
    longer, output = run(patient, tmp_path / "run")
    # Two more, if none of them is lower; counting has gone on, not begun anew.
    found = losses(tmp_path / "run")
    assert longer.step == state.step + 2 * EVERY == found[-1][0]
    assert "Resuming from step" in output
    assert len(events(tmp_path / "run", "stopped")) == 2


def test_a_loss_that_falls_too_little_does_not_count(rows, tmp_path):
    impatient = config(rows, stop_min_change=100.0, stop_patience=1)
    state, output = run(impatient, tmp_path / "run")
    assert state.step == 2 * EVERY and "did not fall by more than 100 below" in output


def test_a_run_whose_loss_falls_goes_on(tmp_path):
    path = npz_rows.write(tmp_path / "rows.npz")
    state, output = run(config(path, num_steps=10), tmp_path / "run")
    assert state.step == 10 and "Stopped" not in output
    saved = manifest.read(tmp_path / "run" / "checkpoints", 10)
    found = losses(tmp_path / "run")
    assert saved["evaluated"] == {
        **{"step": 10, "loss_step": 10, "since": 0},
        "loss": found[-1][1],
    }


def test_all_processes_decide_by_the_loss_of_the_first():
    store = MemoryStore(2)
    ends: dict[int, int] = {}

    def decide(index: int, found: list[float]) -> None:
        group = Group(index, 2, store.view(index))
        stop = EarlyStop(StopRule(2), group)
        for step, loss in enumerate(found, start=1):
            stop(step, loss)
            if stop.is_over():
                ends[index] = step
                return

    falls_a_little = [2.0, 2.0, 1.999999, 1.0]
    threads = [
        threading.Thread(target=decide, args=(0, [2.0, 2.0, 2.0, 1.0])),
        threading.Thread(target=decide, args=(1, falls_a_little)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert ends == {0: 3, 1: 3}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"stop_patience": -1}, "stop_patience must be >= 0, got -1"),
        ({"eval_batches": 0}, "eval_batches=0 means there are none before the end"),
        ({"eval_every": 0}, "eval_every=0 means there are none before the end"),
        ({"stop_min_change": -1.0}, "stop_min_change must be >= 0, got -1.0"),
        (
            {"stop_patience": 0, "stop_min_change": 0.1},
            "stop_min_change=0.1 has no effect without stop_patience",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(rows, changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(config(rows), **changes)
