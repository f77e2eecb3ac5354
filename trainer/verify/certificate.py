"""What a certificate says of one resumed run, judged by two run folders alone.

Three levels: `state`, the arrays that training went on with are those that were saved;
`data`, each step had the samples of the uninterrupted run; `trajectory`, the losses
after the resume are equal bit for bit on the same mesh, and close on another.
"""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...sharding.text import align
from ..checkpoint import manifest
from ..record import metrics
from ..record.ledger import Ledger
from ..record.ledger_audit import audit
from ..record.run_folder import RunFolder

LEVELS = ("state", "data", "trajectory")


@dataclasses.dataclass(frozen=True)
class Level:
    """One level of one mesh.

    Attributes:
      words: for the table if it passed; otherwise what is wrong.
      facts: digests and figures, for the JSON.
    """

    passed: bool
    words: str
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Row:
    """One mesh; `levels` are those of LEVELS."""

    mesh: str
    devices: int
    processes: int
    seconds: float
    levels: dict[str, Level]

    @property
    def passed(self) -> bool:
        return all(level.passed for level in self.levels.values())

    def to_json(self) -> dict[str, Any]:
        levels = {
            name: {"passed": level.passed, "words": level.words, **level.facts}
            for name, level in self.levels.items()
        }
        return {
            "mesh": self.mesh,
            "devices": self.devices,
            "processes": self.processes,
            "seconds": round(self.seconds, 1),
            **levels,
            "passed": self.passed,
        }


def judge(
    reference: Path, resumed: Path, *, save_at: int, steps: int, drift: float | None
) -> dict[str, Level]:
    """The levels of a run that was resumed at `save_at` and trained to `steps`.

    Args:
      reference: the folder of the run without interruption.
      drift: the largest relative difference of a loss; None asks for equal bits.
    """
    return {
        "state": _state(reference, resumed, save_at),
        "data": data_level(reference, resumed, steps),
        "trajectory": _trajectory(reference, resumed, save_at, steps, drift),
    }


def failed(reason: str) -> dict[str, Level]:
    """The levels of a run that came to no end."""
    return {name: Level(False, reason) for name in LEVELS}


def state_at(folder: Path, step: int) -> str:
    """The digest of the state of a run as it was saved, before it was written."""
    return manifest.state_digest(manifest.read(RunFolder(folder).checkpoints, step))


def table(rows: Sequence[Row]) -> str:
    """The meshes, and below them what is wrong, if anything."""
    cells: list[Sequence[str]] = [("mesh", "devices", "processes", *LEVELS, "seconds")]
    for row in rows:
        words = (x.words if x.passed else "FAILED" for x in row.levels.values())
        counts = (str(row.devices), str(row.processes))
        cells.append((row.mesh, *counts, *words, f"{row.seconds:.1f}"))
    lines = [align(cells, right=(1, 2, 6))]
    for row in rows:
        wrong = {k: x.words for k, x in row.levels.items() if not x.passed}
        if len(set(wrong.values())) == 1 and len(wrong) == len(LEVELS):
            lines.append(f"{row.mesh}: {wrong['state']}")
        else:
            lines += [f"{row.mesh}, {name}: {text}" for name, text in wrong.items()]
    return "\n".join(lines)


def _state(reference: Path, resumed: Path, save_at: int) -> Level:
    saved = state_at(reference, save_at)
    events = Ledger(resumed, is_writer=False).read()
    last = max(i for i, row in enumerate(events) if row["event"] == "start")
    restores = [row for row in events[last:] if row["event"] == "restore"]
    if not restores:
        kinds = ("set_aside", "anew")
        aside = [row["reason"] for row in events[last:] if row["event"] in kinds]
        why = aside[0] if aside else "the run began anew"
        return Level(False, f"nothing was restored: {why}", {"saved": saved})
    found = restores[0]
    facts = {"saved": saved, "restored": found["state"]}
    if found["step"] != save_at:
        words = f"step {found['step']} was restored, expected {save_at}"
        return Level(False, words, facts)
    if found["state"] != saved:
        words = f"digest {found['state']} after the restore, {saved} before the save"
        return Level(False, words, facts)
    return Level(True, "exact", facts)


def data_level(reference: Path, resumed: Path, steps: int) -> Level:
    """Whether steps 1 to `steps` had the same samples, and each sample one step."""
    here, there = audit(resumed), audit(reference)
    for name, found in (("resumed", here), ("reference", there)):
        if found.faults:
            return Level(False, f"audit of the {name} run: {found.faults[0]}")
    ours, theirs = (
        {s.step: (s.batch, s.samples, s.skipped) for s in found.history}
        for found in (here, there)
    )
    facts = {"steps": len(ours)}
    for step in range(1, steps + 1):
        if (mine := ours.get(step)) != (other := theirs.get(step)):
            words = f"step {step} has {_batch(mine)}, in the reference {_batch(other)}"
            return Level(False, words, facts)
    return Level(True, "exact", facts)


def _batch(found: tuple[int, str, bool] | None) -> str:
    if found is None:
        return "no row in the ledger"
    batch, samples, skipped = found
    return f"batch {batch} with samples {samples}{', left out' if skipped else ''}"


def _trajectory(
    reference: Path, resumed: Path, save_at: int, steps: int, drift: float | None
) -> Level:
    largest, at = largest_drift(reference, resumed, range(save_at + 1, steps + 1))
    if largest is None:
        return Level(False, f"metrics.jsonl has no loss of step {at}")
    facts = {
        "largest_drift": largest if math.isfinite(largest) else None,
        "at_step": at if largest else None,
        "bit_equal": largest == 0,
        "final_state": state_at(resumed, steps),
    }
    words = f"{largest:.1e} at step {at}" if largest else "losses equal"
    if drift is not None:
        if not largest <= drift:
            words = f"the loss differs by {words}, allowed is {drift:.1e}"
        return Level(largest <= drift, words, facts)
    if largest:
        return Level(False, f"same mesh, but the loss differs by {words}", facts)
    if facts["final_state"] != (expected := state_at(reference, steps)):
        words = (
            f"same mesh and losses, but the last state has digest "
            f"{facts['final_state']}, in the reference {expected}"
        )
        return Level(False, words, facts)
    return Level(True, "bit-equal", facts)


def largest_drift(
    reference: Path, resumed: Path, steps: range
) -> tuple[float | None, int]:
    """Of the losses, relative, and at which step; (None, step) where one is missing."""
    ours, theirs = _losses(resumed), _losses(reference)
    for step in steps:
        if step not in ours or step not in theirs:
            return None, step
    apart = [(_relative(theirs[step], ours[step]), -step) for step in steps]
    largest, at = max(apart)
    return largest, -at


def _losses(folder: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in metrics.read(folder / "metrics.jsonl")}


def _relative(expected: float, found: float) -> float:
    """0 for equal bits, and infinite where the difference is no number."""
    if float(expected).hex() == float(found).hex():
        return 0.0
    gap = abs(found - expected)
    if not math.isfinite(gap) or expected == 0:
        return math.inf
    return gap / abs(expected)
