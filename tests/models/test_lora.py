"""Low-rank adapters: their product, what is trained, and parity of meshes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_transformer import jit, random_batch, random_params

from meshloom.models import lora
from meshloom.models.adapters import DOWN, UP, WEIGHTS, Adapters
from meshloom.models.transformer import Config
from meshloom.sharding import MeshSpec, Sharder, parse_plan
from meshloom.trainer.program.build import build
from meshloom.trainer.program.optimizers import AdamW

BASE = Config(
    vocab_size=29,
    num_layers=2,
    d_model=16,
    num_heads=4,
    num_kv_heads=2,
    d_ff=24,
    max_length=12,
    pad_vocab_to=8,
    qkv_bias=True,
    compute_dtype="float32",
)
MODEL = lora.Config(base=BASE, adapters=Adapters(rank=3, alpha=6.0))


def merged(variables, params):
    """Returns the weights of base with the products of the adapters added."""
    full = jax.tree.map(lambda x: x, variables)
    for part, names in params["blocks"].items():
        for name in {n.removesuffix(DOWN).removesuffix(UP) for n in names}:
            down, up = names[name + DOWN], names[name + UP]
            product = jax.vmap(lambda a, b: jnp.tensordot(a, b, 1))(down, up)
            full["blocks"][part][name] += MODEL.adapters.scale * product
    return full


def test_an_adapter_adds_a_product_to_its_weight():
    variables, params = random_params(BASE), random_params(MODEL, seed=3)
    batch = random_batch(BASE)
    found = jit(MODEL.loss, static_argnums=2)(
        params, batch, Sharder(), variables=variables
    )
    full = merged(variables, params)
    expected = jit(BASE.loss, static_argnums=2)(full, batch, Sharder())
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    plain = jit(BASE.loss, static_argnums=2)(variables, batch, Sharder())
    assert abs(plain[0] - expected[0]) > 1e-2 * expected[0]


def test_a_new_adapter_changes_nothing():
    key = jax.random.key(1)
    params, variables = MODEL.init(key), MODEL.init_variables(key)
    batch = random_batch(BASE)
    found = MODEL.loss(params, batch, Sharder(), variables=variables)
    np.testing.assert_array_equal(found[0], BASE.loss(variables, batch, Sharder())[0])
    names = {
        str(path[-1].key) for path, _ in jax.tree_util.tree_leaves_with_path(params)
    }
    assert names == {name + suffix for name in WEIGHTS for suffix in (DOWN, UP)}


def train(sizes: MeshSpec, plan: str, steps: int):
    batch = random_batch(BASE, num=4)
    mesh = sizes.make(jax.devices()[: 1 if plan == "data" else 8])
    program = build(
        MODEL,
        AdamW(weight_decay=0.0),
        mesh,
        parse_plan(plan),
        batch,
        learning_rate=1e-2,
        donate=False,
    )
    state = first = program.init(jax.random.key(0))
    batch = jax.device_put(batch, program.batch_shardings)
    losses = []
    for _ in range(steps):
        state, metrics = program.step(state, batch)
        losses.append(float(metrics["loss"]))
    return first, state, losses


def test_only_adapters_are_trained_alike_on_every_mesh():
    first, state, losses = train(MeshSpec(data=1), "data", 20)
    before, after = (jax.device_get(x.variables) for x in (first, state))
    jax.tree.map(np.testing.assert_array_equal, before, after)
    count = sum(x.size for x in jax.tree.leaves(state.params))
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
    assert sum(x.size for x in moments) == 2 * count
    assert losses[-1] < losses[0] - 0.05
    sizes = MeshSpec(data=2, fsdp=2, tensor=2)
    _, state, found = train(sizes, "data+fsdp+tensor", 20)
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    for tree in (state.params["blocks"], state.variables["blocks"]):
        matrices = [x for x in jax.tree.leaves(tree) if x.ndim > 2]
        sharded = [not x.sharding.is_fully_replicated for x in matrices]
        assert all(sharded), jax.tree.map(lambda x: x.sharding, tree)


def test_settings_are_checked():
    with pytest.raises(ValueError, match="weights: 'q' is not a weight of a block"):
        Adapters(weights=("q",))
    with pytest.raises(ValueError, match="rank must be positive, got 0"):
        Adapters(rank=0)
    with pytest.raises(ValueError, match="base.adapters must be None"):
        lora.Config(base=dataclasses.replace(BASE, adapters=Adapters()))
