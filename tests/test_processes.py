"""Training as several processes is training as one: same losses, cut arrays, one
writer, and an end for all when one cannot start.
"""

import dataclasses
import fcntl
import json
import os
import re
import shutil
import signal
import sys
from collections import Counter
from pathlib import Path

import jobs
import numpy as np
import pytest

from meshloom.trainer import data, distributed, metrics

TESTS = Path(__file__).parent


pytestmark = pytest.mark.processes

NUM_STEPS, BATCH, LENGTH = 20, 16, 32
TIMEOUT = 240  # seconds; a job takes 10 to 25 on two quiet cores
ROWS = range(BATCH)
HALVES = [ROWS[:8], ROWS[8:]]

CONFIG = """
from __gin__ import dynamic_registration

import recording
from meshloom.models import transformer
from meshloom.trainer import optimizers
from meshloom.trainer import schedules
from meshloom.trainer import train

train.Config:
  model = @transformer.Config()
  data = @recording.Text()
  optimizer = @optimizers.AdamW()
  schedule = @schedules.WarmupCosine()
  batch_size = {BATCH}
  num_steps = {NUM_STEPS}
  log_every = 5
  eval_every = 10
  eval_batches = 2
  save_every = 10
  sample_prompt = "def "
  sample_tokens = 8

transformer.Config:
  vocab_size = 257
  pad_vocab_to = 64
  num_layers = 2
  d_model = 32
  num_heads = 8
  d_ff = 64
  max_length = {LENGTH}
  compute_dtype = "float32"

recording.Text:
  path = "{text}"
  length = {LENGTH}
  holdout = 0.3

schedules.WarmupCosine:
  peak = 3e-3
  warmup_share = 0.25
"""
# Evaluation and sampling are looked at on one layout; elsewhere they only cost time.
TRAIN_ONLY = ("eval_batches=0", "sample_prompt=None", "save_every=0")


@dataclasses.dataclass(frozen=True)
class Layout:
    num_processes: int
    devices_each: int
    mesh: str
    rows: list[range]  # of the batch, for each process
    ways: int  # that the embedding is cut
    settings: tuple[str, ...] = ()


# Devices are laid out process by process and the last axis varies fastest.
LAYOUTS = {
    "one": Layout(1, 1, "data=1", [ROWS], 1),
    "data-across": Layout(2, 4, "data=2,fsdp=2,tensor=2", HALVES, 4),
    "tensor-across": Layout(2, 4, "tensor=8", [ROWS, ROWS], 8, TRAIN_ONLY),
    "both-across": Layout(
        4, 2, "fsdp=2,tensor=4", [HALVES[0]] * 2 + [HALVES[1]] * 2, 8, TRAIN_ONLY
    ),
}
SEVERAL = [name for name in LAYOUTS if name != "one"]


@dataclasses.dataclass(frozen=True)
class Run:
    layout: Layout
    workdir: Path
    recording: Path
    processes: list[jobs.Completed]

    def losses(self) -> np.ndarray:
        rows = metrics.read(self.workdir / "metrics.jsonl")
        assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1))
        return np.array([row["loss"] for row in rows])

    def read(self, split: str, process: int) -> Counter:
        text = (self.recording / f"{split}-{process}.txt").read_text()
        return Counter(map(int, text.split()))

    def pieces(self, step: int):
        """Yields (process, array's name, device, where in the array, piece)."""
        for process in range(self.layout.num_processes):
            with np.load(self.recording / f"pieces-{step}-{process}.npz") as file:
                for key, piece in file.items():
                    name, device, where = key.split("|")
                    yield process, name, int(device), json.loads(where), piece

    def state(self, step: int) -> dict[str, np.ndarray]:
        """The whole arrays, put together; pieces that overlap must be equal."""
        arrays: dict[str, np.ndarray] = {}
        known: dict[str, np.ndarray] = {}
        cuts = list(self.pieces(step))
        for _, name, _, where, piece in cuts:
            ends = np.array([stop for _, stop in where], int)
            shape = known.get(name, ends)
            known[name] = np.maximum(shape, ends)
            arrays[name] = np.empty(known[name], piece.dtype)
        seen = {name: np.zeros(array.shape, bool) for name, array in arrays.items()}
        for _, name, device, where, piece in cuts:
            index = tuple(slice(*cut) for cut in where)
            held = seen[name][index]
            same = arrays[name][index] == piece
            assert np.all(same | ~held), f"{name} differs on device {device}"
            arrays[name][index] = piece
            seen[name][index] = True
        assert all(np.all(mask) for mask in seen.values())
        return arrays


@pytest.fixture(scope="module")
def config_file(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("config")
    text = folder / "text"
    text.mkdir()
    for path in sorted(Path(os.__file__).parent.glob("[a-e]*.py"))[:30]:
        shutil.copy(path, text)
    file = folder / "tiny.gin"
    settings = {"BATCH": BATCH, "NUM_STEPS": NUM_STEPS, "LENGTH": LENGTH}
    file.write_text(CONFIG.format(text=text, **settings))
    return file


def start(layout: Layout, config_file: Path, workdir: Path, program=()) -> Run:
    """Trains by the command line, as each process of the layout."""
    recording = workdir.with_name(f"{workdir.name}-recording")
    recording.mkdir()
    argv = [
        *(program or (sys.executable, str(TESTS / "recording.py"))),
        *("train", "--config", str(config_file), "--workdir", str(workdir)),
        *("--cpu-devices", str(layout.devices_each), "--mesh", layout.mesh),
        *(part for text in layout.settings for part in ("--set", text)),
    ]
    env = {"PYTHONPATH": str(TESTS), "RECORDING_FOLDER": str(recording)}
    if layout.num_processes == 1:
        run = jobs.run_processes([env], layout.devices_each, argv, TIMEOUT)
    else:
        run = jobs.run_job(
            layout.num_processes, layout.devices_each, argv, TIMEOUT, env=env
        )
    return Run(layout, workdir, recording, run)


@pytest.fixture(scope="module")
def run_of(tmp_path_factory, config_file):
    """Gives the finished run of a layout; each is trained once."""
    runs: dict[str, Run] = {}

    def get(name: str) -> Run:
        if name not in runs:
            folder = tmp_path_factory.mktemp("run") / "work"
            runs[name] = start(LAYOUTS[name], config_file, folder)
        for process in runs[name].processes:
            assert process.status == 0, process.stdout + process.stderr
        return runs[name]

    return get


# Gloo prints a line for each group of devices, from several threads in bits and pieces.
GLOO = re.compile(
    r"\[Gloo\] Rank|is connected to|peer ranks\.|[\d\s]|"
    r"Expected number of connected peer ranks is :"
)


@pytest.mark.parametrize("name", SEVERAL)
def test_the_same_losses_and_the_same_start(name, run_of):
    run, one = run_of(name), run_of("one")
    # Sums in another order differ in the last bits, which 20 steps may amplify.
    np.testing.assert_allclose(run.losses(), one.losses(), rtol=1e-5)
    assert run.losses()[-1] < 0.9 * run.losses()[0]
    found, expected = run.state(0), one.state(0)
    params = [path for path in expected if path.startswith("params/")]
    assert len(params) == 9
    for path in params:
        np.testing.assert_array_equal(found[path], expected[path], err_msg=path)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_process_reads_its_rows_and_no_others(name, run_of, config_file):
    run = run_of(name)
    text = data.Text(
        path=str(config_file.parent / "text"), length=LENGTH, holdout=0.3
    ).open("train")
    order = data.Order(len(text), 0)
    for process, rows in enumerate(run.layout.rows):
        places = [step * BATCH + row for step in range(NUM_STEPS) for row in rows]
        expected = Counter(order.index(np.array(places))[1].tolist())
        expected[0] += 1  # looked at for the shapes, before training
        assert run.read("train", process) == expected


@pytest.mark.parametrize("name", LAYOUTS)
def test_arrays_are_cut_as_planned_in_every_process(name, run_of):
    run = run_of(name)
    plan = json.loads((run.workdir / "sharding.json").read_text())
    planned = {array["path"]: array for array in plan["arrays"]}
    each = run.layout.devices_each
    held = Counter()
    for process, path, device, _, piece in run.pieces(NUM_STEPS):
        if not path.startswith("params/"):
            continue
        array = planned[path.removeprefix("params/")]
        assert piece.nbytes == array["bytes_per_device"], (path, device)
        assert piece.nbytes * array["ways"] == array["bytes"], path
        held[process] += piece.nbytes
    total = plan["totals"]["bytes_per_device"] * each
    assert held == Counter({p: total for p in range(run.layout.num_processes)})
    # Cut 8 ways, it is held by no process in whole.
    assert planned["embedding"]["ways"] == run.layout.ways


def test_one_process_writes_and_prints(run_of):
    run = run_of("data-across")
    first, second = run.processes
    assert f"Run folder {run.workdir}\n" in first.stdout
    assert "8 cpu device(s) in 2 process(es)" in first.stdout
    assert f"Report: {run.workdir / 'report.html'}\n" in first.stdout
    assert GLOO.sub("", second.stdout) == second.stderr == first.stderr == ""
    written = [
        set((run.recording / f"written-{process}.txt").read_text().split())
        for process in range(2)
    ]
    names = ["metrics.jsonl", "eval.jsonl", "config.json", "report.html", "sample.txt"]
    assert {str(run.workdir / name) for name in names} <= written[0]
    # A checkpoint is written by all, each process its own pieces.
    strays = [path for path in written[1] if path.startswith(str(run.workdir))]
    assert [p for p in strays if not p.startswith(f"{run.workdir}/checkpoints")] == []


def test_evaluation_and_sampling_take_all_processes(run_of):
    run, one = run_of("data-across"), run_of("one")
    found, expected = (metrics.read(r.workdir / "eval.jsonl") for r in (run, one))
    assert [row["step"] for row in found] == [10, 20]
    for row, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(row["loss"], other["loss"], rtol=1e-5)
    # Two evaluations of two batches, half of the rows in each process.
    assert [sum(run.read("eval", p).values()) for p in (0, 1)] == [32, 32]
    assert not set(run.read("eval", 0)) & set(run.read("eval", 1))
    text = (run.workdir / "sample.txt").read_text()
    assert text.startswith("def ") and text == (one.workdir / "sample.txt").read_text()


def interrupted(run: Run, workdir: Path) -> Path:
    """A copy of the run as if it had been killed after step 10 was saved."""
    shutil.copytree(run.workdir, workdir)
    shutil.rmtree(workdir / "checkpoints" / "20")
    return workdir


def test_the_same_processes_resume_bit_for_bit(run_of, config_file, tmp_path):
    whole = run_of("data-across")
    folder = interrupted(whole, tmp_path / "work")
    layout = dataclasses.replace(whole.layout, settings=TRAIN_ONLY)
    resumed = start(layout, config_file, folder)
    assert [p.status for p in resumed.processes] == [0, 0], resumed.processes
    np.testing.assert_array_equal(resumed.losses(), whole.losses())
    found, expected = resumed.state(NUM_STEPS), whole.state(NUM_STEPS)
    assert found.keys() == expected.keys()
    for path in expected:
        np.testing.assert_array_equal(found[path], expected[path], err_msg=path)
    # Steps 11 to 20 and no others were computed again.
    assert sum(resumed.read("train", 0).values()) == 10 * 8 + 1


def test_one_process_resumes_what_two_have_written(run_of, config_file, tmp_path):
    whole = run_of("data-across")
    folder = interrupted(whole, tmp_path / "work")
    alone = Layout(1, 8, whole.layout.mesh, [ROWS], 4, TRAIN_ONLY)
    program = (str(Path(sys.executable).with_name("meshloom")),)
    resumed = start(alone, config_file, folder, program)
    assert resumed.processes[0].status == 0, resumed.processes
    np.testing.assert_array_equal(resumed.losses()[:10], whole.losses()[:10])
    np.testing.assert_allclose(resumed.losses(), whole.losses(), rtol=1e-5)
    assert "1 process(es)" in resumed.processes[0].stdout


@pytest.mark.parametrize(
    "change, message",
    {
        "half": ({"MESHLOOM_NUM_PROCESSES": None}, "MESHLOOM_NUM_PROCESSES is not set"),
        "outside": ({"MESHLOOM_PROCESS_ID": "2"}, "MESHLOOM_PROCESS_ID is 2, but"),
        "no port": ({"MESHLOOM_COORDINATOR": "here"}, "expected host:port"),
    }.values(),
)
def test_a_wrong_description_ends_with_one_line(change, message, tmp_path):
    env = jobs.job_env(2) | {"MESHLOOM_PROCESS_ID": "1"} | change
    env = {name: value for name, value in env.items() if value is not None}
    argv = [sys.executable, "-m", "meshloom.trainer.cli", "train"]
    argv += ["--cpu-devices", "1", "--workdir", str(tmp_path / "work")]
    # Far less than the five minutes that jax would wait for the other process.
    (found,) = jobs.run_processes([env], 1, argv, 60)
    assert (found.status, found.stdout) == (2, "")
    assert message in found.stderr and found.stderr.count("\n") == 1
    assert not (tmp_path / "work").exists()


def test_what_stops_one_process_stops_all(config_file, tmp_path):
    folder = tmp_path / "work"
    folder.mkdir()
    layout = Layout(2, 1, "data=2", HALVES, 1, TRAIN_ONLY)
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        first, second = start(layout, config_file, folder).processes
    assert (first.status, second.status) == (2, 2), (first, second)
    assert "is in use by another process" in first.stderr
    assert "process 0 of this job cannot start" in second.stderr
    assert first.stderr.count("\n") == second.stderr.count("\n") == 1
    assert [path.name for path in folder.iterdir()] == [".lock"]


def test_an_error_in_one_process_ends_the_job(config_file, tmp_path):
    settings = (*TRAIN_ONLY, "data.broken_in=1")
    layout = Layout(2, 1, "data=2", HALVES, 1, settings)
    first, second = start(layout, config_file, tmp_path / "work").processes
    assert second.stderr.startswith("meshloom: disk: Input/output error\n")
    # Ended by jax, which sees that process 1 leaves and process 0 does not come.
    assert first.status == -signal.SIGABRT, first
    assert "Shutdown barrier has failed" in first.stderr


def test_processes_that_differ_are_told_apart(monkeypatch):
    monkeypatch.setattr(distributed, "_gather", lambda value: [value, 7])
    assert distributed.agree("step", 7) == 7
    with pytest.raises(ValueError, match="differ in step: 3 in process 0, 7 in proces"):
        distributed.agree("step", 3)
