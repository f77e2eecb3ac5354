"""`meshloom test`: every metric of a trained model on data it was not trained on."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optax
from jax.sharding import Mesh

from ...sharding.mesh import mesh_sizes
from ..checkpoint import manifest
from ..checkpoint.inspect import Stored
from ..data import Dataset, open_source
from ..data.batches import WEIGHTS
from ..job.group import Group
from ..program import contract
from ..program.build import Program, build
from ..program.computation import plain
from ..program.rules import name_settings
from . import bootstrap, data_identity, evaluating, overlap, trained
from .held_out import TITLES, Name, with_weights
from .prepare import batch_shapes

if TYPE_CHECKING:
    from .train import Config

Log = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Tested:
    """The metrics of a checkpoint on a split.

    Attributes:
      metrics: {name: value}.
      intervals: {name: (low, high)}; None for a metric without one.
      no_intervals: why there are no intervals; empty if there are.
      num_groups, group_size: groups of examples that the bootstrap draws from.
      found: what it has in common with the training split; None if not compared.
    """

    run: Path
    step: int
    split: Name
    num_examples: int
    metrics: Mapping[str, float]
    intervals: Mapping[str, bootstrap.Interval | None]
    no_intervals: str
    num_groups: int
    group_size: int
    found: overlap.Overlap | None
    data: Mapping[str, Any]
    state: str
    mesh: Mapping[str, int]

    def title(self) -> str:
        return (
            f"{self.run}, step {self.step}: {TITLES[self.split]} split, "
            f"{self.num_examples:,} examples"
        )

    def describe_intervals(self) -> str:
        if self.no_intervals:
            return f"No confidence intervals: {self.no_intervals}"
        return (
            f"{bootstrap.LEVEL:.0%} confidence intervals: bootstrap, "
            f"{bootstrap.DRAWS:,} draws of {self.num_groups} groups of "
            f"{self.group_size:,} examples"
        )

    def describe_overlap(self) -> str:
        if self.found is None:
            return "Not compared with the training split (--no-overlap-check)"
        return self.found.describe()

    def to_json(self) -> dict[str, Any]:
        """Returns the result as JSON, which has no NaN: such values are null."""
        shared = None if self.found is None else self.found.to_json()
        return {
            "run": str(self.run),
            "step": self.step,
            "state": self.state,
            "split": self.split,
            "examples": self.num_examples,
            "metrics": {
                name: {"value": _finite(value), "interval": self.intervals.get(name)}
                for name, value in self.metrics.items()
            },
            "intervals": {
                "level": bootstrap.LEVEL,
                "draws": bootstrap.DRAWS,
                "groups": self.num_groups,
                "group_examples": self.group_size,
                "missing": self.no_intervals or None,
            },
            "overlap": shared,
            "data": dict(self.data),
            "mesh": {axis: size for axis, size in self.mesh.items() if size > 1},
        }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def run_test(
    config: "Config",
    changed: "Config",
    run: Path,
    stored: Stored,
    *,
    split: Name,
    mesh: Mesh,
    check_overlap: bool = True,
    log: Log = lambda _: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Tested:
    """Evaluates a checkpoint on a split, if the run was not trained on it.

    Args:
      config: of the run, with the data that it was trained on.
      changed: the config with the data to test on, mostly the same.
      progress: called with the batches done and their number.
    """
    contract.check(config.model)
    trained.refuse_pipe(mesh, "meshloom test")
    data = with_weights(changed, open_source(changed.data, split))
    train = _training_data(config, changed) if check_overlap else None
    facts = _established(run, stored, split, data, train, config != changed, log)
    found = None
    if train is not None:
        found = overlap.find(train, data, log)
        _refuse_overlap(split, found)
    program = _program(changed, data, mesh)
    state = trained.restore(stored, program.layout, mesh)
    num_batches = math.ceil(len(data) / program.batch_size)
    rows = evaluating.batch_sums(
        program.evaluate,
        state,
        data,
        batch_size=program.batch_size,
        shardings=program.batch_shardings,
        num_batches=num_batches,
        done=lambda done: progress(done, num_batches),
    )
    groups, group_size = _grouped(rows, program.batch_size)
    sums = evaluating.totals(rows)
    if not sums["weight"]:
        raise ValueError(
            f"the weights of the {TITLES[split]} split add up to 0, so it has no mean "
            "loss. Give its examples weights > 0."
        )
    intervals, no_intervals = _intervals(groups, group_size, data)
    return Tested(
        run=run,
        step=stored.step,
        split=split,
        num_examples=len(data),
        metrics=evaluating.means(sums, data),
        intervals=intervals,
        no_intervals=no_intervals,
        num_groups=len(groups),
        group_size=group_size,
        found=found,
        data={**data.describe(), **facts},
        state=manifest.state_digest(stored.manifest()),
        mesh=mesh_sizes(mesh),
    )


def _training_data(config: "Config", changed: "Config") -> Dataset:
    """Opens what the run was trained on, where it was then or where it is now."""
    try:
        return with_weights(config, open_source(config.data, "train"))
    except (ValueError, OSError):
        if config == changed:
            raise
        # Its digest is compared with the run's.
        return with_weights(changed, open_source(changed.data, "train"))


def _established(
    run: Path,
    stored: Stored,
    split: Name,
    data: Dataset,
    train: Dataset | None,
    is_changed: bool,
    log: Log,
) -> dict[str, Any]:
    """Returns the digest of the split; refuses data that changed since the run."""
    datasets = {split: data} if train is None else {split: data, "train": train}
    identity = data_identity.establish(
        datasets, Group(), [0], run, stored.folder, insist=True, log=log
    )
    names = {change["split"] for change in identity.changes}
    if "train" in names or (split in names and not is_changed):
        lines = "; ".join(identity.describe_changes().splitlines())
        raise ValueError(
            f"the data is not what run folder {run} was trained on ({lines}). Restore "
            "it"
            + (
                ", or pass --no-overlap-check to test without comparing with it"
                if "train" in names
                else ", or name the data to test on with --set data.NAME=VALUE"
            )
        )
    return {"digest": identity.splits[split].digest}


def _refuse_overlap(split: Name, found: overlap.Overlap) -> None:
    if not found.count:
        return
    mine, other = found.first
    raise ValueError(
        f"the {TITLES[split]} split overlaps the training split: {found.describe()}, "
        f"such as {mine}, which is {other} there. Test on other data "
        "(--set data.NAME=VALUE, or another --split), or pass --no-overlap-check for "
        "scores that include what was learned by heart."
    )


def _program(config: "Config", data: Dataset, mesh: Mesh) -> Program:
    settled = plain(config)
    rules = settled.make_rules()
    first = data[0]
    with name_settings(config):
        multiple = trained.row_multiple(config.model, rules, mesh)
        rows = _rows(len(data), config.batch_size, multiple, WEIGHTS in first)
        return build(
            config.model,
            optax.identity(),
            mesh,
            rules,
            batch_shapes(first, rows),
            seed=config.seed,
            facts=data.describe(),
        )


def _rows(num_examples: int, most: int, multiple: int, can_pad: bool) -> int:
    """Returns the rows of a batch: few, so that there are groups to draw from."""
    wanted = min(math.ceil(num_examples / bootstrap.MAX_GROUPS), most)
    rows = math.ceil(wanted / multiple) * multiple
    if can_pad:
        return rows
    for size in range(rows, 0, -multiple):
        if num_examples % size == 0:
            return size
    for size in range(rows, num_examples + 1, multiple):
        if num_examples % size == 0:
            return size
    raise ValueError(
        f"the split has {num_examples} examples, which are not a multiple of the "
        f"{multiple} shards of a batch on this mesh, and a batch can only be padded "
        f"for a model that takes an array {WEIGHTS!r}. Pass --mesh data=1, or add the "
        "array to the model's batch_axes()."
    )


def _grouped(
    rows: Sequence[evaluating.Sums], batch_size: int
) -> tuple[list[evaluating.Sums], int]:
    """Adds the batches of each group; returns the groups and their examples."""
    size = math.ceil(len(rows) / bootstrap.MAX_GROUPS)
    starts = range(0, len(rows), size)
    groups = [evaluating.totals(rows[i : i + size]) for i in starts]
    return groups, size * batch_size


def _intervals(
    groups: Sequence[evaluating.Sums], group_size: int, data: Dataset
) -> tuple[Mapping[str, bootstrap.Interval | None], str]:
    """Returns the intervals, or {} and why there are none."""
    if len(groups) < bootstrap.MIN_GROUPS:
        return {}, (
            f"{len(data):,} examples are only {len(groups)} groups of {group_size}, "
            f"and a bootstrap needs {bootstrap.MIN_GROUPS}"
        )
    means = bootstrap.intervals(groups, lambda sums: evaluating.means(sums, data))
    return means, ""
