"""All the ways to lay a config out on a target that a search looks at.

  mesh          data x fsdp x tensor x pipe, all that multiply to the devices, and x
                context for examples of at least LONG positions; over several TPU
                slices, data or pipe crosses them
  remat         every policy
  microbatches  every number that divides the examples of a device; in a pipeline up to
                MOST_IN_PIPE, where the bubble is small with any number of stages
  schedule      with a pipe: gpipe, 1f1b, interleaved with every number of chunks
  gather        with a pipe, if the config leaves it open
  head          the loss in blocks of tokens, if it is open and only that makes it fit

Batch and model stay as they are, and so does the sharding plan if it is set; otherwise
`sequence` goes with a tensor axis that divides the positions. An axis that the sharding
plan does not use stays 1, stages have equal numbers of layers, and a mesh that does not
divide the model is skipped.
"""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, get_args

from ....models.remat import Remat
from ....sharding import MeshSpec
from ....sharding.mesh import AXES, mesh_sizes
from ....sharding.pipeline.simulate import GATHERS
from ....sharding.plans import AUTO, STANDARD, WITH_SEQUENCE, with_context
from ....sharding.resolve import Indivisible
from ...program.hardware import Target
from ...program.pipelining import Pipelining, divisors
from ..memory import HEAD
from ..predict import Forecast
from ..scenario import Case, length_of, make_case

if TYPE_CHECKING:
    from ...run.train import Config

REMATS: tuple[Remat, ...] = get_args(Remat)
SEARCHED = ("pipe", "data", "fsdp", "tensor")
ONE_CHUNK = ("gpipe", "1f1b")
MOST_IN_PIPE = 1024
# Adding up the gradient of the head's weight takes ever more time with smaller blocks.
LEAST_BLOCK = 1024
LONG = 32_768


@dataclasses.dataclass(frozen=True)
class Choice:
    """What a search sets in a config; `schedule` is "" without a pipe.

    Attributes:
      head_block: tokens of a device whose logits exist at once; None sets nothing.
    """

    mesh: MeshSpec
    plan: str
    remat: Remat | None
    num_microbatches: int
    schedule: str = ""
    num_chunks: int = 1
    gather: str = "step"
    head_block: int | None = None

    def of(self, config: "Config") -> "Config":
        """Returns the config with these settings."""
        changed: dict[str, Any] = {}
        values = {"remat": self.remat, "head_block": self.head_block}
        if values := {k: v for k, v in values.items() if v is not None}:
            model: Any = config.model
            changed["model"] = dataclasses.replace(model, **values)
        if self.schedule:
            changed["pipeline"] = dataclasses.replace(
                config.pipeline,
                schedule=self.schedule,
                num_chunks=None if self.schedule in ONE_CHUNK else self.num_chunks,
                gather=self.gather,
            )
        return dataclasses.replace(
            config,
            mesh=self.mesh,
            plan=self.plan,
            num_microbatches=self.num_microbatches,
            **changed,
        )

    @property
    def in_parts(self) -> str:
        """The schedule and its microbatches, in short."""
        block = f", head {self.head_block}" if self.head_block else ""
        return self._in_microbatches + block

    @property
    def _in_microbatches(self) -> str:
        num = self.num_microbatches
        if not self.schedule:
            return f"{num} parts" if num > 1 else "whole"
        chunks = f" of {self.num_chunks}" if self.schedule not in ONE_CHUNK else ""
        late = ", gathering each" if self.gather == "microbatch" else ""
        return f"{self.schedule}{chunks}, {num}{late}"


def all_choices(config: "Config", target: Target) -> Iterator[tuple[Case, list]]:
    """Yields (the config on a mesh, its choices) for every mesh that divides it."""
    for spec in all_meshes(config, target):
        on_mesh = dataclasses.replace(
            config, mesh=spec, num_microbatches=1, pipeline=Pipelining()
        )
        case = first_divided(on_mesh, target, Indivisible)
        if case is not None:
            yield case, choices_on(config, case)


def first_divided(
    config: "Config", target: Target, skipped: type[ValueError]
) -> Case | None:
    """Returns the config under its sharding plan, or the best that divides it if open.

    Args:
      skipped: the error of a plan that is passed over.
    """
    plans = [config.plan]
    if config.plan == AUTO:
        sizes = mesh_sizes(config.mesh.abstract(target.num_devices))
        plans = [WITH_SEQUENCE, STANDARD] if sizes["tensor"] > 1 else [STANDARD]
        if sizes["context"] > 1:
            plans = [with_context(plan) for plan in plans]
    for name in plans:
        try:
            return make_case(dataclasses.replace(config, plan=name), target)
        except skipped:
            continue
    return None


def all_meshes(config: "Config", target: Target) -> list[MeshSpec]:
    """Returns the meshes with equal stages and no unused axis; pipe varies slowest."""
    model: Any = config.model
    layers, exchanges = 1, ()
    if hasattr(model, "stack"):
        layers = getattr(model, "num_stacked", None) or model.num_layers
        exchanges = getattr(model.stack(), "exchanges", ())
    used = {
        axis
        for row in config.make_rules().rows
        if row.name not in ("batch", "lookup_batch")
        for candidate in row.candidates
        for axis in candidate
    } | {"data"}
    own = {  # axes along which the model exchanges rows, such as those of experts
        axis
        for row in config.make_rules().rows
        if row.name in exchanges
        for candidate in row.candidates
        for axis in candidate
    }
    found, length = [], length_of(config)
    long = ("context",) if length >= LONG else ()
    searched = (*SEARCHED, *sorted({*own, *long} - {*SEARCHED}))
    for sizes in _factors(target.num_devices, len(searched)):
        by: dict[str, int] = dict(zip(searched, sizes, strict=True))
        if layers % by["pipe"] or any(by[a] > 1 and a not in used for a in searched):
            continue
        if length % (2 * by.get("context", 1)) and by.get("context", 1) > 1:
            continue  # two chunks for each device (models/zigzag.py)
        found += [MeshSpec(**by, dcn=dcn) for dcn in _over_slices(by, target)]
    return found


def _over_slices(sizes: dict[str, int], target: Target) -> list[dict[str, int] | None]:
    """Returns which axis may cross the slices; GPU nodes need no such choice."""
    num = target.num_slices
    if num == 1 or not target.device.torus:
        return [None]
    return [{axis: num} for axis in ("data", "pipe") if not sizes[axis] % num]


def choices_on(config: "Config", case: Case) -> list[Choice]:
    """Returns all choices on the mesh of a case."""
    model: Any = config.model
    each = config.batch_size // case.ways(("batch",), (config.batch_size,))
    remats = REMATS if hasattr(model, "remat") else (None,)
    schedules: list[tuple[str, int]] = [("", 1)]
    counts = divisors(each)
    if case.num_stages > 1:
        counts = [num for num in counts if num <= MOST_IN_PIPE]
        schedules = [(name, 1) for name in ONE_CHUNK]
        chunks = divisors(case.layers)[1:]
        schedules += [("interleaved", num) for num in chunks]
    spec = MeshSpec(**{a: case.sizes[a] for a in AXES}, dcn=case.spec.dcn)
    gathers = gathers_on(case.target, config.pipeline) if case.pipeline else ("step",)
    return [
        Choice(spec, case.config.plan, remat, num, name, chunks, gather)
        for name, chunks in schedules
        for num in counts
        for remat in remats
        for gather in gathers
    ]


Forecasts = Iterator[tuple[Choice, Forecast]]


def in_blocks(choice: Choice, found: Forecast) -> Forecasts:
    """Yields smaller and smaller blocks of the head, as long as it needs most memory.

    Args:
      found: the forecast of the choice, with the logits of all tokens at once.
    """
    for block in _blocks(found):
        if found.memory.peak_moment != HEAD:
            return
        choice, found = _with_block(choice, found, block)
        yield choice, found


def in_fitting_blocks(choice: Choice, found: Forecast) -> tuple[Choice, Forecast]:
    """Returns the largest blocks of the head that fit, or the smallest if none do."""
    if found.fits or found.memory.peak_moment != HEAD or not (sizes := _blocks(found)):
        return choice, found
    least = _with_block(choice, found, sizes[-1])
    if not least[1].fits:
        return least
    larger = (_with_block(choice, found, block) for block in sizes)
    return next(one for one in larger if one[1].fits)


def _blocks(found: Forecast) -> list[int]:
    """Returns the sizes that blocks of the head may have, the largest first."""
    tokens, sizes = found.case.head_tokens, []
    while is_head_open(found.config) and tokens >= 2 * LEAST_BLOCK:
        tokens //= 2
        sizes.append(tokens)
    return sizes


def _with_block(choice: Choice, found: Forecast, block: int) -> tuple[Choice, Forecast]:
    choice = dataclasses.replace(choice, head_block=block)
    return choice, Forecast(make_case(choice.of(found.config), found.target))


def is_head_open(config: "Config") -> bool:
    """Returns whether the trainer chooses into how many blocks the head is divided."""
    return getattr(config.model, "head_block", 0) is None


def gathers_on(target: Target, pipeline: Pipelining) -> tuple[str, ...]:
    """Returns how often a pipeline may gather weights, if that is open.

    Gathering once a microbatch has been checked against the compiler for TPUs only.
    """
    if pipeline.gather != AUTO:
        return (pipeline.gather,)
    return GATHERS if target.device.torus else GATHERS[:1]


def _factors(count: int, num: int) -> Iterator[tuple[int, ...]]:
    """Yields every ordered way to write a number as a product of `num` factors."""
    if num == 1:
        yield (count,)
        return
    for first in divisors(count):
        for rest in _factors(count // first, num - 1):
            yield first, *rest
