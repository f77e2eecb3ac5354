"""Sharding constraints inside jit, from an object that binds a mesh and rules."""

import dataclasses
import math
import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .local import local
from .logical_axes import rewrap, unwrap
from .mesh import mesh_sizes, refuse_explicit
from .placing import place_global, place_local, rows_first
from .resolve import Axes, refuse_unknown_axes, resolve_dimensions, spec_of
from .rules import Role, Rules, check_role
from .tree import named_leaves, resolve


@dataclasses.dataclass(frozen=True)
class Sharder:
    """A mesh and rules. `shard(x, ("batch", "length", "embed"))` constrains x.

    A model takes a Sharder as an argument and never names a mesh axis. `Sharder()` has
    no mesh and constrains nothing, for use on one device. Inside a shard_map, pass
    `jax.sharding.get_abstract_mesh()` as the mesh: manual axes are then left alone.

    Any mesh with axes of type Auto works. A standard axis that it does not have counts
    as size 1; an axis of any other name must occur in a rule.
    """

    mesh: Mesh | AbstractMesh | None = None
    rules: Rules = Rules()

    def __post_init__(self):
        if not isinstance(self.rules, Rules):
            raise ValueError(
                f"Sharder: expected Rules, got {self.rules!r}. Write for instance "
                "Sharder(mesh, data() + fsdp()), or parse_plan('data+fsdp')."
            )
        if self.mesh is None:
            return
        if not isinstance(self.mesh, Mesh | AbstractMesh):
            mesh_sizes(self.mesh)  # raises with the remedy for a MeshSpec
            raise ValueError(f"Sharder: expected a jax Mesh, got {self.mesh!r}")
        refuse_explicit(self.mesh)
        refuse_unknown_axes(self.rules, self._sizes)

    def __call__(
        self,
        x: jax.Array,
        axes: Axes,
        *,
        role: Role = "compute",
        name: str | None = None,
    ) -> jax.Array:
        """Constrains an activation (or, in another role, a gradient) to the rules.

        Args:
          name: the array's name in errors. By default, errors name the calling line.
        """
        check_role(role)
        if self.is_single:
            return x
        what = _what("activation", axes, name)
        return jax.lax.with_sharding_constraint(
            x, self._sharding(x.shape, axes, role, what)
        )

    def weight(
        self, w: jax.Array, axes: Axes, dtype: Any = None, *, name: str | None = None
    ) -> jax.Array:
        """Returns a stored parameter, cast and gathered for computation.

        The cast comes first, so that the smaller type travels. The parameter moves from
        its `param` layout to its `compute` layout. Its gradient goes directly to the
        `optimizer` layout: where that is sharded, it is reduce-scattered.

        Args:
          name: the array's name in errors. By default, errors name the calling line.
        """
        if dtype is not None:
            w = w.astype(dtype)
        if self.is_single:
            return w
        what = _what("weight", axes, name)
        stored, compute, gradient = (
            self._sharding(w.shape, axes, role, what)
            for role in ("param", "compute", "optimizer")
        )
        return _move(stored, compute, gradient, w)

    def weights(self, params: Any, axes: Any = None, dtype: Any = None) -> Any:
        """Returns a tree of stored parameters, each cast and gathered by `weight`.

        All of them are gathered at once and take the memory for it. For a stack of
        layers, call this in the body of the scan with the parameters of one layer.

        Args:
          axes: as in `resolve`. Leave it out for trees that carry their names.
          dtype: the type of floating-point weights; others keep their own.
        """

        def one(path: str, w: Any, axes: Axes) -> Any:
            floating = jnp.issubdtype(w.dtype, jnp.floating)
            return self.weight(w, axes, dtype if floating else None, name=path)

        return _map(one, params, axes)

    def constrain(self, tree: Any, axes: Any = None, *, role: Role = "compute") -> Any:
        """Returns a tree, of gradients for instance, with every array constrained."""
        check_role(role)

        def one(path: str, x: Any, axes: Axes) -> Any:
            return self(x, axes, role=role, name=path)

        return _map(one, tree, axes)

    def shardings(self, tree: Any, axes: Any = None, *, role: Role = "compute") -> Any:
        """Returns the NamedShardings of a tree, of a batch for instance.

        Args:
          tree: arrays or their shapes.
          axes: as in `resolve`. Leave it out for trees that carry their names, and for
            a batch: the first dimension of every array is then `batch`, and no other is
            sharded.
        """
        if not isinstance(self.mesh, Mesh):
            raise ValueError(
                "shardings need a mesh with devices, but this Sharder has "
                f"{self.mesh}. Make the mesh with MeshSpec(...).make()."
            )
        axes = rows_first(tree) if axes is None else axes
        return resolve(tree, self.rules, self.mesh, axes=axes, role=role).shardings(
            self.mesh
        )

    def place(self, batch: Any, axes: Any = None, *, local: bool = False) -> Any:
        """Returns a batch of host arrays as jax arrays, sharded over the mesh.

        Every process must call this with the same global batch. Each device receives
        only its own shard.

        Args:
          axes: as in `shardings`.
          local: whether the arrays are only this process's rows, not the global batch.
            Processes that hold the same rows of the batch must pass the same rows.
        """
        if self.mesh is None:
            return jax.tree.map(jnp.asarray, batch)

        def one(path: str, x: Any, axes: Axes) -> jax.Array:
            what = f"batch array {path}" if path else "batch"

            def sharding(shape: tuple[int, ...]) -> NamedSharding:
                return self._sharding(shape, axes, "compute", what)

            x = np.asarray(x)
            if local:
                return place_local(what, x, sharding)
            return place_global(x, sharding(x.shape))

        return _map(one, batch, rows_first(batch) if axes is None else axes)

    def spec(self, shape: tuple[int, ...], axes: Axes) -> P:
        """Returns the PartitionSpec of an activation of this shape."""
        if self.is_single:
            return P()
        what = _what("activation", axes, None)
        return self._sharding(shape, axes, "compute", what).spec

    def shard_shape(self, shape: tuple[int, ...], axes: Axes) -> tuple[int, ...]:
        """Returns the shape of one device's shard of an activation."""
        if self.is_single:
            return shape
        what = _what("activation", axes, None)
        return tuple(
            d.size // math.prod(self._sizes[axis] for axis in d.mesh_axes)
            for d in self._dimensions(shape, axes, "compute", what)
        )

    def local(
        self, f: Callable[..., jax.Array], in_specs: tuple[P, ...], out_specs: P
    ) -> Callable[..., jax.Array]:
        """Returns f applied to each device's local shards.

        For kernels that the compiler cannot shard, and for exchanges that it would not
        find. f may communicate only over mesh axes that shard its arguments and its
        result.
        """
        return f if self.mesh is None else local(f, self.mesh, in_specs, out_specs)

    @property
    def platform(self) -> str:
        """The platform of the mesh's devices, or jax's default backend without any."""
        device = self.mesh and self.mesh.abstract_mesh.abstract_device
        return device.platform if device else jax.default_backend()

    @property
    def is_single(self) -> bool:
        """Whether no mesh axis is larger than 1, so nothing is ever sharded."""
        return all(size == 1 for size in self._sizes.values())

    @property
    def _sizes(self) -> dict[str, int]:
        """The size of each mesh axis, with manual axes as size 1."""
        if self.mesh is None:
            return {}
        manual = self.mesh.manual_axes
        sizes = mesh_sizes(self.mesh)
        return {axis: 1 if axis in manual else size for axis, size in sizes.items()}

    def _sharding(
        self, shape: tuple[int, ...], axes: Axes, role: Role, what: str
    ) -> NamedSharding:
        assert self.mesh is not None
        return NamedSharding(
            self.mesh, spec_of(self._dimensions(shape, axes, role, what))
        )

    def _dimensions(self, shape: tuple[int, ...], axes: Axes, role: Role, what: str):
        return resolve_dimensions(
            axes, shape, self.rules, self._sizes, name=what, role=role
        )


def _map(f: Callable[[str, Any, Axes], Any], tree: Any, axes: Any) -> Any:
    """Applies f(path, array, axes) to every array of a tree, keeping other leaves."""
    flat, treedef = named_leaves(tree, axes)
    return jax.tree.unflatten(
        treedef,
        [
            leaf if names is None else rewrap(leaf, f(path, unwrap(leaf), names))
            for path, leaf, names in flat
        ],
    )


def _what(kind: str, axes: Axes, name: str | None) -> str:
    """Describes an array for errors: its name, or the line that constrains it."""
    names = f"[{', '.join(map(str, axes))}]"
    if name is not None:
        return f"{kind} {name} {names}"
    frame = sys._getframe(2)
    while frame.f_back and frame.f_globals.get("__package__") == __package__:
        frame = frame.f_back
    file = os.path.basename(frame.f_code.co_filename)
    return f"{kind} {names} at {file}:{frame.f_lineno}"


def _move(stored, compute, gradient, w):
    @jax.custom_vjp
    def move(w):
        w = jax.lax.with_sharding_constraint(w, stored)
        return jax.lax.with_sharding_constraint(w, compute)

    def forward(w):
        return move(w), None

    def backward(_, g):
        g = jax.lax.with_sharding_constraint(g, gradient)
        # Forces the reduce-scatter here, instead of an all-reduce that is sliced later.
        return (jax.lax.optimization_barrier(g),)

    move.defvjp(forward, backward)
    return move(w)
