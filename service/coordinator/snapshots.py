"""What the oldest entries of a job's log amount to, so that they can be removed.

The newest checkpoints are what a restart may fall back to. Nothing from before the
oldest of them is ever taken up again: a snapshot of the job as it was right after the
event that led to this version stands for all entries up to that event. It is computed
as a restart would do it, from the log.

    version      of the checkpoint
    servers      the names that the newest entry has
    placement    the newest one, or null
    incarnations the highest of each learner
    evaluations  the number of their rows in eval.jsonl
    abandoned    the number of commits in abandoned.jsonl
    job, engine  the state of both
"""

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

from ..rounds import snapshot as engine_snapshot
from ..rounds.encoding import get_fields, set_fields
from ..rounds.plateau import Plateau
from .board import Board, Place
from .checkpoints import Checkpoint
from .commits import Received
from .history import History
from .job import Job
from .log import SNAPSHOT, Entry
from .members import Member

CLASSES = {cls.__name__: cls for cls in (Member, Place, Plateau, Received)}
OF_JOB = (
    *("stopped", "num_bytes", "cut", "_received", "_time", "_event"),
    "_commit_facts",
)
OF_PLACES = ("_places",)
OF_MEMBERS = ("_live",)
OF_EVALUATIONS = ("_plateau", "_newest")


def snapshot_of(job: Job, history: History, checkpoint: Checkpoint) -> Entry | None:
    """Returns the snapshot at a checkpoint, for a log that has this history.

    None if an evaluation of a later version came before it: that counts or not as the
    job goes on.
    """
    cut, version = checkpoint.cut, checkpoint.version
    before = history.snapshot or {"evaluations": 0, "abandoned": 0}
    rows = [e for e in history.entries if e.kind == "evaluation" and e.seq <= cut]
    if any(entry.body["step"] > version for entry in rows):
        return None
    entries = tuple(entry for entry in history.entries if entry.seq <= cut)
    past = dataclasses.replace(history, entries=entries, incarnations={})
    shadow = _shadow(job, past)
    shadow.replay(past)
    if (found := (shadow.engine.version, shadow.cut)) != (version, cut):
        raise ValueError(
            f"the entries of the log up to {cut} lead to version {found[0]}, made by "
            f"entry {found[1]}, but the checkpoint is of version {version}. The log "
            "stays as it is; was it written by another version of meshloom?"
        )
    gone = sum(entry["event"] <= cut for entry in history.abandoned)
    body = {
        "version": version,
        "servers": list(history.servers),
        "placement": history.placement and history.placement.to_json(),
        "incarnations": [list(pair) for pair in history.incarnations.items()],
        "evaluations": before["evaluations"] + len(rows),
        "abandoned": before["abandoned"] + gone,
        "job": {
            "job": get_fields(shadow, OF_JOB, CLASSES),
            "places": get_fields(shadow._places, OF_PLACES, CLASSES),
            "members": get_fields(shadow.members, OF_MEMBERS, CLASSES),
            "evaluations": get_fields(shadow._evaluations, OF_EVALUATIONS, CLASSES),
        },
        "engine": engine_snapshot.take(shadow.engine),
    }
    return Entry(cut, SNAPSHOT, body)


def put_back(job: Job, body: Mapping[str, Any]) -> None:
    """Gives a job that was reset the state of a snapshot."""
    parts = body["job"]
    set_fields(job, parts["job"], OF_JOB, CLASSES)
    set_fields(job._places, parts["places"], OF_PLACES, CLASSES)
    set_fields(job.members, parts["members"], OF_MEMBERS, CLASSES)
    set_fields(job._evaluations, parts["evaluations"], OF_EVALUATIONS, CLASSES)
    engine_snapshot.put_back(job.engine, body["engine"])


def _shadow(job: Job, past: History) -> Job:
    """Returns a job that takes entries of the log again, and acts on nothing."""
    shadow = copy.copy(job)
    shadow.board, shadow.num_bytes = Board(), 0
    shadow.around = dataclasses.replace(job.around, say=lambda *_, **__: None)
    shadow.reset(past)
    if past.snapshot is not None:
        put_back(shadow, past.snapshot)
    # No commit is applied once more, and nothing is written at the end.
    shadow._newest_logged, shadow.is_finished = -1, True
    return shadow
