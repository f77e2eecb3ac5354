"""A source that can be slow, fail, and kill a process of its job.

MORTAL_SECONDS is how long each example takes, without using a core. MORTAL names the
processes to kill, separated by commas: the first one in attempt 1, the next one in
attempt 2, each after the first checkpoint that its attempt has saved in the folder
MORTAL_CHECKPOINTS. Batches are read a few steps ahead, so there is always one to read
after a checkpoint. MORTAL_BROKEN is the process that can read 100 examples and no more.
"""

import dataclasses
import errno
import math
import os
import signal
import time
from pathlib import Path

from meshloom.trainer import data
from meshloom.trainer.checkpoint.manager import committed_steps


class Mortal:
    """A dataset that waits before each example, or ends its process instead."""

    def __init__(
        self, dataset: data.Dataset, seconds: float, dies: bool, num_readable: float
    ):
        self._dataset, self._seconds, self._dies = dataset, seconds, dies
        self._num_readable = num_readable
        self._before = _checkpoints() if dies else []

    def __getattr__(self, name):
        return getattr(self._dataset, name)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, i: int):
        if self._dies and _checkpoints() > self._before:
            os.kill(os.getpid(), signal.SIGKILL)
        self._num_readable -= 1
        if self._num_readable < 0:
            raise OSError(errno.EIO, "Input/output error", "disk")
        time.sleep(self._seconds)
        return self._dataset[i]


def _checkpoints() -> list[int]:
    """The newest one, if there is any; later ones compare as larger."""
    return list(committed_steps(Path(os.environ["MORTAL_CHECKPOINTS"])))[-1:]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Synthetic(data.Synthetic):
    def open(self, split):
        process, dies = os.environ.get("MESHLOOM_PROCESS_ID"), False
        if split == "train" and (mortal := os.environ.get("MORTAL")):
            attempt = int(os.environ["MESHLOOM_ATTEMPT"])
            chosen = mortal.split(",")[attempt - 1 : attempt]
            dies = chosen == [process]
        seconds = float(os.environ.get("MORTAL_SECONDS", 0))
        is_broken = process is not None and process == os.environ.get("MORTAL_BROKEN")
        num_readable = 100 if is_broken else math.inf
        return Mortal(super().open(split), seconds, dies, num_readable)
