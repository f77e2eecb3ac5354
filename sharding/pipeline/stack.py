"""The interface of a model to a pipeline: a stack of equal blocks, embed and head."""

from collections.abc import Callable
from typing import Any, Protocol

import jax

from ..resolve import Axes
from ..sharder import Sharder

Batch = dict[str, jax.Array]
Sums = dict[str, jax.Array]


class Stack(Protocol):
    """A model as embed, a stack of blocks, and head.

    The parameters are a dict. Its entry `blocks` holds the stacked blocks, each array
    [layer, ...]. The other entries are the parameters outside the blocks.

    Attributes:
      blocks: the key of the stacked blocks.
      axes: the logical axes of the array that passes from block to block.
      split_dim: the dimension along which work outside the blocks is divided among the
        stages, in that array and in every array of a batch: 0 (examples), or 1 if embed
        and head treat each position independently.
      remat: what the backward pass recomputes, a key of simulate.BACKWARD_COST. Under
        "none", the backward uses the residuals of the forward. Otherwise it recomputes
        the stage from its input, and `rematerialize` decides what that saves.
      dtype: the type that weights of two or more dimensions are cast to for
        computation, before they are gathered; None for the stored type.

    A stack may have one more, `exchanges`: logical axes along which blocks themselves
    exchange rows of the batch, as experts do. Weights stay sharded by these.
    """

    blocks: str
    axes: Axes
    split_dim: int
    remat: str
    dtype: Any

    def complete(self, batch: Batch, shard: Sharder) -> Batch:
        """Returns the batch with the arrays that embed, block and head derive.

        It may also change the order of positions, as its blocks expect it.
        """
        ...

    def embed(self, outside: Any, batch: Batch, shard: Sharder) -> jax.Array:
        """Returns the input of the first block."""
        ...

    def block(self, params: Any, x: jax.Array, batch: Batch, shard: Sharder) -> Any:
        """Applies one block. Its parameters have no layer dimension.

        Returns its output, or (output, {name: sum}) with sums as the head has them; a
        sum named "loss" adds to the loss.
        """
        ...

    def head(self, outside: Any, x: jax.Array, batch: Batch, shard: Sharder) -> Any:
        """Returns (loss sum, its weight, {name: other sum}), as a model's loss does."""
        ...

    def rematerialize(self, body: Callable) -> Callable:
        """Wraps the body of a scan over blocks. Not called under "none"."""
        ...
