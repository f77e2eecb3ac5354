"""What there is to say about a job and its servers, for people and for monitoring.

The job's thread posts the status of its job periodically; times of heartbeats
become seconds when it is asked for.
"""

import collections
from collections.abc import Mapping
from typing import Any

from .board import Board
from .job import Job

Status = dict[str, Any]

RATE_SECONDS = 15.0  # rates are means over this time
REFRESH_SECONDS = 0.25  # a job of many learners has many rows


class Rates:
    """Means per second of numbers that only grow, over the last seconds."""

    def __init__(self, seconds: float = RATE_SECONDS):
        self._seconds = seconds
        self._seen: collections.deque[tuple[float, tuple[float, ...]]]
        self._seen = collections.deque()

    def add(self, now: float, *numbers: float) -> list[float]:
        """Takes the numbers of now, and returns their rates."""
        if self._seen and min(b - a for a, b in self._pairs(numbers)) < 0:
            self._seen.clear()  # they began anew
        self._seen.append((now, numbers))
        while len(self._seen) > 2 and now - self._seen[1][0] >= self._seconds:
            self._seen.popleft()
        seconds = now - self._seen[0][0]
        if seconds <= 0:
            return [0.0] * len(numbers)
        return [
            round((b - a) / seconds, 3) for a, b in self._pairs(numbers, first=True)
        ]

    def _pairs(self, numbers: tuple[float, ...], first: bool = False):
        return zip(self._seen[0 if first else -1][1], numbers, strict=True)


class Watched:
    """A job as its own thread sees it, turn after turn."""

    def __init__(self, job: Job):
        self._job, self._rates = job, Rates()
        self._refreshed = -REFRESH_SECONDS
        self._more: Status = {}

    def status(self) -> Status:
        """Returns the status; the rows of the learners may be a moment old."""
        job = self._job
        now = job.now()
        if now - self._refreshed >= REFRESH_SECONDS:
            self._refreshed = now
            moved, commits = self._rates.add(now, job.num_bytes, job.engine.version)
            self._more = {
                "bytes_per_s": moved,
                "commits_per_s": commits,
                "members": _members(job),
            }
        live = [m for m in job.engine.members.values() if m.is_live]
        return {
            "state": _state(job),
            "version": job.engine.version,
            "checkpoint": job.saved,
            "learners": len(job.members),
            "num_learners": job.spec.num_learners,
            "waiting": sum(member.status == "waiting" for member in live),
            "bytes": job.num_bytes,
            **self._more,
        }


def _state(job: Job) -> str:
    if not job.is_initialized:
        return "waiting for the initial parameters"
    if job.is_finished:
        return "done"
    return "running" if job.engine.is_started else "waiting for learners"


def _members(job: Job) -> list[Status]:
    """Returns a row for each learner that ever joined."""
    places, _ = job.board.look()
    rounds = [m.round for m in job.engine.members.values() if m.is_live]
    version, furthest = job.engine.version, max(rounds, default=0)
    rows = []
    for learner, seen in sorted(job.engine.members.items()):
        member = job.members.get(learner, seen.incarnation)
        is_here = member is not None and not member.must_rejoin
        row: Status = {
            "learner": learner,
            "incarnation": seen.incarnation,
            "state": seen.status if is_here else "left",
            "round": seen.round,
            "contributed": seen.contributed,
        }
        if member is not None:
            row["heard"] = member.heard
        if is_here:
            row["lag"] = furthest - seen.round
            # Of what it computes now; once it has contributed, the commits since.
            row["staleness"] = version - seen.base if seen.round else 0
        elif (place := places.get(learner)) is not None:
            row["reason"] = place.reason
        rows.append(row)
    return rows


def answer(status: Mapping[str, Any], board: Board, now: float) -> Status:
    """Returns a status with heartbeats as seconds ago, also those of just now."""
    _, heard = board.look()
    rows = []
    for row in status.get("members", ()):
        row, when = dict(row), row.get("heard")
        row.pop("heard", None)
        if when is not None:
            key = row["learner"], row["incarnation"]
            when = max(when, heard.get(key, when))
            row["heard_s"] = round(max(0.0, now - when), 3)
        rows.append(row)
    return {**status, "members": rows}


class ServerBeats:
    """What a server said with its beats: the blocks it holds, and what it moved.

    Attributes:
      heard: when it last sent a heartbeat.
    """

    def __init__(self, address: str, now: float):
        self.address, self.heard = address, now
        self._rates = Rates()
        self._held: Status = {}

    def hear(self, message: Mapping[str, Any], now: float) -> None:
        self.heard = now
        held = message.get("held")
        if not isinstance(held, Mapping):
            return
        moved = [held.get(name) for name in ("received_bytes", "sent_bytes")]
        numbers = [n if type(n) is int else 0 for n in moved]
        received, sent = self._rates.add(now, *numbers)
        rates = {"received_bytes_per_s": received, "sent_bytes_per_s": sent}
        self._held = {**held, **rates}

    def answer(self, name: str, now: float) -> Status:
        seconds = round(max(0.0, now - self.heard), 3)
        about = {"name": name, "address": self.address, "heard_s": seconds}
        return {**about, **self._held}
