"""One commit: its scale, its entry in the log, and its row of metrics.

The arithmetic follows `apply` in trainer/program/step.py: float32, the same comparison
and the same cases in which an update is skipped.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..rounds.events import Commit, Contribution, SetAside
from ..rounds.leases import MAX_FAILURES
from ..wire import sums as sums_lib
from ..wire.sums import Tree
from .run_files import number, plain
from .spec import JobSpec

Key = tuple[int, int, int]  # learner, incarnation, round


@dataclasses.dataclass(frozen=True)
class Received:
    """What the coordinator knows of a contribution that is staged on the servers.

    Attributes:
      tree: of the sum that it is part of; None if it is staged by itself.
    """

    base: int
    steps: int
    arrived: float
    sums: Mapping[str, Any]
    num_bytes: int
    tree: Tree | None = None

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> "Received":
        """Makes it from the entry of the log."""
        event = body["event"]
        return cls(
            base=event["base"],
            steps=event["steps"],
            arrived=event["time"],
            sums=body["sums"],
            num_bytes=body["bytes"],
            tree=body.get("sum"),
        )


def key_of(part: Contribution) -> Key:
    return part.learner, part.incarnation, part.round


def keys_of(decisions: Sequence[Any]) -> set[Key]:
    """Returns the contributions of the commits among some decisions."""
    found = (d.contributions for d in decisions if isinstance(d, Commit))
    return {key_of(part) for parts in found for part in parts}


def trees_of(commit: Commit, received: Mapping[Key, Received]) -> list[Tree]:
    """Returns the trees of the sums that a commit consists of, in order of key."""
    parts = (received[key_of(part)].tree for part in commit.contributions)
    trees = {sums_lib.key_of(tree): tree for tree in parts if tree is not None}
    return [trees[key] for key in sorted(trees)]


def unwanted(received: Mapping[Key, Received], wanted: set[Key]) -> list[list[int]]:
    """Returns the keys that servers can drop: of contributions, and of their sums."""
    found = {key: None for key in received if key not in wanted}
    for key in list(found):
        tree = received[key].tree
        if tree is not None and not wanted & {*sums_lib.contributions_of(tree)}:
            found[sums_lib.key_of(tree)] = None
    return [list(key) for key in found]


def merge_message(commit: Commit, received: Mapping[Key, Received]) -> dict[str, Any]:
    """Returns what servers need to merge the contributions of a commit."""
    names = ("learner", "incarnation", "round", "base", "weight", "coefficient")
    parts = [{n: getattr(p, n) for n in names} for p in commit.contributions]
    return {
        "version": commit.version,
        "fragment": commit.fragment,
        "divisor": commit.divisor,
        "contributions": sums_lib.staged_parts(parts, trees_of(commit, received)),
    }


def apply_message(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what servers need to apply a commit of the log."""
    names = ("version", "scale", "step", "share", "keep", "drop")
    return {name: entry[name] for name in names}


def why_set_aside(decision: SetAside) -> str:
    return (
        f"blocks {list(decision.blocks)} of the data are set aside: learner "
        f"{decision.learner} is the last of {MAX_FAILURES} that crashed or were not "
        "heard of while they computed on them"
    )


def facts_of(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what learners are told about the commit of a version."""
    return {
        **{"version": entry["version"], "scale": entry["scale"]},
        "norm": number(entry["norm"]),
        "skipped": entry["metrics"]["skipped"],
    }


def make_entry(
    commit: Commit,
    merged: Sequence[Mapping[str, Any]],
    received: Mapping[Key, Received],
    spec: JobSpec,
    now: float,
) -> dict[str, Any]:
    """Returns the entry of a commit.

    Args:
      merged: each server's part of the sum of squares, and whether all is finite.
      received: what learners sent along with their contributions.
    """
    norm, parts = _norm(merged), commit.contributions
    fresh = [received[key_of(part)] for part in parts if not part.is_reused]
    means = _means([info.sums for info in fresh])
    is_finite = bool(merged) and all(part["finite"] for part in merged)
    is_valid = is_finite and _is_valid(norm, means, spec.skip_grad_norm)
    ages = [commit.version - 1 - part.base for part in parts]
    waits = [now - info.arrived for info in fresh]
    metrics = {
        "step": commit.version,
        **means,
        "grad_norm": float(norm),
        "skipped": 0 if is_valid else 1,
        "update_step": commit.step,
        "learners": len(parts),
        "staleness": max(ages, default=0),
        "wait_s": round(math.fsum(waits) / len(waits), 6) if waits else 0.0,
        "bytes": sum(info.num_bytes for info in fresh),
        "time": round(now, 3),
    }
    entry = {
        **{"version": commit.version, "fragment": commit.fragment},
        **{"step": commit.step, "share": commit.share, "divisor": commit.divisor},
        "scale": _scale(norm, spec.max_grad_norm) if is_valid else 0.0,
        "norm": float(norm),
        "contributions": [_part(part, received[key_of(part)]) for part in parts],
        "set_aside": commit.set_aside,
        "metrics": metrics,
        "time": now,
    }
    if trees := trees_of(commit, received):
        entry["sums"] = trees
    return plain(entry)


def check_entry(commit: Commit, entry: Mapping[str, Any]) -> None:
    """Raises a ValueError if the log has another commit than the engine decided."""
    logged = [
        (p["learner"], p["incarnation"], p["round"], p.get("blocks"))
        for p in entry["contributions"]
    ]
    parts = commit.contributions
    decided = [(*key_of(part), plain(part.blocks)) for part in parts]
    if logged != decided or entry["divisor"] != commit.divisor:
        raise ValueError(
            f"the log has another commit {commit.version} than follows from its "
            f"events: {logged} instead of {decided}. Was it written by another version "
            "of meshloom?"
        )


def _part(part: Contribution, info: Received) -> dict[str, Any]:
    names = ("learner", "incarnation", "round", "base", "weight", "coefficient")
    fields = {name: getattr(part, name) for name in names}
    about = {"steps": info.steps, "blocks": part.blocks}
    return {**fields, "is_reused": part.is_reused, **about}


def _norm(merged: Sequence[Mapping[str, Any]]) -> np.float32:
    parts = [number(part["sum_of_squares"]) for part in merged]
    if not all(map(math.isfinite, parts)):
        return np.float32(math.nan)
    with np.errstate(over="ignore"):  # infinite then, and the update is skipped
        # fsum rounds once: the order of the servers does not matter.
        return np.float32(math.sqrt(math.fsum(parts)))


def _scale(norm: np.float32, limit: float | None) -> float:
    if limit is None:
        return 1.0
    floor = np.maximum(norm, np.float32(1e-12))
    return float(np.minimum(np.float32(1.0), np.float32(limit) / floor))


def _is_valid(
    norm: np.float32, means: Mapping[str, float], limit: float | None
) -> bool:
    if not math.isfinite(norm) or not math.isfinite(means.get("loss", 0.0)):
        return False
    return limit is None or bool(norm <= np.float32(limit))


def _means(sums: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the weighted means of what learners summed, and the whole weight."""
    names = dict.fromkeys(name for part in sums for name in part)
    totals = {n: sum(number(part.get(n, 0.0)) for part in sums) for n in names}
    weight = totals.pop("weight", 0.0)
    divisor = weight if weight > 0 else 1.0
    return {name: total / divisor for name, total in totals.items()} | {
        "weight": weight
    }
