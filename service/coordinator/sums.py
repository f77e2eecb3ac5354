"""Contributions that a merger has added up: taken note of together, or not at all."""

from collections.abc import Mapping
from typing import Any

from ..wire.errors import Refused
from ..wire.sums import Key, check_counts_all, contributions_of, is_sum, key_of
from . import requests
from .commits import Received
from .members import Members
from .places import Places
from .requests import Body
from .spec import JobSpec


def judged(
    message: Mapping[str, Any],
    spec: JobSpec,
    now: float,
    received: Mapping[Key, Received],
    members: Members,
    places: Places,
) -> tuple[list[Body], list[list[int]]]:
    """Returns the entries for the log, and the contributions that cannot count.

    If there are any of these, none of the others count either: the sum has them all.
    Of a repeated message there is nothing to log.
    """
    check_counts_all(spec.job, spec.policy)
    bodies = _bodies_of(message, now)
    key, known = key_of(message["tree"]), [received.get(own) for own in bodies]
    trees = [info.tree for info in known if info is not None]
    if len(trees) == len(bodies) and all(t and key_of(t) == key for t in trees):
        return [], []
    gone = []
    for part in message["parts"]:
        learner, incarnation, round = (
            part["learner"],
            part["incarnation"],
            part["round"],
        )
        member, place = members.get(learner, incarnation), places.get(learner)
        if (
            member is None
            or member.must_rejoin
            or member.last_round >= round
            or place is None
            or (place.state, place.round) != ("go", round)
        ):
            gone.append([learner, incarnation, round])
        else:
            requests.check_lease(part, place.blocks)
    return ([] if gone else list(bodies.values())), gone


def _bodies_of(message: Mapping[str, Any], now: float) -> dict[Key, Body]:
    """Returns the entry of each contribution; refuses a message without sense."""
    tree, parts = message.get("tree"), message.get("parts")
    if not isinstance(tree, Mapping) or not isinstance(parts, list):
        raise Refused(f"sum: tree is {tree!r}, expected an object, and a list of parts")
    key, keys, found = key_of(tree), contributions_of(tree), {}
    for part in parts:
        body = requests.contributed(part, now)
        event = body["event"]
        own = event["learner"], event["incarnation"], event["round"]
        found[own] = {**body, "sum": tree}
    rounds = {key[2], *(own[2] for own in keys)}
    if set(keys) != set(found) or len(keys) != len(found) or len(rounds) > 1:
        raise Refused(
            f"sum {list(key)} of {sorted(keys)}: expected one contribution each, all "
            f"of one round, got {sorted(found)}"
        )
    if not is_sum(key[0]):
        raise Refused(f"sum {list(key)}: this is the key of a learner's contribution")
    return found
