"""Sharding constraints inside jit, with mesh and rules bound once and passed along."""

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
    """Mesh and rules, bound. `shard(x, ("batch", "length", "embed"))` constrains x.

    A model takes one as an argument and never names a mesh axis. `Sharder()` has no
    mesh and constrains nothing: for one device, or to use a model without any of this.
    Inside a shard_map, give it `jax.sharding.get_abstract_mesh()`: the axes that are
    manual there are no longer its business.

    The mesh may be anybody's whose axes are of type Auto. A standard axis that it does
    not have counts as one of size 1; an axis of another name must be in a rule.
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
            mesh_sizes(self.mesh)  # says what to do with a MeshSpec
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
          name: what to call the array in errors; by default they name your line.
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
        """Returns a stored parameter, made ready to compute with.

        It is cast first, so that what travels is the smaller type, and gathered from
        its `param` layout to its `compute` layout; its gradient goes straight to the
        `optimizer` layout, so it is scattered, never gathered where that is sharded.

        Args:
          name: what to call the array in errors; by default they name your line.
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
        """Returns a tree of stored parameters, each made ready as `weight` does.

        All of them are ready at once, which takes the memory of all. For a stack of
        layers call it in the scan's body, with the parameters of one layer.

        Args:
          axes: as in `resolve`. Left out for trees that carry their names.
          dtype: the type of floating-point weights; others keep their own.
        """

        def one(path: str, w: Any, axes: Axes) -> Any:
            floating = jnp.issubdtype(w.dtype, jnp.floating)
            return self.weight(w, axes, dtype if floating else None, name=path)

        return _map(one, params, axes)

    def constrain(self, tree: Any, axes: Any = None, *, role: Role = "compute") -> Any:
        """Returns a tree (of activations, gradients) with every array constrained."""
        check_role(role)

        def one(path: str, x: Any, axes: Axes) -> Any:
            return self(x, axes, role=role, name=path)

        return _map(one, tree, axes)

    def shardings(self, tree: Any, axes: Any = None, *, role: Role = "compute") -> Any:
        """Returns the NamedShardings of a tree, of a batch for instance.

        Args:
          tree: arrays or their shapes.
          axes: as in `resolve`. Left out for trees that carry their names, and for a
            batch: then the first dimension of every array is `batch`, and no other is
            sharded.
        """
        if not isinstance(self.mesh, Mesh):
            raise ValueError(
                "shardings need a mesh with devices, and this Sharder has "
                f"{self.mesh}. Make it with MeshSpec(...).make()."
            )
        axes = rows_first(tree) if axes is None else axes
        return resolve(tree, self.rules, self.mesh, axes=axes, role=role).shardings(
            self.mesh
        )

    def place(self, batch: Any, axes: Any = None, *, local: bool = False) -> Any:
        """Returns a batch of host arrays as jax arrays, sharded over the mesh.

        Every process must call this, with the same global batch: each device gets its
        part of it and no other.

        Args:
          axes: as in `shardings`.
          local: whether the arrays are this process's rows only, not the global batch.
            Processes that hold the same part of the batch must pass the same rows.
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
        """Returns how the rules shard an activation of this shape."""
        if self.is_single:
            return P()
        what = _what("activation", axes, None)
        return self._sharding(shape, axes, "compute", what).spec

    def part(self, shape: tuple[int, ...], axes: Axes) -> tuple[int, ...]:
        """The shape of one device's part of an activation."""
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
        """Returns f on each device's part of such arrays; it must not communicate.

        For kernels that the compiler cannot shard by itself.
        """
        return f if self.mesh is None else local(f, self.mesh, in_specs, out_specs)

    @property
    def platform(self) -> str:
        """Of the mesh's devices, which need not be here; else of jax's own."""
        device = self.mesh and self.mesh.abstract_mesh.abstract_device
        return device.platform if device else jax.default_backend()

    @property
    def is_single(self) -> bool:
        """Whether there is one device only, so that nothing is ever sharded."""
        return all(size == 1 for size in self._sizes.values())

    @property
    def _sizes(self) -> dict[str, int]:
        """Of the axes that may shard; manual ones have done so already."""
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
    """f(path, array, axes) on every array of a tree; other leaves as they are."""
    flat, treedef = named_leaves(tree, axes)
    return jax.tree.unflatten(
        treedef,
        [
            leaf if names is None else rewrap(leaf, f(path, unwrap(leaf), names))
            for path, leaf, names in flat
        ],
    )


def _what(kind: str, axes: Axes, name: str | None) -> str:
    """Which array an error is about: its path, or else the line that constrains it."""
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
        # Sums are scattered here, not where the update needs its part of them.
        return (jax.lax.optimization_barrier(g),)

    move.defvjp(forward, backward)
    return move(w)
