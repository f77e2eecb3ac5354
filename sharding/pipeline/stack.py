"""What a pipeline asks of a model: equal blocks in a stack, and what is around it."""

from collections.abc import Callable
from typing import Any, Protocol

import jax

from ..resolve import Axes
from ..sharder import Sharder

Batch = dict[str, jax.Array]
Sums = dict[str, jax.Array]


class Stack(Protocol):
    """A model as embed, a stack of blocks, and head.

    The parameters are a dict; `blocks` is the key of the stacked blocks in it, each
    array [layer, ...]. What remains of the dict is the parameters outside.

    Attributes:
      blocks: the key of the stacked blocks.
      axes: logical names of what goes from block to block, one array.
      cut: the dimension along which work outside the blocks may be divided, the same
        in that array and in every array of a batch: 0 (examples), or 1 where embed and
        head treat each position for itself.
      remat: what the backward pass recomputes, a key of simulate.BACKWARD_COST. Under
        "none" it uses what the forward of the microbatch kept; otherwise the stage is
        computed again from its input, and `rematerialize` says what is kept then.
      dtype: the type in which all weights of two dimensions and more are computed with,
        so that they travel as that; None for the type they are stored in.
    """

    blocks: str
    axes: Axes
    cut: int
    remat: str
    dtype: Any

    def complete(self, batch: Batch) -> Batch:
        """The batch with what the parts below would otherwise make up."""
        ...

    def embed(self, outside: Any, batch: Batch, shard: Sharder) -> jax.Array:
        """The input of the first block."""
        ...

    def block(
        self, params: Any, x: jax.Array, batch: Batch, shard: Sharder
    ) -> jax.Array:
        """One block, of parameters without the layer dimension."""
        ...

    def head(self, outside: Any, x: jax.Array, batch: Batch, shard: Sharder) -> Any:
        """(sum to differentiate, its weight, {name: other sum}), as a model's loss."""
        ...

    def rematerialize(self, body: Callable) -> Callable:
        """Wraps the body of a scan over blocks; not called under "none"."""
        ...
