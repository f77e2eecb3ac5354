"""A run that follows a folder, to which it adds files itself after given steps.

As a program it is the command `meshloom`. FOLLOWING_ADDS lists the files that process 0
adds as STEP:NAME:ROWS, unless they are there. FOLLOWING_KILL is the step after which
every process kills itself.
"""

import dataclasses
import functools
import os
import signal
import sys
from pathlib import Path

import jax
import npz_rows
import numpy as np

from meshloom.trainer import cli, data
from meshloom.trainer.record import ledger
from meshloom.trainer.run import train

CONFIG = """
from __gin__ import dynamic_registration

import npz_rows
from meshloom.trainer import data
from meshloom.trainer.program import optimizers
from meshloom.trainer.program import schedules
from meshloom.trainer.run import train

train.Config:
  model = @npz_rows.Linear()
  data = @data.ArrayFiles()
  optimizer = @optimizers.AdamW()
  schedule = @schedules.Constant()
  batch_size = 16
  num_steps = 1000
  eval_every = 0
  eval_batches = 1
  save_every = 0
  check_replicas_every = 0
  follow_seconds = 1.5
  probe_network = False

schedules.Constant.value = 0.01
data.ArrayFiles.path = "{path}"
data.ArrayFiles.holdout = 0.1
"""


def write(folder: Path, name: str, rows: int) -> None:
    """Adds a file by renaming it, with contents that follow from its name."""
    if (folder / name).exists():
        return
    draw = np.random.default_rng(sum(name.encode()))
    x = draw.normal(size=(rows, npz_rows.NUM_FEATURES)).astype(np.float32)
    label = np.argmax(x[:, : npz_rows.NUM_CLASSES], -1).astype(np.int32)
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f".{name}"
    np.savez(draft, x=x, label=label)
    draft.rename(folder / name)


def config(folder: Path, **settings) -> train.Config:
    values = {
        "num_steps": 1000,
        "eval_every": 0,
        "eval_batches": 1,
        "save_every": 0,
        "follow": True,
        "follow_seconds": 1.5,
    }
    source = data.ArrayFiles(path=str(folder), holdout=0.1)
    tiny = npz_rows.config("", data=source)
    return dataclasses.replace(tiny, **(values | settings))


@dataclasses.dataclass
class Adds:
    """A hook that adds files to a folder after given steps."""

    folder: Path
    files: list[tuple[int, str, int]]
    kill_at: int = -1
    every: int = 1

    def __call__(self, step: int, state) -> None:
        for at, name, rows in self.files if jax.process_index() == 0 else ():
            if at == step:
                write(self.folder, name, rows)
        if step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def history(folder: Path) -> dict[int, tuple[int, str]]:
    """The batch and the samples of each step; of steps that were repeated, the last."""
    rows = ledger.Ledger(folder, is_writer=False).read()
    steps = [row for row in rows if row["event"] == "step"]
    return {row["step"]: (row["batch"], row["samples"]) for row in steps}


def adds_from(text: str) -> list[tuple[int, str, int]]:
    parts = (part.split(":") for part in text.split())
    return [(int(step), name, int(rows)) for step, name, rows in parts]


if __name__ == "__main__":
    adds = Adds(
        Path(os.environ["FOLLOWING_FOLDER"]),
        adds_from(os.environ.get("FOLLOWING_ADDS", "")),
        int(os.environ.get("FOLLOWING_KILL", "-1")),
    )
    train.train = functools.partial(train.train, hooks=[adds])
    sys.exit(cli.main())
