"""Jobs of one or several processes that train by the command line."""

import dataclasses
import json
import os
import shutil
import sys
from collections import Counter
from pathlib import Path

import jobs
import numpy as np

from meshloom.trainer.record import metrics

SUPPORT = Path(__file__).parent

NUM_STEPS, BATCH, LENGTH = 20, 16, 32
TIMEOUT = 240  # seconds; a job takes 10 to 25 on two quiet cores
ROWS = range(BATCH)
HALVES = [ROWS[:8], ROWS[8:]]

CONFIG = """
from __gin__ import dynamic_registration

import recording
from meshloom.models import transformer
from meshloom.trainer.program import optimizers
from meshloom.trainer.program import schedules
from meshloom.trainer.run import train

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
  check_replicas_every = 0  # test_replica_check looks at several processes
  probe_network = False

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
    ways: int  # that the embedding is sharded
    settings: tuple[str, ...] = ()


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


def write_config(folder: Path) -> Path:
    """A config file in `folder`, beside the text that it trains on."""
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
        *(program or (sys.executable, str(SUPPORT / "recording.py"))),
        *("train", "--config", str(config_file), "--workdir", str(workdir)),
        *("--cpu-devices", str(layout.devices_each), "--mesh", layout.mesh),
        *(part for text in layout.settings for part in ("--set", text)),
    ]
    env = {"PYTHONPATH": str(SUPPORT), "RECORDING_FOLDER": str(recording)}
    if layout.num_processes == 1:
        run = jobs.run_processes([env], layout.devices_each, argv, TIMEOUT)
    else:
        run = jobs.run_job(
            layout.num_processes, layout.devices_each, argv, TIMEOUT, env=env
        )
    return Run(layout, workdir, recording, run)


class Runs:
    """The finished runs of layouts; each is trained once."""

    def __init__(self, config_file: Path, folder: Path):
        self._config_file, self._folder = config_file, folder
        self._runs: dict[str, Run] = {}

    def __call__(self, layout: Layout) -> Run:
        key = repr(layout)
        if key not in self._runs:
            folder = self._folder / str(len(self._runs))
            self._runs[key] = start(layout, self._config_file, folder)
        for process in self._runs[key].processes:
            assert process.status == 0, process.stdout + process.stderr
        return self._runs[key]
