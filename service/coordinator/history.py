"""The history of a job: the entries of its log that still count.

Kinds of entries:

| kind | body |
|---|---|
| spec | the spec of the job, and the names of its servers |
| placement | where the blocks are from then on, if they may move |
| initialized | the servers hold version 0 |
| event | an event of the engine, and what was sent along with it |
| evaluation | a row that a learner reported; its `step` is a version |
| commit | one update: its contributions, and all that servers need to apply it |
| rollback | the servers restarted from the checkpoint of `version`: what came after |
| | entry `cut` is abandoned |
| finished | the job is done, and its final parameters are saved |
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

from ..blocks.placement import Placement
from .log import Entry

# What a rollback abandons. The others are facts that stay true.
TAKEN_BACK = ("event", "evaluation", "commit", "finished")


@dataclasses.dataclass(frozen=True)
class History:
    """What the log of a job amounts to.

    Attributes:
      placement: the newest one; None if blocks never move.
      entries: events, evaluations, commits and rollbacks that count, in order.
      commits: the commits that count, by version.
      evaluations: the rows of the evaluations that count, oldest first.
      abandoned: the commits that rollbacks took back, oldest first.
      cuts: for each version, the number of the event that led to it; 0 for version 0.
      incarnations: the highest incarnation each learner ever had, abandoned or not.
    """

    spec: dict[str, Any] | None
    servers: tuple[str, ...]
    placement: Placement | None
    is_initialized: bool
    is_finished: bool
    entries: tuple[Entry, ...]
    commits: dict[int, dict[str, Any]]
    evaluations: tuple[dict[str, Any], ...]
    abandoned: tuple[dict[str, Any], ...]
    cuts: dict[int, int]
    incarnations: dict[int, int]

    @property
    def version(self) -> int:
        """The newest version that the log knows."""
        return max(self.commits, default=0)


def make_history(entries: Iterable[Entry]) -> History:
    """Returns the history that the entries of one job's log describe."""
    entries = list(entries)
    counting, abandoned = _divide(entries)
    kinds = {entry.kind for entry in counting}
    specs = [entry.body for entry in counting if entry.kind == "spec"]
    placed = [e.body["placement"] for e in counting if e.kind == "placement"]
    kept = ("event", "evaluation", "commit", "rollback")
    steps = [e for e in counting if e.kind in kept]
    commits, cuts, event = {}, {0: 0}, 0
    for entry in steps:
        if entry.kind == "event":
            event = entry.seq
        elif entry.kind == "commit":
            commits[entry.body["version"]] = entry.body
            cuts[entry.body["version"]] = entry.body["event"]
    assert all(cut <= event for cut in cuts.values()), (cuts, event)
    return History(
        spec=specs[0]["spec"] if specs else None,
        servers=tuple(specs[-1]["servers"]) if specs else (),
        placement=Placement.from_json(placed[-1]) if placed else None,
        is_initialized="initialized" in kinds,
        is_finished="finished" in kinds,
        entries=tuple(steps),
        commits=commits,
        evaluations=tuple(e.body for e in steps if e.kind == "evaluation"),
        abandoned=tuple(e.body for e in abandoned if e.kind == "commit"),
        cuts=cuts,
        incarnations=_incarnations(entries),
    )


def _divide(entries: list[Entry]) -> tuple[list[Entry], list[Entry]]:
    """Returns the entries that count, and those that were abandoned."""
    counting: list[Entry] = []
    abandoned: list[Entry] = []
    for entry in entries:
        if entry.kind == "rollback":
            cut, version = entry.body["cut"], entry.body["version"]
            gone = [e for e in counting if _is_abandoned(e, cut, version)]
            counting = [e for e in counting if not _is_abandoned(e, cut, version)]
            abandoned += gone
        counting.append(entry)
    return counting, abandoned


def _is_abandoned(entry: Entry, cut: int, version: int) -> bool:
    if entry.kind == "commit":  # the entry of a commit follows the event it came from
        return entry.body["version"] > version
    if entry.kind == "evaluation":  # it may come long after the version it is about
        return entry.body["step"] > version
    return entry.kind in TAKEN_BACK and entry.seq > cut


def _incarnations(entries: list[Entry]) -> dict[int, int]:
    highest: dict[int, int] = {}
    for entry in entries:
        event = entry.body.get("event", {}) if entry.kind == "event" else {}
        if "incarnation" in event:
            learner = event["learner"]
            highest[learner] = max(highest.get(learner, 0), event["incarnation"])
    return highest
