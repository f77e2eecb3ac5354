"""The costs of a transformer, against jax's own differentiation of it."""

import jax
import jax.numpy as jnp
import pytest

from meshloom.models import transformer
from meshloom.models.remat import rematerialize
from meshloom.sharding import MeshSpec, Sharder, hlo, parse_plan

LAYERS, ROWS, LENGTH = 3, 6, 128
GPT = dict(norm="layer", positions="learned", mlp="gelu", use_bias=True)
LLAMA = dict(num_kv_heads=2)
SPLASH = LLAMA | dict(attention="splash")
QWEN = LLAMA | dict(qk_norm=True)
POLICIES = ["none", "full", "save-dots", "save-named"]


def model(**settings) -> transformer.Config:
    sizes = dict(vocab_size=50, d_model=64, num_heads=4, d_ff=160, max_length=LENGTH)
    return transformer.Config(num_layers=LAYERS, **(sizes | settings))


def residuals(config: transformer.Config) -> tuple[int, int]:
    """Returns the bytes that the scan keeps of each block, and once for all blocks.

    Weights and sums over the values of a position are not counted.
    """
    params = jax.eval_shape(config.init, jax.random.key(0))["blocks"]
    mesh = MeshSpec(fsdp=2).abstract()
    shard = Sharder(mesh, parse_plan("data+fsdp"))
    x = jax.ShapeDtypeStruct((ROWS, LENGTH, config.d_model), jnp.bfloat16)
    positions = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)

    def kept(params, x, positions):
        def block(x, p):
            return config.block(p, x, {"positions": positions}, shard), None

        def stack(params, x):
            return jax.lax.scan(rematerialize(block, config.remat), x, params)[0]

        return jax.tree.leaves(jax.vjp(stack, params, x)[1])

    with jax.sharding.use_abstract_mesh(mesh):
        result = jax.eval_shape(kept, params, x, positions)
    large = [a for a in result if a.ndim > 3 and ROWS in a.shape and a.shape[-1] > 1]
    by_block = [a for a in large if a.shape[0] == LAYERS]
    once = [a for a in large if a.shape[0] != LAYERS and a.shape[-2] == LENGTH]
    return tuple(sum(a.size * a.dtype.itemsize for a in x) for x in (by_block, once))


@pytest.mark.parametrize("remat", POLICIES)
@pytest.mark.parametrize(
    "settings", [GPT, LLAMA, LLAMA | {"num_kv_heads": 4}, SPLASH, QWEN]
)
def test_a_block_keeps_what_jax_keeps(remat, settings):
    config = model(remat=remat, **settings)
    costs = config.costs(ROWS, LENGTH, platform="cpu")
    by_block = LAYERS * sum(array.bytes for array in costs.kept)
    once = sum(array.bytes for array in costs.kept_once)
    assert (by_block, once) == residuals(config)


@pytest.mark.parametrize("settings", [GPT, LLAMA])
def test_products_add_up_to_the_model_flops(settings):
    """model_flops counts the causal half of attention; a compiled step does all."""
    config = model(**settings)
    costs = config.costs(ROWS, LENGTH, platform="cpu")
    squares = {"scores", "attend"}
    causal = sum(p.flops / (2 if p.name in squares else 1) for p in costs.products)
    total = 3 * (LAYERS * causal + costs.head.flops)
    shapes = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)
    assert total == config.model_flops({"inputs": shapes})


def jax_products(remat: str) -> float:
    """Returns the FLOPs of all products in the jaxpr of a step, loops included."""
    config = model(remat=remat, compute_dtype="float32", **GPT)
    params = jax.eval_shape(config.init, jax.random.key(0))
    names = ("inputs", "targets", "weights")
    batch = {n: jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32) for n in names}
    loss = jax.jit(jax.grad(lambda p, b: config.loss(p, b, Sharder())[0]))
    return hlo.flops(loss.lower(params, batch).compile().as_text())


@pytest.mark.parametrize("remat", POLICIES)
def test_recomputed_products_match_the_jaxpr(remat):
    config = model(remat=remat, compute_dtype="float32", **GPT)
    costs = config.costs(ROWS, LENGTH, platform="cpu")
    again = {p.name: 1 if p.name in costs.recomputed else 0 for p in costs.products}
    blocks = sum((3 + again[p.name]) * p.flops for p in costs.products)
    assert LAYERS * blocks + 3 * costs.head.flops == jax_products(remat)
