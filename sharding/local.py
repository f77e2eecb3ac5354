"""Functions that run on each device's part of arrays, for kernels.

The compiler cannot shard a kernel by itself, so it is wrapped in a shard_map over every
mesh axis that is not manual yet. Kernels know nothing of the types by which a shard_map
around them tells values that vary over its axes; so they are taken off on the way in
and put back on the way out, forward and backward.
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
    """f on each device's part of arrays that are sharded so; it must not communicate.

    Arguments that are no numbers with a fraction get no gradient.
    """
    names = set(mesh.axis_names) - set(mesh.manual_axes)

    def mapped(f: Function, in_specs: Any, out_specs: Any) -> Function:
        return jax.shard_map(
            f,
            mesh=mesh,
            axis_names=names,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )

    run = mapped(f, tuple(in_specs), out_specs)
    if not mesh.manual_axes:
        return run

    def bare(x: jax.Array, spec: P) -> jax.Array:
        # Something has to be done to it, or its type comes through.
        return mapped(lambda x: x[None][0], spec, spec)(x)

    def arguments(xs):
        return [bare(x, spec) for x, spec in zip(xs, in_specs, strict=True)]

    @jax.custom_vjp
    def whole(*xs):
        return vary(run(*arguments(xs)), *xs)

    def forward(*xs):
        out, pullback = jax.vjp(run, *arguments(xs))
        # Arrays of no size carry the types of the arguments.
        return vary(out, *xs), (pullback, [x.ravel()[:0] for x in xs])

    def backward(saved, g):
        pullback, types = saved
        grads = pullback(bare(g, out_specs))
        return tuple(
            None if g.dtype == jax.dtypes.float0 else vary(g, x)
            for g, x in zip(grads, types, strict=True)
        )

    whole.defvjp(forward, backward)
    return whole


def vary(x: jax.Array, *like: jax.Array) -> jax.Array:
    """x, typed as varying over all axes over which one of the others does."""
    axes = frozenset().union(*(jax.typeof(other).mat.varying for other in like))
    missing = tuple(sorted(axes - jax.typeof(x).mat.varying))
    return jax.lax.pcast(x, missing, to="varying") if missing else x
