"""A stack that is not in `meshloom.models`: an image classifier of residual blocks.

It is plain jax and implements only what a pipeline needs. The stages divide embed and
head by example, because an image has no positions.
"""

import dataclasses

import jax
import jax.numpy as jnp

from meshloom.sharding import Sharder

WIDE = ("batch", "embed")
BLOCK = {"up": ("embed", "mlp"), "bias": ("mlp",), "down": ("mlp", "embed")}
AXES = {
    "enter": {"w": (None, "embed"), "bias": ("embed",)},
    "trunk": {name: ("layer", *axes) for name, axes in BLOCK.items()},
    "leave": {"w": ("embed", "vocab"), "bias": ("vocab",)},
}
POLICIES = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "save-dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Classifier:
    """tanh blocks between an input projection of pixels and an output layer.

    Attributes:
      remat: none, save-dots or full, as in the transformer.
    """

    num_layers: int = 8
    width: int = 16
    num_hidden: int = 24
    side: int = 4
    num_classes: int = 8
    remat: str = "save-dots"

    def init(self, key):
        keys = iter(jax.random.split(key, 7))

        def normal(*shape):
            return 0.3 * jax.random.normal(next(keys), shape)

        L, D, F = self.num_layers, self.width, self.num_hidden
        C = self.num_classes
        return {
            "enter": {"w": normal(self.side**2, D), "bias": normal(D)},
            "trunk": {
                "up": normal(L, D, F),
                "bias": normal(L, F),
                "down": normal(L, F, D),
            },
            "leave": {"w": normal(D, C), "bias": normal(C)},
        }

    def axes(self):
        return AXES

    def batch_axes(self):
        pixels = ("batch", None, None)
        return {"image": pixels, "label": ("batch",), "importance": ("batch",)}

    def batch(self, num_rows: int):
        image, label, importance = jax.random.split(jax.random.key(1), 3)
        shape = (num_rows, self.side, self.side)
        return {
            "image": jax.random.normal(image, shape),
            "label": jax.random.randint(label, (num_rows,), 0, self.num_classes),
            "importance": jax.random.uniform(importance, (num_rows,)),
        }

    def loss(self, params, batch, shard: Sharder):
        """Computes the loss without a pipeline."""
        stack = self.stack()
        x = stack.embed(params, batch, shard)
        for layer in range(self.num_layers):
            block = jax.tree.map(lambda w, i=layer: w[i], params["trunk"])
            x = stack.block(block, x, batch, shard)
        return stack.head(params, x, batch, shard)

    def stack(self):
        return ClassifierStack(self)


@dataclasses.dataclass(frozen=True)
class ClassifierStack:
    """Implements meshloom.sharding.pipeline.Stack."""

    model: Classifier
    blocks = "trunk"
    axes = WIDE
    split_dim = 0
    dtype = None

    @property
    def remat(self) -> str:
        return self.model.remat

    def complete(self, batch, shard):
        del shard
        return batch

    def embed(self, outside, batch, shard: Sharder):
        p = _weights(outside["enter"], AXES["enter"], shard)
        pixels = batch["image"].reshape(batch["image"].shape[0], -1)
        return shard(pixels @ p["w"] + p["bias"][None], WIDE)

    def block(self, params, x, batch, shard: Sharder):
        p = _weights(params, BLOCK, shard)
        hidden = shard(jnp.tanh(x @ p["up"] + p["bias"][None]), ("batch", "mlp"))
        return shard(x + hidden @ p["down"], WIDE)

    def head(self, outside, x, batch, shard: Sharder):
        p = _weights(outside["leave"], AXES["leave"], shard)
        logits = x @ p["w"] + p["bias"][None]
        chosen = jax.nn.one_hot(batch["label"], self.model.num_classes)
        nll = -jnp.sum(jax.nn.log_softmax(logits) * chosen, axis=-1)
        weight = batch["importance"]
        right = jnp.argmax(logits, axis=-1) == batch["label"]
        others = {"right": jnp.sum(weight * right), "size": jnp.sum(jnp.square(x))}
        return jnp.sum(weight * nll), jnp.sum(weight), others

    def rematerialize(self, body):
        policy = POLICIES[self.remat]
        return jax.checkpoint(body, policy=policy, prevent_cse=False)


def _weights(params, axes, shard: Sharder):
    return {name: shard.weight(w, axes[name]) for name, w in params.items()}
