"""Weights inside the pipeline: what is gathered before use, how gradients are reduced.

Inside the pipeline the axes of the mesh that cut the batch are manual, beside `pipe`:
each device computes with its own rows, and gradients are summed over the devices once,
after the last microbatch. Axes that cut the computation itself, such as `tensor`, stay
with the compiler; a weight stays cut over them while it is gathered.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

Dims = tuple[tuple[str, ...], ...]  # mesh axes of each dimension, the major one first


@dataclasses.dataclass(frozen=True)
class Weight:
    """How one array is stored, and how its gradient is, over the manual axes.

    Attributes:
      stored, gradient: the manual axes that cut each dimension.
      late: axes gathered where the weight is used, once a microbatch.
      summed: axes over which devices hold different parts of the gradient's sum.
      rest, gradient_rest: how both are cut over the axes that are not manual.
      dtype: what it is cast to before it is gathered, so that less travels; None for
        as it is.
    """

    stored: Dims
    gradient: Dims
    late: frozenset[str]
    summed: tuple[str, ...]
    rest: Dims
    gradient_rest: Dims
    dtype: Any = None

    def gather(self, w: jax.Array, *, late: bool, skip: int = 0) -> jax.Array:
        """Whole along the axes of `stored` that are due now, or at the use.

        Args:
          skip: leading dimensions that w has lost, as one layer of a stack has.
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
            w = _reduced_at_once(w)
        return in_pieces(gather, w, self.rest[skip:], [dim for dim, _ in due])

    def reduce(self, g: jax.Array) -> jax.Array:
        """The sum over devices, cut as `gradient`. The late axes are summed already."""
        left = [axis for axis in self.summed if axis not in self.late]
        if not left:
            return g
        cut = [
            (d, a) for d, axes in enumerate(self.gradient) for a in axes if a in left
        ]
        whole = tuple(axis for axis in left if axis not in {a for _, a in cut})

        def reduce(g):
            for dim, axis in cut:
                g = lax.psum_scatter(g, axis, scatter_dimension=dim, tiled=True)
            return lax.psum(g, whole) if whole else g

        return in_pieces(reduce, g, self.gradient_rest, [dim for dim, _ in cut])


@jax.custom_vjp
def _reduced_at_once(w: jax.Array) -> jax.Array:
    """w; its gradient is summed over devices once a microbatch, as it is made.

    The compiler for TPUs would sum microbatches first, which takes the whole gradient's
    memory, and fails where they are cast in between.
    """
    return w


_reduced_at_once.defvjp(
    lambda w: (w, None), lambda _, g: (lax.optimization_barrier(g),)
)


def in_pieces(
    f: Callable, x: jax.Array, rest: Iterable[Any], moved: Collection[int]
) -> jax.Array:
    """f(x), where f is a collective over manual axes and x is cut over others too.

    Left to itself, the compiler makes the operand of a gather, scatter or all-to-all
    whole along the axes that are its own, on every device.

    Args:
      rest: the other axes that cut each dimension.
      moved: dimensions that f joins or divides; these must be whole.
    """
    spec = P(*(None if d in moved else axes or None for d, axes in enumerate(rest)))
    names = {axis for entry in spec for axis in mesh_axes(entry)}
    if not names:
        return f(x)
    return jax.shard_map(f, axis_names=names, in_specs=spec, out_specs=spec)(x)


def plan_weights(
    stored: Any,
    gradient: Any,
    *,
    manual: Sequence[str],
    batch_axes: Sequence[str],
    summed: Sequence[str],
    late: bool,
    dtype: Any = None,
    num_stacked: int = 0,
) -> Any:
    """A tree of Weight from trees of PartitionSpec for parameters and gradients.

    Args:
      dtype: of matrices, when they are computed with.
      num_stacked: leading dimensions that tell layers apart.
    """

    def one(path, spec: P, gradient_spec: P) -> Weight:
        dims = tuple(_manual(entry, summed) for entry in spec)
        gradient_dims = tuple(_manual(entry, summed) for entry in gradient_spec)
        used = {a for axes in dims for a in axes if late and a in batch_axes}
        same = all(
            set(d) & used == set(g) & used
            for d, g in zip(dims, gradient_dims, strict=True)
        )
        # Of two axes that cut one dimension, the minor one must be gathered first.
        major = all(set(axes[: len(set(axes) & used)]) <= used for axes in dims)
        if not (same and major):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise ValueError(
                f"{name}: it is stored as {spec} and its gradient as {gradient_spec}; "
                "weights gathered once a microbatch need both cut alike over the axes "
                "of the batch, and by these before any other. Gather once a step."
            )
        return Weight(
            dims,
            gradient_dims,
            late=frozenset(used),
            summed=tuple(summed),
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
        one, stored, gradient, is_leaf=lambda x: isinstance(x, P)
    )


def mesh_axes(entry: None | str | tuple[str, ...]) -> tuple[str, ...]:
    """The mesh axes of one entry of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else entry


def _manual(entry: Any, axes: Collection[str]) -> tuple[str, ...]:
    return tuple(name for name in mesh_axes(entry) if name in axes)


def manual_specs(specs: Any, axes: Collection[str]) -> Any:
    """PartitionSpecs with these axes alone, as shard_map takes them."""
    return jax.tree.map(
        lambda spec: P(*(_manual(entry, axes) or None for entry in spec)),
        specs,
        is_leaf=lambda x: isinstance(x, P),
    )
