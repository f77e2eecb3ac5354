"""Trees of other libraries: equinox modules, Linen boxes."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshloom.sharding import (
    MeshSpec,
    Sharder,
    axes_for_state,
    axes_from_paths,
    axes_of,
    data,
    fsdp,
    resolve,
    tensor,
)

RULES = data() + fsdp() + tensor()
MESH = MeshSpec(data=2, fsdp=2, tensor=2).make()


# Like an equinox module: functions and numbers are leaves too.
MODULE = {
    "up": {"weight": jnp.ones((8, 4)), "bias": jnp.ones(8)},
    "activation": jax.nn.relu,
    "rate": 0.1,
}
PATTERNS = {".*weight": ("mlp", "embed"), ".*bias": ("mlp",)}
NAMES = {
    "up": {"weight": ("mlp", "embed"), "bias": ("mlp",)},
    "activation": None,
    "rate": None,
}


def test_leaves_that_are_not_arrays_have_no_axes_and_are_unchanged():
    axes = axes_from_paths(MODULE, PATTERNS)
    assert axes == NAMES
    layout = resolve(MODULE, RULES, MESH, axes=axes)
    assert [a.path for a in layout.arrays] == ["up/bias", "up/weight"]
    specs = layout.specs()
    assert specs["up"]["weight"] == P("tensor", "fsdp")
    assert specs["activation"] is None and specs["rate"] is None
    shardings = layout.shardings(MESH)
    placed = jax.device_put(MODULE["up"], shardings["up"])
    assert placed["weight"].addressable_shards[0].data.shape == (4, 2)


def test_a_pattern_that_matches_no_array_is_an_error():
    with pytest.raises(ValueError, match="1 patterns match no array: rate."):
        axes_from_paths(MODULE, PATTERNS | {"rate": ()})


def test_optimizer_state_of_such_a_tree_resolves():
    arrays = {"up": MODULE["up"], "activation": None, "rate": None}
    axes = axes_from_paths(arrays, PATTERNS)
    state = optax.adam(1e-3).init(arrays)
    names = axes_for_state((state, 3, "text"), arrays, axes)
    assert names[0][0].mu["up"]["weight"] == ("mlp", "embed")
    assert names[1] is None and names[2] is None
    assert axes_for_state(state, MODULE, NAMES) == names[0]


class Mlp(nn.Module):
    """Boxes of both kinds, and a parameter without one."""

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        up = self.param("up", nn.with_partitioning(init, ("embed", "mlp")), (8, 32))
        down = self.param(
            "down", nn.with_logical_partitioning(init, ("mlp", "embed")), (32, 8)
        )
        return self.param("scale", nn.initializers.ones, (8,))[None] * (x @ up @ down)


def init():
    return Mlp().init(jax.random.key(0), jnp.ones((2, 8)))["params"]


def test_linen_boxes_carry_names():
    params = {k: v for k, v in jax.eval_shape(init).items() if k != "scale"}
    assert axes_of(params) == {"up": ("embed", "mlp"), "down": ("mlp", "embed")}
    with pytest.raises(ValueError, match="^1 arrays have no logical axes: scale. "):
        resolve(jax.eval_shape(init), RULES, MESH)


def test_patterns_name_arrays_without_names_and_may_override_boxes():
    params = jax.eval_shape(init)
    axes = axes_from_paths(params, {"scale": ("norm",)})
    assert axes["up"] == ("embed", "mlp") and axes["scale"] == ("norm",)
    axes = axes_from_paths(params, {"scale": ("norm",), "up": (None, "mlp")})
    assert axes["up"] == (None, "mlp") and axes["down"] == ("mlp", "embed")


def test_a_boxed_tree_and_its_optimizer_state_are_initialized_sharded():
    tx = optax.adam(1e-3)

    def both():
        params = init()
        return params, tx.init(params)

    params, state = jax.eval_shape(both)
    axes = axes_from_paths(params, {"scale": ("norm",)})
    layout = resolve(params, RULES, MESH, axes=axes)
    names = axes_for_state(state, params, axes)
    moments = resolve(state, RULES, MESH, axes=names, role="optimizer")
    assert "0/mu/up" in {a.path for a in moments.arrays}
    shardings = layout.shardings(MESH), moments.shardings(MESH)
    params, state = jax.jit(both, out_shardings=shardings)()
    for box in (params["up"], state[0].mu["up"]):
        assert isinstance(box, nn.Partitioned)
        assert box.value.sharding.spec == P("fsdp", "tensor")
        assert box.value.addressable_shards[0].data.shape == (4, 16)


def test_gathered_weights_stay_in_their_boxes():
    shard, params = Sharder(MESH, RULES), init()
    axes = axes_from_paths(params, {"scale": ("norm",)})
    out = jax.jit(lambda params: shard.weights(params, axes))(params)
    assert isinstance(out["down"], nn.LogicallyPartitioned)
    gathered = NamedSharding(MESH, P("tensor", None))
    assert out["down"].value.sharding.is_equivalent_to(gathered, 2)
