"""A source that kills one process of a job, once, after the first checkpoint.

MORTAL is the number of the process, MORTAL_CHECKPOINTS the folder to look at. Batches
are read a few steps ahead, so there is always one to read after a checkpoint.
"""

import dataclasses
import os
import signal
from pathlib import Path

from meshloom.trainer import data
from meshloom.trainer.checkpoint.manager import committed_steps


class Mortal:
    """A dataset that ends its process instead of giving an example."""

    def __init__(self, dataset: data.Dataset):
        self._dataset = dataset

    def __getattr__(self, name):
        return getattr(self._dataset, name)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, i: int):
        if committed_steps(Path(os.environ["MORTAL_CHECKPOINTS"])):
            os.kill(os.getpid(), signal.SIGKILL)
        return self._dataset[i]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Synthetic(data.Synthetic):
    def open(self, split):
        is_chosen = os.environ["MESHLOOM_PROCESS_ID"] == os.environ.get("MORTAL")
        dies = is_chosen and os.environ["MESHLOOM_ATTEMPT"] == "1" and split == "train"
        return Mortal(super().open(split)) if dies else super().open(split)
