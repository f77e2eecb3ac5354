"""Lookup in a table sharded by rows: values, gradients, and rows it does not have."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from meshloom.models.rows import Table, look_up_rows
from meshloom.sharding import MeshSpec, Rules, Sharder, parse_plan

DRAW = np.random.default_rng(0)
TABLE = DRAW.normal(size=(32, 6)).astype(np.float32)
INDEX = DRAW.integers(0, 31, size=16).astype(np.int32)  # repeated, and 31 never
GRADIENT = DRAW.normal(size=(16, 6)).astype(np.float32)


def summed():
    """Computes the gradient by definition, in float64."""
    result = np.zeros(TABLE.shape)
    for number, row in zip(INDEX, GRADIENT, strict=True):
        result[number] += row
    return result


@pytest.mark.parametrize(
    ("mesh", "rows", "ways"),
    [
        ("data=1", None, 1),
        ("data=8", "data", 8),
        ("data=2,tensor=4", "tensor", 4),  # gradients of the batch are gathered
        ("data=4,tensor=2", "tensor", 2),  # sums of the size of a shard are added up
        ("data=2,fsdp=2,tensor=2", ("data", "tensor"), 4),
        ("data=8", {"optimizer": "data", "param": None, "compute": None}, 8),
    ],
)
def test_values_and_gradient_match_the_definition(mesh, rows, ways):
    spec = MeshSpec.parse(mesh)
    made = spec.make(jax.devices()[: np.prod(spec.abstract().axis_sizes)])
    rules = parse_plan("data+fsdp+tensor")
    by_role = rows if isinstance(rows, dict) else {None: rows}
    for role, candidates in by_role.items():
        rules += Rules.of({"rows": candidates}, role=role)
    shard = Sharder(made, rules)
    batch = NamedSharding(made, shard.spec((16,), ("batch",)))

    def look_up(table, index, g):
        x, vjp = jax.vjp(lambda t: look_up_rows(t, "rows", index, shard), table)
        return x, vjp(g)[0]

    index, g = jax.device_put((INDEX, GRADIENT), batch)
    x, grad = jax.jit(look_up)(TABLE, index, g)
    np.testing.assert_array_equal(x, TABLE[INDEX])
    np.testing.assert_allclose(grad, summed(), atol=1e-5)
    assert not np.asarray(grad)[31].any()
    assert grad.sharding.shard_shape(grad.shape) == (32 // ways, 6)


def test_a_row_that_the_table_does_not_have_is_nan():
    index = jnp.array([0, 32, -1, 31])
    found = look_up_rows(TABLE, "rows", index, Sharder())
    assert np.isnan(found).all(axis=1).tolist() == [False, True, True, False]

    class Fixed:
        def params(self):
            return jax.random.key(0)

    table = Table(5, 3, 8, Fixed())  # type: ignore
    assert table.embedding.shape == (8, 3)
    found = table(jnp.array([4, 5]), Sharder())  # 5 is padding
    assert np.isnan(found).any(axis=1).tolist() == [False, True]


def test_gradients_are_summed_in_float32():
    # The same row 512 times: in bfloat16, a running sum would stop growing at 256.
    table, index = jnp.zeros((4, 2), jnp.bfloat16), jnp.ones(512, jnp.int32)

    def total(table):
        return look_up_rows(table, "rows", index, Sharder()).astype(jnp.float32).sum()

    grad = jax.grad(total)(table)
    assert grad.dtype == jnp.bfloat16
    assert np.array_equal(np.asarray(grad[1], np.float32), [512.0, 512.0])
