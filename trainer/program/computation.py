"""What defines the computation of a run: the part of a config that a Program is of.

How a run is saved, logged and watched is not here: see run/train.py.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...sharding import MeshSpec, Rules
from ...sharding.plans import AUTO, STANDARD
from ..data import Source
from . import compiler_options
from .optimizers import Optimizer
from .pipelining import Pipelining
from .rules import make_rules, name_settings
from .schedules import Schedule
from .state import Layout, Model, make_layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Computation:
    """Model, data, optimizer, and how they are laid out over devices.

    Attributes:
      batch_size: examples of one update, over all devices and microbatches.
      plan: sharding plans joined with +, see meshloom.sharding.plans; "auto" is chosen
        for the mesh and its devices, as all that is left open below (docs/plan.md).
      rules: rules of your own, after those of the plan: {"classes": "tensor"} shards
        the logical axis `classes` over the mesh axis tensor, {"classes": None} never
        does, a list is tried in order, and {"classes": {"param": "fsdp"}} holds for one
        role only (param, compute, optimizer).
      num_microbatches: parts of the batch computed one after the other; in a pipeline
        they are its microbatches. None is chosen: the fewest that fit in memory, and in
        a pipeline a number for which little of the step is bubble.
      pipeline: how a mesh axis pipe larger than 1 is used.
      max_grad_norm: gradients are scaled down to this global norm; None does not clip.
      skip_grad_norm: a step whose gradient has a larger norm is left out, as one that
        is not finite always is; None for no such limit.
      compiler_options: "xla_NAME=VALUE" of what the step is compiled with.
    """

    model: Model
    data: Source
    optimizer: Optimizer
    schedule: Schedule
    batch_size: int
    num_steps: int
    mesh: MeshSpec = MeshSpec(data=-1)
    plan: str = AUTO
    rules: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    num_microbatches: int | None = None
    pipeline: Pipelining = Pipelining()
    max_grad_norm: float | None = 1.0
    skip_grad_norm: float | None = None
    seed: int = 0
    compiler_options: tuple[str, ...] = ()

    def __post_init__(self):
        check_least(self, 1, "batch_size", "num_steps", "num_microbatches")
        check_least(self, 0, "seed")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ValueError(
                f"max_grad_norm must be positive, got {self.max_grad_norm}; None does "
                "not clip"
            )
        if short := -self.batch_size % (self.num_microbatches or 1):
            raise ValueError(
                f"batch_size {self.batch_size} is not divided by num_microbatches "
                f"{self.num_microbatches}; {self.batch_size + short} would be"
            )
        if self.skip_grad_norm is not None and not self.skip_grad_norm > 0:
            raise ValueError(
                f"skip_grad_norm must be positive, got {self.skip_grad_norm}; None "
                "leaves out only steps that are not finite"
            )
        self.make_rules()
        compiler_options.parse(self.compiler_options)

    def make_rules(self) -> Rules:
        return make_rules(self.plan, self.rules)


def check_least(config: Any, least: int, *names: str) -> None:
    """Raises ValueError for a field below its least value; None is not checked."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")


@dataclasses.dataclass(frozen=True)
class Chosen:
    """A config as it was given, the same with nothing left open, and why, in a line.

    The line is empty where there was nothing to choose.
    """

    given: Any
    config: Any
    line: str = ""


# Fills what a config leaves open, for a mesh of these sizes of these devices.
Choose = Callable[[Any, Mapping[str, int], Sequence[Any]], Chosen]


def plain(config: Any) -> Any:
    """Returns the config with the simplest value for all that is left open."""
    plan = STANDARD if config.plan == AUTO else config.plan
    return dataclasses.replace(config, plan=plan, pipeline=config.pipeline.plain())


def choose_plain(
    config: Any, sizes: Mapping[str, int], devices: Sequence[Any]
) -> Chosen:
    """A Choose that compares nothing; `plan.choosing.choose_here` does."""
    del sizes, devices
    return Chosen(config, plain(config))


def layout_of(config: Any, mesh: Any) -> tuple[Layout, Rules]:
    """Returns the layout of a config's state on a mesh, and the rules behind it."""
    rules = config.make_rules()
    learning_rate = config.schedule.make(config.num_steps)
    tx = config.optimizer.make(learning_rate, config.model.axes())
    with name_settings(config):
        axes = getattr(config.optimizer, "state_axes", None)
        return make_layout(config.model, tx, rules, mesh, state_axes=axes), rules
