"""Cross-entropy against optax's, gradients included."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshloom.models.cross_entropy import cross_entropy
from meshloom.sharding import MeshSpec


@pytest.fixture
def case():
    rng = np.random.default_rng(0)
    logits = 5 * rng.normal(size=(4, 6, 16)).astype(np.float32)
    targets = rng.integers(0, 16, size=(4, 6)).astype(np.int32)
    weights = rng.uniform(size=(4, 6)).astype(np.float32)
    return jnp.asarray(logits), jnp.asarray(targets), jnp.asarray(weights)


def ours(logits, targets, weights, z_loss=0.0):
    nll, z = cross_entropy(logits, targets, z_loss=z_loss)
    return jnp.sum((nll + z) * weights)


def theirs(logits, targets, weights, z_loss=0.0):
    logits = logits.astype(jnp.float32)
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    z = z_loss * jax.nn.logsumexp(logits, axis=-1) ** 2
    return jnp.sum((nll + z) * weights)


def grad_of(loss):
    return jax.jit(jax.value_and_grad(loss))


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_values_and_gradients_match_optax(case, z_loss):
    value, grad = grad_of(ours)(*case, z_loss)
    expected, expected_grad = grad_of(theirs)(*case, z_loss)
    # Both are float32 sums over 16 entries and 24 positions, in different orders.
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(grad, expected_grad, atol=1e-6)


def test_the_z_loss_is_the_square_of_log_z(case):
    logits, targets, _ = case
    nll, z = cross_entropy(logits, targets, z_loss=0.5)
    assert nll.shape == z.shape == (4, 6)
    assert nll.dtype == z.dtype == jnp.float32
    log_z = np.log(np.exp(np.asarray(logits, np.float64)).sum(-1))
    np.testing.assert_allclose(z, 0.5 * log_z**2, rtol=1e-5)


def test_bfloat16_logits_are_computed_in_float32(case):
    logits, targets, weights = case
    rounded = logits.astype(jnp.bfloat16)
    value, grad = grad_of(ours)(rounded, targets, weights)
    assert value.dtype == jnp.float32 and grad.dtype == jnp.bfloat16
    # Equals the float32 loss of the rounded logits: no step in between is bfloat16.
    expected, expected_grad = grad_of(ours)(
        rounded.astype(jnp.float32), targets, weights
    )
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    # The gradient itself is rounded to 8 bits.
    np.testing.assert_allclose(
        grad.astype(jnp.float32), expected_grad, rtol=2**-8, atol=1e-6
    )


def test_large_logits_stay_finite(case):
    logits, targets, weights = case
    value, grad = grad_of(ours)(1e4 * logits, targets, weights)
    assert np.isfinite(value) and np.all(np.isfinite(grad))


def test_logits_sharded_by_vocabulary_are_not_gathered(case):
    """Each device reduces its shard; nothing as large as the logits is moved."""
    mesh = MeshSpec(tensor=8).make()
    by_vocabulary = NamedSharding(mesh, P(None, None, "tensor"))
    replicated = NamedSharding(mesh, P())
    step = jax.jit(
        jax.value_and_grad(ours),
        in_shardings=(by_vocabulary, replicated, replicated),
        out_shardings=(replicated, by_vocabulary),
    )
    compiled = step.lower(*case).compile()
    text = compiled.as_text()
    assert "all-reduce" in text
    assert "all-gather" not in text and "all-to-all" not in text
    value, grad = compiled(
        *jax.device_put(case, (by_vocabulary, replicated, replicated))
    )
    expected, expected_grad = grad_of(theirs)(*case)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(grad, expected_grad, atol=1e-6)
