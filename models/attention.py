"""Attention over heads: the one place where an implementation is chosen.

Shape letters: B batch, L query length, S key length, H heads, G key-value heads
(H is a multiple of G), K head width.
"""

from typing import Literal

import jax
import jax.numpy as jnp

Implementation = Literal["auto", "xla", "cudnn"]


def attend(
    q_BLHK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGK: jax.Array,
    *,
    segments_BL: jax.Array | None = None,
    implementation: Implementation = "auto",
) -> jax.Array:
    """Causal attention; with segments, a position sees its own segment only."""
    mask = None
    if segments_BL is not None:
        mask = segments_BL[:, None, :, None] == segments_BL[:, None, None, :]
    return jax.nn.dot_product_attention(
        q_BLHK,
        k_BSGK,
        v_BSGK,
        mask=mask,
        is_causal=True,
        implementation=_choose(implementation, q_BLHK),
    )


def _choose(implementation: Implementation, q_BLHK: jax.Array):
    """cuDNN's flash kernel on GPUs for the types and widths it takes, else XLA."""
    if implementation != "auto":
        return implementation
    platform, itemsize = jax.default_backend(), q_BLHK.dtype.itemsize
    fused = is_fused(implementation, platform, itemsize, q_BLHK.shape[-1])
    return "cudnn" if fused else "xla"


def is_fused(
    implementation: Implementation, platform: str, itemsize: int, head_width: int
) -> bool:
    """Whether attention is one kernel, which never stores its scores."""
    if implementation != "auto":
        return implementation == "cudnn"
    return (
        platform == "gpu" and itemsize == 2 and head_width <= 128 and not head_width % 8
    )


def attend_cached(
    q_BHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, position: jax.Array
) -> jax.Array:
    """One query a sequence against a cache filled up to and including `position`."""
    num_seen = jnp.full(q_BHK.shape[:1], position + 1, jnp.int32)
    out = jax.nn.dot_product_attention(
        q_BHK[:, None],
        k_BSGK,
        v_BSGK,
        key_value_seq_lengths=num_seen,
        implementation="xla",
    )
    return out[:, 0]


def rotate(x_BLHK: jax.Array, positions_BL: jax.Array, theta: float) -> jax.Array:
    """Rotary positions: pairs (i, i + K/2) turned by position * theta^(-2i/K)."""
    half = x_BLHK.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = (
        positions_BL[..., None, None].astype(jnp.float32) * frequency[None, None, None]
    )
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    a, b = jnp.split(x_BLHK.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return turned.astype(x_BLHK.dtype)
