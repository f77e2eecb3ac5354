"""Tests that optimizers learn, decay only matrices, and shard their state."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers

from meshloom.models import transformer
from meshloom.sharding import MeshSpec, parse_plan
from meshloom.trainer.program.optimizers import (
    Adafactor,
    AdamW,
    Lion,
    Muon,
    is_matrix,
    matrix_dimensions,
)
from meshloom.trainer.program.state import make_layout

ALL = [AdamW(), Lion(), Adafactor(min_dim_size_to_factor=8), Muon()]
each = pytest.mark.parametrize("optimizer", ALL, ids=lambda o: type(o).__name__)


GPT2 = transformer.Config(
    vocab_size=32,
    num_layers=2,
    d_model=16,
    num_heads=2,
    d_ff=32,
    max_length=8,
    norm="layer",
    positions="learned",
    mlp="gelu",
    use_bias=True,
)


class Small:
    """A model with parameters of every kind and no computation."""

    def axes(self):
        return {
            "table": ("vocab", "embed"),
            "query": ("layer", "embed", "heads", "head_dim"),
            "qkv_bias": ("layer", "heads", None, "head_dim"),
            "out": ("layer", "heads", "head_dim", "embed"),
            "norm": ("layer", "norm"),
        }

    def init(self, key):
        sizes = dict(vocab=24, embed=64, layer=2, heads=4, head_dim=16, norm=64)
        del key
        shapes = {
            name: tuple(sizes.get(a, 3) for a in axes)
            for name, axes in self.axes().items()
        }
        return {
            name: jnp.sin(jnp.arange(math.prod(shape)) * 1.7).reshape(shape)
            for name, shape in shapes.items()
        }


def is_axes(x):
    return (
        isinstance(x, tuple) and bool(x) and all(a is None or type(a) is str for a in x)
    )


def leaves(tree):
    paths = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_axes)[0]
    return {jax.tree_util.keystr(p, simple=True, separator="/"): v for p, v in paths}


@each
def test_lowers_the_loss_of_a_small_problem(optimizer):
    """The problem is least squares with two stacked matrices and a bias."""
    rng = np.random.default_rng(0)
    x, y = jnp.asarray(rng.normal(size=(2, 64, 8)), jnp.float32)
    params = {
        "w": jnp.asarray(0.3 * rng.normal(size=(2, 8, 8)), jnp.float32),
        "b": jnp.zeros((2, 8)),
    }
    axes = {"w": ("layer", "embed", "mlp"), "b": ("layer", "mlp")}
    tx = optimizer.make(optax.constant_schedule(0.03), axes)

    def loss(params):
        h = jnp.tanh(x @ params["w"][0] + params["b"][0][None])
        return jnp.mean((h @ params["w"][1] + params["b"][1][None] - y) ** 2)

    @jax.jit
    def run(params):
        def one(carry, _):
            params, state = carry
            value, grads = jax.value_and_grad(loss)(params)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), value

        return jax.lax.scan(one, (params, tx.init(params)), None, length=60)

    (end, _), losses = run(params)
    assert losses[-1] < 0.9 * losses[0]
    assert not np.array_equal(end["b"], params["b"])


def test_biases_and_norms_are_no_matrices():
    axes = leaves(GPT2.axes())
    small = {
        name for name in axes if name.endswith(("bias", "scale")) or "norm" in name
    }
    assert "blocks/mlp/up_bias" in small
    assert {name for name, a in axes.items() if not is_matrix(a)} == small


@each
def test_only_matrices_decay(optimizer):
    """With zero gradients an update consists of decay alone."""
    config = Small()
    if not optimizer.weight_decay:
        optimizer = type(optimizer)(min_dim_size_to_factor=8, weight_decay=0.1)
    tx = optimizer.make(optax.constant_schedule(0.01), config.axes())

    @jax.jit
    def update():
        params = jax.tree.map(jnp.ones_like, config.init(jax.random.key(0)))
        zeros = jax.tree.map(jnp.zeros_like, params)
        return tx.update(zeros, tx.init(params), params)[0]

    axes = leaves(config.axes())
    for name, change in leaves(update()).items():
        # Decoupled decay: learning rate * weight decay * parameter.
        expected = -0.01 * 0.1 if is_matrix(axes[name]) else 0.0
        np.testing.assert_allclose(change, expected, rtol=1e-5, err_msg=name)


def test_adafactor_without_decay_is_optax_adafactor():
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(16, 8)), jnp.float32)}
    grads = {"w": jnp.asarray(rng.normal(size=(16, 8)), jnp.float32)}
    rate = optax.linear_schedule(0.1, 0.2, 3)
    ours = Adafactor(min_dim_size_to_factor=8).make(rate, {"w": ("embed", "mlp")})
    theirs = optax.adafactor(rate, min_dim_size_to_factor=8)

    def three_updates(tx):
        state, out = tx.init(params), []
        for _ in range(3):
            change, state = tx.update(grads, state, params)
            out.append(change["w"])
        return jnp.stack(out)

    np.testing.assert_allclose(
        jax.jit(lambda: three_updates(ours))(),
        jax.jit(lambda: three_updates(theirs))(),
        rtol=1e-6,  # the same factors, multiplied in a different order
    )


@pytest.mark.parametrize(
    ("axes", "rows", "columns"),
    [
        (("layer", "embed", "heads", "head_dim"), (1,), (2, 3)),
        (("layer", "heads", "head_dim", "embed"), (1, 2), (3,)),
        (("embed", "mlp"), (0,), (1,)),
        (("layer", "embed", "kv_heads", None, "head_dim"), (1,), (2, 4)),
        (("layer", "mlp", "embed"), (1,), (2,)),
    ],
)
def test_muon_dimensions(axes, rows, columns):
    assert matrix_dimensions(axes) == MuonDimensionNumbers(rows, columns)


@pytest.mark.parametrize(
    "axes",
    [
        ("vocab", "embed"),
        ("embed", "vocab"),
        ("position", "embed"),
        ("layer", "norm"),
        ("layer", "heads", "head_dim"),
        ("layer", "kv_heads", None, "head_dim"),
        ("layer", None, "mlp"),
        ("mlp",),
    ],
)
def test_muon_leaves_tables_and_vectors_to_adam(axes):
    assert matrix_dimensions(axes) is None


def test_muon_updates_are_orthogonal_by_layer():
    config = Small()
    tx = Muon(weight_decay=0.0).make(optax.constant_schedule(1.0), config.axes())

    rng = np.random.default_rng(0)
    params = config.init(jax.random.key(0))
    grads = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), params
    )
    updates = jax.jit(lambda: tx.update(grads, tx.init(params), params)[0])()
    for name in ("query", "out"):
        for matrix in np.asarray(updates[name]):
            values = np.linalg.svd(matrix.reshape(64, 64), compute_uv=False)
            # Newton-Schulz steps bring the singular values close together, not exactly
            # to 1. The smallest one of a random square matrix is far below the mean.
            assert np.quantile(values, 0.1) > 0.4 * values.max(), (name, values)


@each
def test_state_is_cut_like_the_parameters(optimizer):
    config = Small()
    tx = optimizer.make(optax.constant_schedule(0.01), config.axes())
    mesh = MeshSpec(fsdp=8).make()
    layout = make_layout(config, tx, parse_plan("data+fsdp+tensor"), mesh)
    state = layout.create(jax.random.key(0), mesh)

    params = leaves(state.params)
    replicated = {n for n, x in params.items() if x.sharding.is_fully_replicated}
    named = leaves(config.axes())
    assert replicated == {n for n, axes in named.items() if "embed" not in axes}
    same_shape = 0
    for path, x in leaves(state.opt_state).items():
        if x.size == 1 or path.endswith("ns_coeffs"):
            continue
        owner = next(n for n in params if path.endswith(n))
        if x.shape == params[owner].shape:
            assert x.sharding == params[owner].sharding, path
            same_shape += 1
    # Factored moments have the shape of a row or column of their parameter.
    factored = isinstance(optimizer, Adafactor)
    assert same_shape >= (len(replicated) if factored else len(params))
    per_device = sum(x.addressable_shards[0].data.size for x in jax.tree.leaves(state))
    total = sum(x.size for x in jax.tree.leaves(state))
    assert per_device < total / 4
