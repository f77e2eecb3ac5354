"""Two towers: a vector for a user and one for an item, whose product is the score.

Shape letters: B batch, C candidates, I items (with the table's padding), K width.
"""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from ..sharding import Sharder
from . import nnx_pure
from .classifier import check_counts
from .factorization import check_ids
from .nnx_pure import Params
from .perceptron import Perceptron, num_weights
from .rows import AXIS, Table

OUT = -1e30  # the score of what is no candidate


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Predicts which items a user chooses; implements the trainer's model interface.

    Batches have `user` [B], the `item` [B] that this user chose, `weights` [B],
    `situation` [B, D] if there are such numbers, which the tower of users takes too,
    and perhaps `log_share` [B], the logarithm of the item's share of all choices. The
    loss is a cross-entropy over candidates.

    Attributes:
      num_situation: how many numbers describe the situation of a choice.
      width: of the rows of both tables, and of the vectors.
      hidden: hidden layers of each tower.
      candidates: of training. "batch": the items of the batch, so that the gradient
        touches no other rows. Popular items are there more often, for which
        `log_share` corrects; with microbatches, candidates are those of a microbatch.
        "all": all items. Evaluation always takes all of them.
      recall_at: evaluation counts how often the item is among so many with the highest
        scores, and `predict` returns so many.
      pad_rows_to: tables are padded to a multiple of it, so that shards are equal.
    """

    num_users: int
    num_items: int
    width: int
    num_situation: int = 0
    hidden: tuple[int, ...] = (64,)
    candidates: Literal["batch", "all"] = "batch"
    recall_at: int = 10
    pad_rows_to: int = 64

    def __post_init__(self):
        check_counts(self, "num_users", "num_items", "width", "hidden")
        check_counts(self, "recall_at", "pad_rows_to")
        if self.num_situation < 0:
            raise ValueError(f"num_situation must be >= 0, got {self.num_situation}")
        if self.candidates not in ("batch", "all"):
            raise ValueError(
                f"candidates must be 'batch' or 'all', got {self.candidates!r}"
            )
        if self.recall_at > self.num_items:
            raise ValueError(
                f"recall_at is {self.recall_at}, more than num_items {self.num_items}"
            )

    @property
    def axis_settings(self) -> dict[str, str]:
        """The setting that each logical axis takes its size from, for errors."""
        return {AXIS: "pad_rows_to"}

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths of the tower of items."""
        return (self.width, *self.hidden, self.width)

    @property
    def user_widths(self) -> tuple[int, ...]:
        return (self.width + self.num_situation, *self.widths[1:])

    @property
    def make(self):
        """A function that makes the module from nnx.Rngs."""
        return functools.partial(TwoTowers, self)

    def init(self, key: jax.Array) -> Params:
        return nnx_pure.init(self.make, key)

    def axes(self) -> Params:
        return nnx_pure.axes(self.make)

    def batch_axes(self) -> dict[str, tuple[str | None, ...]]:
        names = ("user", "item", "log_share", "weights")
        return {**dict.fromkeys(names, ("batch",)), "situation": ("batch", None)}

    def check_batch(self, batch: dict[str, Any], facts: dict[str, Any]) -> None:
        """Raises ValueError if the data does not fit, before anything is compiled."""
        for name in ("user", "item"):
            if name not in batch:
                raise ValueError(
                    f"the model needs an array {name!r}, but the batch has only "
                    f"{', '.join(batch)}"
                )
        found = batch["situation"].shape[1:] if "situation" in batch else (0,)
        if found != (self.num_situation,):
            raise ValueError(
                f"the data's 'situation' has shape {found} for each example, but the "
                f"model's num_situation is {self.num_situation}. Set it to the data's."
            )
        check_ids(self, facts)

    def loss(
        self,
        params: Params,
        batch: dict[str, jax.Array],
        shard: Sharder,
        *,
        train: bool,
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """Returns the loss sum and its weight, and in evaluation the recall."""
        module = nnx_pure.bind(self.make, params)
        weights_B = batch["weights"].astype(jnp.float32)
        if train and self.candidates == "batch":
            nll_B, others = module.among_batch(batch, shard), {}
        else:
            nll_B, rank_B = module.among_all(batch, shard)
            hits = jnp.sum(weights_B * (rank_B < self.recall_at))
            others = {f"recall_at_{self.recall_at}": hits}
        return jnp.sum(weights_B * nll_B), jnp.sum(weights_B), others

    def predict(
        self, params: Params, batch: dict[str, jax.Array], shard: Sharder
    ) -> dict[str, jax.Array]:
        """Returns the items with the highest scores for each user, highest first."""
        module = nnx_pure.bind(self.make, params)
        return module.best(batch, shard)

    def model_flops(self, batch: dict[str, Any]) -> float:
        """Returns the FLOPs of one update: 6 per weight of a layer, and of a score."""
        rows = batch["user"].shape[0]
        count = rows if self.candidates == "batch" else self.num_items
        towers = rows * num_weights(self.user_widths) + count * num_weights(self.widths)
        return 6.0 * (towers + rows * count * self.width)

    def num_params(self) -> int:
        shapes = jax.eval_shape(lambda: self.init(jax.random.key(0)))
        return sum(leaf.size for leaf in jax.tree.leaves(shapes))


class TwoTowers(nnx.Module):
    """A table and a tower for users, and the same for items."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        c = self.config = config
        self.users = Table(c.num_users, c.width, c.pad_rows_to, rngs)
        self.items = Table(c.num_items, c.width, c.pad_rows_to, rngs)
        self.user_tower = Perceptron(c.user_widths, rngs)
        self.item_tower = Perceptron(c.widths, rngs)

    def user_vectors(self, batch: dict[str, jax.Array], shard: Sharder) -> jax.Array:
        x_BK = self.users(batch["user"], shard)
        if self.config.num_situation:
            x_BK = jnp.concatenate([x_BK, batch["situation"]], axis=1)
        return self.user_tower(x_BK, shard)

    def among_batch(self, batch: dict[str, jax.Array], shard: Sharder) -> jax.Array:
        """Returns [B]: the cross-entropy with the items of the batch as candidates.

        A candidate that is the same item is left out, and so are rows of weight 0.
        """
        user_BK = self.user_vectors(batch, shard)
        item_BK = self.item_tower(self.items(batch["item"], shard), shard)
        item_CK, item_C = shard(item_BK, (None, None)), shard(batch["item"], (None,))
        weights_C = shard(batch["weights"], (None,))
        score_BC = shard(user_BK @ item_CK.T, ("batch", None))
        if "log_share" in batch:
            score_BC -= shard(batch["log_share"], (None,))[None]
        size = len(item_C)
        is_own_BC = jax.lax.broadcasted_iota(jnp.int32, (size, size), 0) == (
            jax.lax.broadcasted_iota(jnp.int32, (size, size), 1)
        )
        is_same_BC = batch["item"][:, None] == item_C[None]
        is_out_BC = (is_same_BC | (weights_C == 0)[None]) & ~is_own_BC
        score_BC = jnp.where(is_out_BC, OUT, score_BC)
        own_B = jnp.sum(jnp.where(is_own_BC, score_BC, 0.0), axis=1)
        return jax.nn.logsumexp(score_BC, axis=1) - own_B

    def among_all(
        self, batch: dict[str, jax.Array], shard: Sharder
    ) -> tuple[jax.Array, jax.Array]:
        """Returns [B]: the cross-entropy over all items, and how many score higher."""
        item_B, score_IB = batch["item"], self.scores(batch, shard)
        number_IB = jax.lax.broadcasted_iota(item_B.dtype, score_IB.shape, 0)
        is_own_IB = number_IB == item_B[None]
        own_B = jnp.sum(jnp.where(is_own_IB, score_IB, 0.0), axis=0)
        rank_B = jnp.sum((score_IB > own_B[None]) & ~is_own_IB, axis=0)
        nll_B = jax.nn.logsumexp(score_IB, axis=0) - own_B
        is_known_B = (item_B >= 0) & (item_B < self.config.num_items)
        return jnp.where(is_known_B, nll_B, jnp.nan), rank_B

    def scores(self, batch: dict[str, jax.Array], shard: Sharder) -> jax.Array:
        """Returns [I, B] the scores of all items, sharded as the table of items is."""
        user_BK = self.user_vectors(batch, shard)
        item_IK = shard.weight(self.items.embedding[...], (AXIS, None))
        item_IK = self.item_tower(item_IK, shard, AXIS)
        score_IB = shard(item_IK @ user_BK.T, (AXIS, "batch"))
        number_IB = jax.lax.broadcasted_iota(jnp.int32, score_IB.shape, 0)
        return jnp.where(number_IB < self.config.num_items, score_IB, OUT)

    def best(self, batch: dict[str, jax.Array], shard: Sharder) -> dict[str, jax.Array]:
        """Returns [B, recall_at]: items and their scores. Of what is sharded as the
        table is, only scores are gathered."""
        score_BI = self.scores(batch, shard).T
        score, item = jax.lax.top_k(score_BI, self.config.recall_at)
        return {"items": item, "scores": score}
