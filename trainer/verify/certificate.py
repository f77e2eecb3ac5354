"""Compares a resumed run with an uninterrupted one, from their run folders alone.

There are three levels. `state`: the restored arrays are the ones that were saved.
`data`: every step used the samples of the uninterrupted run. `trajectory`: after the
resume the losses are bit-equal on the same mesh, and within a tolerance on another.
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
    """One level of the comparison on one mesh.

    Attributes:
      passed: whether the level holds.
      summary: the table cell if the level passed, otherwise what is wrong.
      facts: digests and numbers for the JSON document.
    """

    passed: bool
    summary: str
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class MeshResult:
    """The result on one mesh, with one entry in `levels` for each of LEVELS."""

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
            name: {"passed": level.passed, "words": level.summary, **level.facts}
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
    """Judges a run that was resumed at step `save_at` and trained to `steps`.

    Args:
      reference: the folder of the uninterrupted run.
      resumed: the folder of the resumed run.
      save_at: the step that was restored.
      steps: the last step of both runs.
      drift: the largest relative difference allowed in a loss; None requires
        bit-equal losses and final state.

    Returns:
      The result of each level, keyed by its name.
    """
    return {
        "state": _state(reference, resumed, save_at),
        "data": data_level(reference, resumed, steps),
        "trajectory": _trajectory(reference, resumed, save_at, steps, drift),
    }


def failed(reason: str) -> dict[str, Level]:
    """Returns the levels of a run that did not finish: all failed for `reason`."""
    return {name: Level(False, reason) for name in LEVELS}


def state_at(folder: Path, step: int) -> str:
    """Returns the digest that was taken of a run's state before it was written."""
    return manifest.state_digest(manifest.read(RunFolder(folder).checkpoints, step))


def table(results: Sequence[MeshResult]) -> str:
    """Formats one line per mesh, followed by the reason of each failure."""
    cells: list[Sequence[str]] = [("mesh", "devices", "processes", *LEVELS, "seconds")]
    for result in results:
        levels = result.levels.values()
        summaries = (x.summary if x.passed else "FAILED" for x in levels)
        counts = (str(result.devices), str(result.processes))
        cells.append((result.mesh, *counts, *summaries, f"{result.seconds:.1f}"))
    lines = [align(cells, right=(1, 2, 6))]
    for result in results:
        mesh = result.mesh
        wrong = {k: x.summary for k, x in result.levels.items() if not x.passed}
        if len(set(wrong.values())) == 1 and len(wrong) == len(LEVELS):
            lines.append(f"{mesh}: {wrong['state']}")
        else:
            lines += [f"{mesh}, {name}: {text}" for name, text in wrong.items()]
    return "\n".join(lines)


def _state(reference: Path, resumed: Path, save_at: int) -> Level:
    saved = state_at(reference, save_at)
    events = Ledger(resumed, is_writer=False).read()
    last = max(i for i, row in enumerate(events) if row["event"] == "start")
    restores = [row for row in events[last:] if row["event"] == "restore"]
    if not restores:
        kinds = ("set_aside", "anew")
        aside = [row["reason"] for row in events[last:] if row["event"] in kinds]
        why = aside[0] if aside else "the run started from scratch"
        return Level(False, f"nothing was restored: {why}", {"saved": saved})
    found = restores[0]
    facts = {"saved": saved, "restored": found["state"]}
    if found["step"] != save_at:
        problem = f"restored step {found['step']}, expected {save_at}"
        return Level(False, problem, facts)
    if found["state"] != saved:
        problem = f"restored digest {found['state']} differs from saved digest {saved}"
        return Level(False, problem, facts)
    return Level(True, "exact", facts)


def data_level(reference: Path, resumed: Path, steps: int) -> Level:
    """Checks that steps 1 to `steps` used the same samples, each exactly once."""
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
            problem = f"step {step} has {_batch(mine)}, the reference {_batch(other)}"
            return Level(False, problem, facts)
    return Level(True, "exact", facts)


def _batch(found: tuple[int, str, bool] | None) -> str:
    if found is None:
        return "no row in the ledger"
    batch, samples, skipped = found
    return f"batch {batch} with samples {samples}{', skipped' if skipped else ''}"


def _trajectory(
    reference: Path, resumed: Path, save_at: int, steps: int, drift: float | None
) -> Level:
    largest, at = largest_drift(reference, resumed, range(save_at + 1, steps + 1))
    if largest is None:
        return Level(False, f"metrics.jsonl has no loss for step {at}")
    facts = {
        "largest_drift": largest if math.isfinite(largest) else None,
        "at_step": at if largest else None,
        "bit_equal": largest == 0,
        "final_state": state_at(resumed, steps),
    }
    summary = f"{largest:.1e} at step {at}" if largest else "losses equal"
    if drift is not None:
        if not largest <= drift:
            summary = f"the loss differs by {summary}, more than --drift {drift:.1e}"
        return Level(largest <= drift, summary, facts)
    if largest:
        return Level(False, f"same mesh, but the loss differs by {summary}", facts)
    if facts["final_state"] != (expected := state_at(reference, steps)):
        problem = (
            f"same mesh and losses, but the final state has digest "
            f"{facts['final_state']}, the reference {expected}"
        )
        return Level(False, problem, facts)
    return Level(True, "bit-equal", facts)


def largest_drift(
    reference: Path, resumed: Path, steps: range
) -> tuple[float | None, int]:
    """Finds the largest relative difference between the losses of two runs.

    Returns:
      The difference and its step, or (None, step) for the first step without a loss.
    """
    ours, theirs = _losses(resumed), _losses(reference)
    for step in steps:
        if step not in ours or step not in theirs:
            return None, step
    differences = [(_relative(theirs[step], ours[step]), -step) for step in steps]
    largest, at = max(differences)
    return largest, -at


def _losses(folder: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in metrics.read(folder / "metrics.jsonl")}


def _relative(expected: float, found: float) -> float:
    """Returns 0 for equal bits, and infinity where the difference is not finite."""
    if float(expected).hex() == float(found).hex():
        return 0.0
    gap = abs(found - expected)
    if not math.isfinite(gap) or expected == 0:
        return math.inf
    return gap / abs(expected)
