import itertools

import jax
import jax.numpy as jnp
import optax
import optax.contrib
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from meshloom.sharding import (
    MeshSpec,
    axes_for_state,
    axes_from_paths,
    axes_of,
    data,
    fsdp,
    resolve,
    tensor,
)
from meshloom.sharding.logical_axes import SMALL

RULES = data() + fsdp() + tensor()
SPEC = MeshSpec(data=2, fsdp=2, tensor=2)


class Mlp(nnx.Module):
    """Names in our metadata, in flax's metadata, and from flax's initializers."""

    def __init__(self, rngs: nnx.Rngs):
        kernel = nnx.with_partitioning(
            nnx.initializers.lecun_normal(), ("embed", "mlp"), eager_sharding=False
        )
        self.up = nnx.Linear(8, 32, use_bias=False, kernel_init=kernel, rngs=rngs)
        self.down = nnx.Param(
            jnp.ones((32, 8)), out_sharding=("mlp", "embed"), eager_sharding=False
        )
        self.scale = nnx.Param(jnp.ones(8), axes=("norm",))
        self.dropout = nnx.Dropout(0.1, rngs=rngs)


def test_nnx_state_carries_its_names():
    axes = axes_of(nnx.state(Mlp(nnx.Rngs(0)), nnx.Param))
    assert nnx.to_pure_dict(axes) == {
        "up": {"kernel": ("embed", "mlp")},
        "down": ("mlp", "embed"),
        "scale": ("norm",),
    }


def test_nnx_state_is_resolved_by_shapes_and_initialized_sharded():
    mesh = SPEC.make()

    def init():
        return nnx.state(Mlp(nnx.Rngs(0)))

    # Scalars (the counter and the key of dropout) need no names.
    resolved = resolve(jax.eval_shape(init), RULES, mesh)
    specs = {a.path: a.spec for a in resolved.arrays}
    assert specs["up/kernel"] == P("fsdp", "tensor")
    assert specs["dropout/rngs/count"] == P()
    state = jax.jit(init, out_shardings=resolved.shardings(mesh))()
    assert state["up"]["kernel"].get_value().sharding.spec == P("fsdp", "tensor")
    assert state["down"].get_value().sharding.spec == P("tensor", "fsdp")
    assert state["down"].get_value().addressable_shards[0].data.shape == (16, 4)


def test_nnx_variables_without_names_are_an_error_that_lists_them():
    state = nnx.state(nnx.Linear(8, 4, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError) as error:
        axes_of(state)
    assert str(error.value) == (
        "2 arrays have no logical axes: bias, kernel. Add axes=(...) metadata to the "
        "variables, or pass axes=axes_from_paths(tree, {...})."
    )
    with pytest.raises(
        ValueError, match="10 arrays .*: 0, 1, 2, 3, 4, 5, 6, 7, and 2 m"
    ):
        axes_of([jnp.ones(3)] * 10)


def test_a_string_is_not_a_tuple_of_names():
    with pytest.raises(ValueError) as error:
        axes_of({"w": nnx.Param(jnp.ones(5), axes="embed")})
    assert str(error.value) == (
        "w: metadata axes: logical axes must be a tuple with one name per dimension, "
        "got 'embed'"
    )


def test_nnx_state_without_names_gets_them_from_paths():
    state = nnx.state(nnx.Linear(8, 4, rngs=nnx.Rngs(0)))
    patterns = {"kernel": ("embed", "mlp"), "bias": ("mlp",)}
    resolved = resolve(
        state, RULES, SPEC.abstract(), axes=axes_from_paths(state, patterns)
    )
    assert {a.path: a.spec for a in resolved.arrays} == {
        "kernel": P("fsdp", "tensor"),
        "bias": P("tensor"),
    }


TREE = {
    "blocks": [{"w": jnp.ones((8, 4))}, {"w": jnp.ones((8, 4))}],
    "norm": jnp.ones(8),
}


def test_patterns_name_plain_trees_and_their_shapes():
    patterns = {r"blocks/\d+/w": ("embed", "mlp"), ".*": (None,)}
    expected = {
        "blocks": [{"w": ("embed", "mlp")}, {"w": ("embed", "mlp")}],
        "norm": (None,),
    }
    assert axes_from_paths(TREE, patterns) == expected
    assert axes_from_paths(jax.eval_shape(lambda: TREE), patterns) == expected


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (
            {r"blocks/0/w": ("embed", "mlp"), "1": ("embed", "mlp")},
            "2 paths match no pattern: blocks/1/w, norm. Add a pattern for them; "
            "(None, ...) replicates an array.",
        ),
        (
            {r"blocks/.*": ("embed", "mlp"), "norm": (None,), "nor": (None,)},
            "1 patterns match no array: nor. Remove or fix them: a pattern must match "
            "the full path, and only the first matching pattern applies.",
        ),
        (
            {r"blocks/.*": ("embed", "mlp"), "n.*": (None,), "norm": ("norm",)},
            "1 patterns match no array: norm. Remove or fix them: a pattern must match "
            "the full path, and only the first matching pattern applies.",
        ),
        (
            {".*": ("embed", "mlp")},
            "norm: pattern '.*' names 2 dimensions ('embed', 'mlp'), but its shape is "
            "(8,). Name each dimension.",
        ),
        (
            {"blocks/.*": "embed"},
            "path pattern 'blocks/.*': logical axes must be a tuple with one name per "
            "dimension, got 'embed'",
        ),
        (
            {"blocks/(": (None,)},
            "path pattern 'blocks/(' is not a regular expression: missing ), "
            "unterminated subpattern at position 7",
        ),
    ],
)
def test_bad_patterns_are_errors(patterns, message):
    with pytest.raises(ValueError) as error:
        axes_from_paths(TREE, patterns)
    assert str(error.value) == message


# Only the lookup table is not square, to test both cases.
PARAMS = {
    "layers": {"w": jax.ShapeDtypeStruct((4, 256, 256), "float32")},
    "table": jax.ShapeDtypeStruct((512, 256), "float32"),
    "w": jax.ShapeDtypeStruct((256,), "float32"),
}
AXES = {
    "layers": {"w": ("layer", "embed", "mlp")},
    "table": ("vocab", "embed"),
    "w": ("norm",),
}


def state_axes(tx, **kwargs) -> dict[str, tuple]:
    """Returns the axes of the state's arrays by path, without one-element arrays."""
    state = jax.eval_shape(tx.init, PARAMS)
    axes = axes_for_state(state, PARAMS, AXES, **kwargs)
    resolved = resolve(state, RULES, SPEC.abstract(), axes=axes, role="optimizer")
    sized = (a for a in resolved.arrays if a.bytes > a.itemsize)
    return {a.path: a.axes for a in sized}


MOMENTS = {
    "layers/w": ("layer", "embed", "mlp"),
    "table": ("vocab", "embed"),
    "w": ("norm",),
}


def below(prefix: str, names=MOMENTS) -> dict[str, tuple]:
    return {f"{prefix}/{path}": axes for path, axes in names.items()}


def test_adamw_moments_follow_their_parameters():
    assert state_axes(optax.adamw(1e-3)) == below("0/mu") | below("0/nu")


def test_lion_moments_follow_their_parameters():
    assert state_axes(optax.lion(1e-3)) == below("0/mu")


def test_adafactor_drops_the_factored_dimension():
    # Layers are not factored, nor is "w", which has one dimension.
    assert state_axes(optax.adafactor(1e-3)) == {
        "0/v_row/layers/w": ("layer", "embed"),
        "0/v_col/layers/w": ("layer", "mlp"),
        "0/v_row/table": ("embed",),
        "0/v_col/table": ("vocab",),
        "0/v/w": ("norm",),
    }


@pytest.mark.parametrize("shape", [*itertools.product((4, 8), repeat=3)], ids=str)
def test_adafactor_drops_the_dimension_it_averages_over(shape):
    """Also where dimensions have one size, so that the shape does not tell which."""
    names = ("layer", "embed", "mlp")
    grads = {"w": jax.random.normal(jax.random.key(0), shape)}
    tx = optax.scale_by_factored_rms(min_dim_size_to_factor=4)
    state = tx.update(grads, tx.init(grads), grads)[1]
    axes = axes_for_state(state, grads, {"w": names})
    for kind in ("v_row", "v_col"):
        stored = getattr(state, kind)["w"]
        (dropped,) = (
            i
            for i in range(3)
            if (mean := jnp.mean(grads["w"] ** 2, axis=i)).shape == stored.shape
            and jnp.allclose(mean, stored)
        )
        assert getattr(axes, kind) == {"w": names[:dropped] + names[dropped + 1 :]}


def test_muon_is_partitioned_and_its_coefficients_are_replicated():
    adam = "inner_states/adam/inner_state/0"
    muon = "inner_states/muon/inner_state/0"
    numbers = {
        "layers": {"w": optax.contrib.MuonDimensionNumbers((1,), (2,))},
        "table": None,
        "w": None,
    }
    tx = optax.contrib.muon(1e-3, muon_weight_dimension_numbers=numbers)
    rest = {k: v for k, v in MOMENTS.items() if k != "layers/w"}
    assert state_axes(tx) == {
        f"{muon}/mu/layers/w": MOMENTS["layers/w"],
        f"{muon}/ns_coeffs": (None,),
        **below(f"{adam}/mu", rest),
        **below(f"{adam}/nu", rest),
    }


def test_chained_and_masked_optimizers_resolve():
    mask = {"layers": {"w": True}, "table": False, "w": False}
    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.masked(optax.trace(0.9), mask),
        optax.scale_by_schedule(lambda step: 0.1),
    )
    assert state_axes(tx) == {"1/inner_state/trace/layers/w": MOMENTS["layers/w"]}


def test_injected_hyperparameters_are_replicated():
    tx = optax.inject_hyperparams(optax.lion)(learning_rate=1e-3)
    assert state_axes(tx) == below("inner_state/0/mu")


def test_the_longest_suffix_is_the_owner():
    # Both "layers/w" and "w" are suffixes of the path; the longer one owns the array.
    params = {"layers": {"w": jnp.ones(4)}, "w": jnp.ones(4)}
    axes = {"layers": {"w": ("mlp",)}, "w": ("norm",)}
    state = {"mu": params}
    assert axes_for_state(state, params, axes) == {"mu": axes}


def test_state_that_does_not_fit_its_parameter_is_an_error():
    params = {"layers": {"w": jnp.ones((4, 2))}, "w": jnp.ones(8)}
    axes = {"layers": {"w": ("embed", "mlp")}, "w": ("norm",)}
    state = {"mu": {"layers": {"w": jnp.ones(8)}}}
    with pytest.raises(ValueError) as error:
        axes_for_state(state, params, axes)
    assert str(error.value) == (
        "optimizer state mu/layers/w of shape (8,) does not fit its parameter layers/w "
        "of shape (4, 2). Name its dimensions: others={'mu/layers/w': (None,)} "
        "replicates it."
    )
    assert axes_for_state(state, params, axes, others={"mu/.*": ("embed",)}) == {
        "mu": {"layers": {"w": ("embed",)}}
    }


def test_a_large_array_without_a_parameter_is_an_error():
    params, axes = {"w": jnp.ones(8)}, {"w": ("norm",)}
    assert axes_for_state({"c": jnp.ones(SMALL)}, params, axes) == {"c": (None,)}
    with pytest.raises(ValueError) as error:
        axes_for_state({"cache": jnp.ones(SMALL + 1)}, params, axes)
    assert str(error.value) == (
        "optimizer state cache of shape (1025,) belongs to no parameter: no "
        "parameter's path is a suffix of its path. Name its dimensions: "
        "others={'cache': (None,)} replicates it."
    )


def test_parameters_may_be_a_single_array():
    state = jax.eval_shape(optax.adamw(1e-3).init, jnp.ones((8, 4)))
    axes = axes_for_state(state, jnp.ones((8, 4)), ("embed", "mlp"))
    assert axes[0].mu == ("embed", "mlp")
    assert axes[0].count == ()


def test_optimizer_state_of_an_nnx_state_resolves():
    params = nnx.state(Mlp(nnx.Rngs(0)), nnx.Param)
    state = jax.eval_shape(optax.adamw(1e-3).init, params)
    axes = axes_for_state(state, params, axes_of(params))
    resolved = resolve(state, RULES, SPEC.abstract(), axes=axes, role="optimizer")
    specs = {a.path: a.spec for a in resolved.arrays}
    assert specs["0/mu/up/kernel"] == P("fsdp", "tensor")
    assert specs["0/nu/down"] == P("tensor", "fsdp")
