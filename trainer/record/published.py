"""The pointer to the weights that readers should use: `published.json`.

It names a committed checkpoint and is replaced atomically after each commit, so whoever
reads it finds complete weights, also while the run goes on.
"""

import dataclasses
import json
import os
from pathlib import Path

from ...launch.atomic_file import replace_text

FILE = "published.json"


@dataclasses.dataclass(frozen=True)
class Published:
    """Weights that a run has published.

    Attributes:
      step: the number of updates they have had.
      checkpoint: the folder of the checkpoint, or its address in a bucket.
      time: when they were published, in seconds since 1970.
    """

    step: int
    checkpoint: str
    time: float


def read(folder: str | os.PathLike) -> Published | None:
    """Returns the newest weights of a run folder; None if none were published."""
    path = Path(folder) / FILE
    if not path.exists():
        return None
    try:
        return Published(**json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{path} does not name a checkpoint ({error}). Remove it; the run writes "
            "it again with its next checkpoint."
        ) from error


def write(folder: str | os.PathLike, published: Published) -> None:
    text = json.dumps(dataclasses.asdict(published)) + "\n"
    replace_text(Path(folder) / FILE, text)


def withdraw_after(folder: str | os.PathLike, step: int) -> None:
    """Removes the pointer if it names a later step, which no longer counts."""
    published = read(folder)
    if published is not None and published.step > step:
        (Path(folder) / FILE).unlink()
