"""The history of a run that begins anew is kept, and never written over in silence."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from . import ledger as ledger_lib
from . import metrics
from .ledger import Ledger

NAMES = (*metrics.FILES.values(), ledger_lib.FILE, "tensorboard")


@dataclasses.dataclass(frozen=True)
class Anew:
    """Where the history is, by its name in the run folder, and why it ended."""

    history: str
    reason: str


def begin_anew(folder: Path, ledger: Ledger, say: Callable[[str], None]) -> Anew | None:
    """Says what becomes of steps that were done and that no checkpoint is left of.

    Where there were checkpoints, figures and ledger are moved into a folder of their
    own. A run that died before its first one only does its steps again.

    Returns None where nothing was moved.
    """
    rows = ledger.read()
    done = max((row["step"] for row in rows if row["event"] == "step"), default=0)
    if not done:
        return None
    saved = [row["step"] for row in rows if row["event"] in ("commit", "restore")]
    if not saved:
        say(f"No checkpoint was saved before: steps 1 to {done} are done again.")
        return None
    aside = _free_name(folder)
    aside.mkdir()
    moved = [name for name in NAMES if (folder / name).exists()]
    for name in moved:
        (folder / name).rename(aside / name)
    say(
        f"This run had checkpoints, up to step {max(saved)}, and none is left to go on "
        f"from: it starts anew at step 0. Its history until now ({', '.join(moved)}) "
        f"is in {aside}."
    )
    last = max(i for i, row in enumerate(rows) if row["event"] in ("step", "restore"))
    torn = [row["reason"] for row in rows[last:] if row["event"] == "set_aside"]
    return Anew(aside.name, "; ".join(torn) or "its checkpoints were removed")


def _free_name(folder: Path) -> Path:
    number = 1
    while (found := folder / f"earlier-{number}").exists():
        number += 1
    return found
