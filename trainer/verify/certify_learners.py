"""`meshloom certify --run`: a certificate of a finished training between learners.

It has the three levels of a certificate (certificate.py), found by a replay in one
process. `state`: the final parameters are those that were computed again. `data`: the
training and each learner's ledger pass their audits, and no round is in two commits.
`trajectory`: every commit has the same gradient norm.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...launch.atomic_file import replace_text
from ..record import metrics
from ..record.ledger_audit import audit
from ..record.run_folder import PACKAGES
from . import replay
from .certificate import LEVELS, Level
from .training_audit import audit_training

FILE = "certificate.json"


def certify(run: Path, log: Callable[[str], None] = print) -> dict[str, Any]:
    """Replays a training and returns its certificate, which it also writes to `run`."""
    began = time.monotonic()
    verdict = replay.replay(run, log)
    log(str(verdict))
    levels = {
        "state": _state(verdict),
        "data": _data(run, metrics.read(run / "commits.jsonl")),
        "trajectory": _trajectory(verdict),
    }
    assert tuple(levels) == LEVELS
    spec = json.loads((run / "spec.json").read_text())
    learners = [_learner(folder) for folder in _folders(run)]
    versions = [learner.pop("versions") for learner in learners]
    document = {
        "format": 1,
        "time": time.time(),
        "versions": versions[0],
        "job": spec["job"],
        "policy": spec["policy"],
        "config_digest": spec["config_digest"],
        "learners": learners,
        "commits": verdict.commits,
        "rounds": verdict.rounds,
        "seconds": round(time.monotonic() - began, 1),
        **{
            name: {"passed": level.passed, "words": level.summary, **level.facts}
            for name, level in levels.items()
        },
        "passed": all(level.passed for level in levels.values()),
    }
    replace_text(run / FILE, json.dumps(document, indent=2) + "\n")
    return document


def verdict_of(document: Mapping[str, Any]) -> str:
    """Returns the last line of the command."""
    wrong = {n: document[n]["words"] for n in LEVELS if not document[n]["passed"]}
    if wrong:
        reasons = "; ".join(f"{name}: {words}" for name, words in wrong.items())
        return f"certify: FAILED: {reasons}"
    return (
        f"certify: state, data and trajectory hold for {document['commits']} commits "
        f"of {len(document['learners'])} learners"
    )


def _state(verdict: replay.Verdict) -> Level:
    facts = {"arrays": verdict.num_leaves, "different": list(verdict.different)}
    if verdict.different:
        more = len(verdict.different) - 1
        also = f" and {more} more" * bool(more)
        problem = f"another final digest of {verdict.different[0]}{also}"
        return Level(False, problem, facts)
    return Level(True, "bit-equal", facts)


def _data(run: Path, commits: Sequence[Mapping[str, Any]]) -> Level:
    rounds = Counter(
        (part["learner"], part["round"])
        for row in commits
        for part in row["contributions"]
        if not part["is_reused"]
    )
    found = audit_training(run)
    facts = {
        "contributions": sum(rounds.values()),
        "samples": found.consumed * found.rows,
        "unfinished": found.unfinished,
        "set_aside": found.set_aside,
    }
    for (learner, round), count in rounds.items():
        if count > 1:
            problem = f"round {round} of learner {learner} is in {count} commits"
            return Level(False, problem, facts)
    if found.faults:
        return Level(False, f"audit: {found.faults[0]}", facts)
    for folder in _folders(run):
        if faults := audit(folder).faults:
            problem = f"audit of learner {folder.name}: {faults[0]}"
            return Level(False, problem, facts)
    return Level(True, "exact", facts)


def _trajectory(verdict: replay.Verdict) -> Level:
    if verdict.norms:
        problem = f"another gradient norm in commit {verdict.norms[0]}"
        return Level(False, problem, {"commits": list(verdict.norms)})
    return Level(True, "bit-equal")


def _folders(run: Path) -> list[Path]:
    folders = [folder for folder in (run / "learners").iterdir() if folder.is_dir()]
    return sorted(folders, key=lambda folder: int(folder.name))


def _learner(folder: Path) -> dict[str, Any]:
    ran_on = json.loads((folder / "environment.json").read_text())
    kept = (*PACKAGES, "meshloom", "python", "platform", "device_kind", "xla_flags")
    return {
        "learner": int(folder.name),
        "mesh": ran_on["mesh"],
        "devices": ran_on["num_devices"],
        "processes": ran_on["num_processes"],
        "versions": {name: ran_on[name] for name in kept},
    }
