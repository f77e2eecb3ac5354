"""Attention and rotary positions against their definitions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshloom.models.attention import attend, attend_cached, rotate
from meshloom.sharding import Sharder

rng = np.random.default_rng(0)
BATCH, LENGTH, HEADS, KV_HEADS, WIDTH = 2, 7, 4, 2, 8


def normal(*shape):
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


def plain_attention(q, k, v, segments=None):
    """Computes softmax(q k / sqrt(K)) v, masking the future and other segments."""
    length, num_heads, width = q.shape[1:]
    group = num_heads // k.shape[2]
    allowed = jnp.tril(jnp.ones((length, length), bool))[None]
    if segments is not None:
        allowed = allowed & (segments[:, :, None] == segments[:, None, :])
    heads = []
    for h in range(num_heads):
        scores = jnp.einsum("blk,bsk->bls", q[:, :, h], k[:, :, h // group])
        scores = jnp.where(allowed, scores / width**0.5, -jnp.inf)
        shares = jnp.exp(scores - scores.max(-1, keepdims=True))
        shares = shares / shares.sum(-1, keepdims=True)
        heads.append(jnp.einsum("bls,bsk->blk", shares, v[:, :, h // group]))
    return jnp.stack(heads, axis=2)


@pytest.fixture
def qkv():
    return [normal(BATCH, LENGTH, h, WIDTH) for h in (HEADS, KV_HEADS, KV_HEADS)]


SEGMENTS = jnp.array([[0, 0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1]], jnp.int32)


@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["causal", "segments"])
def test_values_and_gradients_match_the_definition(qkv, segments):
    weights = normal(*qkv[0].shape)

    @functools.partial(jax.jit, static_argnums=0)
    def values_and_gradients(attention, *qkv):
        out, vjp = jax.vjp(attention, *qkv)
        return out, *vjp(weights)

    ours = values_and_gradients(
        functools.partial(attend, shard=Sharder(), segments_BL=segments), *qkv
    )
    plain = values_and_gradients(
        functools.partial(plain_attention, segments=segments), *qkv
    )
    for result, expected in zip(ours, plain, strict=True):
        # Float32 sums of 7 and 8 values of about 1.
        np.testing.assert_allclose(result, expected, atol=1e-5)


def test_bfloat16_is_close_to_float32(qkv):
    half = [x.astype(jnp.bfloat16) for x in qkv]
    expected = jax.jit(plain_attention)(*(x.astype(jnp.float32) for x in half))
    out = attend(*half, Sharder())
    assert out.dtype == jnp.bfloat16
    # Outputs are about 1; they and the attention weights are rounded to 8 bits.
    np.testing.assert_allclose(out.astype(jnp.float32), expected, atol=0.03)

    def total(*qkv):
        return attend(*qkv, Sharder()).astype(jnp.float32).sum()

    grads = jax.jit(jax.grad(total, (0, 1, 2)))(*half)
    assert all(g.dtype == jnp.bfloat16 and np.all(np.isfinite(g)) for g in grads)


def test_cached_attention_equals_the_last_row_of_full_attention(qkv):
    q, k, v = qkv
    full = jax.jit(plain_attention)(q, k, v)
    cached = jax.jit(attend_cached)
    for position in (0, 3, LENGTH - 1):
        # The contents of the cache after the position must not matter.
        seen = jnp.arange(LENGTH)[None, :, None, None] <= position
        out = cached(
            q[:, position],
            jnp.where(seen, k, 100.0),
            jnp.where(seen, v, 100.0),
            jnp.asarray(position),
        )
        np.testing.assert_allclose(out, full[:, position], atol=1e-5)


def test_rotate_multiplies_pairs_as_complex_numbers():
    x = normal(BATCH, LENGTH, HEADS, WIDTH)
    positions = jnp.array([range(LENGTH), range(3, 3 + LENGTH)], jnp.int32)
    half = WIDTH // 2
    number = np.asarray(x[..., :half]) + 1j * np.asarray(x[..., half:])
    frequency = 100.0 ** (-2 * np.arange(half) / WIDTH)
    angle = np.asarray(positions)[:, :, None, None] * frequency
    turned = number * np.exp(1j * angle)
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    np.testing.assert_allclose(rotate(x, positions, 100.0), expected, atol=1e-5)


def test_rotated_scores_depend_only_on_distance():
    q, k = normal(2, 1, 1, 1, WIDTH)

    @jax.jit
    def score(i, j):
        at = lambda n: jnp.full((1, 1), n, jnp.int32)  # noqa: E731
        return jnp.sum(rotate(q, at(i), 1e4) * rotate(k, at(j), 1e4))

    np.testing.assert_allclose(score(9, 4), score(105, 100), atol=1e-4)
    assert abs(score(9, 4) - score(9, 5)) > 1e-3


def test_rotate_keeps_the_type_and_computes_in_float32():
    x = normal(1, 1, 1, WIDTH).astype(jnp.bfloat16)
    # A position that bfloat16 cannot represent.
    positions = jnp.full((1, 1), 1001, jnp.int32)
    out = rotate(x, positions, 1e4)
    assert out.dtype == jnp.bfloat16
    expected = rotate(x.astype(jnp.float32), positions, 1e4).astype(jnp.bfloat16)
    assert np.array_equal(out, expected)
