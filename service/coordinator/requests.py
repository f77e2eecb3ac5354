"""What learners ask of a job, checked, and as entries for the log."""

import math
from collections.abc import Mapping
from typing import Any

from ..rounds.events import Contributed, Joined, Left, Ranges
from ..wire.errors import Refused
from .members import Member
from .run_files import number, plain

Body = dict[str, Any]


def field(message: Mapping[str, Any], name: str, least: int = 0) -> int:
    """Returns a whole number of a message."""
    value = message.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise Refused(f"{name} is {value!r}, expected a whole number >= {least}")
    return value


def text(message: Mapping[str, Any], name: str) -> str:
    """Returns a name of a message."""
    value = message.get(name)
    if not isinstance(value, str) or not value:
        raise Refused(f"{name} is {value!r}, expected a name")
    return value


def who(message: Mapping[str, Any]) -> tuple[int, int]:
    """Returns learner and incarnation of a message."""
    learner, incarnation = message.get("learner"), message.get("incarnation")
    if type(learner) is not int or type(incarnation) is not int:
        raise Refused(
            f"learner is {learner!r} and incarnation {incarnation!r}, expected whole "
            "numbers"
        )
    return learner, incarnation


def joined(message: Mapping[str, Any], incarnation: int, now: float) -> Body:
    event = Joined(now, message["learner"], incarnation)
    owner = message.get("owner")
    if owner is not None and not isinstance(owner, str):
        raise Refused(f"learner {event.learner}: owner is {owner!r}, expected a string")
    return {"event": event.to_json(), "owner": owner}


def left(member: Member, reason: str, now: float, *, failed: bool) -> Body:
    event = Left(now, member.learner, member.incarnation, reason, failed)
    return {"event": event.to_json()}


def contributed(message: Any, now: float) -> Body:
    """Returns the entry of a contribution; refuses one that makes no sense."""
    if not isinstance(message, Mapping):
        raise Refused(f"a contribution is {message!r}, expected an object")
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
        "bytes": field({"bytes": message.get("bytes", 0)}, "bytes"),
    }
    return plain(body)


def check_lease(message: Mapping[str, Any], leased: Ranges) -> None:
    """Refuses a contribution that says it was computed on other data than leased."""
    found, expected = message.get("blocks"), plain(leased)
    if found is not None and found != expected:
        raise Refused(
            f"learner {message['learner']}, round {message['round']}: computed on "
            f"blocks {found} of the data, but leased were {expected}"
        )
