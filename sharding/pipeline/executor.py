"""The pipeline of a model on a mesh: losses and gradients by a schedule."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..mesh import mesh_sizes
from ..resolve import Axes, resolve_dimensions, spec_of
from ..rules import Rules
from ..sharder import Sharder
from ..tree import resolve
from . import loops as loops_lib
from .chunks import Chunks
from .loops import Rows
from .order import layer_order
from .schedule import Schedule
from .simulate import GATHERS, Gather
from .stack import Batch, Stack, Sums
from .ticks import PIPE, Ticks
from .weights import manual_specs, mesh_axes, plan_weights


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """A stack, a schedule and a mesh, bound. Its methods go under jit.

    Parameters come with their layers in the order of `order.layer_order`.

    Attributes:
      axes: logical names of each parameter; batch_axes: of each array of a batch.
      gather: when weights cut over the axes of the batch are made whole: once a
        "step", or at each use, once a "microbatch" and pass.
      bubble: for tests, a value for every input that is no microbatch's.
    """

    stack: Stack
    schedule: Schedule
    mesh: Mesh
    rules: Rules
    axes: Any
    batch_axes: Mapping[str, Axes]
    gather: Gather = "step"
    bubble: float | None = None

    def __post_init__(self):
        if self.gather not in GATHERS:
            raise ValueError(
                f"gather must be one of {', '.join(GATHERS)}, got {self.gather!r}"
            )
        found = mesh_sizes(self.mesh).get(PIPE, 1)
        if found != self.schedule.num_stages or found < 2:
            raise ValueError(
                f"the schedule has {self.schedule.num_stages} stages, but the mesh "
                f"axis {PIPE!r} has size {found}; they must be equal, and at least 2"
            )

    def value_and_grad(self, params: Any, batch: Batch) -> tuple[Sums, Any]:
        """Sums over the batch, and the gradient of the first in float32."""
        return self._run(params, batch, training=True)

    def sums(self, params: Any, batch: Batch) -> Sums:
        """Sums over the batch, by forwards alone."""
        return self._run(params, batch, training=False)

    def _run(self, params: Any, batch: Batch, *, training: bool) -> Any:
        given, batch = batch, self.stack.complete(batch)
        batch_specs, batch_cut = self._place(batch)
        manual = (PIPE, *batch_cut)
        self._check(params, given, batch_cut)
        stored, gradient, compute = (
            resolve(params, self.rules, self.mesh, axes=self.axes, role=role).specs()
            for role in ("param", "optimizer", "compute")
        )
        check_compute(compute, batch_cut)
        late, dtype = self.gather == "microbatch", self.stack.dtype
        if late and Sharder(self.mesh).platform == "cpu":
            dtype = None  # XLA for CPUs aborts on scatters in bfloat16
        plans = {
            key: plan_weights(
                {key: stored[key]},
                {key: gradient[key]},
                manual=manual,
                batch_axes=batch_cut,
                summed=batch_cut if key == self.stack.blocks else manual,
                late=late,
                dtype=dtype,
                num_stacked=int(key == self.stack.blocks),
            )[key]
            for key in stored
        }

        def body(params, batch):
            params, batch = vary((params, batch), specs[:2], manual)
            sums, grads = self._stage(params, batch, plans, manual, flat, training)
            sums = jax.tree.map(lambda x: lax.psum(x, manual), sums)
            if not training:
                return sums
            return sums, jax.tree.map(lambda plan, g: plan.reduce(g), plans, grads)

        flat = {name for name, spec in batch_specs.items() if not any(spec[1:])}
        specs = manual_specs((stored, batch_specs, gradient), manual)
        result = jax.shard_map(
            body,
            mesh=self.mesh,
            axis_names=set(manual),
            in_specs=specs[:2],
            out_specs=(P(), specs[2]) if training else P(),
        )(params, batch)
        if not training:
            return result
        # An axis that is not manual may stand before one that is, as fsdp in tensor2d.
        return result[0], jax.tree.map(
            lambda g, spec: lax.with_sharding_constraint(
                g, NamedSharding(self.mesh, spec)
            ),
            result[1],
            gradient,
        )

    def _stage(self, params, batch, plans, manual, flat, training) -> tuple[Sums, Any]:
        """The sums and gradients of one stage, not yet added up over devices."""
        params = jax.tree.map(lambda p, w: p.gather(w, late=False), plans, params)
        shard = Sharder(jax.sharding.get_abstract_mesh(), self.rules)
        key, M = self.stack.blocks, self.schedule.num_microbatches
        outside = {k: v for k, v in params.items() if k != key}
        chunks = Chunks(
            self.stack, params[key], plans[key], self.schedule.num_chunks, shard
        )
        ticks = Ticks(
            self.stack,
            self.schedule,
            chunks,
            outside,
            {k: plans[k] for k in outside},
            # Rows of this device that lie together: no copy in another layout is made.
            jax.tree.map(lambda x: x.reshape(M, -1, *x.shape[1:]), batch),
            shard,
            flat=flat,
            training=training,
            bubble=self.bubble,
        )
        zeros = ticks.start()
        carry = jax.tree.map(lambda x: lax.pcast(x, manual, to="varying"), zeros)
        rows, start = loops_lib.rows(self.schedule, training=training), 0
        for loop in loops_lib.loops(rows):
            stop = start + loop.num_ticks
            part = Rows(*(jnp.asarray(table[start:stop]) for table in rows))
            carry, start = ticks.loop(loop, carry, part), stop
        if not training:
            return carry["sums"], None
        return carry["sums"], carry["outside"] | {key: carry["blocks"]}

    def _place(self, batch: Batch) -> tuple[dict[str, P], tuple[str, ...]]:
        """How each array of the batch is cut, and the mesh axes that cut its rows."""
        specs, cuts = {}, {}
        for name, x in batch.items():
            if name not in self.batch_axes:
                raise ValueError(
                    f"batch array {name!r}: batch_axes does not name its dimensions, "
                    f"it has {', '.join(self.batch_axes)}. Add {name!r}."
                )
            dims = resolve_dimensions(
                self.batch_axes[name],
                x.shape,
                self.rules,
                self.mesh,
                name=f"batch array {name!r}",
                role="compute",
            )
            specs[name], cuts[name] = spec_of(dims), dims[0].mesh_axes
        if len(set(cuts.values())) > 1:
            raise ValueError(
                f"batch: its arrays are cut differently along their first dimension, "
                f"{cuts}; a pipeline needs examples there in all of them"
            )
        return specs, next(iter(cuts.values()))

    def _check(self, params: Any, batch: Batch, batch_cut: tuple[str, ...]) -> None:
        schedule, dim = self.schedule, self.stack.cut
        S, M = schedule.num_stages, schedule.num_microbatches
        num_layers = jax.tree.leaves(params[self.stack.blocks])[0].shape[0]
        layer_order(num_layers, S, schedule.num_chunks)
        sizes = mesh_sizes(self.mesh)
        ways = math.prod(sizes[axis] for axis in batch_cut)
        for name, x in batch.items():
            if x.shape[0] % (ways * M):
                raise ValueError(
                    f"batch array {name!r} of {x.shape[0]} examples cannot be cut into "
                    f"{M} microbatches over {ways} devices; the number of examples "
                    f"must be a multiple of {ways * M}"
                )
            size = x.shape[dim] // (ways * M) if dim == 0 else x.shape[dim]
            if size % S:
                raise ValueError(
                    f"batch array {name!r}: {size} places of dimension {dim} cannot be "
                    f"divided among {S} stages, which share the work outside the "
                    f"blocks. Make it a multiple of {S}."
                )


def check_compute(specs: Any, batch_cut: tuple[str, ...]) -> None:
    """Weights must not be computed with in pieces along the axes of the batch."""
    cut = manual_specs(specs, batch_cut)
    leaves = jax.tree_util.tree_leaves_with_path(
        cut, is_leaf=lambda x: isinstance(x, P)
    )
    for path, spec in leaves:
        if any(spec):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise ValueError(
                f"{name}: the plan computes with it cut as {spec}, over axes that also "
                "cut the batch; a pipeline needs it whole along these. Change the plan."
            )


def vary(tree: Any, specs: Any, axes: tuple[str, ...]) -> Any:
    """The tree as different on every device, also where `specs` do not cut it."""

    def one(spec: P, x: jax.Array) -> jax.Array:
        cut = {axis for entry in spec for axis in mesh_axes(entry)}
        missing = tuple(axis for axis in axes if axis not in cut)
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(one, specs, tree, is_leaf=lambda x: isinstance(x, P))
