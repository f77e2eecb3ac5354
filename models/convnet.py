"""A small image classifier: two convolutions, a pooling, and two dense layers.

Shape letters: B batch, H height, W width, C channels, F hidden width, K classes.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..sharding import Sharder
from . import nnx_pure
from .nnx_pure import Params

KERNEL = 3  # pixels on each side
POOL = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A classifier of square images; implements the trainer's model interface.

    Batches have `image` [B, size, size, channels], `label` [B] and `weights` [B].
    The standard axis `embed` is the channels of the first convolution and the hidden
    width, `mlp` the channels of the second.

    Attributes:
      size: pixels on each side of an image; even, because of the pooling.
      channels: of an image, 1 for gray levels.
      widths: channels of the two convolutions.
      d_hidden: width of the dense layer between them and the classes.
    """

    num_classes: int
    size: int
    channels: int = 1
    widths: tuple[int, int] = (16, 32)
    d_hidden: int = 64

    def __post_init__(self):
        names = ("num_classes", "size", "channels", "d_hidden")
        counts = {name: getattr(self, name) for name in names}
        counts |= {f"widths[{i}]": width for i, width in enumerate(self.widths)}
        for name, value in counts.items():
            if value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")
        if len(self.widths) != 2:
            raise ValueError(f"widths must be two numbers, got {self.widths}")
        if self.size % POOL:
            raise ValueError(
                f"size must be a multiple of {POOL}, which the pooling divides by, got "
                f"{self.size}"
            )

    def init(self, key: jax.Array) -> Params:
        return nnx_pure.init(self.make, key)

    def axes(self) -> Params:
        return nnx_pure.axes(self.make)

    def batch_axes(self) -> dict[str, tuple[str | None, ...]]:
        image = ("batch", None, None, None)
        return {"image": image, "label": ("batch",), "weights": ("batch",)}

    def check_batch(self, batch: dict[str, Any], facts: dict[str, Any]) -> None:
        """Raises ValueError if the data does not fit, before anything is compiled."""
        for name in ("image", "label"):
            if name not in batch:
                raise ValueError(
                    f"the model needs an array {name!r}, but the batch has only "
                    f"{', '.join(batch)}"
                )
        expected = (self.size, self.size, self.channels)
        if (found := tuple(batch["image"].shape[1:])) != expected:
            raise ValueError(
                f"the data's images have shape {found}, but the model expects "
                f"{expected}. Set size and channels to those of the data."
            )
        needed = facts.get("num_classes", 0)
        if needed > self.num_classes:
            raise ValueError(
                f"the data has {needed} classes, but the model's num_classes is "
                f"{self.num_classes}. Raise num_classes to {needed}."
            )

    def logits(self, params: Params, image_BHWC: jax.Array, shard: Sharder):
        return nnx_pure.bind(self.make, params).logits(image_BHWC, shard)

    def loss(
        self, params: Params, batch: dict[str, jax.Array], shard: Sharder
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """Returns the loss sum, its weight, and the number of correct predictions."""
        logits_BK = self.logits(params, batch["image"], shard)
        weights_B = batch["weights"].astype(jnp.float32)
        right_BK = jax.nn.one_hot(batch["label"], self.num_classes)
        nll_B = -jnp.sum(right_BK * jax.nn.log_softmax(logits_BK), axis=-1)
        is_right_B = jnp.argmax(logits_BK, axis=-1) == batch["label"]
        correct = jnp.sum(weights_B * is_right_B)
        return jnp.sum(weights_B * nll_B), jnp.sum(weights_B), {"accuracy": correct}

    def predict(
        self, params: Params, batch: dict[str, jax.Array], shard: Sharder
    ) -> dict[str, jax.Array]:
        """Returns the likeliest class of each image and its probability."""
        logits_BK = self.logits(params, batch["image"], shard)
        chosen_B = jnp.argmax(logits_BK, axis=-1)
        probability_B = jnp.max(jax.nn.softmax(logits_BK), axis=-1)
        return {"class": chosen_B, "probability": probability_B}

    def num_params(self) -> int:
        shapes = jax.eval_shape(lambda: self.init(jax.random.key(0)))
        return sum(leaf.size for leaf in jax.tree.leaves(shapes))

    def model_flops(self, batch: dict[str, Any]) -> float:
        """Returns the FLOPs of one update on a batch: 6 per weight and use of it."""
        first, second = self.widths
        pixels, pooled = self.size**2, (self.size // POOL) ** 2
        convolutions = KERNEL**2 * pixels * (self.channels * first + first * second)
        dense = pooled * second * self.d_hidden + self.d_hidden * self.num_classes
        return 6.0 * batch["label"].shape[0] * (convolutions + dense)

    @property
    def make(self):
        """A function that makes the module from nnx.Rngs."""
        return functools.partial(ConvNet, self)


class ConvNet(nnx.Module):
    """The weights, each with its logical axes.

    Sharded over `tensor`, the second convolution computes its share of the channels,
    and the dense layer after it sums over them: one all-reduce each way.
    """

    def __init__(self, config: Config, rngs: nnx.Rngs):
        c = self.config = config
        first, second = c.widths
        side = c.size // POOL
        window = (KERNEL, KERNEL)
        self.conv1 = _weight(rngs, (*window, c.channels, first), (None,) * 3, "embed")
        self.conv1_bias = _bias(first, "norm")
        self.conv2 = _weight(
            rngs, (*window, first, second), (None, None, "embed"), "mlp"
        )
        self.conv2_bias = _bias(second, "mlp")
        self.dense = _weight(
            rngs, (side, side, second, c.d_hidden), (None, None, "mlp"), "embed"
        )
        self.dense_bias = _bias(c.d_hidden, "norm")
        self.head = _weight(rngs, (c.d_hidden, c.num_classes), ("embed",), None)
        self.head_bias = _bias(c.num_classes, "norm")

    def logits(self, image_BHWC: jax.Array, shard: Sharder) -> jax.Array:
        spatial = ("batch", None, None)
        x_BHWC = self._convolved(image_BHWC, "conv1", shard)
        x_BHWC = shard(jax.nn.relu(x_BHWC), (*spatial, "embed"))
        x_BHWC = self._convolved(x_BHWC, "conv2", shard)
        x_BHWC = shard(jax.nn.relu(_pooled(x_BHWC)), (*spatial, "mlp"))
        x_BF = jnp.einsum("BHWC,HWCF->BF", x_BHWC, self._weight("dense", shard))
        x_BF = shard(x_BF + self._weight("dense_bias", shard)[None], ("batch", "embed"))
        x_BK = jax.nn.relu(x_BF) @ self._weight("head", shard)
        return shard(x_BK + self._weight("head_bias", shard)[None], ("batch", None))

    def _convolved(self, x_BHWC: jax.Array, name: str, shard: Sharder) -> jax.Array:
        y_BHWC = jax.lax.conv_general_dilated(
            x_BHWC,
            self._weight(name, shard),
            window_strides=(1, 1),
            padding="SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        return y_BHWC + self._weight(f"{name}_bias", shard)[None, None, None]

    def _weight(self, name: str, shard: Sharder) -> jax.Array:
        variable = getattr(self, name)
        return shard.weight(variable[...], variable.get_metadata()["axes"])


def _pooled(x_BHWC: jax.Array) -> jax.Array:
    """Returns the largest of each square of pixels."""
    B, H, W, C = x_BHWC.shape
    squares = x_BHWC.reshape(B, H // POOL, POOL, W // POOL, POOL, C)
    return jnp.max(squares, axis=(2, 4))


def _weight(rngs: nnx.Rngs, shape, inputs, output: str | None) -> nnx.Param:
    """Returns a weight whose outputs have about the variance of its inputs."""
    scale = math.sqrt(2 / math.prod(shape[:-1]))
    value = scale * jax.random.normal(rngs.params(), shape)
    return nnx.Param(value, axes=(*inputs, output))


def _bias(width: int, axis: str) -> nnx.Param:
    return nnx.Param(jnp.zeros(width), axes=(axis,))
