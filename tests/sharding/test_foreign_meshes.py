"""Meshes made elsewhere: other axis types, other names, fewer axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from meshloom.sharding import MeshSpec, Rules, Sharder, data, fsdp, resolve, tensor

AUTO = AxisType.Auto
RULES = data() + fsdp() + tensor()
AXES = {"w": ("embed", "mlp")}
TREE = {"w": jax.ShapeDtypeStruct((8, 16), "float32")}


def make(types=AUTO, **sizes) -> Mesh:
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(types,) * len(sizes)
    )


def test_explicit_axes_are_refused_at_construction():
    mesh = jax.make_mesh((2, 4), ("data", "tensor"))
    assert set(mesh.axis_types) == {AxisType.Explicit}, "jax's default has changed"
    for given in (mesh, mesh.abstract_mesh):
        with pytest.raises(ValueError) as error:
            Sharder(given, RULES)
        assert str(error.value) == (
            "the mesh (data=2, tensor=4) has axes of type Explicit: data, tensor. That "
            "is the default of jax.make_mesh and jax.sharding.Mesh. A Sharder "
            "constrains arrays and leaves the rest to the compiler, which needs axes "
            "of type Auto: make the mesh with MeshSpec(...).make(), or pass axis_types="
            "(jax.sharding.AxisType.Auto,) * 2 when you make it."
        )
    # resolve accepts Explicit axes: specs and shardings are the same.
    layout = resolve(TREE, RULES, mesh, axes=AXES)
    assert layout.shardings(mesh)["w"].spec == P(None, "tensor")


def test_one_explicit_axis_is_enough():
    types = (AUTO, AxisType.Explicit)
    mesh = jax.make_mesh((8, 1), ("data", "tensor"), axis_types=types)
    with pytest.raises(ValueError, match="has axes of type Explicit: tensor. That"):
        Sharder(mesh, RULES)


def loss(w, x, shard):
    hidden = shard(
        shard(x, ("batch", "embed")) @ shard.weight(w, AXES["w"]), (None,) * 2
    )
    return jnp.sum(jnp.square(hidden))


@pytest.mark.parametrize(
    ("sizes", "rules", "stored"),
    [
        ({"data": 2, "tensor": 4}, RULES, P(None, "tensor")),
        ({"fsdp": 8}, RULES, P("fsdp", None)),
        ({"tensor": 2, "data": 4}, RULES, P(None, "tensor")),
        (
            {"dp": 2, "mp": 4},
            RULES.rename_axes({"data": "dp", "fsdp": "dp", "tensor": "mp"}),
            P("dp", "mp"),
        ),
        (
            {"data": 4, "model": 2},
            data() + Rules.of({"mlp": "model"}),
            P(None, "model"),
        ),
    ],
)
def test_a_mesh_with_fewer_or_renamed_axes_gives_the_same_loss(sizes, rules, stored):
    mesh = make(**sizes)
    shard = Sharder(mesh, rules)
    layout = resolve(TREE, rules, mesh, axes=AXES)
    assert layout.specs()["w"] == stored
    w = jax.random.normal(jax.random.key(0), (8, 16))
    x = jax.random.normal(jax.random.key(1), (16, 8))
    sharded = jax.device_put(w, layout.shardings(mesh)["w"])
    assert sharded.addressable_shards[0].data.size < w.size
    value, grad = jax.jit(jax.value_and_grad(loss), static_argnums=2)(sharded, x, shard)
    assert grad.sharding.is_equivalent_to(sharded.sharding, 2)
    expected = jax.value_and_grad(loss)(w, x, Sharder())
    # The order of summation differs.
    np.testing.assert_allclose(value, expected[0], rtol=1e-5)
    np.testing.assert_allclose(grad, expected[1], rtol=1e-5, atol=1e-4)


def test_an_axis_that_no_rule_names_is_refused_at_construction():
    mesh = make(data=2, model=4)
    for use in (
        lambda: Sharder(mesh, RULES),
        lambda: resolve(TREE, RULES, mesh, axes=AXES),
    ):
        with pytest.raises(ValueError) as error:
            use()
        assert str(error.value) == (
            "mesh axis 'model' of size 4: no rule names it, so it would shard nothing. "
            "The rules name replica, data, fsdp, expert, tensor. If it is one of "
            "these, rename it: rules.rename_axes({'tensor': 'model'}). Otherwise add a "
            "row, for instance Rules.of({'mlp': 'model'})."
        )
    Sharder(make(data=8, model=1), RULES)  # size 1 is allowed


def test_a_foreign_axis_may_be_manual():
    mesh = make(data=4, stage=2)

    def body(x):
        return Sharder(jax.sharding.get_abstract_mesh(), RULES)(x, ("batch", None))

    specs = P("stage")
    f = jax.shard_map(
        body, mesh=mesh, axis_names={"stage"}, in_specs=specs, out_specs=specs
    )
    y = jax.jit(f)(jnp.ones((16, 4)))
    assert {s.data.shape for s in y.addressable_shards} == {(2, 4)}


def test_other_objects_than_meshes_and_rules_are_refused():
    with pytest.raises(ValueError, match="is a MeshSpec, not a mesh. Pass MeshSpec"):
        Sharder(MeshSpec(data=8), RULES)  # pyright: ignore
    with pytest.raises(ValueError, match="is a MeshSpec"):
        resolve(TREE, RULES, MeshSpec(data=8), axes=AXES)  # pyright: ignore
    with pytest.raises(ValueError, match="expected a jax Mesh, got {'data': 8}"):
        Sharder({"data": 8}, RULES)  # pyright: ignore
    with pytest.raises(ValueError, match="expected a jax Mesh, .* got 8"):
        resolve(TREE, RULES, 8, axes=AXES)  # pyright: ignore
    with pytest.raises(ValueError, match="expected Rules, got 'data'. Write for inst"):
        Sharder(make(data=8), "data")  # pyright: ignore
