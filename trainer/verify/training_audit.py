"""`meshloom ledger audit` of a training between learners, from its commit log.

The log says which blocks of the data each commit has consumed. No block may be in two
of them, and every block before the last that was leased must be in one, unless it was
set aside, or was still leased when the training ended; those are listed. Block k is
examples k * rows to (k + 1) * rows - 1 of the run's order, which has each sample once
an epoch. The ledgers of the learners say what their devices have really read: each
round must have been computed on the blocks of its contribution.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...service.rounds.leases import as_ranges, from_ranges
from ...sharding.text import align
from ..data.orders import order_from
from ..record import metrics
from ..record.ledger import Ledger
from ..record.ledger_audit import Applied, Attempt, order_of_start, wrong_samples

COMMITS = "commits.jsonl"
Key = tuple[int, int, int]  # learner, incarnation, round


@dataclasses.dataclass
class TrainingAudit:
    """The result of an audit; counts are of samples.

    Attributes:
      unfinished: blocks that were still leased, or todo, when the training ended.
      set_aside: blocks on which too many learners failed.
      unrecorded: committed, but their learner was killed before it wrote them down.
      computed: steps that learners have computed, committed or not.
      faults: inconsistencies; [] if there are none.
    """

    rows: int
    num_commits: int
    consumed: int
    unfinished: list[int]
    set_aside: list[int]
    unrecorded: int
    computed: int
    faults: list[str]

    def __str__(self) -> str:
        rows = [
            ("commits", f"{self.num_commits:,}"),
            ("samples in an update", f"{self.consumed * self.rows:,}"),
            ("samples computed on", f"{self.computed * self.rows:,}"),
            ("not finished at the end", self._named(self.unfinished)),
            ("set aside", self._named(self.set_aside)),
            ("not in a ledger", f"{self.unrecorded * self.rows:,}"),
        ]
        verdict = (
            "each sample contributed to exactly one update of its epoch, or is listed "
            "above"
        )
        if self.faults:
            verdict = "FAILED\n" + "\n".join(f"  {fault}" for fault in self.faults)
        return f"{align(rows)}\naudit: {verdict}"

    def _named(self, blocks: Sequence[int]) -> str:
        count = f"{len(blocks) * self.rows:,}"
        if not blocks:
            return count
        ranges = [(a * self.rows, b * self.rows - 1) for a, b in as_ranges(blocks)]
        named = ", ".join(f"{first} to {last}" for first, last in ranges[:5])
        return f"{count} (examples {named}{', ...' * (len(ranges) > 5)})"


def audit_training(folder: Path) -> TrainingAudit:
    """Audits the folder of a training, as `meshloom serve` writes it."""
    spec = json.loads((folder / "spec.json").read_text())
    commits = read_commits(folder)
    data, num_learners = spec["data"], spec["num_learners"]
    rows = data["batch_size"] // num_learners
    faults = _other_versions(commits)
    blocks: dict[Key, list[int]] = {}
    commit_of: dict[int, int] = {}
    for commit in commits:
        for part in commit["contributions"]:
            found = from_ranges(part["blocks"])
            if found:
                blocks[part["learner"], part["incarnation"], part["round"]] = found
            elif not part["is_reused"]:
                faults.append(f"commit {commit['version']}: {_name(part)} has no data")
            for block in found:
                if block in commit_of:
                    faults.append(
                        f"block {block} is in commit {commit_of[block]} and again in "
                        f"commit {commit['version']}"
                    )
                commit_of[block] = commit["version"]
    set_aside = sorted({b for commit in commits for b in commit["set_aside"]})
    faults += [
        f"block {block} was set aside, and is in commit {commit_of[block]}"
        for block in set_aside
        if block in commit_of
    ]
    known = {*commit_of, *set_aside}
    unfinished = [b for b in range(max(known, default=-1) + 1) if b not in known]
    order = order_from(data["num_examples"], data["seed"], data)
    attempt = Attempt(rows, order, data["digest"], True)
    recorded = _Recorded(folder, num_learners, attempt)
    unrecorded = recorded.compare(blocks)
    return TrainingAudit(
        rows=rows,
        num_commits=len(commits),
        consumed=len(commit_of),
        unfinished=unfinished,
        set_aside=set_aside,
        unrecorded=unrecorded,
        computed=len(recorded.steps),
        faults=[*faults, *recorded.faults],
    )


def read_commits(folder: Path) -> list[dict[str, Any]]:
    """Returns the commits of a training; refuses one of before data was leased."""
    commits = metrics.read(folder / COMMITS)
    for commit in commits:
        if any("blocks" not in part for part in commit["contributions"]):
            raise ValueError(
                f"{folder / COMMITS}: commit {commit['version']} does not say on which "
                "blocks of data its contributions were computed: an older version of "
                "meshloom wrote it. Use the version that trained it."
            )
    return commits


class _Recorded:
    """What the ledgers of all learners say."""

    def __init__(self, folder: Path, num_learners: int, attempt: Attempt):
        self.steps: list[Applied] = []
        self.faults: list[str] = []
        self._rounds: dict[Key, list[int]] = {}
        self._read: set[tuple[int, int]] = set()  # learners and blocks
        for learner in range(num_learners):
            self._learner(learner, folder / "learners" / str(learner), attempt)
        self.faults += [f"a learner's {fault}" for fault in wrong_samples(self.steps)]

    def _learner(self, learner: int, folder: Path, attempt: Attempt) -> None:
        for row in Ledger(folder, is_writer=False).read():
            if row["event"] == "round":
                key = row["learner"], row["incarnation"], row["round"]
                self._rounds[key] = from_ranges(row["blocks"])
            elif row["event"] == "start":
                theirs = row["batch_size"], order_of_start(row)
                ours = attempt.batch_size, attempt.order
                if theirs != ours or row["data"] != attempt.data:
                    self.faults.append(f"learner {learner} has started with other data")
            elif row["event"] == "step":
                self._read.add((learner, row["batch"]))
                skipped = row.get("skipped", False)
                step = row["step"], row["batch"], row["samples"], skipped
                self.steps.append(Applied(*step, attempt))

    def compare(self, committed: Mapping[Key, list[int]]) -> int:
        """Returns how many committed blocks no ledger has, as after a kill."""
        unrecorded = 0
        last = {key[:2]: 0 for key in committed}  # the last round that was recorded
        for learner, incarnation, round in self._rounds:
            who = learner, incarnation
            last[who] = max(last.get(who, 0), round)
        for key, blocks in committed.items():
            name = f"round {key[2]} of learner {key[0]}, incarnation {key[1]}"
            read = self._rounds.get(key)
            if read is not None and read != blocks:
                self.faults.append(
                    f"{name} is committed with blocks {as_ranges(blocks)}, but was "
                    f"computed on {as_ranges(read)}"
                )
            missing = [b for b in blocks if (key[0], b) not in self._read]
            # A learner that is killed has not written down its last rounds.
            if read is None and key[2] < last[key[:2]]:
                self.faults.append(f"{name} is not in its learner's ledger")
            unrecorded += len(missing)
        return unrecorded


def _other_versions(commits: Sequence[Mapping[str, Any]]) -> list[str]:
    for expected, commit in enumerate(commits, start=1):
        if commit["version"] != expected:
            return [f"commit {expected} is missing: {commit['version']} comes next"]
    return []


def _name(part: Mapping[str, Any]) -> str:
    return f"round {part['round']} of learner {part['learner']}"
