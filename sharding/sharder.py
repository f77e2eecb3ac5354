"""Sharding constraints inside jit, with mesh and rules bound once and passed along."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .local import local
from .mesh import mesh_sizes
from .resolve import Axes, resolve_dimensions, spec_of
from .rules import Role, Rules


@dataclasses.dataclass(frozen=True)
class Sharder:
    """Mesh and rules, bound. `shard(x, ("batch", "length", "embed"))` constrains x.

    A model takes one as an argument and never names a mesh axis. `Sharder()` has no
    mesh and constrains nothing: for one device, or to use a model without any of this.
    Inside a shard_map, give it `jax.sharding.get_abstract_mesh()`: the axes that are
    manual there are no longer its business.
    """

    mesh: Mesh | AbstractMesh | None = None
    rules: Rules = Rules()

    def __call__(
        self, x: jax.Array, axes: Axes, *, role: Role = "compute"
    ) -> jax.Array:
        """Constrains an activation (or, in another role, a gradient) to the rules."""
        if self.is_single:
            return x
        return jax.lax.with_sharding_constraint(x, self._sharding(x.shape, axes, role))

    def weight(self, w: jax.Array, axes: Axes, dtype: Any = None) -> jax.Array:
        """A stored parameter, made ready to compute with.

        It is cast first, so that what travels is the smaller type, and gathered from
        its `param` layout to its `compute` layout; its gradient goes straight to the
        `optimizer` layout, so it is scattered and never whole where that is cut.
        """
        if dtype is not None:
            w = w.astype(dtype)
        if self.is_single:
            return w
        stored, compute, gradient = (
            self._sharding(w.shape, axes, role, "weight")
            for role in ("param", "compute", "optimizer")
        )
        return _move(stored, compute, gradient, w)

    def spec(self, shape: tuple[int, ...], axes: Axes) -> P:
        """How the rules cut an activation of this shape."""
        return P() if self.is_single else self._sharding(shape, axes, "compute").spec

    def part(self, shape: tuple[int, ...], axes: Axes) -> tuple[int, ...]:
        """The shape of one device's part of an activation."""
        if self.is_single:
            return shape
        return tuple(
            d.size // math.prod(self._sizes[axis] for axis in d.mesh_axes)
            for d in self._dimensions(shape, axes, "compute", "activation")
        )

    def local(
        self, f: Callable[..., jax.Array], in_specs: tuple[P, ...], out_specs: P
    ) -> Callable[..., jax.Array]:
        """f on each device's part of arrays that are cut so; it must not communicate.

        For kernels that the compiler cannot cut by itself.
        """
        return f if self.mesh is None else local(f, self.mesh, in_specs, out_specs)

    @property
    def platform(self) -> str:
        """Of the mesh's devices, which need not be here; else of jax's own."""
        device = self.mesh and self.mesh.abstract_mesh.abstract_device
        return device.platform if device else jax.default_backend()

    @property
    def is_single(self) -> bool:
        """Whether there is one device only, so that nothing is ever cut."""
        return all(size == 1 for size in self._sizes.values())

    @property
    def _sizes(self) -> dict[str, int]:
        """Of the axes that may cut; manual ones have done so already."""
        if self.mesh is None:
            return {}
        manual = self.mesh.manual_axes
        sizes = mesh_sizes(self.mesh)
        return {axis: 1 if axis in manual else size for axis, size in sizes.items()}

    def _sharding(
        self,
        shape: tuple[int, ...],
        axes: Axes,
        role: Role,
        what: str = "activation",
    ) -> NamedSharding:
        assert self.mesh is not None
        return NamedSharding(
            self.mesh, spec_of(self._dimensions(shape, axes, role, what))
        )

    def _dimensions(self, shape: tuple[int, ...], axes: Axes, role: Role, what: str):
        name = f"{what} [{', '.join(map(str, axes))}]"
        return resolve_dimensions(
            axes, shape, self.rules, self._sizes, name=name, role=role
        )


def _move(stored, compute, gradient, w):
    @jax.custom_vjp
    def move(w):
        w = jax.lax.with_sharding_constraint(w, stored)
        return jax.lax.with_sharding_constraint(w, compute)

    def forward(w):
        return move(w), None

    def backward(_, g):
        g = jax.lax.with_sharding_constraint(g, gradient)
        # A sum over all devices is cut at once, not where the update needs its part.
        return (jax.lax.optimization_barrier(g),)

    move.defvjp(forward, backward)
    return move(w)
