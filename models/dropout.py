"""Dropout with one key per row, as the trainer passes them to a loss."""

import jax
import jax.numpy as jnp


def dropout(x: jax.Array, key_B: jax.Array, rate: float) -> jax.Array:
    """Zeroes a fraction `rate` of each row of x[B, ...] and scales up the rest.

    The elements dropped from a row depend only on its key, not on the mesh or on the
    other rows. To use dropout several times in a model, fold a different number into
    the keys each time: `jax.vmap(jax.random.fold_in, (0, None))(key_B, 1)`.
    """
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, x.shape[1:]))(key_B)
    return jnp.where(keep, x / (1 - rate), jnp.zeros((), x.dtype))
