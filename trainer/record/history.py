"""Archives the history of a run that starts over, instead of overwriting it."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from . import ledger as ledger_lib
from . import metrics
from .ledger import Ledger

NAMES = (*metrics.FILES.values(), ledger_lib.FILE, "tensorboard")


@dataclasses.dataclass(frozen=True)
class Archived:
    """An archived history.

    Attributes:
      history: name of its folder in the run folder.
      reason: why the run starts over.
    """

    history: str
    reason: str


def archive(
    folder: Path, ledger: Ledger, say: Callable[[str], None]
) -> Archived | None:
    """Archives the metrics and the ledger of a run that has lost all its checkpoints.

    A run that died before its first checkpoint has nothing to archive: it repeats its
    steps, and a line says so.

    Returns:
      The archive, or None if nothing was moved.
    """
    rows = ledger.read()
    done = max((row["step"] for row in rows if row["event"] == "step"), default=0)
    if not done:
        return None
    saved = [row["step"] for row in rows if row["event"] in ("commit", "restore")]
    if not saved:
        say(f"No checkpoint was saved: steps 1 to {done} will be repeated.")
        return None
    archive_folder = _unused_name(folder)
    archive_folder.mkdir()
    moved = [name for name in NAMES if (folder / name).exists()]
    for name in moved:
        (folder / name).rename(archive_folder / name)
    say(
        f"This run had checkpoints up to step {max(saved)}, but none is left to resume "
        f"from: it starts over at step 0. Its history so far ({', '.join(moved)}) is "
        f"in {archive_folder}."
    )
    last = max(i for i, row in enumerate(rows) if row["event"] in ("step", "restore"))
    corrupt = [row["reason"] for row in rows[last:] if row["event"] == "set_aside"]
    reason = "; ".join(corrupt) or "its checkpoints were removed"
    return Archived(archive_folder.name, reason)


def _unused_name(folder: Path) -> Path:
    number = 1
    while (path := folder / f"earlier-{number}").exists():
        number += 1
    return path
