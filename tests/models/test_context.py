"""Attention with positions sharded: the choice of its form, and each form's results."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pipelines import largest_error

from meshloom.models import transformer
from meshloom.models.context import choose
from meshloom.models.vit import Blocks
from meshloom.sharding import MeshSpec, Sharder, parse_plan
from meshloom.sharding.plans import AUTO

ROWS, LENGTH = 2, 32
MODEL = transformer.Config(
    vocab_size=60,
    num_layers=1,
    d_model=16,
    num_heads=4,
    num_kv_heads=2,
    d_ff=32,
    max_length=LENGTH,
    compute_dtype="float32",
)
LLAMA = transformer.Config(
    vocab_size=128256,
    num_layers=32,
    d_model=4096,
    num_heads=32,
    num_kv_heads=8,
    d_ff=14336,
    max_length=2**20,
)


def sharder(mesh: str, plan: str = AUTO, *, abstract: bool = False) -> Sharder:
    spec = MeshSpec.parse(mesh)
    found = spec.abstract()
    if not abstract:
        found = spec.make(jax.devices()[: found.size])
    return Sharder(found, parse_plan(plan))


@pytest.mark.parametrize(
    ("mesh", "length", "name", "reason"),
    [
        ("context=8", 2**17, "gather", "take 512.0 MiB gathered, not more than 512.0"),
        ("context=8", 2**18, "ulysses", "1.0 GiB gathered, and 8 devices divide the"),
        ("context=16", 2**18, "ring", "1.0 GiB gathered, and 16 devices do not divide"),
        ("context=4,tensor=4", 2**18, "gather", "256.0 MiB gathered"),
        ("context=4,tensor=4", 2**20, "ring", "1.0 GiB gathered, and 4 devices do not"),
    ],
)
def test_auto_gathers_while_keys_are_small_and_prefers_heads_to_a_ring(
    mesh, length, name, reason
):
    form = choose(LLAMA, length, sharder(mesh, abstract=True))
    assert form is not None and form.name == name and reason in form.reason
    assert form.zigzag == (name != "ulysses")


def test_without_sharded_positions_there_is_nothing_to_choose():
    model = dataclasses.replace(MODEL, context_attention="ring")
    batch = {"inputs": jnp.zeros((ROWS, LENGTH))}
    for shard in (Sharder(), sharder("data=2", abstract=True)):
        assert choose(MODEL, LENGTH, shard) is None
        assert MODEL.notes(batch, shard) == []
        assert "context_attention='ring' has no effect" in model.notes(batch, shard)[0]


def test_what_does_not_fit_is_refused():
    shard = sharder("context=8", abstract=True)
    with pytest.raises(ValueError, match="8 devices .* do not divide the 4 heads"):
        choose(dataclasses.replace(MODEL, context_attention="ulysses"), LENGTH, shard)
    with pytest.raises(ValueError, match="length 24 .* multiple of 16"):
        choose(MODEL, 24, shard)
    with pytest.raises(ValueError, match="context_attention must be one of auto"):
        dataclasses.replace(MODEL, context_attention="rings")


def batch(packed: bool = True) -> dict[str, jax.Array]:
    tokens = jax.random.randint(jax.random.key(0), (ROWS, LENGTH + 1), 0, 60)
    made = {
        "inputs": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "weights": jnp.ones((ROWS, LENGTH)),
    }
    starts = jax.random.bernoulli(jax.random.key(1), 0.1, (ROWS, LENGTH))
    segments = jnp.cumsum(starts, axis=1).astype(jnp.int32)
    return made | ({"segments": segments} if packed else {})


def gradients(config, shard, data):
    params = jax.jit(config.init)(jax.random.key(1))
    return jax.jit(jax.grad(lambda p: config.loss(p, data, shard)[0]))(params)


LEARNED = dict(norm="layer", positions="learned", mlp="gelu", use_bias=True)


@pytest.mark.parametrize(
    ("mesh", "form", "packed", "settings"),
    [
        # Each key-value head is sent twice.
        ("context=4", "ulysses", True, LEARNED),
        ("context=4", "ring", False, LEARNED | dict(remat="none")),
        ("context=2,tensor=2", "gather", True, dict(remat="full")),
        ("context=3", "ring", True, dict(max_length=36)),
    ],
)
def test_gradients_equal_those_of_one_device(mesh, form, packed, settings):
    config = dataclasses.replace(MODEL, context_attention=form, **settings)
    data = batch(packed)
    if config.max_length != LENGTH:  # a multiple of 2 x 3
        data = {k: jnp.concatenate([x, x[:, :4]], 1) for k, x in data.items()}
    plan = "data+fsdp+tensor+sequence+context"
    found = gradients(config, sharder(mesh, plan), data)
    expected = gradients(config, Sharder(), data)
    errors = largest_error(jax.device_get(found), jax.device_get(expected))
    assert max(errors.values()) <= 1e-5, errors


def test_attention_that_is_not_causal_keeps_the_order_of_positions():
    sizes = dataclasses.asdict(MODEL) | dict(context_attention="ring")
    config = Blocks(**sizes)
    params = jax.jit(config.init)(jax.random.key(1))["blocks"]
    one = jax.tree.map(lambda x: x[0], params)
    x_BLD = jax.random.normal(jax.random.key(2), (ROWS, LENGTH, 16))
    data = batch() | {"positions": jnp.arange(LENGTH)[None].repeat(ROWS, 0)}

    def block(shard):
        run = jax.jit(
            jax.grad(lambda x: (config.block(one, x, data, shard) ** 2).sum())
        )
        return jax.device_get(run(x_BLD))

    np.testing.assert_allclose(block(sharder("context=4")), block(Sharder()), rtol=2e-5)


def test_generation_and_logits_are_those_of_one_device():
    params = jax.jit(MODEL.init)(jax.random.key(1))
    tokens = batch()["inputs"]
    shard = sharder("context=4")

    def logits(shard):
        return jax.device_get(jax.jit(lambda p: MODEL.logits(p, tokens, shard))(params))

    def text(shard):
        def run(p):
            key = jax.random.key(0)
            return MODEL.generate(p, tokens[:, :4], 8, key=key, shard=shard)

        return jax.device_get(jax.jit(run)(params))

    np.testing.assert_allclose(logits(shard), logits(Sharder()), atol=1e-5)
    np.testing.assert_array_equal(text(shard), text(Sharder()))


def temporaries(form: str, num: int, share: int) -> int:
    """Returns a device's temporaries for `share` positions of a sequence."""
    length = num * share
    config = dataclasses.replace(
        MODEL, max_length=length, context_attention=form, positions="rotary"
    )
    shard = sharder(f"context={num}")
    params = jax.eval_shape(config.init, jax.random.key(0))
    names = ("inputs", "targets", "weights")
    data = {n: jax.ShapeDtypeStruct((1, length), jnp.int32) for n in names}
    data = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        data,
        shard.shardings(data, {n: ("batch", "length") for n in names}, role="compute"),
    )
    step = jax.jit(jax.grad(lambda p, b: config.loss(p, b, shard)[0]))
    memory = step.lower(params, data).compile().memory_analysis()
    return memory.temp_size_in_bytes


def test_a_ring_takes_no_more_memory_for_a_longer_sequence():
    few, many = (temporaries("ring", num, 256) for num in (2, 8))
    assert many <= 1.1 * few
    # The measure sees what grows otherwise: gathered keys and their gradients.
    few, many = (temporaries("gather", num, 256) for num in (2, 8))
    assert many - few >= 2 * (8 - 2) * 256 * 2 * MODEL.kv_heads * MODEL.head_width * 4
