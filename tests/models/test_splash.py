"""Splash attention, interpreted, has the gradients of plain attention."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pipelines import GPT, Case, largest_error, reference

from meshloom.models import transformer
from meshloom.models.attention import block_size, choose, key_block_size
from meshloom.sharding import MeshSpec, Rules, Sharder, parse_plan

ROWS, LENGTH = 4, 256
MODEL = transformer.Config(
    vocab_size=64,
    num_layers=2,
    d_model=32,
    num_heads=4,
    num_kv_heads=2,
    d_ff=64,
    max_length=LENGTH,
    compute_dtype="float32",
    attention="splash",
)
PLAIN = dataclasses.replace(MODEL, attention="xla")


def batch(packed: bool) -> dict[str, jax.Array]:
    key = jax.random.key(0)
    tokens = jax.random.randint(key, (ROWS, LENGTH + 1), 0, 64)
    made = {
        "inputs": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "weights": jnp.ones((ROWS, LENGTH)),
    }
    if packed:
        starts = jax.random.bernoulli(key, 0.02, (ROWS, LENGTH))
        made["segments"] = jnp.cumsum(starts, axis=1).astype(jnp.int32)
    return made


@functools.cache
def params():
    return jax.jit(MODEL.init)(jax.random.key(1))


def gradients(config, shard, packed):
    data = batch(packed)
    return jax.jit(jax.grad(lambda p: config.loss(p, data, shard)[0]))(params())


@functools.cache
def plain_gradients(packed):
    return jax.device_get(gradients(PLAIN, Sharder(), packed))


# Segments are one more array that is sharded as the others are.
@pytest.mark.parametrize(
    ("mesh", "remat", "packed"),
    [
        (None, "none", False),
        (None, "none", True),
        ("fsdp=4", "full", True),
        ("data=2,tensor=2", "save-named", False),
        ("data=2,tensor=2", "save-named", True),
        ("fsdp=2,tensor=2", "save-dots", True),
    ],
)
def test_gradients_equal_those_of_plain_attention(mesh, remat, packed):
    shard = Sharder()
    if mesh:
        devices = jax.devices()[:4]
        shard = Sharder(
            MeshSpec.parse(mesh).make(devices), parse_plan("data+fsdp+tensor+sequence")
        )
    config = dataclasses.replace(MODEL, remat=remat)
    result = gradients(config, shard, packed)
    errors = largest_error(jax.device_get(result), plain_gradients(packed))
    assert max(errors.values()) <= 1e-5, errors


@pytest.mark.parametrize(
    ("mesh", "remat", "packed"),
    [
        ("pipe=2,fsdp=2", "save-named", True),
        ("pipe=2,data=2,tensor=2", "full", False),
        ("pipe=2", "none", True),
    ],
)
def test_gradients_in_a_pipeline_equal_those_of_plain_attention(mesh, remat, packed):
    """Inside the pipeline's shard_map, values are typed as varying over its axes."""
    model = dataclasses.replace(GPT, num_layers=4, max_length=128, remat=remat)
    case = Case(
        model=dataclasses.replace(model, attention="splash"),
        mesh=mesh,
        schedule="1f1b",
        num_microbatches=2,
        num_rows=8,
        packed=packed,
    )
    sums, grads = jax.jit(case.pipeline.value_and_grad)(*case.inputs())
    expected_sums, expected = reference(model, case.num_rows, packed)
    np.testing.assert_allclose(sums["loss"], expected_sums["loss"], rtol=1e-6)
    errors = largest_error(case.in_order(grads), expected)
    assert max(errors.values()) <= 1e-5, errors


def test_it_is_chosen_on_tpus_for_supported_lengths():
    assert choose("auto", "tpu", 2, 4096, 128) == "splash"
    assert choose("auto", "tpu", 2, 100, 128) == "xla"
    assert choose("auto", "gpu", 2, 4096, 128) == "cudnn"
    assert choose("auto", "gpu", 4, 4096, 128) == "xla"
    assert choose("auto", "cpu", 2, 4096, 128) == "xla"
    assert choose("xla", "tpu", 2, 4096, 128) == "xla"


def test_blocks_divide_the_length():
    sizes = {n: (block_size(n), key_block_size(n)) for n in (128, 640, 1024, 1536, 100)}
    assert sizes == {
        128: (128, 128),
        640: (128, 640),
        1024: (512, 1024),
        1536: (512, 512),
        100: (None, None),
    }


def test_an_unsupported_length_is_an_error():
    short = {name: x[:, :100] for name, x in batch(False).items()}
    with pytest.raises(ValueError, match="must be a multiple of 128, got 100"):
        MODEL.loss(params(), short, Sharder())


def test_heads_and_key_value_heads_must_be_sharded_alike():
    mesh = MeshSpec.parse("tensor=2").make(jax.devices()[:2])
    rules = parse_plan("data+tensor") + Rules.of({"kv_heads": None}, plan="mine")
    with pytest.raises(
        ValueError, match="heads and key-value heads sharded over the same"
    ):
        gradients(MODEL, Sharder(mesh, rules), False)
