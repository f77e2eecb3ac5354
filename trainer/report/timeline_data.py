"""Who was up when: read from the logs of supervisors, and from ledgers without them."""

import bisect
import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..record import metrics
from ..record.ledger import FILE as LEDGER
from ..record.metrics import Row

EVENTS = Path("logs", "supervisor.jsonl")
SERVICE_EVENTS = Path("service", "log", "events.jsonl")  # in the folder of a fleet
# Events of a supervisor after which its processes are no longer up.
ENDINGS = ("death", "stall", "done", "failed", "stop", "finished", "gave up")
MARKS = {"death": "death", "stall": "stall", "gave up": "death"}


@dataclasses.dataclass(frozen=True)
class Mark:
    """Something that happened at a time: "death", "stall" or "resize"."""

    time: float
    kind: str
    text: str


@dataclasses.dataclass
class Lane:
    """One learner, a part of the service, or a run.

    Attributes:
      spans: (start, end) of each time that it was up.
    """

    name: str
    spans: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    marks: list[Mark] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Timeline:
    """What happened when; times are Unix times.

    Attributes:
      what: what `commits` are: "commits", or "checkpoints" of an ordinary run.
      commits: when each was made.
      taken_back: when commits were made that a restart took back.
    """

    what: str
    lanes: Sequence[Lane]
    commits: Sequence[float]
    taken_back: Sequence[float]


def read_timeline(folder: Path, learners: Sequence[str]) -> Timeline | None:
    """Returns the timeline of a run folder; None if there is nothing to tell.

    Args:
      learners: their names, if the folder is that of a training between learners.
    """
    if learners:
        homes = {f"learner {name}": folder / "learners" / name for name in learners}
        lanes = _service(_rows(folder / EVENTS))
        lanes += _copies(_rows(folder / SERVICE_EVENTS))
        lanes += [_lane(name, home) for name, home in homes.items()]
        commits = _times(_rows(folder / "commits.jsonl"))
        back = _times(_rows(folder / "abandoned.jsonl"))
        found = Timeline("commits", lanes, commits, back)
    else:
        rows = _rows(folder / LEDGER)
        commits = _times(row for row in rows if row["event"] == "commit")
        found = Timeline("checkpoints", [_lane("run", folder)], commits, ())
        if not any(lane.marks for lane in found.lanes):
            return None  # one bar from the beginning to the end
    return found if any(lane.spans for lane in found.lanes) else None


def _lane(name: str, folder: Path) -> Lane:
    """Returns the lane of a run folder."""
    ledger = _rows(folder / LEDGER)
    signs = sorted(_times([*_rows(folder / metrics.FILES["train"]), *ledger]))
    if (rows := _rows(folder / EVENTS)) and any(r["event"] == "start" for r in rows):
        return _supervised(name, rows, signs)
    return _recorded(name, ledger, signs)


def _supervised(name: str, rows: Iterable[Row], signs: Sequence[float]) -> Lane:
    """Returns the lane of processes that a supervisor has watched.

    Args:
      signs: times at which they did something, sorted.
    """
    lane, since = Lane(name), None
    for row in rows:
        kind, time = row["event"], row["time"]
        if kind == "start":
            if since is not None:  # its supervisor was killed, too
                end = _last(signs, since, time)
                lane.spans.append((since, end))
                lane.marks.append(Mark(end, "death", "ended with its supervisor"))
            since = time
        elif kind == "resize":
            text = f"{row['before']} to {row['processes']} processes"
            lane.marks.append(Mark(time, "resize", text))
        if kind in MARKS:
            lane.marks.append(Mark(time, MARKS[kind], str(row.get("reason", kind))))
        if kind in ("resize", *ENDINGS) and since is not None:
            lane.spans.append((since, time))
            since = None
    if since is not None:
        lane.spans.append((since, _last(signs, since, float("inf"))))
    return lane


def _recorded(name: str, rows: Iterable[Row], signs: Sequence[float]) -> Lane:
    """Returns the lane of a run without a supervisor, from its ledger."""
    lane, since, died = Lane(name), None, ""
    for row in rows:
        kind, time = row["event"], row.get("time")
        if time is None:
            continue
        if kind in ("death", "resize", "start") and since is not None:
            # What ended it is recorded by the next attempt.
            lane.spans.append((since, _last(signs, since, time, before=True)))
            since = None
        if kind == "death":
            died = row["reason"]
        elif kind == "resize":
            text = f"{row['before']} to {row['processes']} processes"
            lane.marks.append(Mark(time, "resize", text))
        elif kind == "start":
            if lane.spans and died:
                lane.marks.append(Mark(lane.spans[-1][1], "death", died))
            since, died = time, ""
        elif kind in ("done", "preempted") and since is not None:
            lane.spans.append((since, time))
            since = None
    if since is not None:
        lane.spans.append((since, _last(signs, since, float("inf"))))
    return lane


def _service(rows: Sequence[Row]) -> list[Lane]:
    """Returns the lanes of the service, from the log of the fleet's supervisor."""
    lanes: dict[str, Lane] = {}
    since: dict[str, float] = {}
    died = 0.0  # when a part of the service died last

    def end(name: str, time: float) -> None:
        lanes[name].spans.append((since.pop(name), time))

    for row in rows:
        kind, time, name = row["event"], row["time"], row.get("name", "")
        if name.startswith("learner "):
            continue  # its own supervisor says more
        if kind == "start":
            lanes.setdefault(name, Lane(name))
            if name in since:  # it was restarted with the part that died
                end(name, max(died, since[name]))
            since[name] = time
        elif kind == "death" and name in lanes:
            died = time
            lanes[name].marks.append(Mark(time, "death", row["reason"]))
            if name in since:
                end(name, time)
        elif kind in ("finished", "stop"):
            for name in list(since):
                end(name, time)
    last = max((row["time"] for row in rows), default=0.0)
    for name in list(since):
        end(name, max(last, since[name]))
    return [lanes[name] for name in sorted(lanes)]


def _copies(rows: Sequence[Row]) -> list[Lane]:
    """Returns the lane of the copies of blocks, if there are any.

    It has a bar while each block has all of its copies, and a mark for each server that
    came or went.
    """
    lane, since, servers = Lane("copies"), None, None
    for row in rows:
        kind, time = row["event"], row["time"]
        if kind == "placed":
            if servers is None:
                since = time
            elif row["servers"] != servers:
                lane.marks.append(Mark(time, "resize", row["reason"]))
                if since is not None:
                    lane.spans.append((since, time))
                since = None
            servers = row["servers"]
        elif kind == "moved":
            since = time
    if since is not None:
        lane.spans.append((since, rows[-1]["time"]))
    return [lane] if servers is not None else []


def _last(
    signs: Sequence[float], since: float, until: float, *, before: bool = False
) -> float:
    """Returns the last sign between two times, and at least `since`."""
    find = bisect.bisect_left if before else bisect.bisect_right
    place = find(signs, until)
    return max(since, signs[place - 1]) if place else since


def _times(rows: Iterable[Row]) -> list[float]:
    return [row["time"] for row in rows if isinstance(row.get("time"), int | float)]


def _rows(path: Path) -> list[dict[str, Any]]:
    return metrics.read(path) if path.is_file() else []
