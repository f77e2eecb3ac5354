"""How far a fleet has come, in numbers and in one line."""

import json
from collections.abc import Sequence
from pathlib import Path

from .exit_codes import DONE
from .fleet_parts import Learner, Part


def describe(
    learners: Sequence[Learner], service: Sequence[Part], commit: int | None
) -> str:
    """Returns the status line."""
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
    if commit is not None:
        text += f"; commit {commit}"
    restarts = sum(part.num_restarts() for part in learners)
    restarts += sum(max(part.starts - 1, 0) for part in service)
    return f"learners: {text}; {count(restarts, 'restart')}"


def count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def last_commit(run: Path) -> int | None:
    """Returns the number of the newest commit in the run folder; None without one."""
    try:
        with open(run / "metrics.jsonl", "rb") as rows:
            rows.seek(max(0, rows.seek(0, 2) - 10_000))
            lines = rows.read().splitlines()
    except FileNotFoundError:
        return None
    for line in reversed(lines):
        try:
            return json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            continue  # the row that is being written, or the end of a long one
    return None
