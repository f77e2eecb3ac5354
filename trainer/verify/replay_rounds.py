"""The rounds that learners have computed in a training, as its files tell them."""

import dataclasses
from collections.abc import Mapping, Sequence, Set
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
    learner's own optimizer state; they are in its ledger. Those that a learner forgot
    do not: it came back with a state from before, and they are in no commit, perhaps
    because the service fell back to a checkpoint.
    """
    bases: dict[Key, int] = {}
    leased: dict[Key, Sequence[Sequence[int]]] = {}  # ranges of blocks
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
                key = row["learner"], row["incarnation"], row["round"]
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
    committed = {key_of(part) for row in commits for part in row["contributions"]}
    return {learner: _remembered(own, committed) for learner, own in found.items()}


def _remembered(rounds: Sequence[Round], committed: Set[Key]) -> list[Round]:
    """Returns the rounds of a learner that a commit or a later round depends on."""
    found: list[Round] = []
    used: tuple[int, int] | None = None  # an incarnation with such a later round
    back: int | None = None  # the step of the state with which the learner came back
    for round in reversed(rounds):
        is_forgotten = round.key[:2] != used and round.key not in committed
        if is_forgotten and back is not None and round.first >= back:
            continue
        found.append(round)
        used = round.key[:2]
        if round.optimizer_step is not None:
            back = round.optimizer_step
    return found[::-1]
