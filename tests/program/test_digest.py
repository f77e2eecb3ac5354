"""Tests that digests are equal for equal arrays in any sharding, and only then."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshloom.sharding import MeshSpec
from meshloom.trainer.program.digest import tree_digests


def digest(x) -> str:
    return tree_digests({"x": x})["x"]


def numbers(shape=(8, 16, 4), dtype=jnp.float32):
    return jax.random.normal(jax.random.key(0), shape).astype(dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32, jnp.int8])
@pytest.mark.parametrize(
    "spec",
    [P("data"), P(None, ("fsdp", "tensor")), P("tensor", "data", "fsdp"), P()],
    ids=str,
)
def test_the_sharding_does_not_matter(dtype, spec):
    x = numbers(dtype=dtype)
    mesh = MeshSpec(data=2, fsdp=2, tensor=2).make()
    sharded = jax.device_put(x, NamedSharding(mesh, spec))
    assert digest(sharded) == digest(x) == digest(np.asarray(x))


def test_it_gathers_nothing():
    from meshloom.sharding import audit
    from meshloom.trainer.program.digest import _digest_program

    mesh = MeshSpec(data=2, fsdp=2, tensor=2).make()
    sharding = NamedSharding(mesh, P("data", "fsdp", "tensor"))
    shape = jax.ShapeDtypeStruct((64, 64, 64), jnp.float32, sharding=sharding)
    found = audit(_digest_program(mesh).jitted.lower([shape]).compile(), mesh)
    assert found.collectives
    assert all(c.bytes <= 64 * c.count for c in found.collectives)


def test_every_single_bit_counts():
    x = np.asarray(numbers((3, 5)))
    expected = digest(x)
    for place in range(x.size):
        for bit in (0, 13, 31):
            changed = x.copy()
            changed.view(np.uint32).ravel()[place] ^= np.uint32(1 << bit)
            assert digest(changed) != expected, (place, bit)


def test_order_shape_and_type_count():
    x = np.asarray(numbers((4, 6)))
    swapped = x.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    zeros = jnp.zeros((4, 6))
    others = [x, swapped, x.reshape(6, 4), x.T.copy(), x.view(np.int32), zeros]
    others += [zeros.reshape(24), zeros.astype(jnp.bfloat16), zeros[:3]]
    assert len({digest(other) for other in others}) == len(others)


def test_scalars_booleans_and_names():
    tree = {"step": jnp.int32(7), "inner": {"mask": jnp.array([True, False])}}
    found = tree_digests(tree)
    assert set(found) == {"step", "inner/mask"}
    assert all(len(value) == 16 for value in found.values())
    other = tree_digests(
        {"step": jnp.int32(8), "inner": {"mask": ~tree["inner"]["mask"]}}
    )
    assert all(found[name] != other[name] for name in found)
