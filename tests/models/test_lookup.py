"""Table lookup: values, and gradients summed over repeated rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshloom.models.lookup import lookup
from meshloom.sharding import MeshSpec, Sharder, parse_plan


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    table = rng.normal(size=(16, 8)).astype(np.float32)
    # Few rows, many positions: every row is looked up several times, row 15 never.
    index = rng.integers(0, 15, size=(8, 6)).astype(np.int32)
    g = rng.normal(size=(8, 6, 8)).astype(np.float32)
    return table, index, g


def look_up(table, index, shard, **options):
    return lookup(table, ("vocab", "embed"), index, shard, table.dtype, **options)


def summed(index, g, num_rows):
    """Computes the gradient by definition, in float64."""
    result = np.zeros((num_rows, g.shape[-1]))
    for position in np.ndindex(index.shape):
        result[index[position]] += g[position]
    return result


def test_values_and_gradient_match_the_definition(arrays):
    table, index, g = arrays
    out, vjp = jax.vjp(lambda t: look_up(t, jnp.asarray(index), Sharder()), table)
    assert np.array_equal(out, table[index])
    (grad,) = vjp(jnp.asarray(g))
    # Float32 sums of at most a dozen values of about 1.
    np.testing.assert_allclose(grad, summed(index, g, 16), atol=1e-5)
    assert not np.any(np.asarray(grad)[15])


def test_bfloat16_gradient_is_summed_in_float32():
    # The same row 512 times: in bfloat16, a running sum would stop growing at 256.
    table = jnp.zeros((4, 2), jnp.bfloat16)
    index = jnp.ones((2, 256), jnp.int32)
    grad = jax.jit(
        jax.grad(lambda t: look_up(t, index, Sharder()).astype(jnp.float32).sum())
    )(table)
    assert grad.dtype == jnp.bfloat16
    assert np.array_equal(np.asarray(grad[1], np.float32), [512.0, 512.0])


@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("sizes", [{"data": 8}, {"fsdp": 8}, {"data": 2, "fsdp": 4}])
def test_a_sharded_table_has_the_same_gradient(arrays, sizes, gather):
    table, index, g = arrays
    mesh = MeshSpec(**sizes).make()
    shard = Sharder(mesh, parse_plan("data+fsdp+tensor"))
    rows = NamedSharding(mesh, P(("data", "fsdp")))

    def gradient(table, index, g):
        def total(table):
            return jnp.sum(look_up(table, index, shard, gather=gather) * g)

        return jax.grad(total)(table)

    grad = jax.jit(gradient)(
        table, jax.device_put(index, rows), jax.device_put(g, rows)
    )
    np.testing.assert_allclose(grad, summed(index, g, 16), atol=1e-5)
    ways = sizes.get("fsdp", 1)
    assert grad.sharding.shard_shape(grad.shape) == (16, 8 // ways)
