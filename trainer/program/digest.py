"""Digests of arrays that do not depend on how they are sharded.

Every element is hashed together with its index in the global array, and the hashes are
summed modulo 2**32, in two lanes. Integer addition is exact in any order, so each
device sums its own shard and only the sums are communicated: no array is ever gathered,
and every mesh, process count and order of addition gives the same 64 bits. A changed
bit, a moved element or a different dtype changes the digest. It is not cryptographic.
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

LANES = (0x9E3779B9, 0x85EBCA77)  # arbitrary odd constants
WORD = jnp.uint32


def tree_digests(tree: Any) -> dict[str, str]:
    """Returns {path: digest as 16 hexadecimal digits} of every array of a tree."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    arrays = [leaf for _, leaf in leaves]
    sums = jax.device_get(_digest_program(_mesh_of(arrays))(arrays))
    return {
        path_name(path): hexadecimal(lanes)
        for (path, _), lanes in zip(leaves, sums, strict=True)
    }


def hexadecimal(lanes: Iterable[Any]) -> str:
    """Returns a digest as 16 hexadecimal digits."""
    return "".join(f"{int(lane):08x}" for lane in lanes)


def _mesh_of(arrays: list[Any]) -> Mesh | None:
    shardings = (getattr(x, "sharding", None) for x in arrays)
    meshes = (s.mesh for s in shardings if isinstance(s, NamedSharding))
    return next((mesh for mesh in meshes if isinstance(mesh, Mesh)), None)


def prepare(tree: Any, compile: Callable[[Any], Any]) -> None:
    """Compiles the digest of a tree in advance, with a custom compile function.

    Args:
      tree: arrays, or shapes with shardings.
      compile: compiles the result of jax.jit(f).lower(...).
    """
    arrays = jax.tree.leaves(tree)
    program = _digest_program(_mesh_of(arrays))
    program.compiled[_signature(arrays)] = compile(program.jitted.lower(arrays))


class _DigestProgram:
    """Computes the digests of arrays, replicated on every process of the mesh."""

    def __init__(self, mesh: Mesh | None):
        def digests(arrays: list[jax.Array]) -> list[jax.Array]:
            return [array_digest(x) for x in arrays]

        self.jitted = jax.jit(digests)
        if mesh is not None:
            self.jitted = jax.jit(digests, out_shardings=NamedSharding(mesh, P()))
        self.compiled: dict[Any, Callable] = {}

    def __call__(self, arrays: list[Any]) -> list[jax.Array]:
        return self.compiled.get(_signature(arrays), self.jitted)(arrays)


@functools.lru_cache(maxsize=4)  # so that programs of unused meshes are dropped
def _digest_program(mesh: Mesh | None) -> _DigestProgram:
    return _DigestProgram(mesh)


def _signature(arrays: list[Any]) -> tuple:
    """Returns everything that a program compiled for these arrays depends on."""
    return tuple((x.shape, x.dtype, getattr(x, "sharding", None)) for x in arrays)


@jax.jit  # so that arrays of the same shape share one trace
def array_digest(x: jax.Array) -> jax.Array:
    """Returns the two 32-bit lanes of an array's digest."""
    # Two arrays of zeros differ only in shape and dtype, so these are included.
    about = zlib.crc32(f"{x.dtype.name}{x.shape}".encode())
    words = _words(x)
    position = _position(x.shape)
    lanes = []
    for seed in LANES:
        mixed = functools.partial(_mix, seed=seed)
        total = sum(jnp.sum(mixed(mixed(position + WORD(i)) + w)) for i, w in words)
        lanes.append(total + WORD(about ^ seed))
    return jnp.stack(lanes)


def _words(x: jax.Array) -> list[tuple[int, jax.Array]]:
    """Returns the bits of each element as numbered 32-bit words."""
    if x.dtype == jnp.bool:
        return [(0, x.astype(WORD))]
    size = x.dtype.itemsize
    if size <= 4:
        unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[size]
        return [(0, jax.lax.bitcast_convert_type(x, unsigned).astype(WORD))]
    bits = jax.lax.bitcast_convert_type(x, WORD)  # [..., words per element]
    return [(i, bits[..., i]) for i in range(bits.shape[-1])]


def _position(shape: tuple[int, ...]) -> jax.Array:
    """Returns a number for each element, from its index along every dimension."""
    position = jnp.zeros(shape, WORD)
    for dim in range(len(shape)):
        # Above 2**32 elements the number wraps around, so the leading index is added.
        stride = math.prod(shape[dim + 1 :]) % 2**32
        index = jax.lax.broadcasted_iota(WORD, shape, dim)
        position = position + index * WORD(stride)
        if dim == 0:
            position = position + _mix(index, seed=0xC2B2AE3D)
    return position * WORD(2)  # leaves room for the words of an element


def _mix(x: jax.Array, *, seed: int) -> jax.Array:
    """Applies a bijection of 32-bit words in which every bit affects every other."""
    x = x + WORD(seed)
    x = (x ^ (x >> 16)) * WORD(0x85EBCA6B)
    x = (x ^ (x >> 13)) * WORD(0xC2B2AE35)
    return x ^ (x >> 16)
