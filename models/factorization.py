"""Matrix factorization: a matrix as the product of a factor for users and for items.

With `users` and `items` sharded over different mesh axes, each device computes a block
of the matrix, from a block of rows of either factor.

Shape letters: B batch, U users, I items, K width of the factors.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ..sharding import Sharder
from .classifier import check_counts
from .rows import look_up_rows

Params = dict[str, Any]
AXES = {"users": ("users", None), "items": ("items", None)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Two factors; implements the trainer's model interface.

    A batch has `user` [B] and either `item` [B] and `value` [B], entries of the matrix
    (the sampled loss), or `values` [B, I], rows of it (the dense loss). The loss is the
    mean squared error of an entry. Both are losses of the same parameters, so a run may
    start from the weights of the other (`init_from`).

    Attributes:
      width: of the factors; the rank of the matrix.
      scale: initial factors are uniform in [-scale, scale).
      regularization: what training adds to the loss for every entry, times the squares
        of its rows of both factors; it is the metric `penalty`.
    """

    num_users: int
    num_items: int
    width: int
    scale: float = 0.3
    regularization: float = 0.0

    def __post_init__(self):
        check_counts(self, "num_users", "num_items", "width")
        if not self.scale > 0:
            raise ValueError(
                f"scale must be > 0, got {self.scale}; factors of 0 have no gradient"
            )
        if not self.regularization >= 0:
            raise ValueError(f"regularization must be >= 0, got {self.regularization}")

    @property
    def axis_settings(self) -> dict[str, str]:
        """The setting that each logical axis takes its size from, for errors."""
        return {"users": "num_users", "items": "num_items"}

    def init(self, key: jax.Array) -> Params:
        sizes = {"users": self.num_users, "items": self.num_items}
        keys = jax.random.split(key, len(sizes))
        return {
            name: jax.random.uniform(
                one, (size, self.width), minval=-self.scale, maxval=self.scale
            )
            for one, (name, size) in zip(keys, sizes.items(), strict=True)
        }

    def axes(self) -> dict[str, tuple[str | None, ...]]:
        return dict(AXES)

    def batch_axes(self) -> dict[str, tuple[str | None, ...]]:
        names = ("user", "item", "value", "weights")
        return {**dict.fromkeys(names, ("batch",)), "values": ("batch", "items")}

    def check_batch(self, batch: dict[str, Any], facts: dict[str, Any]) -> None:
        """Raises ValueError if the data does not fit, before anything is compiled."""
        is_sampled = {"item", "value"} <= batch.keys() and "values" not in batch
        is_dense = "values" in batch and not {"item", "value"} & batch.keys()
        if "user" not in batch or not (is_sampled or is_dense):
            raise ValueError(
                "the model needs arrays 'user', 'item' and 'value' (entries of the "
                "matrix), or 'user' and 'values' (rows of it), but the batch has "
                f"{', '.join(batch)}"
            )
        if is_dense and batch["values"].shape[1:] != (self.num_items,):
            raise ValueError(
                f"the data's rows have shape {batch['values'].shape[1:]}, but the "
                f"model's num_items is {self.num_items}. Set it to the data's."
            )
        check_ids(self, facts)

    def loss(
        self, params: Params, batch: dict[str, jax.Array], shard: Sharder
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """Returns the sum of squared errors and the number of entries."""
        weights_B = batch["weights"].astype(jnp.float32)
        user_BK = look_up_rows(params["users"], "users", batch["user"], shard)
        squares_B = jnp.sum(jnp.square(user_BK), axis=1)
        if "values" in batch:
            item_IK = shard.weight(params["items"], AXES["items"])
            product_BI = shard(user_BK @ item_IK.T, ("batch", "items"))
            errors_B = jnp.sum(jnp.square(product_BI - batch["values"]), axis=1)
            penalty_B = self.num_items * squares_B + jnp.sum(jnp.square(item_IK))
            num_entries = self.num_items
        else:
            item_BK = look_up_rows(params["items"], "items", batch["item"], shard)
            product_B = jnp.sum(user_BK * item_BK, axis=1)
            errors_B = jnp.square(product_B - batch["value"])
            penalty_B = squares_B + jnp.sum(jnp.square(item_BK), axis=1)
            num_entries = 1
        total = jnp.sum(weights_B * errors_B)
        weight = num_entries * jnp.sum(weights_B)
        if not self.regularization:
            return total, weight, {}
        penalty = self.regularization * jnp.sum(weights_B * penalty_B)
        return total + penalty, weight, {"penalty": penalty}

    def predict(
        self, params: Params, batch: dict[str, jax.Array], shard: Sharder
    ) -> dict[str, jax.Array]:
        """Returns the entries of users and items, or the rows of users alone."""
        user_BK = look_up_rows(params["users"], "users", batch["user"], shard)
        if "item" in batch:
            item_BK = look_up_rows(params["items"], "items", batch["item"], shard)
            return {"value": jnp.sum(user_BK * item_BK, axis=1)}
        item_IK = shard.weight(params["items"], AXES["items"])
        return {"values": shard(user_BK @ item_IK.T, ("batch", "items"))}

    def model_flops(self, batch: dict[str, Any]) -> float:
        """Returns the FLOPs of one update: 6 for each entry and factor."""
        entries = batch["user"].shape[0]
        if "values" in batch:
            entries *= self.num_items
        return 6.0 * entries * self.width

    def num_params(self) -> int:
        return (self.num_users + self.num_items) * self.width


def check_ids(config: Any, facts: dict[str, Any]) -> None:
    """Raises ValueError if the data has more users or items than the model."""
    for name in ("num_users", "num_items"):
        needed, found = facts.get(name, 0), getattr(config, name)
        if needed > found:
            raise ValueError(
                f"the data's {name} is {needed}, but the model's is {found}. Raise "
                f"{name} to {needed}."
            )
