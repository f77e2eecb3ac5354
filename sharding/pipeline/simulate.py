"""Computes the cost of a schedule from its tables, before anything is compiled.

All stages run in lockstep: at a tick where any stage does a forward, every stage runs
one (masked if it has no microbatch); the same holds for backwards. The unit of cost is
a forward of one microbatch through all layers of a stage. One of R chunks costs 1/R:

  remat                  forward  backward  what it keeps for the backward
  none                      1        2      all values of the chunks in flight
  save-named, save-dots     1        3      their inputs; the policy's values of one
  full                      1        4      their inputs; the layer inputs of one
  full, one-layer chunks    1        3      their inputs

Each forward sends one activation to the next stage over every link of the ring, each
backward one to the previous stage. The stages share the work outside the blocks.

Weights that are sharded over fsdp are gathered in one of two ways:

  gather      remat    per forward   per backward    reduce-scatters    gathered at once
  step        any            1 per step              1 at its end       the stage
  microbatch  none          1              1         1 per backward     one layer
  microbatch  others        1              2         1 per backward     one layer

A backward that recomputes loops over the layers twice, and each loop gathers.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import numpy as np

from .schedule import IDLE, NAMES, Schedule, make

Gather = Literal["step", "microbatch"]
GATHERS: tuple[Gather, ...] = get_args(Gather)
BACKWARD_COST = {"none": 2, "save-named": 3, "save-dots": 3, "full": 4}
# The embedding to stage 0, its gradient back, the output of the last stage, and its
# gradient back.
BOUNDARY_TRANSFERS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes on one device; None if unknown.

    Attributes:
      activation_bytes: of one microbatch between two blocks.
      residual_bytes: by remat policy, what one layer keeps of one microbatch for its
        backward, its input included. `full` uses the entry of `none`, for the one layer
        whose backward runs.
      weight_bytes: the weights of one stage in float32, not sharded over fsdp. Gathered
        copies and gradients are counted in float32 too.
      fsdp: the number of shards of each weight.
    """

    activation_bytes: int | None = None
    layers_per_stage: int | None = None
    residual_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    weight_bytes: int | None = None
    fsdp: int = 1

    def __post_init__(self):
        for policy in self.residual_bytes:
            if policy not in BACKWARD_COST or policy == "full":
                raise ValueError(
                    "residual_bytes: policies must be none, save-named or save-dots "
                    f"(full uses the entry of none), got {policy!r}"
                )
        sizes = {**vars(self), **self.residual_bytes}
        del sizes["residual_bytes"]
        for name, value in sizes.items():
            if value is not None and value < 1:
                raise ValueError(f"size {name} must be >= 1, got {value}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on a device at the peak; None if a size it needs was not given.

    Attributes:
      inputs: chunk inputs that wait for their backward, and under `full` the inputs of
        the layers of the chunk whose backward runs. Under `none`, a chunk's input is
        among its residuals, and its output, which the head reads, is counted here.
      residuals: the residuals of `kept_layers` layers.
      weights: the stored shard, and the weights that are gathered at once.
      gradients: the sums, and the gradients not reduced yet.
    """

    inputs: int | None
    residuals: int | None
    weights: int | None
    gradients: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that a device sends in one step; None if a size was not given.

    Attributes:
      ring: to both neighbors together, bubbles included.
      boundary: transfers of the embedding and the head, bubbles excluded.
      weights: gathers and reduce-scatters over fsdp, each of (fsdp - 1) / fsdp of them.
    """

    ring: int | None
    boundary: int | None
    weights: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Simulation:
    """The cost of one step of a schedule, on every stage.

    Attributes:
      forward_ticks, backward_ticks: ticks at which any stage does one.
      cost: in forwards of a microbatch through a stage.
      ideal: the cost without bubbles.
      live: for each stage, the largest number of inputs that wait for their backward.
      slots: slots for these inputs on every stage.
      layer_inputs: layer inputs kept besides them (`full` only). None if the number of
        layers was not given, like `kept_layers`.
      kept_layers: layers whose values are kept at once, for one microbatch each.
      sends: activations over each link of the ring, (forward, backward).
      boundary_transfers: each of (stages - 1) / stages of an activation.
      weight_gathers: gathers of a stage's weights, bubbles included.
      weight_scatters: reduce-scatters of its gradients, bubbles included.
    """

    name: str
    num_stages: int
    num_microbatches: int
    num_chunks: int
    remat: str
    gather: str
    num_ticks: int
    forward_ticks: int
    backward_ticks: int
    cost: float
    ideal: float
    live: tuple[int, ...]
    slots: int
    layer_inputs: int | None
    kept_layers: int | None
    sends: tuple[int, int]
    boundary_transfers: int
    weight_gathers: float
    weight_scatters: float
    memory: Memory
    traffic: Traffic

    @property
    def recomputes_once(self) -> bool:
        """Whether full remat recomputes a chunk of one layer, once."""
        return self.remat == "full" and self.layer_inputs == 1

    @property
    def backward_cost(self) -> int:
        """Cost of a backward of one microbatch through a stage, in forwards."""
        return backward_cost(self.remat, self.layer_inputs)

    @property
    def bubble(self) -> float:
        """Fraction of the step in which a stage is idle."""
        return (self.cost - self.ideal) / self.cost

    @property
    def ratio(self) -> float:
        """Executed work over useful work."""
        return self.cost / self.ideal

    def to_json(self) -> dict:
        """Returns all fields and properties, for json.dumps."""
        shares = {"bubble": self.bubble, "ratio": self.ratio}
        return {**dataclasses.asdict(self), **shares}


def backward_cost(remat: str, layers: int | None) -> int:
    """Returns the cost of a backward in forwards.

    Args:
      layers: layers of a chunk, None if unknown.
    """
    return BACKWARD_COST[remat] - (remat == "full" and layers == 1)


def simulate(
    schedule: Schedule,
    *,
    remat: str = "save-named",
    gather: str = "step",
    sizes: Sizes | None = None,
) -> Simulation:
    """Computes the cost of one step of a schedule; bytes are None without `sizes`."""
    for what, name, names in (
        ("remat", remat, BACKWARD_COST),
        ("gather", gather, GATHERS),
    ):
        if name not in names:
            raise ValueError(f"{what} must be one of {', '.join(names)}, got {name!r}")
    sizes = sizes or Sizes()
    S, M, R = schedule.num_stages, schedule.num_microbatches, schedule.num_chunks
    forwards = schedule.forward[..., 0] != IDLE
    backwards = schedule.backward[..., 0] != IDLE
    F, B = (int(busy.any(axis=1).sum()) for busy in (forwards, backwards))
    # An input is live from its forward through the tick of its backward.
    live = np.cumsum(forwards, axis=0) - np.cumsum(backwards, axis=0) + backwards

    layers, slots = _layers_of_a_chunk(schedule, sizes), schedule.num_slots
    layer_inputs = layers if remat == "full" else 0
    inputs = None if layer_inputs is None else slots + layer_inputs
    kept_layers = {"none": _product(slots, layers), "full": 1}.get(remat, layers)
    residual = sizes.residual_bytes.get("none" if remat == "full" else remat)
    sends = (F, B) if S > 1 else (0, 0)
    boundary = BOUNDARY_TRANSFERS * M if S > 1 else 0
    gathers = scatters = 1.0
    if gather == "microbatch":
        # A backward recomputes its layers; with more than one, each is recomputed
        # again for its gradient.
        in_a_backward = 1 if remat == "none" or layers == 1 else 2
        gathers = (F + B * in_a_backward) / R
        scatters = B / R
    weights, gradients = _weight_memory(sizes, gather)
    ways = sizes.fsdp
    return Simulation(
        name=schedule.name,
        num_stages=S,
        num_microbatches=M,
        num_chunks=R,
        remat=remat,
        gather=gather,
        num_ticks=schedule.num_ticks,
        forward_ticks=F,
        backward_ticks=B,
        cost=(F + B * backward_cost(remat, layers)) / R,
        ideal=M * (1 + backward_cost(remat, layers)),
        live=tuple(live.max(axis=0).tolist()),
        slots=slots,
        layer_inputs=layer_inputs,
        kept_layers=kept_layers,
        sends=sends,
        boundary_transfers=boundary,
        weight_gathers=gathers,
        weight_scatters=scatters,
        memory=Memory(
            inputs=_product(inputs, sizes.activation_bytes),
            residuals=_product(kept_layers, residual),
            weights=weights,
            gradients=gradients,
        ),
        traffic=Traffic(
            ring=_product(sum(sends), sizes.activation_bytes),
            boundary=_product(boundary, sizes.activation_bytes, (S - 1) / S),
            weights=_product(gathers + scatters, sizes.weight_bytes, (ways - 1) / ways),
        ),
    )


def compare(
    num_stages: int,
    num_microbatches: int,
    num_chunks: int | None = None,
    *,
    names: Sequence[str] = NAMES,
    **settings,
) -> tuple[Simulation, ...]:
    """Simulates several schedules.

    Args:
      num_chunks: for interleaved.
      settings: as for `simulate`.
    """
    chunks = {"interleaved": num_chunks}
    return tuple(
        simulate(make(name, num_stages, num_microbatches, chunks.get(name)), **settings)
        for name in names
    )


def best_microbatches(
    name: str,
    num_stages: int,
    num_chunks: int | None,
    allowed: Sequence[int],
    goal: float = 0.1,
) -> int:
    """Returns the smallest allowed number of microbatches with bubble <= `goal`.

    If there is none, returns the one with the smallest bubble.
    """
    if not allowed:
        raise ValueError(
            f"schedule {name} with {num_stages} stages: allowed must list at least one "
            "number of microbatches, got none"
        )
    bubbles = {}
    for count in sorted(allowed):
        bubbles[count] = simulate(make(name, num_stages, count, num_chunks)).bubble
        if bubbles[count] <= goal:
            return count
    return min(bubbles, key=lambda count: (bubbles[count], count))


def _layers_of_a_chunk(schedule: Schedule, sizes: Sizes) -> int | None:
    layers, R = sizes.layers_per_stage, schedule.num_chunks
    if layers is not None and layers % R:
        raise ValueError(
            f"schedule {schedule.name}: {layers} layers per stage cannot be divided "
            f"into {R} chunks. Use a number of chunks that divides the layers."
        )
    return None if layers is None else layers // R


def _weight_memory(sizes: Sizes, gather: str) -> tuple[int | None, int | None]:
    """Returns the bytes of a stage's weights and gradients on one device."""
    full, layers = sizes.weight_bytes, sizes.layers_per_stage
    if full is None or sizes.fsdp == 1:
        return full, full
    shard = full / sizes.fsdp
    if gather == "step":
        return round(shard + full), full
    if layers is None:
        return None, None
    # Gradients are accumulated sharded; those of one layer are unsharded before that.
    return round(shard + full / layers), round(shard + full / layers)


def _product(*factors: float | None) -> int | None:
    known = [factor for factor in factors if factor is not None]
    return round(math.prod(known)) if len(known) == len(factors) else None
