"""What learners ask of a job, checked, and as entries for the log."""

import math
from collections.abc import Mapping
from typing import Any

from ..rounds.events import Contributed, Joined, Left
from ..wire.errors import Refused
from .members import Member, overlap, rows_of
from .run_files import number, plain

Body = dict[str, Any]


def field(message: Mapping[str, Any], name: str, least: int = 0) -> int:
    """Returns a whole number of a message."""
    value = message.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise Refused(f"{name} is {value!r}, expected a whole number >= {least}")
    return value


def joined(message: Mapping[str, Any], incarnation: int, now: float) -> Body:
    event = Joined(now, message["learner"], incarnation)
    owner = message.get("owner")
    if owner is not None and not isinstance(owner, str):
        raise Refused(f"learner {event.learner}: owner is {owner!r}, expected a string")
    return {"event": event.to_json(), "owner": owner, "rows": rows_of(message)}


def left(member: Member, reason: str, now: float) -> Body:
    event = Left(now, member.learner, member.incarnation, reason)
    return {"event": event.to_json()}


def contributed(message: Mapping[str, Any], now: float) -> Body:
    """Returns the entry of a contribution; refuses one that makes no sense."""
    learner, round = field(message, "learner"), field(message, "round", 1)
    what = f"learner {learner}, round {round}"
    try:
        event = Contributed(
            time=now,
            learner=learner,
            incarnation=field(message, "incarnation", 1),
            round=round,
            base=field(message, "base"),
            weight=number(message.get("weight", math.nan)),
            steps=field(message, "steps", 1),
        )
        sums = {n: number(value) for n, value in message.get("sums", {}).items()}
    except (TypeError, ValueError, AttributeError) as error:
        if isinstance(error, Refused):
            raise Refused(f"{what}: {error}") from error
        raise Refused(f"{what}: not a contribution ({error})") from error
    body = {
        "event": event.to_json(),
        "sums": sums,
        "samples": message.get("samples"),
        "bytes": field({"bytes": message.get("bytes", 0)}, "bytes"),
    }
    return plain(body)


class Samples:
    """The samples of recent contributions, to notice that two learners take the same.

    Only the last few contributions of each learner are compared: enough to find two
    learners with the same data, in bounded memory.
    """

    KEPT = 4

    def __init__(self, job: str):
        self._job = job
        self._recent: dict[int, list[tuple[int, tuple[int, int]]]] = {}

    def check(self, body: Body) -> None:
        """Refuses a contribution with samples of another learner's."""
        event, samples = body["event"], sample_range(body["samples"])
        for learner, recent in self._recent.items():
            for round, other in recent if learner != event["learner"] else ():
                if overlap(samples, other):
                    raise Refused(
                        f"job {self._job!r}: samples {body['samples']} of learner "
                        f"{event['learner']}, round {event['round']}, overlap samples "
                        f"{list(other)} of learner {learner}, round {round}. Give each "
                        "learner data of its own."
                    )

    def add(self, body: Body) -> None:
        event, samples = body["event"], sample_range(body["samples"])
        if samples is not None:
            recent = self._recent.setdefault(event["learner"], [])
            recent.append((event["round"], samples))
            del recent[: -self.KEPT]


def sample_range(samples: Any) -> tuple[int, int] | None:
    """Returns the range [first, stop), or None for a digest, which says only which."""
    if samples is None or isinstance(samples, str):
        return None
    is_pair = isinstance(samples, list | tuple) and len(samples) == 2
    if not is_pair or not all(type(x) is int for x in samples):
        raise Refused(f"samples is {samples!r}, expected [first, stop] or a digest")
    return samples[0], samples[1]
