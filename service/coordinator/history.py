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
| snapshot | what the entries before it amount to, which were removed (snapshots.py) |
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from ..blocks.placement import Placement
from .log import SNAPSHOT, Entry

# What a rollback abandons. The others are facts that stay true.
TAKEN_BACK = ("event", "evaluation", "commit", "finished")


@dataclasses.dataclass(frozen=True)
class History:
    """What the log of a job amounts to.

    Attributes:
      snapshot: the body of the one that the log begins with, if it was compacted. All
        but `spec`, `servers`, `placement`, `cuts` and `incarnations` is about what came
        after it.
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
    snapshot: Mapping[str, Any] | None
    entries: tuple[Entry, ...]
    commits: dict[int, dict[str, Any]]
    evaluations: tuple[dict[str, Any], ...]
    abandoned: tuple[dict[str, Any], ...]
    cuts: dict[int, int]
    incarnations: dict[int, int]

    @property
    def version(self) -> int:
        """The newest version that the log knows."""
        before = 0 if self.snapshot is None else self.snapshot["version"]
        return max(self.commits, default=before)


def make_history(entries: Iterable[Entry]) -> History:
    """Returns the history that the entries of one job's log describe."""
    entries = list(entries)
    counting, abandoned = _divide(entries)
    kinds = {entry.kind for entry in counting}
    specs = [entry.body for entry in counting if entry.kind == "spec"]
    kept = ("event", "evaluation", "commit", "rollback")
    steps = [e for e in counting if e.kind in kept]
    taken = next((entry for entry in entries if entry.kind == SNAPSHOT), None)
    snapshot = None if taken is None else taken.body
    event = 0 if taken is None else taken.seq
    version = 0 if snapshot is None else snapshot["version"]
    commits, cuts = {}, {version: event}
    for entry in steps:
        if entry.kind == "event":
            event = entry.seq
        elif entry.kind == "commit" and entry.body["version"] > version:
            commits[entry.body["version"]] = entry.body
            cuts[entry.body["version"]] = entry.body["event"]
    assert all(cut <= event for cut in cuts.values()), (cuts, event)
    return History(
        spec=specs[0]["spec"] if specs else None,
        servers=_servers(entries),
        placement=_placement(entries),
        is_initialized=bool({"initialized", SNAPSHOT} & kinds),
        is_finished="finished" in kinds,
        snapshot=snapshot,
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


def _servers(entries: list[Entry]) -> tuple[str, ...]:
    """Returns the names of the servers, as the newest entry has them."""
    named = [e.body["servers"] for e in entries if e.kind in ("spec", SNAPSHOT)]
    return tuple(named[-1]) if named else ()


def _placement(entries: list[Entry]) -> Placement | None:
    """Returns the newest placement; a rollback takes none back."""
    kinds = ("placement", SNAPSHOT)
    placed = [e.body.get("placement") for e in entries if e.kind in kinds]
    return Placement.from_json(placed[-1]) if placed and placed[-1] else None


def _incarnations(entries: list[Entry]) -> dict[int, int]:
    highest: dict[int, int] = {}
    for entry in entries:
        if entry.kind == SNAPSHOT:
            highest |= {learner: n for learner, n in entry.body["incarnations"]}
        event = entry.body.get("event", {}) if entry.kind == "event" else {}
        if "incarnation" in event:
            learner = event["learner"]
            highest[learner] = max(highest.get(learner, 0), event["incarnation"])
    return highest
