"""Runs on a mixture: shares in the metrics, the ledger, and weights that change."""

import dataclasses
import io
import json
from pathlib import Path

import npz_rows
import numpy as np
import pytest
from rich.console import Console
from tiny_runs import refused

from meshloom.sharding import MeshSpec
from meshloom.trainer import data
from meshloom.trainer.cli import main
from meshloom.trainer.record import ledger, ledger_audit, metrics
from meshloom.trainer.run import train

FSDP = MeshSpec(data=2, fsdp=4)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> data.Mixture:
    folder, draw = tmp_path_factory.mktemp("mixture"), np.random.default_rng(0)
    sources = {}
    for name, count in (("few", 9), ("many", 70)):
        x = draw.normal(size=(count, npz_rows.NUM_FEATURES))
        label = np.argmax(x[:, : npz_rows.NUM_CLASSES], -1)
        np.savez(folder / f"{name}.npz", x=x, label=label)
        sources[name] = data.ArrayFiles(path=str(folder / f"{name}.npz"), holdout=0.1)
    return data.Mixture(sources=sources, weights={"few": 0.25, "many": 0.75})


def config(mixture, mesh=FSDP, **settings):
    tiny = npz_rows.config("", data=mixture, mesh=mesh, save_every=0, eval_every=0)
    return dataclasses.replace(tiny, num_steps=12, eval_batches=1, **settings)


def run(config, folder) -> str:
    console = Console(file=io.StringIO(), width=300)
    train.train(config, workdir=folder, console=console)
    return console.file.getvalue()  # type: ignore


def batches(folder) -> list[tuple]:
    rows = ledger.Ledger(folder, is_writer=False).read()
    return [(r["step"], r["batch"], r["samples"]) for r in rows if r["event"] == "step"]


def test_shares_are_in_the_metrics_and_any_mesh_reads_the_same(mixture, tmp_path):
    output = run(config(mixture), tmp_path / "run")
    assert "examples, share 0.25, many" in output
    rows = metrics.read(tmp_path / "run" / "metrics.jsonl")
    assert [row["share_few"] for row in rows] == [0.25] * 12
    assert rows[-1]["share_few"] + rows[-1]["share_many"] == 1
    audit = ledger_audit.audit(tmp_path / "run")
    assert audit.faults == [] and len(audit.history) == 12
    run(config(mixture, MeshSpec(data=8)), tmp_path / "other")
    assert batches(tmp_path / "other") == batches(tmp_path / "run")


def test_a_source_that_changed_is_refused(mixture, tmp_path):
    source = mixture.sources["few"]
    copy = tmp_path / "few.npz"
    copy.write_bytes(Path(source.path).read_bytes())
    sources = {**mixture.sources, "few": dataclasses.replace(source, path=str(copy))}
    mine = config(dataclasses.replace(mixture, sources=sources))
    run(mine, tmp_path / "run")
    arrays = dict(np.load(copy))
    np.savez(copy, **{**arrays, "x": -arrays["x"]})
    with pytest.raises(ValueError, match="changed: few/few.npz"):
        run(mine, tmp_path / "run")


def test_weights_may_change_for_steps_to_come_and_only_for_those(mixture, tmp_path):
    folder = tmp_path / "run"
    run(dataclasses.replace(config(mixture), num_steps=4), folder)
    later = {6: {"few": 0.0, "many": 1.0}}
    changed = dataclasses.replace(mixture, weights_from=later)
    run(config(changed), folder)
    rows = metrics.read(folder / "metrics.jsonl")
    assert [row["share_few"] for row in rows[:6]] == [0.25] * 6
    assert rows[-1]["share_few"] == 0.125
    assert ledger_audit.audit(folder).faults == []
    run(config(changed), tmp_path / "at-once")
    assert batches(tmp_path / "at-once") == batches(folder)
    earlier = dataclasses.replace(mixture, weights_from={5: later[6]})
    with pytest.raises(ValueError, match="weights_from"):
        run(config(earlier), folder)


def test_a_lost_sample_of_a_mixture_is_found(mixture, tmp_path):
    folder = tmp_path / "run"
    run(config(mixture), folder)
    rows = ledger.Ledger(folder, is_writer=False).read()
    for row in rows:
        if row["event"] == "step" and row["step"] >= 5:
            row["batch"] -= 1
    found = ledger_audit.examine(rows)
    assert any("step 5" in fault and "already used" in fault for fault in found.faults)
    start = next(row for row in rows if row["event"] == "start")
    start["mixture"]["phases"][0][1] = [1, 1]
    assert ledger_audit.examine(rows).faults


CONFIG = """
from __gin__ import dynamic_registration

import npz_rows
from meshloom.trainer import data
from meshloom.trainer.program import optimizers
from meshloom.trainer.program import schedules
from meshloom.trainer.run import train

data.Mixture:
  sources = {"a": @a/data.ArrayFiles(), "b": @b/data.ArrayFiles()}
  weights = {"a": 0.5, "b": 0.5}

train.Config:
  model = @npz_rows.Linear()
  data = @data.Mixture()
  optimizer = @optimizers.AdamW()
  schedule = @schedules.Constant()
  batch_size = 8
  num_steps = 2
  eval_batches = 0
  save_every = 0
  check_replicas_every = 0

schedules.Constant.value = 0.01
"""


def test_a_config_file_names_the_sources(mixture, tmp_path, capfd):
    paths = {name: source.path for name, source in mixture.sources.items()}
    text = f"{CONFIG}a/data.ArrayFiles.path = {paths['few']!r}\n"
    text += f"b/data.ArrayFiles.path = {paths['many']!r}\n"
    (tmp_path / "mixed.gin").write_text(text)
    argv = ["train", "--config", str(tmp_path / "mixed.gin")]
    argv += ["--workdir", str(tmp_path / "run")]
    assert main(argv) == 0
    (start, *_) = [
        row
        for row in ledger.Ledger(tmp_path / "run", is_writer=False).read()
        if row["event"] == "start"
    ]
    assert json.loads(json.dumps(start["mixture"]))["phases"] == [[0, [1, 1]]]
    error = refused(capfd, [*argv, "--set", "data.weights={'a': 1.0}"])
    assert "weights names a, but the sources are a, b" in error
