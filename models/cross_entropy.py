"""Cross-entropy that never gathers logits over the vocabulary.

Shape letters: B batch, L length, V vocabulary.
"""

import jax
import jax.numpy as jnp


def cross_entropy(
    logits_BLV: jax.Array, targets_BL: jax.Array, *, z_loss: float = 0.0
) -> tuple[jax.Array, jax.Array]:
    """Returns the negative log-likelihood and the z-loss, both [B, L] in float32.

    All operations over the vocabulary are elementwise or reductions. If V is sharded,
    each device reduces its shard, and only [B, L] values are communicated. Indexing the
    logit of the target would gather the logits instead.
    """
    logits_BLV = logits_BLV.astype(jnp.float32)
    vocabulary = jax.lax.broadcasted_iota(jnp.int32, logits_BLV.shape, 2)
    is_target = vocabulary == targets_BL[..., None]
    target_BL = jnp.sum(jnp.where(is_target, logits_BLV, 0.0), axis=-1)
    log_z_BL = jax.nn.logsumexp(logits_BLV, axis=-1)
    return log_z_BL - target_BL, z_loss * jnp.square(log_z_BL)
