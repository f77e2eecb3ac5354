"""A small image classifier: two convolutions, a pooling, and two dense layers.

Shape letters: B batch, H height, W width, C channels, F hidden width, K classes.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..sharding import Sharder
from . import nnx_pure
from .classifier import ImageClassifier, check_counts
from .convolution import bias, convolve, gathered, weight
from .nnx_pure import Params

KERNEL = 3  # pixels on each side
POOL = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ImageClassifier):
    """A classifier of square images; implements the trainer's model interface.

    The standard axis `embed` is the channels of the first convolution and the hidden
    width, `mlp` the channels of the second. The size of an image must be even, because
    of the pooling.

    Attributes:
      widths: channels of the two convolutions.
      d_hidden: width of the dense layer between them and the classes.
    """

    widths: tuple[int, int] = (16, 32)
    d_hidden: int = 64

    def __post_init__(self):
        super().__post_init__()
        check_counts(self, "widths", "d_hidden")
        if len(self.widths) != 2:
            raise ValueError(f"widths must be two numbers, got {self.widths}")
        if self.size % POOL:
            raise ValueError(
                f"size must be a multiple of {POOL}, which the pooling divides by, got "
                f"{self.size}"
            )

    def logits(self, params: Params, image_BHWC: jax.Array, shard: Sharder):
        return nnx_pure.bind(self.make, params).logits(image_BHWC, shard)

    def loss(
        self, params: Params, batch: dict[str, jax.Array], shard: Sharder
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """Returns the loss sum, its weight, and the number of correct predictions."""
        return self.sums(self.logits(params, batch["image"], shard), batch)

    def predict(
        self, params: Params, batch: dict[str, jax.Array], shard: Sharder
    ) -> dict[str, jax.Array]:
        """Returns the likeliest class of each image and its probability."""
        return self.likeliest(self.logits(params, batch["image"], shard))

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
        self.conv1 = weight(rngs, (*window, c.channels, first), (None,) * 3, "embed")
        self.conv1_bias = bias(first, "norm")
        self.conv2 = weight(
            rngs, (*window, first, second), (None, None, "embed"), "mlp"
        )
        self.conv2_bias = bias(second, "mlp")
        self.dense = weight(
            rngs, (side, side, second, c.d_hidden), (None, None, "mlp"), "embed"
        )
        self.dense_bias = bias(c.d_hidden, "norm")
        self.head = weight(rngs, (c.d_hidden, c.num_classes), ("embed",), None)
        self.head_bias = bias(c.num_classes, "norm")

    def logits(self, image_BHWC: jax.Array, shard: Sharder) -> jax.Array:
        spatial = ("batch", None, None)
        x_BHWC = convolve(image_BHWC, self, "conv1", shard)
        x_BHWC = shard(jax.nn.relu(x_BHWC), (*spatial, "embed"))
        x_BHWC = convolve(x_BHWC, self, "conv2", shard)
        x_BHWC = shard(jax.nn.relu(_pooled(x_BHWC)), (*spatial, "mlp"))
        x_BF = jnp.einsum("BHWC,HWCF->BF", x_BHWC, gathered(self, "dense", shard))
        x_BF = shard(
            x_BF + gathered(self, "dense_bias", shard)[None], ("batch", "embed")
        )
        x_BK = jax.nn.relu(x_BF) @ gathered(self, "head", shard)
        return shard(x_BK + gathered(self, "head_bias", shard)[None], ("batch", None))


def _pooled(x_BHWC: jax.Array) -> jax.Array:
    """Returns the largest of each square of pixels."""
    B, H, W, C = x_BHWC.shape
    squares = x_BHWC.reshape(B, H // POOL, POOL, W // POOL, POOL, C)
    return jnp.max(squares, axis=(2, 4))
