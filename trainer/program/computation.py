"""The part of a config that defines the computation of a run.

See run/train.py for how a run is saved, logged and monitored.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...sharding import MeshSpec, Rules
from ...sharding.plans import AUTO, STANDARD, with_context
from ..data import Source
from . import compiler_options
from .optimizers import Optimizer, make_tx
from .pipelining import Pipelining
from .rules import make_rules, name_settings
from .schedules import Schedule, make_rate
from .state import Layout, Model, make_layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Computation:
    """Model, data, optimizer, and how they are sharded over devices.

    Attributes:
      batch_size: examples per update, over all devices and microbatches.
      plan: sharding plans joined with +, see meshloom.sharding.plans. "auto" is chosen
        for the mesh and its devices, like every unset value below (docs/plan.md).
      rules: rules of your own, applied after those of the plan: {"classes": "tensor"}
        shards the logical axis `classes` over the mesh axis tensor, {"classes": None}
        never shards it, a list is tried in order, and {"classes": {"param": "fsdp"}}
        applies to one role only (param, compute, optimizer).
      num_microbatches: number of microbatches, computed sequentially or by the
        pipeline. None is chosen: the fewest that fit in memory, and in a pipeline a
        number with a small bubble.
      pipeline: how to use a mesh axis pipe larger than 1.
      max_grad_norm: gradients are clipped to this global norm; None does not clip.
      skip_grad_norm: an update whose gradient norm is larger is skipped, as a
        non-finite one always is; None means no limit.
      compiler_options: "xla_NAME=VALUE", to compile the step with.
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
        check_minimum(self, 1, "batch_size", "num_steps", "num_microbatches")
        check_minimum(self, 0, "seed")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ValueError(
                f"max_grad_norm must be > 0, got {self.max_grad_norm}; None does not "
                "clip"
            )
        if missing := -self.batch_size % (self.num_microbatches or 1):
            raise ValueError(
                f"batch_size {self.batch_size} is not divisible by num_microbatches "
                f"{self.num_microbatches}; {self.batch_size + missing} would be"
            )
        if self.skip_grad_norm is not None and not self.skip_grad_norm > 0:
            raise ValueError(
                f"skip_grad_norm must be > 0, got {self.skip_grad_norm}; None skips "
                "only non-finite updates"
            )
        self.make_rules()
        compiler_options.parse(self.compiler_options)

    def make_rules(self) -> Rules:
        return make_rules(self.plan, self.rules)


def check_minimum(config: Any, minimum: int, *names: str) -> None:
    """Raises ValueError for a field below its minimum; None is not checked."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value < minimum:
            raise ValueError(f"{name} must be >= {minimum}, got {value}")


@dataclasses.dataclass(frozen=True)
class Chosen:
    """The choices made for a config.

    Attributes:
      given: the config as the user wrote it.
      config: the same config with every choice filled in.
      line: the reasons, in one line; empty if there was nothing to choose.
    """

    given: Any
    config: Any
    line: str = ""


# Fills in what a config leaves open, given the sizes of the mesh axes and the devices.
Choose = Callable[[Any, Mapping[str, int], Sequence[Any]], Chosen]


def plain(config: Any) -> Any:
    """Returns the config with the simplest value for everything it leaves open."""
    standard = STANDARD if config.mesh.context == 1 else with_context(STANDARD)
    plan = standard if config.plan == AUTO else config.plan
    return dataclasses.replace(config, plan=plan, pipeline=config.pipeline.plain())


def choose_plain(
    config: Any, sizes: Mapping[str, int], devices: Sequence[Any]
) -> Chosen:
    """Chooses the simplest values; `plan.choosing.choose_here` compares them."""
    del sizes, devices
    return Chosen(config, plain(config))


def layout_of(config: Any, mesh: Any) -> tuple[Layout, Rules]:
    """Returns the layout of a config's state on a mesh, and the rules behind it."""
    rules = config.make_rules()
    learning_rate = make_rate(config.schedule, config.num_steps)
    tx = make_tx(config.optimizer, config.model.axes(), learning_rate)
    with name_settings(config):
        axes = getattr(config.optimizer, "state_axes", None)
        return make_layout(config.model, tx, rules, mesh, state_axes=axes), rules
