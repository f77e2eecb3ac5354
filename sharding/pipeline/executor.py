"""Runs a model as a pipeline: losses and gradients, computed by a schedule."""

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
from .loops import TickWork
from .order import layer_order
from .schedule import Schedule
from .simulate import GATHERS, Gather
from .stack import Batch, Stack, Sums
from .ticks import PIPE, Ticks
from .weights import kept_sharded, manual_specs, mesh_axes, weight_layouts


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """A stack, a schedule and a mesh. Call the methods under jit.

    The layers of the parameters must be in the order of `order.layer_order`.

    Attributes:
      axes: the logical axes of each parameter.
      batch_axes: the logical axes of each array of a batch.
      gather: when to gather weights that are sharded over the axes of the batch: once
        per "step", or at each use, once per "microbatch" and pass.
      bubble: for tests, a value that replaces every input without a microbatch.
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
        size = mesh_sizes(self.mesh).get(PIPE, 1)
        if size != self.schedule.num_stages or size < 2:
            raise ValueError(
                f"the schedule has {self.schedule.num_stages} stages, but the mesh "
                f"axis {PIPE!r} has size {size}; they must be equal and >= 2"
            )

    def value_and_grad(self, params: Any, batch: Batch) -> tuple[Sums, Any]:
        """Returns the sums over the batch, and the gradient of the loss in float32."""
        return self._run(params, batch, training=True)

    def sums(self, params: Any, batch: Batch) -> Sums:
        """Returns the sums over the batch, without gradients."""
        return self._run(params, batch, training=False)

    def _run(self, params: Any, batch: Batch, *, training: bool) -> Any:
        shard = Sharder(self.mesh, self.rules)
        given, batch = batch, self.stack.complete(batch, shard)
        batch_specs, row_axes = self._batch_specs(batch)
        manual = (PIPE, *row_axes)
        self._check(params, given, row_axes)
        stored, gradient, compute = (
            resolve(params, self.rules, self.mesh, axes=self.axes, role=role).specs()
            for role in ("param", "optimizer", "compute")
        )
        exchanges = getattr(self.stack, "exchanges", ())
        own = kept_sharded(compute, (stored, gradient), row_axes, self.axes, exchanges)
        late, dtype = self.gather == "microbatch", self.stack.dtype
        if late and Sharder(self.mesh).platform == "cpu":
            dtype = None  # XLA for CPU aborts on reduce-scatters in bfloat16
        layouts = {
            key: weight_layouts(
                {key: stored[key]},
                {key: gradient[key]},
                {key: own[key]},
                manual=manual,
                row_axes=row_axes,
                summed=row_axes if key == self.stack.blocks else manual,
                late=late,
                dtype=dtype,
                num_stacked=int(key == self.stack.blocks),
            )[key]
            for key in stored
        }

        def body(params, batch):
            params, batch = vary((params, batch), specs[:2], manual)
            sums, grads = self._stage(params, batch, layouts, manual, flat, training)
            sums = jax.tree.map(lambda x: lax.psum(x, manual), sums)
            if not training:
                return sums
            grads = jax.tree.map(lambda layout, g: layout.reduce(g), layouts, grads)
            return sums, grads

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
        # A non-manual axis may be major to a manual one, as fsdp is in tensor2d.
        return result[0], jax.tree.map(
            lambda g, spec: lax.with_sharding_constraint(
                g, NamedSharding(self.mesh, spec)
            ),
            result[1],
            gradient,
        )

    def _stage(
        self, params, batch, layouts, manual, flat, training
    ) -> tuple[Sums, Any]:
        """Returns the sums and gradients of one stage, not yet reduced over devices."""
        params = jax.tree.map(
            lambda layout, w: layout.gather(w, late=False), layouts, params
        )
        shard = Sharder(jax.sharding.get_abstract_mesh(), self.rules)
        key, M = self.stack.blocks, self.schedule.num_microbatches
        outside = {k: v for k, v in params.items() if k != key}
        chunks = Chunks(
            self.stack, params[key], layouts[key], self.schedule.num_chunks, shard
        )
        ticks = Ticks(
            self.stack,
            self.schedule,
            chunks,
            outside,
            {k: layouts[k] for k in outside},
            # Microbatches are contiguous rows of this device: no relayout is needed.
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
            part = TickWork(*(jnp.asarray(table[start:stop]) for table in rows))
            carry, start = ticks.loop(loop, carry, part), stop
        if not training:
            return carry["sums"], None
        return carry["sums"], carry["outside"] | {key: carry["blocks"]}

    def _batch_specs(self, batch: Batch) -> tuple[dict[str, P], tuple[str, ...]]:
        """Returns the spec of each array, and the mesh axes that shard the rows."""
        specs, row_axes = {}, {}
        for name, x in batch.items():
            if name not in self.batch_axes:
                raise ValueError(
                    f"batch array {name!r}: batch_axes does not name its dimensions, "
                    f"only those of {', '.join(self.batch_axes)}. Add {name!r}."
                )
            dims = resolve_dimensions(
                self.batch_axes[name],
                x.shape,
                self.rules,
                self.mesh,
                name=f"batch array {name!r}",
                role="compute",
            )
            specs[name], row_axes[name] = spec_of(dims), dims[0].mesh_axes
        if len(set(row_axes.values())) > 1:
            raise ValueError(
                "batch: the first dimensions of its arrays are sharded differently, "
                f"{row_axes}; in a pipeline, the first dimension of every array must "
                "be the examples"
            )
        return specs, next(iter(row_axes.values()))

    def _check(self, params: Any, batch: Batch, row_axes: tuple[str, ...]) -> None:
        schedule, dim = self.schedule, self.stack.split_dim
        S, M = schedule.num_stages, schedule.num_microbatches
        num_layers = jax.tree.leaves(params[self.stack.blocks])[0].shape[0]
        layer_order(num_layers, S, schedule.num_chunks)
        sizes = mesh_sizes(self.mesh)
        ways = math.prod(sizes[axis] for axis in row_axes)
        for name, x in batch.items():
            if x.shape[0] % (ways * M):
                raise ValueError(
                    f"batch array {name!r}: {x.shape[0]} examples cannot be split into "
                    f"{M} microbatches over {ways} devices; the number of examples "
                    f"must be a multiple of {ways * M}"
                )
            size = x.shape[dim] // (ways * M) if dim == 0 else x.shape[dim]
            if size % S:
                raise ValueError(
                    f"batch array {name!r}: dimension {dim} of size {size} cannot be "
                    f"divided among {S} stages, which share the work outside the "
                    f"blocks. Make it a multiple of {S}."
                )


def vary(tree: Any, specs: Any, axes: tuple[str, ...]) -> Any:
    """Returns the tree, typed as varying over `axes` also where not sharded by them."""

    def one(spec: P, x: jax.Array) -> jax.Array:
        sharded = {axis for entry in spec for axis in mesh_axes(entry)}
        missing = tuple(axis for axis in axes if axis not in sharded)
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(one, specs, tree, is_leaf=lambda x: isinstance(x, P))
