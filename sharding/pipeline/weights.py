"""Gathers weights and reduces gradients inside the pipeline.

Inside the pipeline, `pipe` and the mesh axes that shard the batch are manual: each
device computes with its own rows, and gradients are summed over devices once, after the
last microbatch. Axes that shard the computation itself, such as `tensor`, are left to
the compiler. A weight stays sharded over them while it is gathered.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

Dims = tuple[tuple[str, ...], ...]  # mesh axes of each dimension, the major one first


@dataclasses.dataclass(frozen=True)
class WeightLayout:
    """How a weight and its gradient are sharded.

    Attributes:
      stored, gradient: the manual axes that shard each dimension.
      late: axes over which the weight is gathered at each use, once per microbatch.
      summed: axes over which the gradient must be summed.
      rest, gradient_rest: the non-manual axes that shard each dimension.
      dtype: the type to cast to before gathering, to send less; None for no cast.
    """

    stored: Dims
    gradient: Dims
    late: frozenset[str]
    summed: tuple[str, ...]
    rest: Dims
    gradient_rest: Dims
    dtype: Any = None

    def gather(self, w: jax.Array, *, late: bool, skip: int = 0) -> jax.Array:
        """Returns w gathered over the `late` axes of `stored`, or over the others.

        Args:
          late: whether this is the gather at the use of the weight.
          skip: leading dimensions that w lacks: 1 for one layer of a stack.
        """
        due = [
            (dim, axis)
            for dim, axes in enumerate(self.stored[skip:])
            for axis in reversed(axes)
            if (axis in self.late) == late
        ]

        def gather(w):
            for dim, axis in due:
                w = lax.all_gather(w, axis, axis=dim, tiled=True)
            return w

        if not due:
            return w
        if self.dtype is not None:
            w = w.astype(self.dtype)
        if late:
            w = _reduce_per_microbatch(w)
        return keep_sharded(gather, w, self.rest[skip:], [dim for dim, _ in due])

    def reduce(self, g: jax.Array) -> jax.Array:
        """Returns g summed over devices, sharded as `gradient`.

        The sum over the late axes was done by the backward of `gather`.
        """
        axes = [axis for axis in self.summed if axis not in self.late]
        if not axes:
            return g
        scattered = [
            (dim, axis)
            for dim, sharded in enumerate(self.gradient)
            for axis in sharded
            if axis in axes
        ]
        reduced = tuple(a for a in axes if a not in {axis for _, axis in scattered})

        def reduce(g):
            for dim, axis in scattered:
                g = lax.psum_scatter(g, axis, scatter_dimension=dim, tiled=True)
            return lax.psum(g, reduced) if reduced else g

        dims = [dim for dim, _ in scattered]
        return keep_sharded(reduce, g, self.gradient_rest, dims)


@jax.custom_vjp
def _reduce_per_microbatch(w: jax.Array) -> jax.Array:
    """Returns w; its gradient is summed over devices in each microbatch.

    XLA for TPU would sum over microbatches first. That needs the memory of the full
    gradient, and fails if they are cast in between.
    """
    return w


_reduce_per_microbatch.defvjp(
    lambda w: (w, None), lambda _, g: (lax.optimization_barrier(g),)
)


def keep_sharded(
    f: Callable, x: jax.Array, rest: Iterable[Any], moved: Collection[int]
) -> jax.Array:
    """Returns f(x) for a collective f over manual axes, keeping other axes sharded.

    Otherwise, the compiler replicates the operand of an all-gather, reduce-scatter or
    all-to-all over the non-manual axes.

    Args:
      rest: the non-manual axes that shard each dimension.
      moved: dimensions that f joins or divides; these must not be sharded.
    """
    spec = P(*(None if d in moved else axes or None for d, axes in enumerate(rest)))
    names = {axis for entry in spec for axis in mesh_axes(entry)}
    if not names:
        return f(x)
    return jax.shard_map(f, axis_names=names, in_specs=spec, out_specs=spec)(x)


def weight_layouts(
    stored: Any,
    gradient: Any,
    own: Any,
    *,
    manual: Sequence[str],
    row_axes: Sequence[str],
    summed: Sequence[str],
    late: bool,
    dtype: Any = None,
    num_stacked: int = 0,
) -> Any:
    """Returns a tree of WeightLayout, from the specs of parameters and gradients.

    Args:
      own: for each parameter, manual axes over which it stays sharded.
      manual: the manual mesh axes.
      row_axes: those of them that shard the rows of the batch.
      summed: axes over which gradients must be summed.
      late: whether to gather at each use.
      dtype: the type of matrices in computation.
      num_stacked: number of leading layer dimensions.
    """

    def one(path, spec: P, gradient_spec: P, own: frozenset[str]) -> WeightLayout:
        moved = [axis for axis in summed if axis not in own]
        dims = tuple(_manual(entry, moved) for entry in spec)
        gradient_dims = tuple(_manual(entry, moved) for entry in gradient_spec)
        at_use = {a for axes in dims for a in axes if late and a in row_axes}
        same = all(
            set(d) & at_use == set(g) & at_use
            for d, g in zip(dims, gradient_dims, strict=True)
        )
        # If two axes shard one dimension, the minor one must be gathered first.
        major = all(set(axes[: len(set(axes) & at_use)]) <= at_use for axes in dims)
        if not (same and major):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise ValueError(
                f"{name}: it is stored as {spec} and its gradient as {gradient_spec}; "
                "to gather weights once per microbatch, both must be sharded alike "
                "over the axes of the batch, with these major to all others. Set "
                'gather="step".'
            )
        return WeightLayout(
            dims,
            gradient_dims,
            late=frozenset(at_use),
            summed=tuple(moved),
            rest=rest(spec),
            gradient_rest=rest(gradient_spec),
            dtype=dtype if len(dims) - num_stacked > 1 else None,
        )

    def rest(spec: P) -> Dims:
        return tuple(
            tuple(axis for axis in mesh_axes(entry) if axis not in manual)
            for entry in spec
        )

    return jax.tree_util.tree_map_with_path(
        one, stored, gradient, own, is_leaf=lambda x: isinstance(x, P)
    )


def kept_sharded(
    compute: Any,
    others: Sequence[Any],
    row_axes: Sequence[str],
    names: Any,
    exchanges: Collection[str],
) -> Any:
    """Returns, for each weight, the axes of the batch that shard it in computation.

    Raises ValueError if it is not the model that exchanges rows along them, or if the
    weight is stored differently.

    Args:
      others: the specs of the stored weights and of their gradients.
      names: the logical axes of each weight.
      exchanges: see Stack.
    """

    def one(path, spec: P, stored: P, gradient: P, names) -> frozenset[str]:
        found: set[str] = set()
        for name, *entries in zip(names, spec, stored, gradient, strict=True):
            axes = _manual(entries[0], row_axes)
            found |= set(axes)
            same = all(mesh_axes(e)[: len(axes)] == axes for e in entries[1:])
            if axes and not (name in exchanges and same):
                where = jax.tree_util.keystr(path, simple=True, separator="/")
                raise ValueError(
                    f"{where}: in computation the plan shards it as {spec}, over axes "
                    "that also shard the batch; a pipeline needs it replicated over "
                    "these. Change the plan."
                )
        return frozenset(found)

    return jax.tree_util.tree_map_with_path(
        one, compute, *others, names, is_leaf=lambda x: isinstance(x, P)
    )


def mesh_axes(entry: None | str | tuple[str, ...]) -> tuple[str, ...]:
    """Returns the mesh axes of one entry of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else entry


def _manual(entry: Any, axes: Collection[str]) -> tuple[str, ...]:
    return tuple(name for name in mesh_axes(entry) if name in axes)


def manual_specs(specs: Any, axes: Collection[str]) -> Any:
    """Returns the PartitionSpecs restricted to these axes, for shard_map."""
    return jax.tree.map(
        lambda spec: P(*(_manual(entry, axes) or None for entry in spec)),
        specs,
        is_leaf=lambda x: isinstance(x, P),
    )
