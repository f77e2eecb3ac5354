"""A run on a mixture whose processes can kill themselves; see growing_folder.py."""

import dataclasses
from pathlib import Path

import growing_folder
import npz_rows

from meshloom.trainer import data
from meshloom.trainer.run import train

ROWS = {"few": 24, "many": 150}
CONFIG = """
from __gin__ import dynamic_registration

import npz_rows
from meshloom.trainer import data
from meshloom.trainer.program import optimizers
from meshloom.trainer.program import schedules
from meshloom.trainer.run import train

train.Config:
  model = @npz_rows.Linear()
  data = @data.Mixture()
  optimizer = @optimizers.AdamW()
  schedule = @schedules.Constant()
  batch_size = 16
  num_steps = 14
  eval_batches = 0
  save_every = 3
  check_replicas_every = 0
  probe_network = False

data.Mixture:
  sources = {"few": @few/data.ArrayFiles(), "many": @many/data.ArrayFiles()}
  weights = {"few": 0.3, "many": 0.7}
  weights_from = {9: {"few": 0.6, "many": 0.4}}

schedules.Constant.value = 0.01
"""


def write(folder: Path) -> str:
    """Writes the files of the sources; returns the text of a config."""
    text = CONFIG
    for name, rows in ROWS.items():
        growing_folder.write(folder / name, f"{name}.npz", rows)
        text += f"{name}/data.ArrayFiles.path = {str(folder / name)!r}\n"
    return text


def config(folder: Path) -> train.Config:
    sources = {name: data.ArrayFiles(path=str(folder / name)) for name in ROWS}
    mixture = data.Mixture(
        sources=sources,
        weights={"few": 0.3, "many": 0.7},
        weights_from={9: {"few": 0.6, "many": 0.4}},
    )
    tiny = npz_rows.config("", data=mixture, save_every=3, eval_batches=0)
    return dataclasses.replace(tiny, num_steps=14)
