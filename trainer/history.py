"""The history of a run that begins anew is kept, and never written over in silence."""

from collections.abc import Callable
from pathlib import Path

from . import ledger as ledger_lib
from . import metrics
from .ledger import Ledger

NAMES = (*metrics.FILES.values(), ledger_lib.FILE, "tensorboard")


def begin_anew(folder: Path, ledger: Ledger, say: Callable[[str], None]) -> str | None:
    """Says what becomes of steps that were done and that no checkpoint is left of.

    Where there were checkpoints, figures and ledger are moved into a folder of their
    own. A run that died before its first one only does its steps again.

    Returns the folder's name, None where nothing was moved.
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
    return aside.name


def _free_name(folder: Path) -> Path:
    number = 1
    while (found := folder / f"earlier-{number}").exists():
        number += 1
    return found
