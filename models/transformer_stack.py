"""The transformer as a pipeline stack: embedding, blocks, head and loss."""

import dataclasses
from collections.abc import Callable

import jax

from ..sharding import Sharder
from . import nnx_pure
from .context import arrange, with_positions
from .layers import RESIDUAL
from .nnx_pure import Params
from .remat import rematerialize
from .transformer import Config

Batch = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class TransformerStack:
    """Implements meshloom.sharding.pipeline.Stack.

    Embedding and head treat each position independently, so the stages divide them by
    length.
    """

    config: Config
    blocks = "blocks"
    axes = RESIDUAL
    split_dim = 1

    @property
    def remat(self) -> str:
        return self.config.remat

    @property
    def dtype(self) -> str:
        return self.config.compute_dtype

    def complete(self, batch: Batch, shard: Sharder) -> Batch:
        return arrange(self.config, with_positions(batch), shard)

    def embed(self, outside: Params, batch: Batch, shard: Sharder) -> jax.Array:
        model = nnx_pure.bind(self.config.make, outside)
        return model.embed(batch["inputs"], batch["positions"], shard)

    def block(
        self, params: Params, x_BLD: jax.Array, batch: Batch, shard: Sharder
    ) -> jax.Array:
        return self.config.block(params, x_BLD, batch, shard)

    def head(self, outside: Params, x_BLD: jax.Array, batch: Batch, shard: Sharder):
        return nnx_pure.bind(self.config.make, outside).head_loss(x_BLD, batch, shard)

    def rematerialize(self, body: Callable) -> Callable:
        return rematerialize(body, self.config.remat)
