"""What a schedule costs, read from its tables before anything is compiled.

All stages keep step: at a tick at which any stage does a forward, every stage runs one
(masked where it has none), and the same for backwards. The unit of cost is a forward of
one microbatch through all layers of a stage. One chunk of R costs 1/R of these:

  remat                  forward  backward  what it keeps for the backward
  none                      1        2      all values of the chunks in flight
  save-named, save-dots     1        3      their inputs; the policy's values of one
  full                      1        4      their inputs; the layer inputs of one
  full, chunks of a layer   1        3      their inputs

Each forward sends one activation to the next stage over every link of the ring, each
backward one to the stage before. The work outside the blocks is cut over the stages.

Weights that are cut over fsdp are gathered whole in one of two ways:

  gather      remat    in a forward  in a backward  reduce-scatters    whole at once
  step        any           1 in the whole step      1 at its end      the stage
  microbatch  none          1              1         1 in a backward   one layer
  microbatch  others        1              2         1 in a backward   one layer

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
# Of the embedding to stage 0 and of its gradient back, of the last hidden state from
# the last stage and of its gradient back.
BOUNDARY_TRANSFERS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """What one device holds; None where it is not known.

    Attributes:
      activation_bytes: of one microbatch between two blocks.
      residual_bytes: by remat policy, what one layer keeps of one microbatch for its
        backward, its input included. `full` needs that of `none`, for the one layer
        whose backward runs.
      weight_bytes: of one stage, all parts over fsdp together, in float32. Gathered
        copies and gradients are counted in float32 too.
      fsdp: parts that weights are cut into.
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
                    f"residual_bytes of {policy!r}: give those of none, save-named or "
                    "save-dots; full uses those of none"
                )
        sizes = {**vars(self), **self.residual_bytes}
        del sizes["residual_bytes"]
        for name, value in sizes.items():
            if value is not None and value < 1:
                raise ValueError(f"size {name} must be at least 1, got {value}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on a device at the peak; None where a size it needs was not given.

    Attributes:
      inputs: chunk inputs that wait for their backward, and under `full` the inputs of
        the layers of the chunk whose backward runs. Under `none` a chunk's input is
        among its residuals, and its output, which the head reads, stands here.
      residuals: `kept_layers` layers' values.
      weights: the stored part, and what is gathered of the others at once.
      gradients: the sums, and what is not reduced yet.
    """

    inputs: int | None
    residuals: int | None
    weights: int | None
    gradients: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that a device sends in one step; None where a size was not given.

    Attributes:
      ring: to both neighbours together, in bubbles too.
      boundary: useful transfers of the embedding and the head.
      weights: gathers and reduce-scatters over fsdp, of (fsdp - 1) / fsdp each.
    """

    ring: int | None
    boundary: int | None
    weights: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Simulation:
    """What one step of a schedule costs on every stage.

    Attributes:
      forward_ticks, backward_ticks: ticks at which any stage does one.
      cost: in forwards of a microbatch through a stage; `ideal` is without bubbles.
      live: by stage, the most inputs that wait for their backward at once.
      slots: places that every stage has for them.
      layer_inputs: inputs of layers that are kept beside them (`full` only); None, as
        `kept_layers`, where the number of layers was not given.
      kept_layers: layers of which values are kept at once, one microbatch each.
      sends: activations over each link of the ring, forward and back.
      boundary_transfers: each of (stages - 1) / stages of an activation.
      weight_gathers: of a stage's weights, in bubbles too; `weight_scatters` of its
        gradients.
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
        """Whether full remat is one layer computed again from its chunk's input."""
        return self.remat == "full" and self.layer_inputs == 1

    @property
    def backward_cost(self) -> int:
        """Of one microbatch through a stage, in forwards."""
        return backward_cost(self.remat, self.layer_inputs)

    @property
    def bubble(self) -> float:
        """Share of the step in which a stage has nothing useful to do."""
        return (self.cost - self.ideal) / self.cost

    @property
    def ratio(self) -> float:
        """Executed work over useful work."""
        return self.cost / self.ideal

    def to_json(self) -> dict:
        """All of it, for json.dumps."""
        shares = {"bubble": self.bubble, "ratio": self.ratio}
        return {**dataclasses.asdict(self), **shares}


def backward_cost(remat: str, layers: int | None) -> int:
    """In forwards; `layers` are those of a chunk, if they are known."""
    return BACKWARD_COST[remat] - (remat == "full" and layers == 1)


def simulate(
    schedule: Schedule,
    *,
    remat: str = "save-named",
    gather: str = "step",
    sizes: Sizes | None = None,
) -> Simulation:
    """Counts one step of a schedule; bytes are known as far as `sizes` are."""
    for what, name, names in (
        ("remat", remat, BACKWARD_COST),
        ("gather", gather, GATHERS),
    ):
        if name not in names:
            raise ValueError(
                f"{what} {name!r} is unknown; there are {', '.join(names)}"
            )
    sizes = sizes or Sizes()
    S, M, R = schedule.num_stages, schedule.num_microbatches, schedule.num_chunks
    forwards = schedule.forward[..., 0] != IDLE
    backwards = schedule.backward[..., 0] != IDLE
    F, B = (int(busy.any(axis=1).sum()) for busy in (forwards, backwards))
    # An input lives from its forward up to and with the tick of its backward.
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
        # A backward computes its layers, and each of several again for its gradient.
        in_a_backward = 1 if remat == "none" or layers == 1 else 2
        gathers = (F + B * in_a_backward) / R
        scatters = B / R
    weights, gradients = _weight_memory(sizes, gather)
    whole, ways = sizes.weight_bytes, sizes.fsdp
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
            weights=_product(gathers + scatters, whole, (ways - 1) / ways),
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
    """Schedules side by side; `num_chunks` is that of interleaved.

    Args:
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
    """The smallest allowed count with a bubble of at most `goal`.

    Where none has that, the one with the smallest bubble.
    """
    if not allowed:
        raise ValueError(
            f"no number of microbatches is allowed for schedule {name} with "
            f"{num_stages} stages; allow at least one"
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
            f"schedule {schedule.name}: {layers} layers a stage cannot be cut into {R} "
            "chunks. Take a number of chunks that divides the layers."
        )
    return None if layers is None else layers // R


def _weight_memory(sizes: Sizes, gather: str) -> tuple[int | None, int | None]:
    """Bytes of the weights and of the gradients of a stage on one device."""
    whole, layers = sizes.weight_bytes, sizes.layers_per_stage
    if whole is None or sizes.fsdp == 1:
        return whole, whole
    part = whole / sizes.fsdp
    if gather == "step":
        return round(part + whole), whole
    if layers is None:
        return None, None
    # Gradients are summed where they are stored; one layer's are whole before that.
    return round(part + whole / layers), round(part + whole / layers)


def _product(*factors: float | None) -> int | None:
    known = [factor for factor in factors if factor is not None]
    return round(math.prod(known)) if len(known) == len(factors) else None
