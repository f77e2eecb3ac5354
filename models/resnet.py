"""A small residual network for images: convolutions, batch norm, shortcuts.

Shape letters: B batch, H height, W width, C channels, K classes.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..sharding import Sharder
from . import batch_norm, nnx_pure
from .batch_norm import BatchNorm, Sums
from .classifier import ImageClassifier, check_counts, check_rate
from .convolution import bias, convolve, gathered, weight
from .dropout import dropout
from .nnx_pure import Params

KERNEL = 3  # pixels on each side
SPATIAL = ("batch", None, None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ImageClassifier):
    """A residual network; implements the trainer's model interface.

    A first convolution, then blocks of two convolutions beside a shortcut, then the
    mean over the pixels and a linear layer. The standard axis `embed` is the channels
    between blocks, `mlp` those inside a block.

    Attributes:
      widths: channels of each stage. Every stage but the first halves the pixels on
        each side.
      num_blocks: blocks of each stage.
      dropout: share of the features before the last layer that training drops.
      momentum: how much of the running averages of the batch norms a step keeps.
      epsilon: added to the variance by the batch norms.
    """

    widths: tuple[int, ...] = (32, 64)
    num_blocks: int = 1
    dropout: float = 0.0
    momentum: float = 0.9
    epsilon: float = 1e-5

    def __post_init__(self):
        super().__post_init__()
        check_counts(self, "widths", "num_blocks")
        check_rate(self, "dropout", "momentum")
        if not self.widths:
            raise ValueError("widths must have at least one number, got none")
        if self.size % (least := 2 ** (len(self.widths) - 1)):
            raise ValueError(
                f"size must be a multiple of {least}, by which {len(self.widths)} "
                f"stages divide it, got {self.size}"
            )

    def init_variables(self, key: jax.Array) -> Params:
        return nnx_pure.init(self.make, key, nnx.BatchStat)

    def variable_axes(self) -> Params:
        return nnx_pure.axes(self.make, nnx.BatchStat)

    def update_variables(self, variables: Params, sums: Sums) -> Params:
        return batch_norm.update(variables, sums, self.momentum)

    def loss(
        self,
        params: Params,
        batch: dict[str, jax.Array],
        shard: Sharder,
        *,
        variables: Params,
        key: jax.Array,
        train: bool,
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array], Sums]:
        """Returns the sums of a batch, and those that update the running averages."""
        model = nnx_pure.bind(self.make, params, variables)
        x_BC, sums = model.features(batch["image"], shard, train=train)
        if train and self.dropout:
            x_BC = dropout(x_BC, key, self.dropout)
        return *self.sums(model.head_logits(x_BC, shard), batch), sums

    def logits(
        self,
        params: Params,
        image_BHWC: jax.Array,
        shard: Sharder,
        *,
        variables: Params,
    ) -> jax.Array:
        """Returns what the model predicts, with the running averages."""
        model = nnx_pure.bind(self.make, params, variables)
        x_BC, _ = model.features(image_BHWC, shard, train=False)
        return model.head_logits(x_BC, shard)

    def predict(
        self,
        params: Params,
        batch: dict[str, jax.Array],
        shard: Sharder,
        *,
        variables: Params,
    ) -> dict[str, jax.Array]:
        """Returns the likeliest class of each image and its probability."""
        logits_BK = self.logits(params, batch["image"], shard, variables=variables)
        return self.likeliest(logits_BK)

    def model_flops(self, batch: dict[str, Any]) -> float:
        """Returns the FLOPs of one update on a batch: 6 per weight and use of it."""
        first, last = self.widths[0], self.widths[-1]
        products = KERNEL**2 * self.size**2 * self.channels * first
        for _, inside, outside, pixels in self.block_shapes:
            products += KERNEL**2 * pixels**2 * (inside + outside) * outside
            products += pixels**2 * inside * outside * (inside != outside)
        products += last * self.num_classes
        return 6.0 * batch["label"].shape[0] * products

    @property
    def block_shapes(self) -> tuple[tuple[int, int, int, int], ...]:
        """(stride, input width, output width, output pixels on a side) of each."""
        shapes, inside, pixels = [], self.widths[0], self.size
        for stage, outside in enumerate(self.widths):
            for block in range(self.num_blocks):
                stride = 2 if stage and not block else 1
                pixels //= stride
                shapes.append((stride, inside, outside, pixels))
                inside = outside
        return tuple(shapes)

    @property
    def make(self):
        """A function that makes the module from nnx.Rngs."""
        return functools.partial(ResNet, self)


class Block(nnx.Module):
    """Two convolutions, each with a batch norm, added to their input.

    Sharded over `tensor`, a device computes its share of the first one's channels, and
    the second sums over them: one all-reduce each way, and batch statistics that never
    leave their device.
    """

    def __init__(self, config: Config, stride: int, inside: int, outside: int, rngs):
        self.stride = stride
        window = (KERNEL, KERNEL)
        axes = (None, None)
        self.conv_1 = weight(rngs, (*window, inside, outside), (*axes, "embed"), "mlp")
        self.norm_1 = BatchNorm(outside, "mlp", config.epsilon)
        self.conv_2 = weight(rngs, (*window, outside, outside), (*axes, "mlp"), "embed")
        self.norm_2 = BatchNorm(outside, "embed", config.epsilon)
        self.projects = (stride, inside) != (1, outside)
        if self.projects:
            shape = (1, 1, inside, outside)
            self.shortcut = weight(rngs, shape, (None,) * 3, "embed")
            self.shortcut_norm = BatchNorm(outside, "embed", config.epsilon)

    def __call__(self, x_BHWC: jax.Array, shard: Sharder, *, train: bool):
        sums: Sums = {}
        stride = self.stride
        y_BHWC = convolve(x_BHWC, self, "conv_1", shard, stride=stride)
        y_BHWC = shard(y_BHWC, (*SPATIAL, "mlp"))
        y_BHWC, sums["norm_1"] = self.norm_1(y_BHWC, shard, train=train)
        y_BHWC = convolve(jax.nn.relu(y_BHWC), self, "conv_2", shard)
        y_BHWC = shard(y_BHWC, (*SPATIAL, "embed"))
        y_BHWC, sums["norm_2"] = self.norm_2(y_BHWC, shard, train=train)
        if self.projects:
            x_BHWC = convolve(x_BHWC, self, "shortcut", shard, stride=stride)
            x_BHWC = shard(x_BHWC, (*SPATIAL, "embed"))
            x_BHWC, sums["shortcut_norm"] = self.shortcut_norm(
                x_BHWC, shard, train=train
            )
        return jax.nn.relu(x_BHWC + y_BHWC), sums


class ResNet(nnx.Module):
    """The weights and running averages, each with its logical axes."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        c = self.config = config
        shape = (KERNEL, KERNEL, c.channels, c.widths[0])
        self.stem = weight(rngs, shape, (None,) * 3, "embed")
        self.stem_norm = BatchNorm(c.widths[0], "embed", c.epsilon)
        for i, (stride, inside, outside, _) in enumerate(c.block_shapes):
            setattr(self, f"block_{i}", Block(c, stride, inside, outside, rngs))
        self.head = weight(rngs, (c.widths[-1], c.num_classes), ("embed",), None)
        self.head_bias = bias(c.num_classes, "norm")

    def features(self, image_BHWC: jax.Array, shard: Sharder, *, train: bool):
        """Returns the features [B, C] before the head, and the batch norms' sums."""
        sums: Sums = {}
        x_BHWC = shard(convolve(image_BHWC, self, "stem", shard), (*SPATIAL, "embed"))
        x_BHWC, sums["stem_norm"] = self.stem_norm(x_BHWC, shard, train=train)
        x_BHWC = jax.nn.relu(x_BHWC)
        for i in range(len(self.config.block_shapes)):
            block = getattr(self, f"block_{i}")
            x_BHWC, sums[f"block_{i}"] = block(x_BHWC, shard, train=train)
        return shard(jnp.mean(x_BHWC, axis=(1, 2)), ("batch", "embed")), sums

    def head_logits(self, x_BC: jax.Array, shard: Sharder) -> jax.Array:
        logits_BK = x_BC @ gathered(self, "head", shard)
        logits_BK += gathered(self, "head_bias", shard)[None]
        return shard(logits_BK, ("batch", None))
