"""What a process of a job saw: the examples it read and the pieces of arrays it held.

Run as a program, it is the command `meshloom` with a hook of its own. Each process
writes into the folder RECORDING_FOLDER, into files that carry its number.
"""

import dataclasses
import functools
import os
import sys
from pathlib import Path

import jax
import numpy as np

from meshloom.trainer import cli, data, train


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
        file = folder() / f"{split}-{jax.process_index()}.txt"
        return Recorded(super().open(split), file)


@dataclasses.dataclass
class Pieces:
    """Keeps this process's pieces of the state after the first step.

    The learning rate of the first update is 0, so the parameters are the initial ones.
    """

    every: int = 1

    def __call__(self, step: int, state) -> None:
        if step != 1:
            return
        self.every = 0
        pieces = {}
        for path, array in jax.tree.flatten_with_path(state)[0]:
            for shard in array.addressable_shards:
                name = f"{jax.tree_util.keystr(path, simple=True, separator='/')}"
                where = str([s.indices(n)[:2] for s, n in _dims(shard, array)])
                pieces[f"{name}|{shard.device.id}|{where}"] = np.asarray(shard.data)
        np.savez(folder() / f"pieces-{jax.process_index()}.npz", **pieces)


def _dims(shard, array):
    return zip(shard.index, array.shape, strict=True)


if __name__ == "__main__":
    train.train = functools.partial(train.train, hooks=[Pieces()])
    sys.exit(cli.main())
