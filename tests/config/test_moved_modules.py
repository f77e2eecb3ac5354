"""Tests that configs which import modules by their old names still load."""

import json

import pytest

from meshloom.trainer.config import tree
from meshloom.trainer.config.files import load
from meshloom.trainer.config.modules import MOVED
from meshloom.trainer.record.run_folder import RunFolder
from meshloom.trainer.run.train import Config

# Uses a class of every module in MOVED; `tokenizer` has no config nodes.
BODY = """
train.Config:
  model = @transformer.Config()
  data = @sources.Synthetic()
  optimizer = @optimizers.AdamW()
  schedule = @schedules.Constant()
  pipeline = @pipelining.Pipelining()
  batch_size = 8
  num_steps = 2

transformer.Config:
  vocab_size = 16
  num_layers = 2
  d_model = 8
  num_heads = 2
  d_ff = 16
  max_length = 8

sources.Synthetic:
  vocab_size = 16
  length = 8
pipelining.Pipelining.schedule = "gpipe"
schedules.Constant.value = 0.001
"""


def write(path, names, style="from"):
    lines = ["from __gin__ import dynamic_registration"]
    lines.append("from meshloom.models import transformer")
    for name in names:
        package, _, module = name.rpartition(".")
        if style == "from":
            lines.append(f"from {package} import {module}")
        else:
            lines.append(f"import {name} as {module}")
    path.write_text("\n".join(lines) + "\n" + BODY)
    return str(path)


@pytest.fixture
def current(tmp_path):
    return load([write(tmp_path / "new.gin", MOVED.values())], root=Config)


@pytest.mark.parametrize("style", ["from", "as"])
def test_a_config_file_with_every_old_name(tmp_path, current, style):
    old = write(tmp_path / "old.gin", MOVED, style)
    loaded = load([old], ["optimizers.AdamW.b1=0.9"], root=Config)
    assert loaded.config == current.config
    # The text that is written to the run folder has only new names.
    assert not any(f" {name}\n" in loaded.text for name in MOVED)
    assert not current.notes
    assert len(loaded.notes) == len(MOVED)
    for number, (name, note) in enumerate(zip(MOVED, loaded.notes, strict=True)):
        assert note == (
            f"{old}:{number + 3}: {name} has moved to {MOVED[name]}; the old name still"
            " works"
        )
        assert note.count(MOVED[name]) == 1


def test_an_import_without_an_alias(tmp_path):
    path = tmp_path / "old.gin"
    path.write_text(
        "from __gin__ import dynamic_registration\n"
        "import meshloom.trainer.schedules\n"
        'include "new.gin"\n'
        "meshloom.trainer.schedules.Constant.value = 0.5\n"
    )
    write(tmp_path / "new.gin", MOVED.values())
    assert load([str(path)], root=Config).config.schedule.value == 0.5


def test_a_name_is_noted_once_for_several_files(tmp_path):
    files = [write(tmp_path / name, MOVED) for name in ("a.gin", "b.gin")]
    notes = load(files, root=Config).notes
    assert len(notes) == len(MOVED)
    assert all(note.startswith(f"{files[0]}:") for note in notes)


def test_a_run_folder_with_every_old_name(tmp_path, current):
    """A run folder of an earlier version can be resumed with its own config.gin."""
    folder = tmp_path / "run"
    folder.mkdir()
    text = current.text
    for old, new in MOVED.items():
        package, _, module = new.rpartition(".")
        old_package = old.rpartition(".")[0]
        text = text.replace(
            f"from {package} import {module}\n", f"from {old_package} import {module}\n"
        )
    (folder / "config.gin").write_text(text)
    document = tree.to_json(current.config, current.origins)
    (folder / "config.json").write_text(json.dumps(document))
    resumed = load([str(folder / "config.gin")], root=Config)
    # The text imports only the modules whose classes it uses.
    used = [old for old in MOVED if not old.endswith("tokenizer")]
    assert {note.split(": ")[1].split(" ")[0] for note in resumed.notes} == set(used)
    assert tree.digest(resumed.config) == document["digest"]
    assert RunFolder(folder).check(resumed.config, free=(), insist=False) == []
