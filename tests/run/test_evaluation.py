"""Evaluation covers what it claims on any mesh, and reports all the model's metrics."""

import dataclasses
import io
import sys

import jax
import job_runs
import npz_rows
import numpy as np
import pytest
from rich.console import Console

from meshloom.sharding import MeshSpec
from meshloom.trainer import data
from meshloom.trainer.commands.forecast_observer import ForecastObserver
from meshloom.trainer.data.batches import Batches
from meshloom.trainer.record import metrics
from meshloom.trainer.run import held_out, hooks, train
from meshloom.trainer.run.prepare import prepare

BATCH, NUM_EVAL = 16, 40  # two batches and a half


def run(config, folder):
    console = Console(file=io.StringIO(), width=300)
    observer = ForecastObserver()
    state = train.train(config, workdir=folder, console=console, observer=observer)
    return state, console.file.getvalue()  # type: ignore


def expected(params, path, split="eval", count=None):
    """Returns (loss, accuracy) of the first `count` rows, computed by numpy."""
    with np.load(path) as file:
        x, label = (file[f"{split}_{name}"][:count] for name in ("x", "label"))
    logits = x.astype(np.float64) @ np.asarray(params["w"], np.float64)
    scores = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    loss = -scores[np.arange(len(label)), label].mean()
    return loss, (logits.argmax(-1) == label).mean()


@pytest.mark.parametrize(
    "mesh", ["data=1", "data=2,fsdp=4", "fsdp=8", "fsdp=2,tensor=1"]
)
def test_all_metrics_over_a_whole_split(mesh, tmp_path):
    path = npz_rows.write(tmp_path / "rows.npz")
    sizes = MeshSpec.parse(mesh)
    devices = jax.devices()[: 1 if mesh == "data=1" else 2 if "tensor" in mesh else 8]
    config = npz_rows.config(path, mesh=sizes, eval_batches=None)
    prepared = prepare(config, devices)
    state = prepared.layout.create(jax.random.key(1), prepared.mesh)
    split = prepared.held_out["eval"]
    assert (split.num_batches, split.num_examples) == (3, NUM_EVAL)
    rows: list = []
    evaluate(prepared, split, rows)(4, state)
    loss, accuracy = expected(jax.device_get(state.params), path)
    (row,) = rows
    assert row == {
        "step": 4,
        "loss": pytest.approx(loss, rel=1e-6),
        "accuracy": pytest.approx(accuracy, rel=1e-6),
    }
    if "fsdp" in mesh:
        assert state.params["w"].addressable_shards[0].data.size < 32


class Rows:
    """A writer that keeps the rows in memory."""

    def __init__(self, rows):
        self.rows = rows

    def write(self, kind, rows):
        self.rows += rows

    def close(self):
        pass


class Quiet:
    """Progress that shows nothing."""

    rate = type("Rate", (), {"restart": lambda self: None})()

    def message(self, text):
        pass


def evaluate(prepared, split, rows):
    return hooks.Evaluate(
        1,
        prepared.program.evaluate,
        split,
        prepared.config.batch_size,
        prepared.program.batch_shardings,
        Quiet(),  # type: ignore
        [Rows(rows)],
    )


def test_a_run_writes_and_shows_every_metric(tmp_path):
    path = npz_rows.write(tmp_path / "rows.npz")
    config = npz_rows.config(path, eval_batches=2, test_batches=None)
    state, output = run(config, tmp_path / "run")
    params = jax.device_get(state.params)
    rows = metrics.read(tmp_path / "run" / "eval.jsonl")
    assert [row["step"] for row in rows] == [4, 8]
    loss, accuracy = expected(params, path, count=2 * BATCH)
    assert rows[-1]["loss"] == pytest.approx(loss, rel=1e-6)
    assert rows[-1]["accuracy"] == pytest.approx(accuracy, rel=1e-6)
    assert f"step 8  held-out loss {loss:.4f}  accuracy {accuracy:.4f}" in output
    (row,) = metrics.read(tmp_path / "run" / "test.jsonl")
    loss, accuracy = expected(params, path, "test")
    assert (row["step"], row["loss"]) == (8, pytest.approx(loss, rel=1e-6))
    assert f"step 8  test loss {loss:.4f}  accuracy {accuracy:.4f}" in output
    assert (
        "Each evaluation uses 32 of the 40 examples of the held-out split (2 batches)"
    ) in output
    assert "The test after training uses all 40 examples of the test split (3" in output
    report = (tmp_path / "run" / "report.html").read_text()
    assert "Accuracy" in report and "Test" in report


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unweighted(npz_rows.Linear):
    """A model that takes no weights, so rows of a batch cannot be padding."""

    def batch_axes(self):
        return {k: v for k, v in super().batch_axes().items() if k != "weights"}

    def loss(self, params, batch, shard):
        weighted = batch | {"weights": np.ones(len(batch["label"]), np.float32)}
        return super().loss(params, weighted, shard)


def test_a_model_without_weights_uses_full_batches(tmp_path):
    path = npz_rows.write(tmp_path / "rows.npz")
    config = npz_rows.config(path, model=Unweighted())
    split = prepare(dataclasses.replace(config, eval_batches=9), jax.devices()[:4])
    assert split.held_out["eval"].num_examples == 32
    assert "uses 32 of the 40 examples" in "\n".join(split.describe())
    with pytest.raises(ValueError, match="eval_batches=None: .* 40 examples, 8 more"):
        prepare(dataclasses.replace(config, eval_batches=None), jax.devices()[:4])
    with pytest.raises(ValueError, match="or to 0 for none"):
        prepare(dataclasses.replace(config, batch_size=64), jax.devices()[:4])


def test_a_split_smaller_than_a_batch(tmp_path):
    path = npz_rows.write(tmp_path / "rows.npz", num_eval=3)
    config = npz_rows.config(path)
    prepared = prepare(config, jax.devices()[:4])
    assert prepared.held_out["eval"].describe() == (
        "Each evaluation uses all 3 examples of the held-out split (1 batch, not "
        f"eval_batches={config.eval_batches})"
    )


def test_padding_counts_nothing():
    source = data.Synthetic(vocab_size=8, length=4, num_eval_examples=5)
    split = source.open("eval")
    batches = Batches(split, data.Order(5, shuffle=False), 4, num_examples=5)
    last = batches[1]
    assert last["weights"].sum(axis=1).tolist() == [4, 0, 0, 0]
    assert batches.sample_ids(1).tolist() == [4, 0, 0, 0]
    np.testing.assert_array_equal(last["inputs"][1], split[0]["inputs"])
    assert split[0]["weights"].sum() == 4  # those of the dataset are unchanged


def test_weights_are_added_for_a_model_that_takes_them(tmp_path):
    path = npz_rows.write(tmp_path / "rows.npz")
    config = npz_rows.config(path)
    rows = held_out.with_weights(config, config.data.open("train"))
    assert rows[0]["weights"] == 1 and len(rows) == 96
    unweighted = dataclasses.replace(config, model=Unweighted())
    assert "weights" not in held_out.with_weights(unweighted, rows._dataset)[0]  # type: ignore


@pytest.mark.processes
def test_a_whole_split_in_two_processes(tmp_path):
    """The padding of the last batch is in the second process."""
    config = job_runs.write_config(tmp_path)
    (tmp_path / "small.txt").write_text("held out, but not much of it. " * 42)
    settings = (
        "eval_batches=None",
        f'data.eval_path="{tmp_path}/small.txt"',
        "data.holdout=None",
        "sample_prompt=None",
        "num_steps=2",
        "save_every=0",
    )
    rows, read = [], []
    one = job_runs.Layout(1, 1, "data=1", [job_runs.ROWS], 1, settings)
    two = job_runs.Layout(2, 2, "fsdp=4", job_runs.HALVES, 4, settings)
    for layout in (one, two):
        workdir = tmp_path / f"run-{layout.num_processes}"
        program = (sys.executable, str(job_runs.SUPPORT / "recording.py"))
        found = job_runs.start(layout, config, workdir, program)
        assert {p.status for p in found.processes} == {0}, found.processes
        rows += metrics.read(workdir / "eval.jsonl")
        read.append([found.read("eval", p) for p in range(layout.num_processes)])
    assert rows[0]["loss"] == pytest.approx(rows[1]["loss"], rel=1e-5)
    assert rows[0]["bits_per_byte"] == pytest.approx(rows[1]["bits_per_byte"], rel=1e-5)
    # 39 examples are two batches and 7 rows; the first example is the padding.
    assert len(read[0][0]) == 39
    both = read[1][0] + read[1][1]
    assert set(both) == set(range(39))
    assert {i: n for i, n in both.items() if i} == dict.fromkeys(range(1, 39), 1)
