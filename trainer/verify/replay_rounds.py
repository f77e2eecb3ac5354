"""The rounds that learners have computed in a training, as its files tell them."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...service.rounds.leases import from_ranges
from ...service.rounds.policy import Policy
from ..record.ledger import Ledger

Key = tuple[int, int, int]  # learner, incarnation, round


@dataclasses.dataclass(frozen=True)
class Round:
    """A round that a learner has computed.

    Attributes:
      base: the version that it started from.
      first, stop: its local steps are first + 1 .. stop.
      blocks: of the data, one for each of them.
      optimizer_step: of the checkpoint that the learner's own optimizer state came
        from, if it joined right before this round; None if it just went on.
    """

    key: Key
    base: int
    first: int
    stop: int
    blocks: Sequence[int]
    optimizer_step: int | None = None


def key_of(part: Mapping[str, Any]) -> Key:
    return part["learner"], part["incarnation"], part["round"]


def find_rounds(
    run: Path, commits: Sequence[Mapping[str, Any]], policy: Policy
) -> dict[int, list[Round]]:
    """Returns the rounds of each learner in the order in which it computed them.

    Most are in a commit. Those that were dropped count too, because they changed the
    learner's own optimizer state; they are in its ledger. Those that a restart of the
    service took back do not: the learner joined again before them, with the state of a
    checkpoint from before them.
    """
    bases: dict[Key, int] = {}
    leased: dict[Key, Sequence[Sequence[int]]] = {}  # ranges of blocks
    recorded: dict[Key, Mapping[str, Any]] = {}
    joined: dict[tuple[int, int], Mapping[str, Any]] = {}
    for commit in commits:
        for part in commit["contributions"]:
            key = key_of(part)
            bases[key] = part["base"]
            # Once more in a later commit, it has consumed its blocks already.
            leased.setdefault(key, part["blocks"])
    for folder in (run / "learners").iterdir():
        for row in Ledger(folder, is_writer=False).read():
            if row["event"] == "joined":
                joined[row["learner"], row["incarnation"]] = row
            elif row["event"] == "round":
                recorded[row["learner"], row["incarnation"], row["round"]] = row
    for key, row in recorded.items():
        if key in bases or not _was_taken_back(key, joined):
            bases[key], leased[key] = row["base"], row["blocks"]
    found: dict[int, list[Round]] = {}
    for key in sorted(bases):
        learner, incarnation, number = key
        own = found.setdefault(learner, [])
        is_first = not own or own[-1].key[1] != incarnation
        start = joined.get((learner, incarnation), {}) if is_first else {}
        first, stop = policy.steps_before(number), policy.steps_before(number + 1)
        blocks, saved = from_ranges(leased[key]), start.get("optimizer_step")
        own.append(Round(key, bases[key], first, stop, blocks, saved))
    return found


def _was_taken_back(
    key: Key, joined: Mapping[tuple[int, int], Mapping[str, Any]]
) -> bool:
    """Returns whether a later incarnation of the learner has begun before a round."""
    learner, incarnation, number = key
    return any(
        who == learner and later > incarnation and row["round"] <= number
        for (who, later), row in joined.items()
    )
