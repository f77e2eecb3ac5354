"""The transformer against the published equations and its own guarantees."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshloom.models import nnx_pure
from meshloom.models.transformer import Config, Transformer
from meshloom.sharding import Sharder

GPT2 = Config(
    vocab_size=29,
    num_layers=2,
    d_model=12,
    num_heads=3,
    d_ff=20,
    max_length=10,
    norm="layer",
    positions="learned",
    mlp="gelu",
    use_bias=True,
    tied_head=True,
    compute_dtype="float32",
)
LLAMA = Config(
    vocab_size=29,
    num_layers=2,
    d_model=16,
    num_heads=4,
    num_kv_heads=2,
    d_ff=24,
    max_length=10,
    rope_theta=100.0,
    remat="save-dots",
    compute_dtype="float32",
)
replace = dataclasses.replace
# Most of the time here is compilation; the programs run only briefly.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def random_params(config, seed=0):
    """Returns larger values than at initialization, so that every term matters."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(config.init, jax.random.key(0))
    return jax.tree.map(
        lambda x: jnp.asarray(0.3 * rng.normal(size=x.shape), x.dtype), shapes
    )


def random_batch(config, num=2, length=8, seed=1):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, config.vocab_size, (num, length + 1)).astype(np.int32)
    weights = rng.integers(0, 3, (num, length)).astype(np.float32)
    return {
        "inputs": jnp.asarray(tokens[:, :-1]),
        "targets": jnp.asarray(tokens[:, 1:]),
        "weights": jnp.asarray(weights),
    }


@functools.partial(jit, static_argnums=0)
def logits_of(config, params, tokens):
    return config.logits(params, tokens, Sharder())


@functools.partial(jit, static_argnums=0)
def loss_of(config, params, batch):
    return config.loss(params, batch, Sharder())


@functools.partial(jit, static_argnums=0)
def grad_of(config, params, batch):
    def loss(params):
        return config.loss(params, batch, Sharder())[0]

    return jax.value_and_grad(loss)(params)


def assert_trees_close(found, expected, rtol):
    """Compares relative to the largest value of each array."""
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            a, b, rtol=0, atol=rtol * float(jnp.max(jnp.abs(b)))
        ),
        found,
        expected,
    )


# The published sizes.
PUBLISHED = {
    "gpt2_124m": (
        124_439_808,
        dict(vocab_size=50257, num_layers=12, d_model=768, num_heads=12, d_ff=3072)
        | dict(max_length=1024, norm="layer", positions="learned", mlp="gelu")
        | dict(use_bias=True, tied_head=True, pad_vocab_to=128),
    ),
    "llama2_7b": (
        6_738_415_616,
        dict(vocab_size=32000, num_layers=32, d_model=4096, num_heads=32, d_ff=11008)
        | dict(max_length=4096),
    ),
    "llama3_8b": (
        8_030_261_248,
        dict(vocab_size=128256, num_layers=32, d_model=4096, num_heads=32, d_ff=14336)
        | dict(max_length=8192, num_kv_heads=8, rope_theta=500_000.0),
    ),
    "llama3_70b": (
        70_553_706_496,
        dict(vocab_size=128256, num_layers=80, d_model=8192, num_heads=64, d_ff=28672)
        | dict(max_length=8192, num_kv_heads=8, rope_theta=500_000.0),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_the_published_ones(name):
    count, sizes = PUBLISHED[name]
    assert Config(**sizes).num_params() == count


# The published equations, in float64, one sequence and one head at a time.


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def plain_norm(config, x, p):
    if config.norm == "layer":
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(
            x.var(-1, keepdims=True) + config.norm_epsilon
        )
        return x * p["scale"] + p["bias"]
    return (
        x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_epsilon) * p["scale"]
    )


def plain_rotary(x, theta):
    """x [L, K]: pairs (i, i + K/2) as complex numbers."""
    length, width = x.shape
    number = x[:, : width // 2] + 1j * x[:, width // 2 :]
    frequency = theta ** (-2 * np.arange(width // 2) / width)
    number = number * np.exp(1j * np.arange(length)[:, None] * frequency)
    return np.concatenate([number.real, number.imag], axis=-1)


def plain_attention(config, x, p):
    shared = config.num_heads // config.kv_heads
    qkv = np.einsum("ld,dgrk->lgrk", x, p["qkv"]) + p.get("qkv_bias", 0.0)
    out = p.get("out_bias", 0.0)
    for h in range(config.num_heads):
        group = qkv[:, h // shared]
        q, k, v = group[:, h % shared], group[:, shared], group[:, shared + 1]
        if config.positions == "rotary":
            q, k = (plain_rotary(y, config.rope_theta) for y in (q, k))
        scores = q @ k.T / np.sqrt(q.shape[-1])
        scores[np.triu_indices(len(x), 1)] = -np.inf
        out = out + softmax(scores) @ v @ p["out"][h]
    return out


def plain_mlp(config, x, p):
    if config.mlp == "swiglu":
        gate, up = x @ p["gate"], x @ p["up"]
        return (gate / (1 + np.exp(-gate)) * up) @ p["down"]
    y = x @ p["up"] + p["up_bias"]
    y = 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
    return y @ p["down"] + p["down_bias"]


def plain_logits(config, params, tokens):
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    result = []
    for row in np.asarray(tokens):
        x = params["embedding"][row]
        if config.positions == "learned":
            x = x + params["position"][: len(row)]
        for i in range(config.num_layers):
            p = jax.tree.map(lambda x, i=i: x[i], params["blocks"])
            y = plain_norm(config, x, p["attention_norm"])
            x = x + plain_attention(config, y, p["attention"])
            x = x + plain_mlp(config, plain_norm(config, x, p["mlp_norm"]), p["mlp"])
        x = plain_norm(config, x, params["final_norm"])
        head = params["embedding"].T if config.tied_head else params["head"]
        result.append(x @ head)
    return np.stack(result)


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_logits_and_loss_match_the_published_equations(config):
    params, batch = random_params(config), random_batch(config)
    expected = plain_logits(config, params, batch["inputs"])
    found = logits_of(config, params, batch["inputs"])
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)

    nll = -np.log(softmax(expected))
    nll = np.take_along_axis(nll, np.asarray(batch["targets"])[..., None], -1)[..., 0]
    total, weight, others = loss_of(config, params, batch)
    np.testing.assert_allclose(total, (nll * batch["weights"]).sum(), rtol=1e-5)
    assert weight == batch["weights"].sum() and others == {}


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_a_later_token_does_not_change_earlier_logits(config):
    params, tokens = random_params(config), random_batch(config)["inputs"]
    before = logits_of(config, params, tokens)
    after = logits_of(config, params, tokens.at[:, 5].add(1) % config.vocab_size)
    assert np.array_equal(before[:, :5], after[:, :5])
    assert np.all(np.abs(before[:, 5:] - after[:, 5:]).max(-1) > 1e-3)


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_packed_documents_equal_separate_ones(config):
    params = random_params(config)
    row = random_batch(config, num=1)
    packed = row | {
        "segments": jnp.array([[0, 0, 0, 0, 1, 1, 1, 1]], jnp.int32),
        "positions": jnp.array([[0, 1, 2, 3, 0, 1, 2, 3]], jnp.int32),
    }
    apart = {name: x.reshape(2, 4) for name, x in row.items()}
    total = loss_of(config, params, packed)[0]
    np.testing.assert_allclose(total, loss_of(config, params, apart)[0], rtol=1e-6)
    mixed = packed | {"segments": jnp.zeros((1, 8), jnp.int32)}
    assert abs(total - loss_of(config, params, mixed)[0]) > 1e-3


def test_padding_of_the_vocabulary_gets_no_probability():
    padded = replace(LLAMA, pad_vocab_to=8)
    assert padded.padded_vocab == 32 and padded.num_params() == LLAMA.num_params()
    params, batch = random_params(padded), random_batch(LLAMA)
    shares = jax.nn.softmax(logits_of(padded, params, batch["inputs"]), axis=-1)
    assert not np.any(np.asarray(shares)[..., 29:])

    small = params | {
        "embedding": params["embedding"][:29],
        "head": params["head"][:, :29],
    }
    loss, grads = grad_of(padded, params, batch)
    expected, expected_grads = grad_of(LLAMA, small, batch)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    np.testing.assert_allclose(grads["head"][:, :29], expected_grads["head"], atol=1e-5)
    assert not np.any(grads["head"][:, 29:]) and not np.any(grads["embedding"][29:])


def test_padding_works_with_a_tied_head():
    tied = replace(GPT2, pad_vocab_to=8)
    params, batch = random_params(tied), random_batch(GPT2)
    small = params | {"embedding": params["embedding"][:29]}
    np.testing.assert_allclose(
        loss_of(tied, params, batch)[0], loss_of(GPT2, small, batch)[0], rtol=1e-6
    )


def test_tied_head_is_the_embedding():
    tied = replace(LLAMA, tied_head=True)
    params, tokens = random_params(tied), random_batch(LLAMA)["inputs"]
    assert "head" not in params
    both = params | {"head": params["embedding"].T}
    np.testing.assert_allclose(
        logits_of(tied, params, tokens), logits_of(LLAMA, both, tokens), atol=1e-5
    )


def test_softcap_squeezes_logits():
    params, tokens = random_params(LLAMA), random_batch(LLAMA)["inputs"]
    params["head"] *= 4
    raw = logits_of(LLAMA, params, tokens)
    capped = logits_of(replace(LLAMA, logit_softcap=1.5), params, tokens)
    assert np.abs(raw).max() > 2 and np.abs(capped).max() < 1.5
    np.testing.assert_allclose(capped, 1.5 * np.tanh(raw / 1.5), atol=1e-5)


def test_z_loss_is_added_and_reported():
    params, batch = random_params(LLAMA), random_batch(LLAMA)
    plain, weight, _ = loss_of(LLAMA, params, batch)
    total, same_weight, others = loss_of(replace(LLAMA, z_loss=0.1), params, batch)
    logits = np.asarray(logits_of(LLAMA, params, batch["inputs"]), np.float64)
    log_z = np.log(np.exp(logits).sum(-1))
    expected = 0.1 * (log_z**2 * batch["weights"]).sum()
    np.testing.assert_allclose(others["penalty"], expected, rtol=1e-5)
    np.testing.assert_allclose(total, plain + expected, rtol=1e-5)
    assert weight == same_weight


def test_remat_changes_nothing_but_memory():
    params, batch = random_params(LLAMA), random_batch(LLAMA)
    loss, grads = grad_of(LLAMA, params, batch)
    for remat in ("none", "full", "save-named"):
        found = grad_of(replace(LLAMA, remat=remat), params, batch)
        # The same operations, possibly fused differently.
        np.testing.assert_allclose(found[0], loss, rtol=1e-6)
        assert_trees_close(found[1], grads, rtol=1e-6)


def test_remat_policies_save_what_they_promise():
    batch = random_batch(LLAMA)
    kept = {}
    for remat in ("none", "full", "save-dots", "save-named"):
        config = replace(LLAMA, remat=remat)
        params = jax.eval_shape(config.init, jax.random.key(0))

        def residuals(params, config=config):
            loss = lambda p: config.loss(p, batch, Sharder())[0]  # noqa: E731
            return jax.vjp(loss, params)[1]

        saved = jax.tree.leaves(jax.eval_shape(residuals, params))
        kept[remat] = sum(x.size for x in saved)
    assert kept["full"] < kept["save-named"] < kept["none"]
    assert kept["full"] < kept["save-dots"] < kept["none"]


def test_bfloat16_compute_keeps_float32_parameters_and_gradients():
    config = replace(LLAMA, compute_dtype="bfloat16")
    params, batch = random_params(LLAMA), random_batch(LLAMA)
    loss, grads = grad_of(config, params, batch)
    expected, expected_grads = grad_of(LLAMA, params, batch)
    assert loss.dtype == jnp.float32
    assert {x.dtype for x in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
    # Eight bits of precision, through two blocks with values of about 1 to 10.
    np.testing.assert_allclose(loss, expected, rtol=0.02)
    assert loss != expected
    assert_trees_close(grads, expected_grads, rtol=0.15)
    low = jax.eval_shape(
        replace(config, param_dtype="bfloat16").init, jax.random.key(0)
    )
    assert {x.dtype for x in jax.tree.leaves(low)} == {jnp.dtype("bfloat16")}


def test_scan_equals_blocks_one_by_one():
    params, tokens = random_params(LLAMA), random_batch(LLAMA)["inputs"]

    @jit
    def one_by_one(params):
        model = nnx_pure.bind(functools.partial(Transformer, LLAMA), params)
        positions = jax.lax.broadcasted_iota(jnp.int32, tokens.shape, 1)
        x = model.embed(tokens, positions, Sharder())
        for i in range(LLAMA.num_layers):
            layer = jax.tree.map(lambda p, i=i: p[i], model.block_params())
            block = nnx_pure.bind(model.make_block, layer)
            x = block(x, positions, None, Sharder())
        return model.head_logits(x, Sharder())

    found = logits_of(LLAMA, params, tokens)
    np.testing.assert_allclose(found, one_by_one(params), rtol=1e-5, atol=1e-5)


def test_layers_are_initialized_differently_and_norms_to_one():
    params = jit(LLAMA.init)(jax.random.key(0))
    first, second = params["blocks"]["mlp"]["down"]
    assert not np.array_equal(first, second)
    assert np.all(params["blocks"]["mlp_norm"]["scale"] == 1)
    np.testing.assert_allclose(params["embedding"].std(), 0.02, rtol=0.2)
    # Each layer adds twice to the residual stream: scaled by 1 / sqrt(2 * 2).
    np.testing.assert_allclose(params["blocks"]["mlp"]["down"].std(), 0.01, rtol=0.2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(num_heads=5), "d_model 16 must be a multiple of num_heads 5"),
        (dict(num_kv_heads=3), "num_heads 4 must be a multiple of num_kv_heads 3"),
        (dict(head_dim=3), "rotary positions need an even head_dim, got 3"),
        (dict(vocab_size=0), "vocab_size must be positive, got 0"),
        (dict(num_heads=0), "num_heads must be positive, got 0"),
        (dict(num_kv_heads=0), "num_kv_heads must be positive, got 0"),
        (dict(head_dim=-2), "head_dim must be positive, got -2"),
        (dict(d_model=0), "d_model must be positive, got 0"),
        (dict(pad_vocab_to=0), "pad_vocab_to must be positive, got 0"),
    ],
)
def test_impossible_sizes_are_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(LLAMA, **{"num_kv_heads": None, **changes})


def test_data_that_does_not_fit_is_an_error():
    def batch(length, names=("inputs", "targets", "weights")):
        return dict.fromkeys(names, jax.ShapeDtypeStruct((2, length), jnp.int32))

    LLAMA.check_batch(batch(8), {"vocab_size": 29})
    with pytest.raises(ValueError, match="vocabulary of 30.*Raise vocab_size to 30"):
        LLAMA.check_batch(batch(8), {"vocab_size": 30})
    with pytest.raises(ValueError, match="length 11.*max_length is 10"):
        LLAMA.check_batch(batch(11), {})


def test_model_flops_of_a_small_model():
    # One token: 6 per matmul weight, and attention only to itself.
    weights = 2 * (16 * 4 * 4 * 2 + 16 * 2 * 4 * 2 + 16 * 24 * 3) + 29 * 16
    batch = {"inputs": jax.ShapeDtypeStruct((1, 1), jnp.int32)}
    assert LLAMA.model_flops(batch) == 6 * (weights + 2 * 16)
