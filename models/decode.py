"""Generates text in one compiled loop over positions, with a key-value cache.

Shape letters: B batch, T total length, D width, V vocabulary, N layers, G key-value
heads, K head width.
"""

import dataclasses

import jax
import jax.numpy as jnp

from ..sharding import Sharder
from .transformer import Transformer


def generate(
    model: Transformer,
    prompt_BP: jax.Array,
    num_tokens: int,
    *,
    key: jax.Array,
    temperature: float = 1.0,
    top_k: int | None = None,
    shard: Sharder,
) -> jax.Array:
    """Returns the prompt followed by `num_tokens` sampled tokens, [B, T].

    The prompt goes through the same loop, one position at a time. That is simple and
    matches what training computed.

    Args:
      temperature: 0 takes the most likely token.
      top_k: sample only from the `top_k` most likely tokens.
    """
    c = model.config
    num_sequences, prompt_length = prompt_BP.shape
    total = prompt_length + num_tokens
    if total > c.max_length:
        room = c.max_length - prompt_length
        remedy = f"Generate at most {room} tokens" if room > 0 else "Shorten the prompt"
        raise ValueError(
            f"prompt tokens ({prompt_length}) plus new tokens ({num_tokens}) are "
            f"{total}, but the model's max_length is {c.max_length}. {remedy}."
        )
    if not prompt_length:
        raise ValueError("the prompt is empty; give at least one token")
    if temperature < 0:
        raise ValueError(
            f"temperature must be >= 0 (0 takes the most likely token), got "
            f"{temperature}"
        )
    if top_k is not None and not 1 <= top_k <= c.vocab_size:
        raise ValueError(
            f"top_k must be from 1 to vocab_size ({c.vocab_size}), got {top_k}"
        )
    # There is only one position at a time, so length cannot be sharded.
    rules = shard.rules.without("length", "residual_length")
    shard = dataclasses.replace(shard, rules=rules)
    shape = (c.num_layers, num_sequences, total, c.kv_heads, c.head_width)
    cache = (jnp.zeros(shape, c.compute_dtype), jnp.zeros(shape, c.compute_dtype))
    tokens_BT = jnp.pad(prompt_BP, ((0, 0), (0, num_tokens)))

    def one(carry, position):
        tokens_BT, cache, key = carry
        token_B1 = jax.lax.dynamic_slice_in_dim(tokens_BT, position, 1, axis=1)
        x_B1D = model.embed(token_B1, jnp.full_like(token_B1, position), shard)
        x_B1D, cache = model.decode(x_B1D, cache, position, shard)
        logits_BV = model.head_logits(x_B1D, shard)[:, 0]
        key, use = jax.random.split(key)
        new_B = _pick(logits_BV, use, temperature, top_k)
        known_B = jax.lax.dynamic_index_in_dim(tokens_BT, position + 1, 1, False)
        next_B = jnp.where(position + 1 < prompt_length, known_B, new_B)
        tokens_BT = jax.lax.dynamic_update_index_in_dim(
            tokens_BT, next_B, position + 1, 1
        )
        return (tokens_BT, cache, key), None

    positions = jnp.arange(total - 1)
    (tokens_BT, _, _), _ = jax.lax.scan(one, (tokens_BT, cache, key), positions)
    return tokens_BT


def _pick(logits_BV, key, temperature: float, top_k: int | None) -> jax.Array:
    if temperature == 0.0:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    if top_k is not None:
        least_B1 = jax.lax.top_k(logits_BV, top_k)[0][:, -1:]
        logits_BV = jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)
    return jax.random.categorical(key, logits_BV / temperature).astype(jnp.int32)
