"""A transformer with experts as a pipeline stack: blocks that also return sums."""

import dataclasses

import jax

from ..sharding import Sharder
from . import nnx_pure
from .moe import Config
from .nnx_pure import Params
from .transformer_stack import Batch, TransformerStack


@dataclasses.dataclass(frozen=True)
class MoEStack(TransformerStack):
    """Implements meshloom.sharding.pipeline.Stack.

    Dense layers before the stack are outside of it. They attend over positions, so with
    them the stages divide the work outside by examples.
    """

    config: Config
    exchanges = ("experts",)

    @property
    def split_dim(self) -> int:  # type: ignore
        return 0 if self.config.first_dense else 1

    def embed(self, outside: Params, batch: Batch, shard: Sharder) -> jax.Array:
        x_BLD = super().embed(outside, batch, shard)
        return nnx_pure.bind(self.config.make, outside).dense(x_BLD, batch, shard)

    def block(  # type: ignore
        self, params: Params, x_BLD: jax.Array, batch: Batch, shard: Sharder
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        c = self.config
        x_BLD, sums, _ = nnx_pure.bind(c.make_block, params)(x_BLD, batch, shard)
        means = {name: x / c.num_moe_layers for name, x in sums.items()}
        return x_BLD, means | {"loss": c.extra_loss(sums)}
