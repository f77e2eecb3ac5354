"""A vision transformer: patches of an image as positions of the transformer's blocks.

Shape letters: B batch, L patches, P elements of a patch, D width, K classes.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from ..sharding import Sharder
from . import nnx_pure, transformer
from .attention import Implementation, choose
from .classifier import ImageClassifier, check_counts, check_rate
from .convolution import bias, gathered
from .costs import Array, Costs, Product
from .dropout import dropout
from .layers import RESIDUAL, Block, Norm, weight
from .nnx_pure import Params
from .remat import Remat, rematerialize
from .transformer import DType

Batch = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks(transformer.Config):
    """The transformer's blocks, with every position seeing all others."""

    causal: ClassVar[bool] = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ImageClassifier):
    """A vision transformer; implements the trainer's model interface.

    A linear layer on each patch, learned positions, the blocks of
    `transformer.Config` with LayerNorm, GELU and biases, the mean over the patches, and
    a linear layer.

    Attributes:
      patch_size: pixels on each side of a patch.
      dropout: share of what the embedding and each half of a block add to the residual
        stream that training drops. A pipeline needs 0.
      attention, remat, param_dtype, compute_dtype: see docs/models.md.
    """

    patch_size: int
    num_layers: int
    d_model: int
    num_heads: int
    d_ff: int
    dropout: float = 0.0
    remat: Remat = "save-named"
    attention: Implementation = "auto"
    param_dtype: DType = "float32"
    compute_dtype: DType = "bfloat16"

    def __post_init__(self):
        super().__post_init__()
        check_counts(self, "patch_size")
        check_rate(self, "dropout")
        if self.size % self.patch_size:
            raise ValueError(
                f"size {self.size} must be a multiple of patch_size {self.patch_size}"
            )
        self.blocks  # noqa: B018  # checks the settings of the blocks

    @property
    def num_patches(self) -> int:
        return (self.size // self.patch_size) ** 2

    @property
    def length(self) -> int:
        """The number of positions, for forecasts."""
        return self.num_patches

    @functools.cached_property
    def blocks(self) -> Blocks:
        names = ("num_layers", "d_model", "num_heads", "d_ff", "remat", "attention")
        dtypes = ("param_dtype", "compute_dtype")
        return Blocks(
            vocab_size=self.num_classes,
            max_length=self.num_patches,
            norm="layer",
            positions="learned",
            mlp="gelu",
            use_bias=True,
            **{name: getattr(self, name) for name in (*names, *dtypes)},
        )

    @property
    def loss(self) -> Callable[..., Any]:
        """Takes random keys and the mode only if there is dropout."""
        return self._loss_with_dropout if self.dropout else self._loss

    def _loss(self, params: Params, batch: Batch, shard: Sharder):
        return self.sums(self.logits(params, batch["image"], shard), batch)

    def _loss_with_dropout(
        self,
        params: Params,
        batch: Batch,
        shard: Sharder,
        *,
        key: jax.Array,
        train: bool,
    ):
        model = nnx_pure.bind(self.make, params)
        x_BLD = model.hidden(batch["image"], shard, key if train else None)
        return self.sums(model.head_logits(x_BLD, shard), batch)

    def logits(self, params: Params, image_BHWC: jax.Array, shard: Sharder):
        model = nnx_pure.bind(self.make, params)
        return model.head_logits(model.hidden(image_BHWC, shard), shard)

    def predict(
        self, params: Params, batch: dict[str, jax.Array], shard: Sharder
    ) -> dict[str, jax.Array]:
        """Returns the likeliest class of each image and its probability."""
        return self.likeliest(self.logits(params, batch["image"], shard))

    def stack(self):
        """Returns the model as a meshloom.sharding.pipeline.Stack."""
        return VisionStack(self)

    def model_flops(self, batch: dict[str, Any]) -> float:
        """Returns the FLOPs of one update on a batch: 6 per weight and use of it.

        Attention, which multiplies activations, adds 12 * layers * patches * d_model to
        each patch.
        """
        c, L, D = self, self.num_patches, self.d_model
        block = 4 * D**2 + 2 * D * c.d_ff + 2 * L * D
        patch = c.patch_size**2 * c.channels * D
        products = L * (patch + c.num_layers * block) + D * c.num_classes
        return 6.0 * next(iter(batch.values())).shape[0] * products

    def costs(self, rows: int, length: int, *, platform: str = "tpu") -> Costs:
        """Returns the costs of a step on `rows` examples, for `meshloom plan`."""
        from . import transformer_costs

        c, size = self, 2 if self.compute_dtype == "bfloat16" else 4
        width = c.blocks.head_width
        kernel = choose(c.attention, platform, size, length, width)
        shape, axes = (rows, c.d_model, c.num_classes), ("batch", "embed", None)
        return dataclasses.replace(
            transformer_costs.costs(c.blocks, rows, length, kernel),
            head=Product("head", shape, axes, "head"),
            table="",
            logits=Array("logits", (rows, c.num_classes), ("batch", None), 4),
        )

    @property
    def make(self):
        """A function that makes the module from nnx.Rngs."""
        return functools.partial(ViT, self)


class ViT(nnx.Module):
    """Patches, positions, a stack of blocks with a leading layer dimension, a head."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        c = self.config = config
        width = c.patch_size**2 * c.channels
        self.patch = weight(
            c.blocks,
            rngs,
            (width, c.d_model),
            (None, "embed"),
            scale=1 / math.sqrt(width),
        )
        self.patch_bias = bias(c.d_model, "norm")
        # Of about the size of the patches: with less, it takes long to tell them apart.
        self.position = weight(
            c.blocks,
            rngs,
            (c.num_patches, c.d_model),
            ("position", "embed"),
            scale=0.5,
        )
        make_block = functools.partial(Block, c.blocks)
        self.blocks = nnx_pure.stack(make_block, c.num_layers, rngs)
        self.final_norm = Norm(c.blocks, rngs)
        self.head = weight(c.blocks, rngs, (c.d_model, c.num_classes), ("embed", None))
        self.head_bias = bias(c.num_classes, "norm")

    def embed(self, image_BHWC: jax.Array, shard: Sharder) -> jax.Array:
        c = self.config
        dtype = c.compute_dtype
        patches_BLP = to_patches(image_BHWC.astype(dtype), c.patch_size)
        x_BLD = patches_BLP @ gathered(self, "patch", shard, dtype)
        x_BLD += gathered(self, "patch_bias", shard, dtype)[None, None]
        x_BLD += gathered(self, "position", shard, dtype)[None]
        return shard(x_BLD, RESIDUAL)

    def hidden(
        self, image_BHWC: jax.Array, shard: Sharder, key_B: jax.Array | None = None
    ) -> jax.Array:
        """Returns the residual stream after the last block; drops if given keys."""
        c = self.config

        def drop(y_BLD: jax.Array, number: jax.Array | int) -> jax.Array:
            """Drops with the same keys at the same place of the model."""
            if key_B is None:
                return y_BLD
            keys = jax.vmap(jax.random.fold_in, (0, None))(key_B, number)
            return dropout(y_BLD, keys, c.dropout)

        def block(x_BLD, numbered):
            layer, params = numbered
            model = nnx_pure.bind(functools.partial(Block, c.blocks), params)

            def drop_part(y_BLD, part):
                return drop(y_BLD, 1 + 2 * layer + part)

            return model(x_BLD, None, None, shard, drop_part), None

        x_BLD = shard(drop(self.embed(image_BHWC, shard), 0), RESIDUAL)
        params = nnx.to_pure_dict(nnx.state(self.blocks, nnx.Param))
        numbered = (jnp.arange(c.num_layers), params)
        return jax.lax.scan(rematerialize(block, c.remat), x_BLD, numbered)[0]

    def head_logits(self, x_BLD: jax.Array, shard: Sharder) -> jax.Array:
        x_BLD = shard(self.final_norm(x_BLD, shard), ("batch", "length", "embed"))
        x_BD = jnp.mean(x_BLD.astype(jnp.float32), axis=1)
        x_BK = x_BD @ gathered(self, "head", shard, "float32")
        x_BK += gathered(self, "head_bias", shard)[None]
        return shard(x_BK, ("batch", None))


@dataclasses.dataclass(frozen=True)
class VisionStack:
    """Implements meshloom.sharding.pipeline.Stack.

    The head takes the mean over an image, so the stages divide the work outside the
    blocks by images.
    """

    config: Config
    blocks = "blocks"
    axes = RESIDUAL
    split_dim = 0

    @property
    def remat(self) -> str:
        return self.config.remat

    @property
    def dtype(self) -> str:
        return self.config.compute_dtype

    def complete(self, batch: Batch, shard: Sharder) -> Batch:
        del shard
        return batch

    def embed(self, outside: Params, batch: Batch, shard: Sharder) -> jax.Array:
        model = nnx_pure.bind(self.config.make, outside)
        return model.embed(batch["image"], shard)

    def block(self, params: Params, x: jax.Array, batch: Batch, shard: Sharder):
        model = nnx_pure.bind(functools.partial(Block, self.config.blocks), params)
        return model(x, None, None, shard)

    def head(self, outside: Params, x: jax.Array, batch: Batch, shard: Sharder):
        model = nnx_pure.bind(self.config.make, outside)
        return self.config.sums(model.head_logits(x, shard), batch)

    def rematerialize(self, body: Callable) -> Callable:
        return rematerialize(body, self.config.remat)


def to_patches(image_BHWC: jax.Array, size: int) -> jax.Array:
    """Returns squares of pixels [B, L, P], row by row."""
    B, H, W, C = image_BHWC.shape
    x = image_BHWC.reshape(B, H // size, size, W // size, size, C)
    return x.swapaxes(2, 3).reshape(B, -1, size * size * C)
