"""Pipelines a model over the pipe axis of a mesh: schedule and microbatches."""

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from ...sharding import Rules
from ...sharding.mesh import mesh_sizes
from ...sharding.pipeline import Pipeline, Schedule, layer_order, make
from ...sharding.pipeline.schedule import NAMES
from ...sharding.pipeline.simulate import (
    GATHERS,
    Simulation,
    Sizes,
    best_microbatches,
    simulate,
)
from ...sharding.pipeline.ticks import PIPE
from ...sharding.plans import AUTO
from ...sharding.resolve import resolve_dimensions
from ...sharding.text import percent
from . import contract

# If the bubble is a larger fraction of a step, a line suggests better settings.
LARGE_BUBBLE = 0.2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pipelining:
    """How to use a mesh axis `pipe` larger than 1.

    Attributes:
      schedule: gpipe, 1f1b or interleaved; "auto" is chosen for the devices, see
        docs/pipeline.md.
      num_chunks: chunks of layers per stage, for interleaved; None is chosen.
      gather: whether weights sharded over fsdp are gathered once per "step", or at each
        use, once per "microbatch"; "auto" is chosen.
    """

    schedule: str = AUTO
    num_chunks: int | None = None
    gather: str = AUTO

    def __post_init__(self):
        for name, names in (("schedule", NAMES), ("gather", GATHERS)):
            if getattr(self, name) not in (*names, AUTO):
                raise ValueError(
                    f"{name} must be one of {', '.join((*names, AUTO))}, got "
                    f"{getattr(self, name)!r}"
                )
        num = self.num_chunks
        if num is not None and num < 1:
            raise ValueError(f"num_chunks must be >= 1, got {num}")
        if self.schedule not in ("interleaved", AUTO) and num not in (None, 1):
            raise ValueError(
                f"num_chunks {num}: schedule {self.schedule} has one chunk of layers "
                "per stage. Leave num_chunks unset, or use schedule interleaved."
            )

    def plain(self) -> "Pipelining":
        """Returns these settings with the simplest value for each that is unset."""
        schedule = self.schedule
        if schedule == AUTO:
            schedule = "1f1b" if self.num_chunks in (None, 1) else "interleaved"
        gather = "step" if self.gather == AUTO else self.gather
        return dataclasses.replace(self, schedule=schedule, gather=gather)


@dataclasses.dataclass(frozen=True)
class Staging:
    """How a model is pipelined on a mesh: its schedule and the cost of it.

    Attributes:
      order: the layer at each index of the stored stack.
      derived: whether the number of microbatches was chosen automatically.
      advice: settings that would shrink a large bubble; empty if it is small.
    """

    schedule: Schedule
    simulation: Simulation
    order: np.ndarray
    derived: bool
    advice: str = ""

    def bind(
        self, model: Any, mesh: Mesh, rules: Rules, settings: Pipelining
    ) -> Pipeline:
        return Pipeline(
            model.stack(),
            self.schedule,
            mesh,
            rules,
            model.axes(),
            model.batch_axes(),
            gather=settings.plain().gather,  # type: ignore
        )

    def describe(self, batch_size: int) -> str:
        simulation = self.simulation
        num, num_chunks = simulation.num_microbatches, simulation.num_chunks
        chunks = f" of {num_chunks} chunks" if num_chunks > 1 else ""
        derived = " (derived)" if self.derived else ""
        return (
            f"Pipeline: {simulation.name}, stages {simulation.num_stages}{chunks}, "
            f"microbatches {num}{derived}, examples in each {batch_size // num}; "
            f"bubble {percent(simulation.bubble)} of the step (simulated), saved "
            f"inputs per stage {simulation.slots}{self.advice}"
        )

    def to_json(self, start: int) -> dict[str, Any]:
        """Returns what the run folder records of the steps after `start`."""
        facts = {"start": start, "derived": self.derived}
        return {**facts, **self.simulation.to_json()}


def make_staging(
    model: Any,
    mesh: Mesh | AbstractMesh,
    rules: Rules,
    settings: Pipelining,
    *,
    batch_size: int,
    num_microbatches: int | None = None,
    num_layers: int | None = None,
    advise: bool = True,
) -> Staging | None:
    """Stages a model on a mesh with a pipe axis; returns None for a mesh without one.

    Args:
      num_microbatches: None chooses the number with the smallest bubble.
      num_layers: of the stack; None reads it from the model.
      advise: whether to look for settings that shrink a large bubble.
    """
    num_stages = mesh_sizes(mesh).get(PIPE, 1)
    if num_stages == 1:
        return None
    if not hasattr(model, "stack"):
        raise ValueError(
            f"mesh axis pipe={num_stages}: {type(model).__name__} is not a stack of "
            "equal blocks (it has no method `stack`), so it cannot be split into "
            "stages. Set pipe=1."
        )
    if wanted := contract.extras(model):
        raise ValueError(
            f"mesh axis pipe={num_stages}: {type(model).__name__}.loss takes "
            f"{', '.join(wanted)}, but a pipeline calls the parts of the model's "
            "stack, which do not take any of these. Set pipe=1."
        )
    row = rules.find("layer", "param")
    if row is None or all(PIPE not in candidate for candidate in row.candidates):
        raise ValueError(
            f"mesh axis pipe={num_stages}: the rules do not shard layers over it. Add "
            "+pipeline to the plan, or set pipe=1."
        )
    settings = settings.plain()
    name, num_chunks = settings.schedule, settings.num_chunks
    each = _examples_each(batch_size, mesh, rules)
    stack, num = model.stack(), num_microbatches
    # Stages that divide the work outside the blocks by examples need some for each.
    by_example = stack.split_dim == 0 and each % num_stages == 0
    groups = each // num_stages if by_example else each
    if num is None:
        num = best_microbatches(name, num_stages, num_chunks, divisors(groups))
    elif each % num:
        below = max(n for n in divisors(each) if n < num)
        above = [n for n in divisors(each) if n > num][:1]
        raise ValueError(
            f"num_microbatches {num} does not divide the {each} examples per device of "
            f"batch_size {batch_size}. Set it to "
            f"{' or '.join(map(str, [below, *above]))}, or change batch_size."
        )
    schedule = _make(name, num_stages, num, num_chunks)
    if num_layers is None:
        state = jax.eval_shape(lambda: model.init(jax.random.key(0)))
        blocks = state[stack.blocks]
        num_layers = int(jax.tree.leaves(blocks)[0].shape[0])
    try:
        order = layer_order(num_layers, num_stages, schedule.num_chunks)
    except ValueError as error:
        raise ValueError(f"mesh axis pipe={num_stages}: {error}") from error
    derived = num_microbatches is None
    each_stage = num_layers // num_stages
    simulation = _simulate(schedule, stack.remat, settings.gather, each_stage)
    advice = ""
    if advise:
        advice = _advice(schedule, derived, groups, batch_size, each_stage)
    return Staging(schedule, simulation, order, derived=derived, advice=advice)


# Cached because a search tries the same schedule on many meshes.
_make = functools.lru_cache(maxsize=256)(make)


@functools.lru_cache(maxsize=1024)
def _simulate(schedule: Schedule, remat: str, gather: str, layers: int) -> Simulation:
    sizes = Sizes(layers_per_stage=layers)
    return simulate(schedule, remat=remat, gather=gather, sizes=sizes)


def _advice(
    schedule: Schedule, derived: bool, each: int, batch_size: int, num_layers: int
) -> str:
    """Returns which settings would shrink the bubble, "" if it is small.

    Args:
      each: examples of a batch per device, or groups that cannot be divided.
      num_layers: layers per stage.
    """
    if (bubble := simulate(schedule).bubble) <= LARGE_BUBBLE:
        return ""
    name, S, R = schedule.name, schedule.num_stages, schedule.num_chunks

    def best(name: str, R: int, allowed: list[int]) -> tuple[int, float]:
        num = best_microbatches(name, S, R, allowed)
        return num, simulate(make(name, S, num, R)).bubble

    num, less = best(name, R, divisors(each))
    setting, times = f"num_microbatches={num}", 1
    if less == bubble:
        while less > LARGE_BUBBLE:
            times *= 2
            num, less = best(name, R, divisors(each * times))
        both = "" if derived else f" and num_microbatches={num}"
        setting = f"batch_size={batch_size * times}{both}"
    settings = [(setting, less)]
    if more := [n for n in divisors(num_layers) if n > R]:
        allowed = divisors(each) if derived else [schedule.num_microbatches]
        _, less = best("interleaved", more[0], allowed)
        parts = [] if name == "interleaved" else ['pipeline.schedule="interleaved"']
        if not parts or more[0] > 2:
            parts.append(f"pipeline.num_chunks={more[0]}")
        if less < bubble:
            settings.append((" and ".join(parts), less))
    choices = " or ".join(f"{name} ({percent(less)})" for name, less in settings)
    return f". It would be smaller with {choices}."


def _examples_each(batch_size: int, mesh: Mesh | AbstractMesh, rules: Rules) -> int:
    """Returns the number of examples in each shard of a batch."""
    (rows,) = resolve_dimensions(
        ("batch",),
        (batch_size,),
        rules,
        mesh,
        name=f"batch_size {batch_size}",
        role="compute",
    )
    sizes = mesh_sizes(mesh)
    return batch_size // math.prod(sizes[axis] for axis in rows.mesh_axes)


def divisors(count: int) -> list[int]:
    """Returns all divisors of a number, smallest first."""
    small = [n for n in range(1, math.isqrt(count) + 1) if count % n == 0]
    return sorted({*small, *(count // n for n in small)})
