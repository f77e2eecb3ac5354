"""Failed steps are skipped; too many in a row make a run rewind."""

import dataclasses
import io
import math

import numpy as np
import pytest
from rich.console import Console
from tiny_runs import TINY

from meshloom.trainer import data
from meshloom.trainer.checkpoint import manager, manifest
from meshloom.trainer.config import files as config_files
from meshloom.trainer.record import ledger, ledger_audit, metrics
from meshloom.trainer.run import failed_steps, train


class Poisoned:
    """A dataset in which some examples have weights that are NaN."""

    def __init__(self, dataset: data.Dataset, bad: set[int]):
        self._dataset, self._bad = dataset, bad

    def __getattr__(self, name):
        return getattr(self._dataset, name)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, i: int):
        example = self._dataset[i]
        weight = math.nan if i in self._bad else 1.0
        shape = example["targets"].shape
        return example | {"weights": np.full(shape, weight, np.float32)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source(data.Synthetic):
    """Poisons the batches of 16 examples whose numbers are in `bad`."""

    bad: tuple[int, ...] = ()

    def open(self, split):
        dataset = super().open(split)
        order = data.Order(len(dataset), 0)
        ids = [order.index(np.arange(16 * b, 16 * b + 16))[1] for b in self.bad]
        bad = set(np.concatenate(ids).tolist()) if split == "train" and ids else set()
        return Poisoned(dataset, bad)


def run(folder, bad=(), should_stop=None, **settings):
    """Trains 12 steps, saved at 4, 8 and 12; returns the state and the output."""
    tiny = config_files.load([TINY], root=train.Config).config
    fields = {f.name: getattr(tiny.data, f.name) for f in dataclasses.fields(tiny.data)}
    source = Source(**fields, bad=tuple(bad))
    config = dataclasses.replace(tiny, data=source, **settings)
    console = Console(file=io.StringIO(), width=200)
    state = train.train(
        config, workdir=folder, console=console, should_stop=should_stop
    )
    return state, console.file.getvalue()  # type: ignore


def events(folder, kind):
    rows = ledger.Ledger(folder, is_writer=False).read()
    return [row for row in rows if row["event"] == kind]


def test_a_failed_step_is_skipped_and_reported(tmp_path):
    state, output = run(tmp_path, bad=[4])
    assert int(state.step) == 12
    assert (
        "step 5 failed (loss nan, gradient norm nan): its update was skipped (1 in a "
        "row; limit 10)"
    ) in output
    rows = metrics.read(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert [row["step"] for row in rows if row.get("skipped")] == [5]
    assert math.isnan(rows[4]["loss"])
    assert all(math.isfinite(row["loss"]) for row in rows if row["step"] != 5)
    audit = ledger_audit.audit(tmp_path)
    assert audit.faults == [] and [s.skipped for s in audit.history].count(True) == 1


def test_the_state_of_a_failed_step_is_the_one_before(tmp_path):
    """The last of 4 steps is skipped and changes nothing but the step count."""
    settings = {"eval_batches": 0, "save_every": 1, "keep_checkpoints": None}
    run(tmp_path / "run", bad=[3], num_steps=4, **settings)
    folder = tmp_path / "run" / "checkpoints"
    before, after = (manifest.read(folder, s)["arrays"] for s in (3, 4))
    differ = [path for path in before if before[path] != after[path]]
    assert differ == ["step"]


def test_no_checkpoint_of_a_failed_step(tmp_path):
    _, output = run(tmp_path, bad=[7])
    assert manager.committed_steps(tmp_path / "checkpoints") == [4, 12]
    assert "step 8 failed: no checkpoint is saved" in output


def test_an_exploding_gradient_is_skipped(tmp_path):
    _, output = run(tmp_path, skip_grad_norm=1e-3, rewind_after=100)
    assert output.count("its update was skipped") == 12
    rows = metrics.read(tmp_path / "metrics.jsonl")
    assert all(row["skipped"] and math.isfinite(row["loss"]) for row in rows)


def test_many_in_a_row_rewind_and_skip_the_data(tmp_path):
    state, output = run(tmp_path, bad=[5, 6, 7], rewind_after=3)
    assert int(state.step) == 12
    assert "Rewinding from step 8 to step 4; skipping the data of 4 batches" in output
    (rewind,) = events(tmp_path, "rewind")
    assert (rewind["step"], rewind["failed_step"]) == (4, 8)
    assert rewind["skipped_batches"] == [4, 8]
    audit = ledger_audit.audit(tmp_path)
    assert audit.faults == []
    assert [s.batch for s in audit.history] == [0, 1, 2, 3, *range(8, 16)]
    assert [part[:2] for part in audit.passed_over] == [(4 * 16, 8 * 16)]
    rows = metrics.read(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert not any(row.get("skipped") for row in rows)


def test_a_resumed_run_knows_which_data_was_skipped(tmp_path):
    """Resumed at step 8, saved after the rewind, it equals the uninterrupted run."""
    bad = [5, 6, 7]
    straight, _ = run(tmp_path / "one", bad=bad, rewind_after=3)
    run(tmp_path / "two", bad=bad, rewind_after=3)
    folder = tmp_path / "two" / "checkpoints"
    checkpoints = manager.Checkpoints(folder)
    checkpoints.set_aside(12)
    checkpoints.close()
    state, output = run(tmp_path / "two", bad=bad, rewind_after=3)
    assert "Resuming from step 8" in output and "Rewinding" not in output
    np.testing.assert_array_equal(
        state.params["embedding"], straight.params["embedding"]
    )
    assert ledger_audit.audit(tmp_path / "two").faults == []


def test_giving_up_if_rewinding_does_not_help(tmp_path):
    with pytest.raises(
        FloatingPointError,
        match=r"3 steps in a row failed, the last at step 3 with loss nan.*there is "
        r"no earlier checkpoint to rewind to\. Lower the learning rate",
    ):
        run(tmp_path / "none", bad=range(12), rewind_after=3)
    with pytest.raises(FloatingPointError, match="1 rewind did not help"):
        run(tmp_path / "one", bad=range(4, 32), rewind_after=3, max_rewinds=1)
    assert manager.committed_steps(tmp_path / "one" / "checkpoints") == [4]


def test_a_state_after_which_no_step_succeeds_is_abandoned(tmp_path):
    with pytest.raises(FloatingPointError, match="2 rewinds did not help"):
        run(tmp_path, bad=range(8, 32), rewind_after=3, max_rewinds=2)
    folder = tmp_path / "checkpoints"
    assert manager.committed_steps(folder) == [4]
    assert (folder / "abandoned-8").is_dir()
    assert [row["step"] for row in events(tmp_path, "rewind")] == [8, 4]


def test_counting():
    log = []
    steps = failed_steps.FailedSteps(2, log.append)
    row = {"loss": 1.0, "grad_norm": 2.0}
    steps.update(row | {"step": 1, "skipped": 1.0})
    steps.update(row | {"step": 2, "skipped": 0.0})
    steps.update(row | {"step": 3, "skipped": 1.0})
    assert steps.consecutive == 1 and steps.any_succeeded and len(log) == 2
    with pytest.raises(failed_steps.Rewind) as caught:
        steps.update(row | {"step": 4, "skipped": 1.0})
    assert caught.value.step == 4
