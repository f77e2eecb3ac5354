"""A config on a mesh of devices that need not be here: what a forecast is made from.

All of it comes from shapes: the abstract state, the resolver, the pipeline's schedule
and the model's own account of what it keeps and multiplies (models/costs.py).
"""

import collections
import dataclasses
import functools
import inspect
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from ...sharding import MeshSpec, Rules, Sharder
from ...sharding.mesh import mesh_sizes
from ...sharding.pipeline import Schedule
from ...sharding.pipeline import loops as loops_lib
from ..program.hardware import Target
from ..program.optimizers import make_tx
from ..program.pipelining import Staging, make_staging
from ..program.rules import name_settings
from ..program.state import State, make_layout
from .fitted import Fitted, fitted_to
from .sharded import Sharded

if TYPE_CHECKING:
    from ..run.train import Config


@dataclasses.dataclass(frozen=True)
class Ticks:
    """How often a device does each kind of work in one step."""

    forwards: int
    backwards: int
    heads: int
    exchanges: int = 0
    embeds: int = 0
    embed_backwards: int = 0


@dataclasses.dataclass(frozen=True)
class Case:
    """One config on one mesh.

    Attributes:
      rows: examples of a microbatch, over all devices.
      costs: of one microbatch (models/costs.py: Costs).
    """

    config: "Config"
    target: Target
    sizes: dict[str, int]
    sharded: Sharded
    pipeline: Staging | None
    num_microbatches: int
    rows: int
    length: int
    costs: Any

    @property
    def spec(self) -> MeshSpec:
        return self.config.mesh

    @property
    def num_stages(self) -> int:
        return self.sizes["pipe"]

    @property
    def layers(self) -> int:
        """Layers on a device."""
        return self.config.model.num_layers // self.num_stages  # type: ignore

    @property
    def chunk_layers(self) -> int:
        """Layers of a device that run in one go: of a chunk of its stage, or all."""
        chunks = self.pipeline.schedule.num_chunks if self.pipeline else 1
        return self.layers // chunks

    @functools.cached_property
    def ticks(self) -> Ticks:
        """Passes through a chunk of layers, or through the stack without a pipeline."""
        num = self.num_microbatches
        if self.pipeline is None:
            return Ticks(forwards=num, backwards=num, heads=num)
        return _pipeline_ticks(self.pipeline.schedule)

    @property
    def head_tokens(self) -> int:
        """Tokens of a microbatch for which a device computes the head."""
        shape = (self.rows, self.length)
        ways = self.ways(("batch", "length"), shape) * self.num_stages
        return math.prod(shape) // ways

    @property
    def head_blocks(self) -> int:
        """Into how many blocks the head divides them."""
        tokens = self.head_tokens
        return math.ceil(tokens / (self.costs.head_block or tokens))

    @property
    def itemsize(self) -> int:
        """Of the compute dtype."""
        return jnp.dtype(self.config.model.compute_dtype).itemsize  # type: ignore

    @property
    def fitted(self) -> Fitted:
        return fitted_to(self.target.device.platform)

    def ways(self, axes: Any, shape: Sequence[int]) -> int:
        """Returns into how many shards an array is split."""
        return math.prod(self.sizes[axis] for axis in self.mesh_axes(axes, shape))

    def mesh_axes(self, axes: Any, shape: Sequence[int]) -> tuple[str, ...]:
        """Returns the mesh axes that shard an array, as it is computed with."""
        found = self.sharded.mesh_axes(axes, shape)
        return tuple(axis for each in found for axis in each)

    def is_block(self, path: str) -> bool:
        return path.startswith(self.costs.stack)

    def bytes(self, array: Any) -> int:
        """Returns what a device stores of an array of the model's costs."""
        return self.sharded.bytes(array)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Mesh axes that shard the examples."""
        return self.mesh_axes(("batch",), (self.rows,))

    @property
    def notes(self) -> list[str]:
        """Lines of the model about what it chooses on this mesh."""
        model: Any = self.config.model
        if not hasattr(model, "notes"):
            return []
        shape = jax.ShapeDtypeStruct((self.rows, self.length), jnp.int32)
        mesh = self.spec.abstract(self.target.num_devices)
        shard = Sharder(mesh, self.config.make_rules())
        return model.notes({"inputs": shape}, shard)

    @property
    def token_axes(self) -> tuple[str, ...]:
        """Mesh axes over which gradients are summed: of examples and positions."""
        return self.mesh_axes(("batch", "length"), (self.rows, self.length))

    def takes_slice(self, axes: Sequence[str]) -> bool:
        """Returns whether groups along these axes are whole slices that wrap around.

        There the compiler turns scatters into all-reduces (on v5p, libtpu 0.0.51).
        """
        size, target = math.prod(self.sizes[axis] for axis in axes), self.target
        return all(target.wrap) and size == math.prod(target.shape)

    def scatters_in_ring(self, axes: Sequence[str]) -> bool:
        """Returns whether a gradient's product and its scatter become one ring.

        The compiler for TPUs does that where no other axis shards the batch: then the
        scatter is all that the sum over devices needs.
        """
        return (
            bool(self.target.device.torus)
            and set(axes) == set(self.token_axes)
            and not self.takes_slice(axes)
        )


@functools.lru_cache(maxsize=256)
def _pipeline_ticks(schedule: Schedule) -> Ticks:
    rows = loops_lib.rows(schedule, training=True)
    found = collections.Counter()
    for loop in loops_lib.loops(rows):
        for kind, length in loop.runs:
            count = loop.times * length
            found["forwards"] += count * kind.forward
            found["backwards"] += count * kind.backward
            found["heads"] += count * kind.head
            found["embeds"] += count * kind.embed
            found["embed_backwards"] += count * kind.embed_backward
            scatters = kind.embed_backward or kind.head
            found["exchanges"] += count * (scatters + (kind.embed or kind.head))
    return Ticks(**found)


def make_case(config: "Config", target: Target) -> Case:
    """Checks a config against a target, with the errors that a run would give.

    Open settings have their plain values here; choosing.py fills them.
    """
    with name_settings(config):
        return _make_case(config, target)


def _make_case(config: "Config", target: Target) -> Case:
    model: Any = config.model
    for name in ("costs", "model_flops"):
        if not hasattr(model, name):
            raise ValueError(
                f"model {type(model).__name__} has no method `{name}`, so a forecast "
                "cannot know what its step keeps and multiplies. Write one as "
                "models/transformer.py does, or look at its parameters alone with "
                "meshloom explain."
            )
    _check_slices(config.mesh, target)
    mesh = config.mesh.abstract(target.num_devices)
    sizes, rules = mesh_sizes(mesh), config.make_rules()
    pipeline = make_staging(
        model,
        mesh,
        rules,
        config.pipeline,
        batch_size=config.batch_size,
        num_microbatches=config.num_microbatches,
        num_layers=getattr(model, "num_stacked", getattr(model, "num_layers", None)),
        advise=False,
    )
    num = pipeline.schedule.num_microbatches if pipeline else config.num_microbatches
    num, length = num or 1, length_of(config)
    rows = config.batch_size // num
    is_torus = bool(target.device.torus)
    sharded = _sharded(
        _shaped(model), config.optimizer, rules, tuple(sizes.items()), is_torus
    )
    for count, what in ((config.batch_size, ""), (rows, f" in {num} microbatches")):
        name = f"batch_size {config.batch_size}{what}"
        sharded.mesh_axes(("batch", "length"), (count, length), name)
    options: dict[str, Any] = {"platform": target.device.platform}
    # What a device multiplies may depend on how positions are sharded.
    is_sharded = any(sharded.mesh_axes(("length",), (length,), f"length {length}"))
    if is_sharded:
        if "shard" not in inspect.signature(model.costs).parameters:
            raise ValueError(
                f"`costs` of model {type(model).__name__} has no parameter `shard`, so "
                "a forecast cannot know what devices exchange where positions are "
                "sharded. Add it as models/transformer.py does, or shard other axes."
            )
        options["shard"] = Sharder(mesh, rules)
    costs = _costs(model, rows, length, **options)
    if pipeline is not None and pipeline.simulation.recomputes_once:
        # Under full remat a chunk of one layer is recomputed once, not twice.
        costs = dataclasses.replace(costs, recomputed=frozenset())
    return Case(
        config=config,
        target=target,
        sizes=sizes,
        sharded=sharded,
        pipeline=pipeline,
        num_microbatches=num,
        rows=rows,
        length=length,
        costs=costs,
    )


def _shaped(model: Any) -> Any:
    """Returns the model under one remat policy, which changes no shape."""
    has_remat = hasattr(model, "remat")
    return dataclasses.replace(model, remat="none") if has_remat else model


@functools.lru_cache(maxsize=16)
def _abstract_state(model: Any, optimizer: Any, rules: Rules) -> tuple[State, State]:
    """Returns shapes of the state and their logical axes; no mesh changes either."""
    # The learning rate changes no shape.
    tx = make_tx(optimizer, model.axes(), lambda step: 0.0)
    layout = make_layout(
        model,
        tx,
        rules,
        MeshSpec().abstract(),
        state_axes=getattr(optimizer, "state_axes", None),
    )
    return layout.abstract, layout.axes


# A mesh is asked for many times in a row, then never again.
@functools.lru_cache(maxsize=16)
def _sharded(
    model: Any,
    optimizer: Any,
    rules: Rules,
    sizes: tuple[tuple[str, int], ...],
    tiled: bool,
) -> Sharded:
    state, axes = _abstract_state(model, optimizer, rules)
    return Sharded(rules, dict(sizes), tiled, state, axes)


@functools.lru_cache(maxsize=256)
def _costs(model: Any, rows: int, length: int, **options: Any) -> Any:
    return model.costs(rows, length, **options)


def _check_slices(spec: MeshSpec, target: Target) -> None:
    """Over several TPU slices a mesh must say which axis crosses them."""
    crossed = math.prod((spec.dcn or {}).values())
    if target.device.torus and crossed != target.num_slices:
        num = target.num_slices
        raise ValueError(
            f"mesh {spec} is split over {crossed} slices by its dcn part, but target "
            f"{target.name} has {num}. Give an axis its slice part, for instance "
            f"data={num}/{num},fsdp=-1."
            if num > 1
            else f"mesh {spec} has a dcn part, but target {target.name} is one slice. "
            "Leave out the part after /."
        )


def length_of(config: "Config") -> int:
    """Returns the positions of an example, known to its data or to the model."""
    for node in (config.data, config.model):
        if (length := getattr(node, "length", None)) is not None:
            return length
    raise ValueError(
        f"data {type(config.data).__name__} has no attribute `length`, nor has model "
        f"{type(config.model).__name__}, and a forecast opens no data. Use one of the "
        "sources of text in meshloom.trainer.data."
    )


def axes_of(case: Case, product: Any, name: str) -> tuple[str, ...]:
    """Returns the mesh axes that shard one logical axis of a product."""
    if not name:
        return ()
    place = product.axes.index(name)
    found = case.mesh_axes((name,), (product.shape[place],))
    return tuple(axis for axis in case.sizes if axis in found)
