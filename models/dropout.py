"""Dropout with a key for each row, as the trainer gives them to a loss."""

import jax
import jax.numpy as jnp


def dropout(x: jax.Array, key_B: jax.Array, rate: float) -> jax.Array:
    """Sets a share `rate` of each row of x[B, ...] to 0 and scales up the rest.

    What is dropped of a row depends on its key alone: not on the mesh, nor on which
    other rows are computed with it. For several in one model, fold a number into the
    keys: `jax.vmap(jax.random.fold_in, (0, None))(key_B, 1)`.
    """
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, x.shape[1:]))(key_B)
    return jnp.where(keep, x / (1 - rate), jnp.zeros((), x.dtype))
