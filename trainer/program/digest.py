"""Digests of arrays that do not depend on how they are cut.

Every element is mixed with its place in the whole array, and the results are added
modulo 2**32, in two lanes. Additions of integers are exact in any order, so each
device adds its own part and only the sums travel: no array is ever gathered, and any
mesh, process count or order of addition gives the same 64 bits. A changed bit, a moved
element or another type changes them. They are no protection against a forger.
"""

import functools
import math
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ...sharding.logical_axes import path_name

LANES = (0x9E3779B9, 0x85EBCA77)  # odd numbers without a pattern
WORD = jnp.uint32


def tree_digests(tree: Any) -> dict[str, str]:
    """{path: 16 hexadecimal digits} of every array of a tree."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    arrays = [leaf for _, leaf in leaves]
    sums = jax.device_get(_everywhere(_mesh_of(arrays))(arrays))
    return {
        path_name(path): hexadecimal(lanes)
        for (path, _), lanes in zip(leaves, sums, strict=True)
    }


def hexadecimal(lanes: Iterable[Any]) -> str:
    """A digest as 16 digits."""
    return "".join(f"{int(lane):08x}" for lane in lanes)


def _mesh_of(arrays: list[Any]) -> Mesh | None:
    shardings = (getattr(x, "sharding", None) for x in arrays)
    meshes = (s.mesh for s in shardings if isinstance(s, NamedSharding))
    return next((mesh for mesh in meshes if isinstance(mesh, Mesh)), None)


def prepare(tree: Any, compile: Callable[[Any], Any]) -> None:
    """Compiles the digests of a tree of arrays, or of shapes with shardings, by others.

    Args:
      compile: of what jax.jit(f).lower(...) gives; must give the same program.
    """
    arrays = jax.tree.leaves(tree)
    program = _everywhere(_mesh_of(arrays))
    program.compiled[_form(arrays)] = compile(program.jitted.lower(arrays))


class _Everywhere:
    """The digests of arrays, whose few numbers every process of the mesh gets."""

    def __init__(self, mesh: Mesh | None):
        def digests(arrays: list[jax.Array]) -> list[jax.Array]:
            return [array_digest(x) for x in arrays]

        self.jitted = jax.jit(digests)
        if mesh is not None:
            self.jitted = jax.jit(digests, out_shardings=NamedSharding(mesh, P()))
        self.compiled: dict[Any, Callable] = {}

    def __call__(self, arrays: list[Any]) -> list[jax.Array]:
        return self.compiled.get(_form(arrays), self.jitted)(arrays)


@functools.lru_cache(maxsize=4)  # those of a mesh that is no longer used are dropped
def _everywhere(mesh: Mesh | None) -> _Everywhere:
    return _Everywhere(mesh)


def _form(arrays: list[Any]) -> tuple:
    """All that a compiled program of these arrays depends on."""
    return tuple((x.shape, x.dtype, getattr(x, "sharding", None)) for x in arrays)


@jax.jit  # arrays of one shape then share what is traced
def array_digest(x: jax.Array) -> jax.Array:
    """The two lanes of an array's digest, of 32 bits each."""
    # Shape and type count too: of zeros, only they differ.
    about = zlib.crc32(f"{x.dtype.name}{x.shape}".encode())
    words = _words(x)
    place = _place(x.shape)
    lanes = []
    for seed in LANES:
        mixed = functools.partial(_mix, seed=seed)
        total = sum(jnp.sum(mixed(mixed(place + WORD(i)) + w)) for i, w in words)
        lanes.append(total + WORD(about ^ seed))
    return jnp.stack(lanes)


def _words(x: jax.Array) -> list[tuple[int, jax.Array]]:
    """The bits of each element as numbered 32-bit words."""
    if x.dtype == jnp.bool:
        return [(0, x.astype(WORD))]
    size = x.dtype.itemsize
    if size <= 4:
        unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[size]
        return [(0, jax.lax.bitcast_convert_type(x, unsigned).astype(WORD))]
    bits = jax.lax.bitcast_convert_type(x, WORD)  # [..., words of an element]
    return [(i, bits[..., i]) for i in range(bits.shape[-1])]


def _place(shape: tuple[int, ...]) -> jax.Array:
    """A number for each element's place, from its index along every dimension."""
    place = jnp.zeros(shape, WORD)
    for dim in range(len(shape)):
        # Beyond 2**32 elements the count wraps, so the leading index is mixed in too.
        stride = math.prod(shape[dim + 1 :]) % 2**32
        index = jax.lax.broadcasted_iota(WORD, shape, dim)
        place = place + index * WORD(stride)
        if dim == 0:
            place = place + _mix(index, seed=0xC2B2AE3D)
    return place * WORD(2)  # room for the words of an element


def _mix(x: jax.Array, *, seed: int) -> jax.Array:
    """A bijection of 32-bit words in which every bit depends on every other."""
    x = x + WORD(seed)
    x = (x ^ (x >> 16)) * WORD(0x85EBCA6B)
    x = (x ^ (x >> 13)) * WORD(0xC2B2AE35)
    return x ^ (x >> 16)
