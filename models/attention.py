"""Attention over heads, and the choice of its implementation.

The compiler shards plain products; a kernel runs on each device's examples and heads.

Shape letters: B batch, L query length, S key length, H heads, G key-value heads
(H is a multiple of G), K head width.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from ..sharding import Sharder
from .rope_scaling import RopeScaling

if TYPE_CHECKING:
    from .context import Form

Implementation = Literal["auto", "xla", "cudnn", "splash"]
# Splash attention needs lengths that are multiples of this.
LANES = 128
# The largest blocks of scores that fit into a chip's VMEM. The backward pass stores
# gradients of all queries for each block of keys. It therefore uses larger key blocks,
# although these skip less above the diagonal.
LARGEST_BLOCK, LARGEST_KEY_BLOCK = 512, 1024


def attend(
    q_BLHK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGK: jax.Array,
    shard: Sharder,
    *,
    segments_BL: jax.Array | None = None,
    causal: bool = True,
    implementation: Implementation = "auto",
    form: "Form | None" = None,
) -> jax.Array:
    """Computes attention; with segments, only within each segment.

    Args:
      form: how devices exchange keys, where positions are sharded (context.py).
    """
    _, L, _, K = q_BLHK.shape
    chosen = choose(implementation, shard.platform, q_BLHK.dtype.itemsize, L, K)
    arrays = [q_BLHK, k_BSGK, v_BSGK]
    if segments_BL is not None:
        arrays.append(segments_BL)
    if chosen == "xla" and form is None:
        out_BLHK = _dot_product(*arrays, causal=causal)
        return checkpoint_name(out_BLHK, "attended")
    queries, keys = (
        shard.spec(x.shape, ("batch", "length", heads, "head_dim"))
        for x, heads in ((q_BLHK, "heads"), (k_BSGK, "kv_heads"))
    )
    _check_sharding(chosen, q_BLHK.shape, k_BSGK.shape, queries, keys, form)
    specs = (queries, keys, keys, P(*queries[:2]))[: len(arrays)]
    run = _on_one_device(chosen, shard.platform, causal)
    if form is None:
        out_BLHK = shard.local(run, specs, queries)(*arrays)
    else:
        from .context import attend_sharded

        out_BLHK = attend_sharded(form, arrays, specs, shard, causal=causal, whole=run)
    # Splash attention and rings name what their backward passes need themselves.
    is_named = chosen == "splash" or (form is not None and form.name != "ulysses")
    return out_BLHK if is_named else checkpoint_name(out_BLHK, "attended")


def _on_one_device(
    chosen: Literal["xla", "cudnn", "splash"], platform: str, causal: bool
) -> Callable[..., jax.Array]:
    """Returns attention for a device's own heads and all positions."""
    if chosen != "splash":
        return functools.partial(_dot_product, causal=causal, implementation=chosen)
    from .splash import splash

    return functools.partial(splash, causal=causal, interpret=platform != "tpu")


def _dot_product(
    q_BLHK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGK: jax.Array,
    segments_BL: jax.Array | None = None,
    *,
    causal: bool,
    implementation: Literal["xla", "cudnn"] = "xla",
) -> jax.Array:
    mask = None
    if segments_BL is not None:
        mask = segments_BL[:, None, :, None] == segments_BL[:, None, None, :]
    return jax.nn.dot_product_attention(
        q_BLHK,
        k_BSGK,
        v_BSGK,
        mask=mask,
        is_causal=causal,
        implementation=implementation,
    )


def _check_sharding(
    chosen: str, q_shape, k_shape, queries: P, keys: P, form: "Form | None"
) -> None:
    """Raises ValueError unless each device has full sequences and matching heads."""
    _, length, heads, _ = (*queries, None, None, None, None)[:4]
    is_matched = heads == (*keys, None, None, None)[2]
    if form is not None and not is_matched:
        raise ValueError(
            f'context attention "{form.name}": queries {list(q_shape)} are sharded as '
            f"{queries} and keys {list(k_shape)} as {keys}; expected heads and "
            "key-value heads sharded over the same axes. Change the plan."
        )
    if form is None and (length is not None or not is_matched):
        raise ValueError(
            f'attention "{chosen}": queries {list(q_shape)} are sharded as {queries} '
            f"and keys {list(k_shape)} as {keys}; expected an unsharded length, and "
            "heads and key-value heads sharded over the same axes. Change the plan or "
            'set attention="xla".'
        )


def choose(
    implementation: Implementation,
    platform: str,
    itemsize: int,
    length: int,
    head_width: int,
) -> Literal["xla", "cudnn", "splash"]:
    """Returns a kernel that never stores its scores, if one supports the shapes.

    That is cuDNN on GPUs and splash attention on TPUs. Otherwise returns "xla", plain
    matrix products.
    """
    if implementation != "auto":
        return implementation
    if platform == "tpu":
        return "splash" if block_size(length) else "xla"
    fits = itemsize == 2 and head_width <= 128 and not head_width % 8
    return "cudnn" if platform == "gpu" and fits else "xla"


def block_size(length: int) -> int | None:
    """Returns splash attention's block size, or None for an unsupported length."""
    sizes = range(LARGEST_BLOCK, 0, -LANES)
    return next((size for size in sizes if length % size == 0), None)


def key_block_size(length: int) -> int | None:
    """Returns the size of key blocks in its backward pass, a multiple of block_size."""
    block = block_size(length)
    if block is None:
        return None
    times = range(LARGEST_KEY_BLOCK // block, 0, -1)
    return next(block * num for num in times if length % (block * num) == 0)


def attend_cached(
    q_BHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, position: jax.Array
) -> jax.Array:
    """Attends with one query per sequence to a cache filled through `position`."""
    num_seen = jnp.full(q_BHK.shape[:1], position + 1, jnp.int32)
    out = jax.nn.dot_product_attention(
        q_BHK[:, None],
        k_BSGK,
        v_BSGK,
        key_value_seq_lengths=num_seen,
        implementation="xla",
    )
    return out[:, 0]


def rotate(
    x_BLHK: jax.Array,
    positions_BL: jax.Array,
    theta: float,
    scaling: RopeScaling | None = None,
) -> jax.Array:
    """Applies rotary positions: rotates (i, i + K/2) by position * theta^(-2i/K)."""
    half = x_BLHK.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if scaling is not None:
        frequency = scaling.scale(frequency)
    angle = (
        positions_BL[..., None, None].astype(jnp.float32) * frequency[None, None, None]
    )
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    # Split and concatenate in the dtype of x: only that is stored for the backward.
    a, b = (half.astype(jnp.float32) for half in jnp.split(x_BLHK, 2, axis=-1))
    rotated = (a * cos - b * sin, b * cos + a * sin)
    return jnp.concatenate([half.astype(x_BLHK.dtype) for half in rotated], axis=-1)
