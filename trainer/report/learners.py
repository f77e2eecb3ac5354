"""The learners of a training in its report: rounds, staleness, bytes, waiting."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from ...sharding.text import human_bytes, percent, short_number
from ..record import metrics
from .tables import section, table

HEADINGS = (
    *("Learner", "Mesh", "Rounds", "Staleness, mean", "Staleness, max"),
    *("Sent", "Received", "Waiting"),
)


@dataclasses.dataclass(frozen=True)
class Exchanged:
    """What a learner exchanged, from its own metrics.

    Attributes:
      waiting: the share of its time that it waited for others; None if unknown.
    """

    sent: int
    received: int
    waiting: float | None


@dataclasses.dataclass(frozen=True)
class LearnerFiles:
    """One learner: from its folder, and from the commits of the training."""

    name: str
    mesh: str
    rounds: int
    ages: Sequence[int]
    exchanged: Exchanged


def exchanged(rows: Sequence[Mapping[str, Any]]) -> Exchanged | None:
    """Returns what a run exchanged; None if it trained alone."""
    rows = [row for row in rows if "pushed_bytes" in row]
    if not rows:
        return None
    seconds, waited = 0.0, 0.0
    for before, row in zip(rows, rows[1:], strict=False):
        # A restart loses time, but does not wait.
        if row["step"] > before["step"] and "exchange_wait_s" in row:
            seconds += row["time"] - before["time"]
            waited += row["exchange_wait_s"]
    return Exchanged(
        sent=int(sum(row["pushed_bytes"] for row in rows)),
        received=int(sum(row["pulled_bytes"] for row in rows)),
        waiting=min(waited / seconds, 1.0) if seconds > 0 else None,
    )


def read_learners(folder: Path) -> tuple[LearnerFiles, ...]:
    """Returns the learners of a training; none if the folder is an ordinary run."""
    commits = folder / "commits.jsonl"
    if not commits.is_file() or not (folder / "learners").is_dir():
        return ()
    ages: dict[str, list[int]] = {}
    for row in metrics.read(commits):
        for part in row["contributions"]:
            if not part["is_reused"]:
                age = row["version"] - 1 - part["base"]
                ages.setdefault(str(part["learner"]), []).append(age)
    homes = [home for home in (folder / "learners").iterdir() if home.is_dir()]
    return tuple(
        _read(home, ages.get(home.name, []))
        for home in sorted(homes, key=lambda home: (len(home.name), home.name))
    )


def _read(home: Path, ages: Sequence[int]) -> LearnerFiles:
    rows, mesh = home / metrics.FILES["train"], ""
    if (environment := home / "environment.json").is_file():
        mesh = json.loads(environment.read_text()).get("mesh", "")
    found = exchanged(metrics.read(rows)) if rows.is_file() else None
    return LearnerFiles(
        home.name, mesh, len(ages), ages, found or Exchanged(0, 0, None)
    )


def learners(found: Sequence[LearnerFiles]) -> str:
    """Returns the section with one row a learner."""
    if not found:
        return ""
    rows = [
        [
            escape(learner.name),
            escape(learner.mesh),
            f"{learner.rounds:,}",
            short_number(float(np.mean(learner.ages))) if learner.ages else "",
            f"{max(learner.ages)}" if learner.ages else "",
            human_bytes(learner.exchanged.sent),
            human_bytes(learner.exchanged.received),
            "" if (share := learner.exchanged.waiting) is None else percent(share, 0),
        ]
        for learner in found
    ]
    numbers = range(2, len(HEADINGS))
    return section("Learners", table(HEADINGS, rows, numbers=numbers))
