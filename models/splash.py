"""Causal attention on TPUs as one kernel that never stores its scores.

The kernel is jax's own splash attention (Pallas). It works on one device's examples
and heads, so it runs inside a shard_map over every mesh axis. Blocks of scores above
the diagonal are skipped.

Shape letters: B batch, L length, H heads, G key-value heads, K head width.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as kernels,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as masks,
)
from jax.sharding import PartitionSpec as P

from ..sharding import Sharder
from .attention import LANES, block_size, key_block_size
from .remat import SPLASH


def splash(
    q_BLHK: jax.Array,
    k_BLGK: jax.Array,
    v_BLGK: jax.Array,
    segments_BL: jax.Array | None,
    shard: Sharder,
) -> jax.Array:
    """Attention [B, L, H, K], cut as `q` is. On CPU the kernel is interpreted."""
    if block_size(q_BLHK.shape[1]) is None:
        raise ValueError(
            f'attention "splash": length {q_BLHK.shape[1]} is no multiple of {LANES}. '
            'Change the data\'s length, or set attention="xla".'
        )
    queries, keys = (
        shard.spec(x.shape, ("batch", "length", heads, "head_dim"))
        for x, heads in ((q_BLHK, "heads"), (k_BLGK, "kv_heads"))
    )
    tokens = P(*queries[:2])
    if segments_BL is None:
        arrays, specs = (q_BLHK, k_BLGK, v_BLGK), (queries, keys, keys)
    else:
        arrays = (q_BLHK, k_BLGK, v_BLGK, segments_BL)
        specs = (queries, keys, keys, tokens)
    _check(q_BLHK.shape, k_BLGK.shape, queries, keys)
    attend = functools.partial(_attend, interpret=shard.platform != "tpu")
    return shard.local(attend, specs, queries)(*arrays)


def _check(q_shape, k_shape, queries: P, keys: P) -> None:
    """The kernel sees all positions, and the heads of its own keys."""
    _, length, heads, _ = (*queries, None, None, None, None)[:4]
    if length is not None or heads != (*keys, None, None, None, None)[2]:
        raise ValueError(
            f'attention "splash": queries {list(q_shape)} are cut as {queries} and '
            f"keys {list(k_shape)} as {keys}; expected whole sequences, and heads and "
            "key-value heads cut by the same axes. Change the plan or set "
            'attention="xla".'
        )


def _attend(q_BLHK, k_BLGK, v_BLGK, segments_BL=None, *, interpret: bool):
    _, L, H, K = q_BLHK.shape
    q_BLHK = (q_BLHK.astype(jnp.float32) * K**-0.5).astype(q_BLHK.dtype)
    by_head = [x.swapaxes(1, 2) for x in (q_BLHK, k_BLGK, v_BLGK)]
    kernel = _kernel(H, L, interpret)
    if segments_BL is None:
        out_BHLK: jax.Array = jax.vmap(kernel)(*by_head)
    else:
        segments = kernels.SegmentIds(segments_BL, segments_BL)
        out_BHLK = jax.vmap(kernel)(*by_head, segments)
    return out_BHLK.swapaxes(1, 2)


def _kernel(num_heads: int, length: int, interpret: bool) -> Callable[..., Any]:
    block = block_size(length)
    assert block is not None, length
    sizes = kernels.BlockSizes(
        block_q=block,
        block_kv=block,
        block_q_dkv=block,
        block_kv_dkv=key_block_size(length),
        block_kv_dkv_compute=block,
        # One kernel for all gradients multiplies five times a block, two need seven.
        use_fused_bwd_kernel=True,
    )
    mask = masks.MultiHeadMask([masks.CausalMask((length, length))] * num_heads)
    return kernels.make_splash_mha_single_device(
        mask,
        block_sizes=sizes,
        # Its result, and the sums that its backward pass needs, are kept by this name.
        residual_checkpoint_name=SPLASH,
        interpret=interpret,
    )
