"""Which experts compute each token, and how evenly the experts are used.

All functions work on the tokens of one device. Sums are per example, so they add up to
the same on every mesh and in any microbatches.

Shape letters: B examples, L length, E experts, K experts of a token.
"""

from typing import TYPE_CHECKING, Literal, NamedTuple

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from .moe import Config

Scores = Literal["softmax", "sigmoid"]


class Routed(NamedTuple):
    """The experts of every token.

    Attributes:
      experts_BLK: indices, the one with the highest score first.
      weights_BLK: by which the experts' results are added up.
      shares_BLE: the scores, divided by their sum over all experts.
      log_z_BL: logarithm of the sum of the exponentials of the router's logits.
    """

    experts_BLK: jax.Array
    weights_BLK: jax.Array
    shares_BLE: jax.Array
    log_z_BL: jax.Array


def route(logits_BLE: jax.Array, bias_E: jax.Array | None, config: "Config") -> Routed:
    """Chooses the experts with the highest scores.

    Args:
      bias_E: added to the scores for the choice alone, not for the weights.
    """
    logits_BLE = logits_BLE.astype(jnp.float32)
    if config.scores == "softmax":
        scores = shares = jax.nn.softmax(logits_BLE, axis=-1)
    else:
        scores = jax.nn.sigmoid(logits_BLE)
        shares = scores / jnp.sum(scores, axis=-1, keepdims=True)
    ranked = scores if bias_E is None else scores + bias_E[None, None]
    _, experts = jax.lax.top_k(jax.lax.stop_gradient(ranked), config.experts_per_token)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if config.normalize_weights:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights * config.weight_scale
    log_z = jax.nn.logsumexp(logits_BLE, axis=-1)
    return Routed(experts, weights, shares, log_z)


def counts(routed: Routed, weights_BL: jax.Array, num_experts: int) -> jax.Array:
    """Returns how many tokens of each example choose each expert, [B, E]."""
    chosen_BLKE = jax.nn.one_hot(routed.experts_BLK, num_experts)
    return jnp.einsum("BLKE,BL->BE", chosen_BLKE, weights_BL)


def balance(
    counts_BE: jax.Array, shares_BE: jax.Array, tokens_B: jax.Array
) -> jax.Array:
    """Returns the load-balance loss of each example, times its tokens.

    It is E * sum over experts of (share of the choices) * (mean score), which is 1 if
    all experts are used alike. An example is balanced by itself: a loss over the whole
    batch would depend on how the batch is split.

    Args:
      shares_BE: sums over tokens of Routed.shares_BLE.
    """
    num_experts = counts_BE.shape[-1]
    total_B = jnp.sum(counts_BE, axis=-1)
    product_B = jnp.sum(jax.lax.stop_gradient(counts_BE) * shares_BE, axis=-1)
    return num_experts * product_B / jnp.where(total_B > 0, total_B, 1.0)


def imbalance(counts_BE: jax.Array, tokens_B: jax.Array) -> jax.Array:
    """Returns the load of each example's busiest expert over the mean, times tokens."""
    total_B = jnp.sum(counts_BE, axis=-1)
    most_B = jnp.max(counts_BE, axis=-1) * counts_BE.shape[-1]
    return tokens_B * most_B / jnp.where(total_B > 0, total_B, 1.0)


def entropy(shares_BLE: jax.Array) -> jax.Array:
    """Returns the entropy of each token's scores, in nats."""
    return -jnp.sum(jax.scipy.special.xlogy(shares_BLE, shares_BLE), axis=-1)
