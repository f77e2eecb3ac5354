"""Attention on TPUs, in one kernel that never stores its scores.

The kernel is jax's splash attention (Pallas). If causal, it skips blocks above
the diagonal.

Shape letters: B batch, L length, H heads, G key-value heads, K head width.
"""

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

from .attention import LANES, block_size, key_block_size
from .remat import SPLASH


def splash(
    q_BLHK: jax.Array,
    k_BLGK: jax.Array,
    v_BLGK: jax.Array,
    segments_BL: jax.Array | None = None,
    *,
    causal: bool,
    interpret: bool,
) -> jax.Array:
    """Computes attention [B, L, H, K] on one device's examples and heads.

    Args:
      interpret: run the kernel as plain operations, without a TPU.
    """
    if block_size(q_BLHK.shape[1]) is None:
        raise ValueError(
            f'attention "splash": the length must be a multiple of {LANES}, got '
            f'{q_BLHK.shape[1]}. Change the data\'s length, or set attention="xla".'
        )
    _, L, H, K = q_BLHK.shape
    q_BLHK = (q_BLHK.astype(jnp.float32) * K**-0.5).astype(q_BLHK.dtype)
    by_head = [x.swapaxes(1, 2) for x in (q_BLHK, k_BLGK, v_BLGK)]
    kernel = _kernel(H, L, causal, interpret)
    if segments_BL is None:
        out_BHLK: jax.Array = jax.vmap(kernel)(*by_head)
    else:
        segments = kernels.SegmentIds(segments_BL, segments_BL)
        out_BHLK = jax.vmap(kernel)(*by_head, segments)
    return out_BHLK.swapaxes(1, 2)


def _kernel(
    num_heads: int, length: int, causal: bool, interpret: bool
) -> Callable[..., Any]:
    block = block_size(length)
    assert block is not None, length
    sizes = kernels.BlockSizes(
        block_q=block,
        block_kv=block,
        block_q_dkv=block,
        block_kv_dkv=key_block_size(length),
        block_kv_dkv_compute=block,
        # The fused kernel takes five products per block, two separate ones take seven.
        use_fused_bwd_kernel=True,
    )
    mask_of_head = masks.CausalMask if causal else masks.FullMask
    mask = masks.MultiHeadMask([mask_of_head((length, length))] * num_heads)
    return kernels.make_splash_mha_single_device(
        mask,
        block_sizes=sizes,
        # The checkpoint name of its output and of the sums its backward pass needs.
        residual_checkpoint_name=SPLASH,
        interpret=interpret,
    )
