"""How far a fleet has come, in numbers and in one line."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .exit_codes import DONE
from .fleet_parts import Learner, Part


def describe(
    learners: Sequence[Learner],
    service: Sequence[Part],
    rows: Sequence[Mapping[str, Any]],
) -> str:
    """Returns the status line.

    Args:
      rows: metrics of recent commits.
    """
    done = sum(part.is_over and part.status == DONE for part in learners)
    groups = {
        "running": sum(part.is_running for part in learners),
        "restarting": sum(part.due is not None for part in learners),
        "done": done,
        "given up": sum(part.is_over for part in learners) - done,
    }
    text = ", ".join(f"{number} {what}" for what, number in groups.items() if number)
    steps = [part.highest for part in learners if part.highest is not None]
    if steps:
        text += f" at step {min(steps)}"
        text += f" to {max(steps)}" * (max(steps) > min(steps))
    if rows:
        text += f"; commit {rows[-1]['step']}"
        about = figures(rows, groups["running"])
        text += f" ({about})" if about else ""
    restarts = sum(part.num_restarts() for part in learners)
    restarts += sum(max(part.starts - 1, 0) for part in service)
    return f"learners: {text}; {count(restarts, 'restart')}"


def count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def last_commit(run: Path) -> int | None:
    """Returns the number of the newest commit in the run folder; None without one."""
    rows = last_rows(run)
    return rows[-1]["step"] if rows else None


def last_rows(run: Path) -> list[dict[str, Any]]:
    """Returns the metrics of the newest commits in the run folder, some 40 of them."""
    try:
        with open(run / "metrics.jsonl", "rb") as rows:
            rows.seek(max(0, rows.seek(0, 2) - 10_000))
            lines = rows.read().splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue  # the row that is being written, or the end of a long one
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            found.append(row)
    return found


def figures(rows: Sequence[Mapping[str, Any]], learners: int) -> str:
    """Returns what recent commits were like; an empty string if they do not say.

    Args:
      learners: how many take part: each waits once a round, and a round of all of them
        is as many contributions.
    """
    names = ("time", "bytes", "staleness", "wait_s", "learners")
    rows = [row for row in rows if all(name in row for name in names)]
    seconds = rows[-1]["time"] - rows[0]["time"] if rows else 0
    if seconds <= 0:
        return ""
    new = rows[1:]
    sent, parts = (sum(row[name] for row in new) for name in ("bytes", "learners"))
    waited = sum(row["wait_s"] * row["learners"] for row in new)
    share = min(waited / (seconds * max(learners, 1)), 1.0)
    return (
        f"{len(new) / seconds:.2g} commits/s of {parts / len(new):.2g} contributions, "
        f"staleness up to {max(row['staleness'] for row in new)}, "
        f"{sent / seconds / 1e6:.2g} MB/s sent, {share:.0%} of the time waiting"
    )
