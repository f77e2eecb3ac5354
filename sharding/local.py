"""Runs functions on each device's local shards, for kernels and rings.

The compiler cannot shard a kernel, so the kernel is wrapped in a shard_map over every
mesh axis that is not manual yet. Kernels do not support the varying-axes types of an
enclosing shard_map. Those types are removed from the arguments and restored on the
results, forward and backward.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

Function = Callable[..., jax.Array]


def local(
    f: Function, mesh: Mesh | AbstractMesh, in_specs: Sequence[P], out_specs: P
) -> Function:
    """Returns f applied to each device's local shards.

    f may communicate only over mesh axes that shard its arguments and its result.
    Arguments that are not floating point get no gradient.
    """
    run = mapped(f, mesh, tuple(in_specs), out_specs)
    if not mesh.manual_axes:
        return run

    def arguments(xs):
        return [untyped(x, mesh, s) for x, s in zip(xs, in_specs, strict=True)]

    @jax.custom_vjp
    def wrapped(*xs):
        return vary(run(*arguments(xs)), *xs)

    def forward(*xs):
        out, pullback = jax.vjp(run, *arguments(xs))
        # Empty arrays carry the types of the arguments.
        return vary(out, *xs), (pullback, [x.ravel()[:0] for x in xs])

    def backward(saved, g):
        pullback, types = saved
        grads = pullback(untyped(g, mesh, out_specs))
        return tuple(
            None if g.dtype == jax.dtypes.float0 else vary(g, x)
            for g, x in zip(grads, types, strict=True)
        )

    wrapped.defvjp(forward, backward)
    return wrapped


def mapped(f: Any, mesh: Mesh | AbstractMesh, in_specs: Any, out_specs: Any) -> Any:
    """Returns a shard_map over the axes not manual yet, without varying types."""
    return jax.shard_map(
        f,
        mesh=mesh,
        axis_names=set(mesh.axis_names) - set(mesh.manual_axes),
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,
    )


def untyped(x: jax.Array, mesh: Mesh | AbstractMesh, spec: P) -> jax.Array:
    """Returns x without the varying-axes type of an enclosing shard_map."""
    # An identity function would pass the type through.
    return mapped(lambda x: x[None][0], mesh, spec, spec)(x)


def vary(x: jax.Array, *like: jax.Array) -> jax.Array:
    """Returns x typed as varying over every axis that any of `like` varies over."""
    axes = frozenset().union(*(jax.typeof(other).mat.varying for other in like))
    missing = tuple(sorted(axes - jax.typeof(x).mat.varying))
    return jax.lax.pcast(x, missing, to="varying") if missing else x
