"""A model that compiles in no time, for jobs whose model does not matter.

It predicts a token from the one before, by two matrices that plans shard.
Shapes: B batch, L length, V vocabulary, D width.
"""

import dataclasses

import jax
import jax.numpy as jnp
from paths import SUPPORT

V, D = 64, 128
AXES = {"up": ("vocab", "embed"), "down": ("embed", "vocab")}
CONFIG = str(SUPPORT / "bigram.gin")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bigram:
    def init(self, key):
        both = 0.2 * jax.random.uniform(key, (2, V, D)) - 0.1
        return {"up": both[0], "down": both[1].T}

    def axes(self):
        return AXES

    def batch_axes(self):
        return dict.fromkeys(("inputs", "targets", "weights"), ("batch", None))

    def check_batch(self, batch, facts):
        pass

    def loss(self, params, batch, shard):
        up, down = (shard.weight(params[name], AXES[name]) for name in AXES)
        x_BLD = jnp.tanh(jax.nn.one_hot(batch["inputs"], V) @ up)
        scores_BLV = jax.nn.log_softmax(x_BLD @ down)
        target_BLV = jax.nn.one_hot(batch["targets"], V)
        weight = batch["weights"]
        total = -jnp.sum(jnp.sum(scores_BLV * target_BLV, axis=-1) * weight)
        return total, jnp.sum(weight), {}
