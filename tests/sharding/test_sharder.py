import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshloom.sharding import MeshSpec, Sharder, data, fsdp, resolve, tensor

MESH = MeshSpec(data=2, fsdp=2, tensor=2).make()
SHARD = Sharder(MESH, data() + fsdp() + tensor())
W = jnp.arange(8 * 16, dtype=jnp.float32).reshape(8, 16)
AXES = ("embed", "mlp")


def same(x: jax.Array, spec: P, mesh=MESH) -> bool:
    return x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim)


def test_an_activation_is_sharded():
    f = jax.jit(lambda x: SHARD(x * 2, ("batch", "length", "mlp")))
    y = f(jnp.ones((8, 4, 16)))
    assert same(y, P(("data", "fsdp"), None, "tensor"))
    assert {s.data.shape for s in y.addressable_shards} == {(2, 4, 8)}


def test_a_gradient_can_be_constrained_in_its_role():
    y = jax.jit(lambda x: SHARD(x, AXES, role="optimizer"))(W)
    assert same(y, P("fsdp", "tensor"))
    assert same(jax.jit(lambda x: SHARD(x, AXES))(W), P(None, "tensor"))


def test_a_weight_is_gathered_for_computation():
    stored = jax.device_put(W, NamedSharding(MESH, P("fsdp", "tensor")))
    y = jax.jit(lambda w: SHARD.weight(w, AXES))(stored)
    assert same(y, P(None, "tensor"))
    np.testing.assert_array_equal(y, W)


def loss(shard, w, x):
    y = jnp.einsum("BD,DF->BF", x, shard.weight(w, AXES))
    return jnp.sum(jnp.square(y))


@pytest.mark.parametrize(
    ("stage", "stored"), [(3, P("fsdp", "tensor")), (1, P(None, "tensor"))]
)
def test_its_gradient_has_the_optimizer_layout(stage, stored):
    shard = Sharder(MESH, data() + fsdp(stage) + tensor())
    w = jax.device_put(W, NamedSharding(MESH, stored))
    x = jax.device_put(
        jax.random.normal(jax.random.key(0), (8, 8)),
        NamedSharding(MESH, P(("data", "fsdp"), None)),
    )
    # No out_shardings: the layout comes from `weight`.
    g = jax.jit(jax.grad(loss, argnums=1), static_argnums=0)(shard, w, x)
    assert same(g, P("fsdp", "tensor"))
    assert {s.data.shape for s in g.addressable_shards} == {(4, 8)}
    expected = jax.grad(loss, argnums=1)(
        Sharder(), jax.device_get(w), jax.device_get(x)
    )
    # Sums over 8 examples, in a different order.
    np.testing.assert_allclose(g, expected, rtol=1e-5, atol=1e-4)


def test_data_parallel_replicates_the_gradient():
    shard = Sharder(MESH, data())
    g = jax.jit(jax.grad(loss, argnums=1), static_argnums=0)(shard, W, jnp.ones((8, 8)))
    assert same(g, P(None, None))


def test_a_weight_is_cast_before_it_is_gathered():
    stored = jax.device_put(W, NamedSharding(MESH, P("fsdp", "tensor")))
    f = jax.jit(lambda w: SHARD.weight(w, AXES, jnp.bfloat16))
    assert f(stored).dtype == jnp.bfloat16
    # In the lowered program, before the backend rewrites it: cast, then constraints.
    # (XLA for CPU gathers in float32, because it has no bfloat16 collectives.)
    text = f.lower(stored).as_text()
    assert text.index("stablehlo.convert") < text.index("sharding_constraint")


def test_the_gradient_has_the_stored_type():
    def f(w):
        return jnp.sum(SHARD.weight(w, AXES, jnp.bfloat16).astype(jnp.float32))

    assert jax.jit(jax.grad(f))(W).dtype == jnp.float32


@pytest.mark.parametrize(
    "shard", [Sharder(), Sharder(MeshSpec().make(jax.devices()[:1]), data())]
)
def test_nothing_is_constrained_without_devices_to_shard_over(shard):
    x = jnp.ones((3, 5))
    assert shard(x, ("no", "rules")) is x
    assert shard.weight(x, ("no", "rules")) is x
    assert shard.weight(x, ("no", "rules"), jnp.bfloat16).dtype == jnp.bfloat16
    assert shard.is_single


def test_is_single_means_no_axis_larger_than_1():
    assert not SHARD.is_single


ROWS = P(("data", "fsdp"))


def inside(f, *arrays, axes=("data", "fsdp"), specs=None, out=ROWS):
    """Runs f(sharder, ...) in a shard_map over the manual `axes`."""

    def body(*arrays):
        return f(Sharder(jax.sharding.get_abstract_mesh(), SHARD.rules), *arrays)

    mapped = jax.shard_map(
        body,
        mesh=MESH,
        axis_names=set(axes),
        in_specs=specs or (ROWS,) * len(arrays),
        out_specs=out,
    )
    return jax.jit(mapped)(*arrays)


def test_manual_axes_are_left_alone_and_the_others_shard():
    y = inside(lambda shard, x: shard(2 * x, ("batch", "mlp")), jnp.ones((8, 16)))
    assert same(y, P(("data", "fsdp"), "tensor"))
    assert {s.data.shape for s in y.addressable_shards} == {(2, 8)}


def test_inside_a_shard_map_manual_axes_need_not_divide_a_dimension():
    """A batch of 3 on each device is already sharded."""
    y = inside(lambda shard, x: shard(x, ("batch", "mlp")), jnp.ones((12, 16)))
    assert {s.data.shape for s in y.addressable_shards} == {(3, 8)}


def test_inside_a_shard_map_a_weight_is_gathered_over_the_other_axes_only():
    def gradient(shard, w, x):
        w = jax.lax.pcast(w, ("data", "fsdp"), to="varying")
        g = jax.grad(loss, argnums=1)(shard, w, x)
        return jax.lax.psum(g, ("data", "fsdp"))

    x = jax.random.normal(jax.random.key(0), (8, 8))
    g = inside(gradient, W, x, specs=(P(), ROWS), out=P())
    assert same(g, P(None, "tensor"))
    expected = jax.grad(loss, argnums=1)(Sharder(), W, x)
    # Sums over 8 examples, in a different order.
    np.testing.assert_allclose(g, expected, rtol=1e-5, atol=1e-4)


def test_with_all_axes_manual_a_sharder_is_single():
    def body(shard, x):
        assert shard.is_single
        y = shard(x, ("no", "rules"))
        assert y is x and shard.spec(x.shape, ("no", "rules")) == P()
        return y

    inside(body, jnp.ones((8, 4)), axes=MESH.axis_names)


def test_spec_is_the_sharding_of_an_activation():
    shape, axes = (8, 4, 16), ("batch", None, "mlp")
    assert SHARD.spec(shape, axes) == P(("data", "fsdp"), None, "tensor")
    assert Sharder().spec(shape, axes) == P()

    def body(shard, x):
        assert shard.spec(x.shape, axes) == P(None, None, "tensor")
        return x

    inside(body, jnp.ones(shape))


def line_of(f) -> str:
    return f"test_sharder.py:{f.__code__.co_firstlineno}"


def test_errors_name_the_array_or_the_calling_line():
    f = lambda x: SHARD(x, ("batch", "length"))  # noqa: E731
    with pytest.raises(ValueError) as error:
        jax.jit(f)(jnp.ones((6, 4)))
    assert str(error.value) == (
        f"activation [batch, length] at {line_of(f)}: dimension 'batch' of size 6 "
        "cannot be sharded 4 ways (data=2,fsdp=2, plan data). Pad it to 8, use a mesh "
        "axis size that divides 6, or let the rule end in None to replicate it."
    )
    f = lambda w: SHARD.weight(w, AXES)  # noqa: E731
    at = rf"^weight \[embed, mlp\] at {line_of(f)}: dimension 'mlp' of size 5 cannot"
    with pytest.raises(ValueError, match=at):
        jax.jit(f)(jnp.ones((8, 5)))
    with pytest.raises(ValueError, match=r"^weight blocks/up \[embed, mlp\]: dimens"):
        SHARD.weight(jnp.ones((8, 5)), AXES, name="blocks/up")
    with pytest.raises(ValueError, match=r"^activation hidden \[batch\]: dimension"):
        SHARD(jnp.ones(6), ("batch",), name="hidden")


PARAMS = {"blocks": [{"up": W, "steps": jnp.ones(8, jnp.int32)}]}
PARAMS_AXES = {"blocks": [{"up": AXES, "steps": (None,)}]}


def test_weights_gathers_every_array_of_a_tree():
    def f(params):
        return SHARD.weights(params, PARAMS_AXES, jnp.bfloat16)

    stored = jax.device_put(W, NamedSharding(MESH, P("fsdp", "tensor")))
    block = jax.jit(f)({"blocks": [PARAMS["blocks"][0] | {"up": stored}]})["blocks"][0]
    assert same(block["up"], P(None, "tensor")) and block["up"].dtype == jnp.bfloat16
    assert block["steps"].dtype == jnp.int32
    np.testing.assert_array_equal(block["up"], W)


def test_gradients_of_weights_have_the_optimizer_layout():
    def f(params, x):
        return jnp.sum(jnp.square(x @ SHARD.weights(params, {"w": AXES})["w"]))

    g = jax.jit(jax.grad(f))({"w": W}, jnp.ones((8, 8)))["w"]
    assert same(g, P("fsdp", "tensor"))
    assert {s.data.shape for s in g.addressable_shards} == {(4, 8)}


def test_weights_name_the_path_of_the_array_that_fails_inside_jit():
    bad = {"blocks": [{"up": jnp.ones((8, 5)), "steps": jnp.ones(8)}]}
    with pytest.raises(ValueError) as error:
        jax.jit(lambda params: SHARD.weights(params, PARAMS_AXES))(bad)
    assert str(error.value).startswith(
        "weight blocks/0/up [embed, mlp]: dimension 'mlp' of size 5 cannot be sharded 2"
    )


def test_leaves_that_are_not_arrays_and_single_device_trees_are_unchanged():
    tree = {"w": W, "f": jax.nn.relu}
    for shard in (SHARD, Sharder()):
        assert shard.weights(tree, {"w": AXES, "f": None})["f"] is jax.nn.relu
    assert Sharder().weights(tree, {"w": AXES, "f": None})["w"] is W


def test_weights_of_an_nnx_state_stay_variables():
    state = nnx.State({"w": nnx.Param(W, axes=AXES)})
    out = jax.jit(SHARD.weights)(state)
    assert isinstance(out["w"], nnx.Param)
    assert same(out["w"].get_value(), P(None, "tensor"))


def test_a_tree_can_be_constrained_in_a_role():
    out = jax.jit(lambda g: SHARD.constrain(g, {"w": AXES}, role="optimizer"))({"w": W})
    assert same(out["w"], P("fsdp", "tensor"))
    assert same(jax.jit(lambda x: SHARD.constrain(x, AXES))(W), P(None, "tensor"))


def test_an_unknown_role_is_an_error_on_any_number_of_devices():
    message = "role 'optimiser' is unknown. Did you mean 'optimizer'?"
    for shard in (SHARD, Sharder()):
        with pytest.raises(ValueError) as error:
            shard(W, AXES, role="optimiser")  # pyright: ignore
        assert str(error.value).startswith(message)
        with pytest.raises(ValueError, match="^role 'optimiser' is unknown"):
            shard.constrain({}, {}, role="optimiser")  # pyright: ignore


def test_resolve_and_a_sharder_treat_lenient_rules_alike():
    odd, axes = jnp.ones((8, 5)), ("embed", "mlp")
    with pytest.raises(ValueError, match="cannot be sharded"):
        resolve({"w": odd}, SHARD.rules, MESH, axes={"w": axes})
    rules = SHARD.rules.lenient()
    layout = resolve({"w": odd}, rules, MESH, axes={"w": axes})
    assert layout.specs() == {"w": P("fsdp", None)}
    assert "tensor: indivisible (5 by 2)" in layout.arrays[0].why
    w = jax.jit(lambda w: Sharder(MESH, rules)(w, axes, role="param"))(odd)
    assert same(w, P("fsdp", None))
    assert not (rules + data()).strict and not (data() + rules).strict


def test_a_sharder_can_be_a_static_argument_of_jit():
    assert hash(SHARD) == hash(Sharder(MESH, data() + fsdp() + tensor()))
