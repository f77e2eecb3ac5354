"""Runs a function on each device's shards, which may communicate over mesh axes.

`local` is for kernels that do not communicate. This is for code that chooses its own
collectives, such as the exchange of tokens between experts.
"""

import functools
from collections.abc import Callable, Mapping, Sequence

import jax
from jax import lax

from .local import mapped, untyped, vary
from .mesh import mesh_sizes
from .resolve import Axes, resolve_dimensions
from .sharder import Sharder

Arrays = tuple[jax.Array, ...]


def manual(
    f: Callable[..., Arrays],
    shard: Sharder,
    in_axes: Sequence[Axes],
    out_axes: Sequence[Axes],
    out_shapes: Sequence[tuple[int, ...]],
) -> Callable[..., Arrays]:
    """Returns f applied to each device's shards, with every mesh axis manual.

    f calls `enter` on what it computes differently on devices that have the same
    argument, and `leave` on what they have parts of. Arguments must be floating point.

    Inside a shard_map over other axes, jax cannot differentiate a nested one in a scan.
    There the backward pass computes f again from its arguments.

    Args:
      in_axes, out_axes: logical axes of the arguments and results.
      out_shapes: shapes of the results, as the caller sees them.
    """
    mesh = shard.mesh
    if mesh is None or (shard.is_single and not mesh.manual_axes):
        return f
    outs = tuple(shard.spec(s, a) for s, a in zip(out_shapes, out_axes, strict=True))

    def specs(xs):
        return tuple(shard.spec(x.shape, a) for x, a in zip(xs, in_axes, strict=True))

    def whole(*xs):
        return jax.shard_map(f, mesh=mesh, in_specs=specs(xs), out_specs=outs)(*xs)

    def without_types(xs, specs):
        return [untyped(x, mesh, spec) for x, spec in zip(xs, specs, strict=True)]

    @jax.custom_vjp
    def nested(*xs):
        given = specs(xs)
        found = mapped(f, mesh, given, outs)(*without_types(xs, given))
        return tuple(vary(y, *xs) for y in found)

    def forward(*xs):
        return nested(*xs), xs

    def backward(xs, gs):
        def pull(xs, gs):
            return jax.vjp(f, *xs)[1](gs)

        given = specs(xs)
        arguments = tuple(without_types(xs, given)), tuple(without_types(gs, outs))
        grads = mapped(pull, mesh, (given, outs), given)(*arguments)
        return tuple(vary(g, x) for g, x in zip(grads, xs, strict=True))

    nested.defvjp(forward, backward)
    return nested if mesh.manual_axes else whole


def enter(x: jax.Array, axes: Sequence[str], shard: Sharder) -> jax.Array:
    """Returns x, of which devices along these axes will compute different parts.

    Their gradients are added up.
    """
    if not axes:
        return x
    if _is_nested(shard):
        return _enter(tuple(axes), x)
    missing = tuple(axis for axis in axes if axis not in jax.typeof(x).mat.varying)
    return lax.pcast(x, missing, to="varying") if missing else x


def leave(x: jax.Array, axes: Sequence[str], shard: Sharder) -> jax.Array:
    """Returns the sum of x over these axes, which all devices along them then have."""
    if not axes:
        return x
    return _leave(tuple(axes), x) if _is_nested(shard) else lax.psum(x, tuple(axes))


def axes_of_name(shard: Sharder, name: str, size: int) -> Mapping[str, int]:
    """Returns the mesh axes that shard a logical axis in computation, and their sizes.

    Unlike `Sharder.spec`, it includes manual axes.

    Args:
      size: of the dimension, as it is without sharding.
    """
    if shard.mesh is None:
        return {}
    sizes = mesh_sizes(shard.mesh)
    (dim,) = resolve_dimensions(
        (name,), (size,), shard.rules, sizes, name=name, role="compute"
    )
    return {axis: sizes[axis] for axis in dim.mesh_axes if sizes[axis] > 1}


def _is_nested(shard: Sharder) -> bool:
    return shard.mesh is not None and bool(shard.mesh.manual_axes)


# What the types of varying axes say to jax, said by hand where there are none.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _enter(axes, x):
    return x


_enter.defvjp(lambda axes, x: (x, None), lambda axes, _, g: (lax.psum(g, axes),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _leave(axes, x):
    return lax.psum(x, axes)


_leave.defvjp(lambda axes, x: (lax.psum(x, axes), None), lambda axes, _, g: (g,))
