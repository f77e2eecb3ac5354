"""What a process of a job saw: examples it read, pieces it held, files it wrote.

Run as a program, it is the command `meshloom` with a hook of its own. Each process
writes into the folder RECORDING_FOLDER, into files that carry its number.
"""

import dataclasses
import functools
import json
import os
import sys
from pathlib import Path

import jax
import numpy as np

from meshloom.trainer import cli, data
from meshloom.trainer.program.state import Layout
from meshloom.trainer.run import train


def folder() -> Path:
    return Path(os.environ["RECORDING_FOLDER"])


class Recorded:
    """A dataset that notes in a file which examples it was asked for."""

    def __init__(self, dataset: data.Dataset, file: Path):
        self._dataset = dataset
        self._file = file

    def __getattr__(self, name):
        return getattr(self._dataset, name)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, i: int):
        with open(self._file, "a") as file:
            file.write(f"{i}\n")
        return self._dataset[i]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text(data.Text):
    """Text files; what a process reads of each split is noted."""

    def open(self, split):
        process = jax.process_index()
        file = folder() / f"{split}-{process}.txt"
        return Recorded(super().open(split), file)


@dataclasses.dataclass
class Pieces:
    """Keeps this process's pieces of a state."""

    every: int = 0  # at the end only

    def __call__(self, step: int, state) -> None:
        pieces = {}
        for path, array in jax.tree.flatten_with_path(state)[0]:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            for shard in array.addressable_shards:
                sizes = zip(shard.index, array.shape, strict=True)
                where = json.dumps([cut.indices(size)[:2] for cut, size in sizes])
                pieces[f"{name}|{shard.device.id}|{where}"] = np.asarray(shard.data)
        np.savez(folder() / f"pieces-{step}-{jax.process_index()}.npz", **pieces)


def create_and_keep(layout, key, mesh, *, create=Layout.create):
    """The layout's own `create`, with the new state kept as step 0."""
    state = create(layout, key, mesh)
    Pieces()(0, state)
    return state


def note_files(event: str, args: tuple) -> None:
    """Notes each file that Python opens to write, and each that it moves."""
    if event == "open" and isinstance(args[0], str | bytes | Path):
        path, writes = args[0], args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    elif event == "os.rename":
        path, writes = args[1], True
    else:
        return
    path = os.path.abspath(os.fsdecode(path))
    if writes and not path.startswith(str(folder())):
        number = os.environ.get("MESHLOOM_PROCESS_ID", "0")
        with open(folder() / f"written-{number}.txt", "a") as file:
            file.write(f"{path}\n")


if __name__ == "__main__":
    sys.addaudithook(note_files)
    Layout.create = create_and_keep
    train.train = functools.partial(train.train, hooks=[Pieces()])
    sys.exit(cli.main())
