"""What a training of one mode has come to: samples, held-out losses, speed."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from modes_cases import BARE, Case
from modes_fleet import Failed, Trained

from meshloom.service.blocks.dtypes import dtype_of
from meshloom.service.blocks.layout import Layout
from meshloom.service.server import block_files
from meshloom.trainer.config import files as config_files
from meshloom.trainer.record import metrics
from meshloom.trainer.record.ledger import Ledger
from meshloom.trainer.run.train import Config
from meshloom.trainer.verify.compare_task import Task


class Judge:
    """Evaluates parameters on the same held-out examples for all cases of a config."""

    def __init__(self, case: Case, rows: int):
        sets = [*BARE, *case.sets]
        self.config = config_files.load([case.config], sets, root=Config).config
        self._task = Task(self.config, 1, eval_rows=rows)

    def initial_loss(self) -> float:
        """Returns the loss without training, of the parameters of one seed."""
        params = self._task.initial.params
        return self._task.loss([np.asarray(x) for x in jax.tree.leaves(params)])

    def loss(self, saved: Path, layout: Layout) -> float:
        """Returns the loss of a version that the service saved."""
        leaves = [np.empty(x.shape, dtype_of(x.dtype)) for x in layout.leaves]
        for block in layout.blocks:
            facts = {"layout": layout.digest}
            arrays = block_files.read(saved, block.index, facts)
            for slab in block.slabs:
                path = layout.leaves[slab.leaf].path
                leaves[slab.leaf][(*slab.box.slices(), ...)] = arrays[f"params/{path}"]
        return self._task.loss(leaves)


@dataclasses.dataclass(frozen=True)
class Result:
    """Figures of one case.

    Attributes:
      points: (samples that were committed, seconds, held-out loss) of some versions;
        the last one is the end of the training.
      rounds: that learners have computed; `dropped` were not committed.
      staleness: mean and maximum over contributions, in commits.
      rates: local steps a second of each learner.
      allowed: seconds in which each learner with slots could run.
      busy: the share of the cores that had work, with slots.
    """

    points: list[tuple[int, float, float]]
    commits: int
    rounds: int
    dropped: int
    staleness: tuple[float, int]
    rates: list[float]
    allowed: list[float]
    busy: float

    @property
    def loss(self) -> float:
        return self.points[-1][2]

    @property
    def samples(self) -> int:
        return self.points[-1][0]

    @property
    def seconds(self) -> float:
        return self.points[-1][1]

    def seconds_to(self, loss: float, initial: float) -> float | None:
        """Returns when a loss was reached, between two points; None: never."""
        before = 0, 0.0, initial
        for point in self.points:
            if point[2] <= loss:
                share = (before[2] - loss) / (before[2] - point[2])
                return before[1] + share * (point[1] - before[1])
            before = point
        return None

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Result":
        return cls(**data)


def measure(case: Case, trained: Trained, judge: Judge) -> Result:
    """Returns the figures of a training."""
    run = trained.run
    spec = json.loads((run / "spec.json").read_text())
    commits = metrics.read(run / "commits.jsonl")
    rows = judge.config.batch_size // case.learners
    samples, ages, committed, total = {}, [], set(), 0
    for commit in commits:
        version = commit["version"]
        for part in commit["contributions"]:
            if not part["is_reused"]:
                total += part["steps"] * rows
                ages.append(version - 1 - part["base"])
                committed.add((part["learner"], part["incarnation"], part["round"]))
        samples[version] = total
    times = {commit["version"]: commit["time"] for commit in commits}
    if (last := commits[-1]["version"]) not in trained.saved:
        raise Failed(f"version {last}, the last one, was not saved")
    layout = Layout.from_json(spec["layout"])
    versions = sorted(set(trained.saved) - {0})
    # From the last one backwards; some modes save more often than was asked for.
    chosen = versions[:: -max(len(versions) // case.points, 1)][::-1]
    points = [
        (samples[v], times[v] - trained.began, judge.loss(trained.saved[v], layout))
        for v in chosen
    ]
    computed = {key for i in range(case.learners) for key in rounds(trained, i)}
    return Result(
        points=points,
        commits=len(commits),
        rounds=len(computed | committed),
        dropped=len(computed - committed),
        staleness=(float(np.mean(ages)), max(ages)),
        rates=[rate(trained, i) for i in range(case.learners)],
        allowed=[trained.allowed[i] for i in sorted(trained.allowed)],
        busy=trained.busy,
    )


def rounds(trained: Trained, learner: int) -> list[tuple[int, int, int]]:
    ledger = Ledger(trained.learner(learner), is_writer=False)
    return [
        (row["learner"], row["incarnation"], row["round"])
        for row in ledger.read()
        if row["event"] == "round"
    ]


def rate(trained: Trained, learner: int) -> float:
    """Returns the local steps a second of a learner, until its last one."""
    rows = metrics.read(trained.learner(learner) / "metrics.jsonl")
    times = [row["time"] for row in rows if row["time"] > trained.began]
    return len(times) / (times[-1] - trained.began) if times else 0.0
