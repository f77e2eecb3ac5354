"""The header of a report: the status of the run and its key numbers."""

from html import escape
from typing import Any

import numpy as np

from ...sharding.text import duration, human_bytes, percent, short_number
from .data import RATE, RunFiles, columns, training_seconds
from .learners import exchanged

Figure = tuple[str, str, str]  # name, value, note
_NUM_LAST = 50
_MAX_HELD_OUT = 3


def header(run: RunFiles) -> str:
    """Returns the name, the status, any warning, and the key numbers."""
    step, total = run.last_step, run.total_steps
    unit = "commits" if run.learners else "steps"
    if run.stopped is not None:
        number = f"{unit.removesuffix('s')} {step}"
        number += "" if run.learners else f" of {total}"
        state = f"<b>Complete</b>: stopped at {number}, because {escape(run.stopped)}"
    elif run.is_complete:
        state = f"<b>Complete</b>: {step} {unit}"
    elif total is None:
        state = f"<b>At {unit.removesuffix('s')} {step}</b>"
    else:
        state = f"<b>At step {step}</b> of {total}"
    held_out = _scores(run.evals, "Held-out loss", "held out")
    tested = _scores(run.tests, "Test loss", "test")
    figures = [*_training(run), *held_out, *tested, *_speed(run), *_exchange(run)]
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{value}<small>{note}</small></dd></div>"
        for name, value, note in figures
    )
    shown = f'<dl class="figures">{items}</dl>' if items else ""
    return (
        f'<header><p class="kicker">Meshloom run report</p><h1>{escape(run.name)}</h1>'
        f'<p class="state">{state}</p>{_warning(run)}</header>{shown}'
    )


def _warning(run: RunFiles) -> str:
    steps, loss = columns(run.train).get("loss", (np.array([]), np.array([])))
    bad = steps[~np.isfinite(loss)]
    if len(bad) == 0:
        return ""
    which = f"step {bad[0]}" if len(bad) == 1 else f"{len(bad)} steps from {bad[0]} on"
    return (
        f'<p class="warning">The loss is not finite at {which}, shown as a gap and a '
        "dashed line in the charts.</p>"
    )


def _training(run: RunFiles) -> list[Figure]:
    """Returns the final loss, as a mean because single batches vary."""
    found = columns(run.train).get("loss")
    if found is None:
        return []
    steps, values = found[0][-_NUM_LAST:], found[1][-_NUM_LAST:]
    finite = values[np.isfinite(values)]
    mean = short_number(float(finite.mean())) if len(finite) else "not finite"
    note = f"at step {steps[-1]}"
    if len(steps) > 1:
        last = short_number(float(values[-1]))
        note = f"mean of steps {steps[0]} to {steps[-1]}; latest {last}"
    return [("Training loss", mean, note)]


def _scores(rows: list[dict[str, Any]], loss: str, split: str) -> list[Figure]:
    """Returns the numbers of the evaluation with the lowest loss."""
    scored = [row for row in rows if np.isfinite(row.get("loss", np.nan))]
    if not scored:
        return []
    best = min(scored, key=lambda row: row["loss"])
    note = f"at step {best['step']}"
    if len(scored) > 1:
        note = f"lowest of {len(scored)}, {note}"
    figures = [(loss, short_number(best["loss"]), note)]
    for name in columns([best]):
        if name != "loss":
            title = f"{name.replace('_', ' ').capitalize()}, {split}"
            figures.append((title, short_number(best[name]), f"at step {best['step']}"))
    return figures[:_MAX_HELD_OUT]


def _speed(run: RunFiles) -> list[Figure]:
    found, train = [], columns(run.train)
    for name in train:
        if name.endswith(RATE):
            median = short_number(float(np.median(train[name][1])), digits=3)
            unit = name.removesuffix(RATE).capitalize()
            found.append((f"{unit} per second", median, "median"))
    seconds = training_seconds(run.train)
    if seconds is not None:
        found.append(("Time", duration(seconds), "without interruptions"))
    return found


def _exchange(run: RunFiles) -> list[Figure]:
    """Returns what a learner, or all learners of a training, exchanged."""
    if run.learners:
        found = [learner.exchanged for learner in run.learners]
        shares = [x.waiting for x in found if x.waiting is not None]
        sent, received = sum(x.sent for x in found), sum(x.received for x in found)
        waiting = float(np.mean(shares)) if shares else None
        whose = f"of {len(run.learners)} learners"
    elif own := exchanged(run.train):
        sent, received, waiting, whose = own.sent, own.received, own.waiting, ""
    else:
        return []
    figures = [("Sent", human_bytes(sent), f"{human_bytes(received)} received {whose}")]
    if waiting is not None:
        share = percent(waiting, 0)
        figures.append(("Waiting for others", share, f"of the time {whose}"))
    return [(name, value, note.strip()) for name, value, note in figures]
