"""A run from start to end: its folder, its metrics, and how it continues."""

import dataclasses
import io
import json
import math
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest
from paths import TINY
from rich.console import Console

from meshloom.sharding import MeshSpec
from meshloom.trainer import data
from meshloom.trainer.checkpoint import manager
from meshloom.trainer.commands.forecast_observer import ForecastObserver
from meshloom.trainer.config import files as config_files
from meshloom.trainer.config import tree as config_tree
from meshloom.trainer.record import metrics
from meshloom.trainer.run import train

NUM_STEPS, SAVE_EVERY, STOP = 12, 4, 6
FIGURES = ("loss", "grad_norm", "learning_rate")
WORDS = ("red", "green", "blue", "loom", "mesh", "thread", "weave", "warp")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """The tiny model on a little text; saves at 4, 8 and 12, keeping two."""
    folder = tmp_path_factory.mktemp("corpus")
    choose = np.random.default_rng(0)
    for number in range(40):
        (folder / f"{number}.txt").write_text(" ".join(choose.choice(WORDS, 80)))
    tiny = config_files.load([TINY], root=train.Config).config
    return dataclasses.replace(
        tiny,
        model=dataclasses.replace(tiny.model, vocab_size=257, pad_vocab_to=64),
        data=data.Text(path=str(folder), length=16, holdout=0.25),
        sample_prompt="red ",
        sample_tokens=8,
    )


def run(config, folder, **settings):
    """Returns the final state, and what the user saw."""
    console = Console(file=io.StringIO(), width=200)
    settings = {"observer": ForecastObserver()} | settings
    state = train.train(config, workdir=folder, console=console, **settings)
    return state, console.file.getvalue()  # type: ignore


@dataclasses.dataclass
class Stop:
    """A hook that aborts the run, with no cleanup after it."""

    every: int = STOP

    class Stopped(BaseException):
        pass

    def __call__(self, step, state):
        raise self.Stopped


@pytest.fixture(scope="module")
def straight(config, tmp_path_factory):
    """An uninterrupted run on data=8: (folder, final state, output)."""
    folder = tmp_path_factory.mktemp("runs") / "straight"
    started = dataclasses.replace(config, mesh=MeshSpec(data=8))
    loaded = config_files.load([TINY], root=train.Config)
    state, output = run(started, folder, origins=loaded.origins, config_text="# text\n")
    return folder, state, output


@pytest.fixture(scope="module")
def stopped(config, tmp_path_factory):
    """A run that was stopped after step 6; its newest checkpoint is of step 4."""
    folder = tmp_path_factory.mktemp("runs") / "stopped"
    started = dataclasses.replace(config, mesh=MeshSpec(data=8))
    with pytest.raises(Stop.Stopped):
        run(started, folder, hooks=[Stop()])
    assert manager.committed_steps(folder / "checkpoints") == [SAVE_EVERY]
    assert [row["step"] for row in metrics.read(folder / "metrics.jsonl")] == list(
        range(1, STOP + 1)
    )
    return folder


def figures(folder) -> dict[str, list[float]]:
    """Returns the metrics of every step; each step is there once, in order."""
    rows = metrics.read(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1))
    return {name: [row[name] for row in rows] for name in FIGURES}


def evaluations(folder) -> list[tuple[int, float]]:
    rows = metrics.read(folder / "eval.jsonl")
    return [(row["step"], row["loss"]) for row in rows]


def assert_same_run(folder, state, straight):
    """Compares metrics, evaluations and the final state bit for bit."""
    expected, expected_state, _ = straight
    assert figures(folder) == figures(expected)
    assert evaluations(folder) == evaluations(expected)
    jax.tree.map(
        np.testing.assert_array_equal,
        jax.device_get(state),
        jax.device_get(expected_state),
    )


def test_the_run_folder_holds_everything(straight):
    folder, state, _ = straight
    assert int(state.step) == NUM_STEPS
    assert {path.name for path in folder.iterdir()} == {
        ".lock",
        "config.gin",
        "config.json",
        "data.json",
        "environment.json",
        "sharding.json",
        "forecast.json",
        "published.json",
        "metrics.jsonl",
        "eval.jsonl",
        "ledger.jsonl",
        "checkpoints",
        "sample.txt",
        "report.html",
    }
    assert (folder / "config.gin").read_text() == "# text\n"


def test_the_config_is_recorded_with_origins(config, straight):
    folder = straight[0]
    record = json.loads((folder / "config.json").read_text())
    started = dataclasses.replace(config, mesh=MeshSpec(data=8))
    assert record["digest"] == config_tree.digest(started)
    assert record["values"]["model.vocab_size"]["value"] == 257
    assert record["values"]["num_steps"] == {"value": 12, "origin": f"{TINY}:17"}


def test_environment_and_sharding_are_recorded(straight):
    folder = straight[0]
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["num_devices"] == 8 and environment["mesh"] == "data=8"
    assert environment["jax"] == jax.__version__
    sharding = json.loads((folder / "sharding.json").read_text())
    paths = {array["path"] for array in sharding["arrays"]}
    assert {"embedding", "head", "blocks/mlp/down"} <= paths
    assert {"arrays", "totals", "mesh"} <= set(sharding)


def test_every_step_is_recorded_once(straight):
    folder, _, output = straight
    found = figures(folder)
    assert all(math.isfinite(x) for row in found.values() for x in row)
    assert found["loss"][-1] < found["loss"][0]
    rows = metrics.read(folder / "metrics.jsonl")
    rates = [row["tokens_per_s"] for row in rows if "tokens_per_s" in row]
    assert rates and all(math.isfinite(rate) and rate > 0 for rate in rates)
    for row in rows:
        assert ("step_s" in row) == ("tokens_per_s" in row) and "bubble" not in row
    assert f"step {NUM_STEPS}/{NUM_STEPS}" in output


def test_evaluations_are_recorded(straight):
    folder = straight[0]
    rows = metrics.read(folder / "eval.jsonl")
    assert [row["step"] for row in rows] == [4, 8, 12]
    for row in rows:
        assert 0 < row["bits_per_byte"] < 9
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_the_newest_checkpoints_are_kept(straight):
    folder = straight[0]
    assert manager.committed_steps(folder / "checkpoints") == [8, 12]


def test_the_end_shows_a_sample_and_the_report(straight):
    folder, _, output = straight
    sample = (folder / "sample.txt").read_text()
    assert sample.startswith("red ") and len(sample) > len("red ")
    assert sample.splitlines()[0] in output
    assert f"Report: {folder / 'report.html'}" in output
    assert "<svg" in (folder / "report.html").read_text()


def test_a_stopped_run_continues_bit_for_bit(config, straight, stopped, tmp_path):
    folder = shutil.copytree(stopped, tmp_path / "run")
    state, output = run(dataclasses.replace(config, mesh=MeshSpec(data=8)), folder)
    assert "different settings" not in output
    assert_same_run(folder, state, straight)


def test_a_run_continues_on_another_mesh(config, straight, stopped, tmp_path):
    folder = shutil.copytree(stopped, tmp_path / "run")
    spec = MeshSpec(fsdp=4, tensor=2)
    # Writers may change too.
    moved = dataclasses.replace(config, mesh=spec, writers=("tensorboard",))
    state, output = run(moved, folder)
    assert "Continuing with different settings" in output
    for line in ("mesh.data    8 -> 1", "mesh.fsdp    1 -> 4", "mesh.tensor  1 -> 2"):
        assert line in output
    # Sums in a different order differ in the last bits.
    expected = figures(straight[0])["loss"]
    np.testing.assert_allclose(figures(folder)["loss"], expected, rtol=1e-5)
    up = state.params["blocks"]["mlp"]["down"]
    assert up.addressable_shards[0].data.size * 8 == up.size
    (events,) = (folder / "tensorboard").iterdir()
    assert "tfevents" in events.name and events.stat().st_size > 500


def test_a_complete_run_trains_nothing(config, straight):
    folder, state, _ = straight
    files = [folder / "metrics.jsonl", folder / "eval.jsonl"]
    files += (folder / "checkpoints").rglob("*")
    before = [(path, path.stat().st_mtime_ns) for path in files]
    again, output = run(dataclasses.replace(config, mesh=MeshSpec(data=8)), folder)
    assert f"This run is complete at step {NUM_STEPS}." in output
    assert "Compiling" not in output
    assert before == [(path, path.stat().st_mtime_ns) for path in files]
    jax.tree.map(
        np.testing.assert_array_equal, jax.device_get(state), jax.device_get(again)
    )


# Trains as the command does, and waits to be killed after step 6.
SLEEPER = """
import pathlib, pickle, sys, time
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
from meshloom.trainer.run import train

class Sleep:
    every = 6
    def __call__(self, step, state):
        print("asleep", flush=True)
        time.sleep(600)

config = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes())
train.train(config, workdir=pathlib.Path(sys.argv[2]), hooks=[Sleep()])
"""


def test_a_killed_run_continues_bit_for_bit(config, straight, tmp_path):
    folder = tmp_path / "run"
    started = dataclasses.replace(config, mesh=MeshSpec(data=8))
    kill_after_step_six(started, folder, tmp_path)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "lo')  # as if it was killed while writing
    state, _ = run(started, folder)
    assert_same_run(folder, state, straight)


def kill_after_step_six(config, folder, tmp_path):
    pickled = tmp_path / "config.pickle"
    pickled.write_bytes(pickle.dumps(config))
    process = subprocess.Popen(
        [sys.executable, "-c", SLEEPER, str(pickled), str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    watchdog = threading.Timer(200, os.killpg, (process.pid, signal.SIGKILL))
    watchdog.start()
    try:
        for line in process.stdout:
            if line == "asleep\n":
                break
        else:
            pytest.fail(f"the process ended by itself with {process.wait()}")
        while manager.latest_step(folder / "checkpoints") != SAVE_EVERY:
            assert process.poll() is None
            time.sleep(0.05)
    finally:
        watchdog.cancel()
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=20)
        process.stdout.close()
    assert len(metrics.read(folder / "metrics.jsonl")) == STOP
