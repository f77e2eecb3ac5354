"""A recommender like DLRM: dense features, embedding tables, and their dot products.

Shape letters: B batch, D dense features, T tables, K width of their rows, V vectors of
an example: one of each table and one of the dense features.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..sharding import Sharder
from . import nnx_pure
from .classifier import check_counts
from .nnx_pure import Params
from .perceptron import Perceptron, num_weights
from .rows import Table, check_tables


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Predicts clicks; implements the trainer's model interface.

    Batches have `dense` [B, D], `ids` [B, T] with a row of each table, `label` [B] (1
    for a click) and `weights` [B].

    Attributes:
      table_rows: how many rows each table has.
      width: of the rows of all tables.
      bottom, top: hidden layers before and after the dot products.
      pad_rows_to: tables are padded to a multiple of it, so that shards are equal.
    """

    num_dense: int
    table_rows: tuple[int, ...]
    width: int
    bottom: tuple[int, ...] = (64,)
    top: tuple[int, ...] = (64, 32)
    pad_rows_to: int = 64

    def __post_init__(self):
        check_counts(self, "num_dense", "width", "bottom", "top")
        check_tables(self, "table_rows")

    @property
    def axis_settings(self) -> dict[str, str]:
        """The setting that each logical axis takes its size from, for errors."""
        return {"rows": "pad_rows_to"}

    @property
    def bottom_widths(self) -> tuple[int, ...]:
        return (self.num_dense, *self.bottom, self.width)

    @property
    def top_widths(self) -> tuple[int, ...]:
        num_vectors = len(self.table_rows) + 1
        pairs = num_vectors * (num_vectors - 1) // 2
        return (self.width + pairs, *self.top, 1)

    @property
    def make(self):
        """A function that makes the module from nnx.Rngs."""
        return functools.partial(Dlrm, self)

    def init(self, key: jax.Array) -> Params:
        return nnx_pure.init(self.make, key)

    def axes(self) -> Params:
        return nnx_pure.axes(self.make)

    def batch_axes(self) -> dict[str, tuple[str | None, ...]]:
        features = dict.fromkeys(("dense", "ids"), ("batch", None))
        return {**features, "label": ("batch",), "weights": ("batch",)}

    def check_batch(self, batch: dict[str, Any], facts: dict[str, Any]) -> None:
        """Raises ValueError if the data does not fit, before anything is compiled."""
        sizes = {"dense": self.num_dense, "ids": len(self.table_rows)}
        for name in (*sizes, "label"):
            if name not in batch:
                raise ValueError(
                    f"the model needs an array {name!r}, but the batch has only "
                    f"{', '.join(batch)}"
                )
        for name, size in sizes.items():
            if batch[name].shape[1:] != (size,):
                setting = {"dense": "num_dense", "ids": "table_rows"}[name]
                raise ValueError(
                    f"the data's {name!r} has shape {batch[name].shape[1:]} for each "
                    f"example, but the model expects ({size},). Set {setting} to those "
                    "of the data."
                )
        needed = facts.get("table_rows", ())
        if any(n > rows for n, rows in zip(needed, self.table_rows, strict=False)):
            raise ValueError(
                f"the data's table_rows are {tuple(needed)}, but the model's are "
                f"{self.table_rows}. Raise them to those of the data."
            )

    def logits(self, params: Params, batch: dict[str, jax.Array], shard: Sharder):
        return nnx_pure.bind(self.make, params).logits(
            batch["dense"], batch["ids"], shard
        )

    def loss(
        self, params: Params, batch: dict[str, jax.Array], shard: Sharder
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """Returns the loss sum, its weight, and the number of correct predictions."""
        weights_B = batch["weights"].astype(jnp.float32)
        label_B = batch["label"].astype(jnp.float32)
        logit_B = self.logits(params, batch, shard)
        nll_B = jax.nn.softplus(logit_B) - label_B * logit_B
        is_right_B = (logit_B > 0) == (label_B > 0.5)
        accuracy = jnp.sum(weights_B * is_right_B)
        return jnp.sum(weights_B * nll_B), jnp.sum(weights_B), {"accuracy": accuracy}

    def predict(
        self, params: Params, batch: dict[str, jax.Array], shard: Sharder
    ) -> dict[str, jax.Array]:
        """Returns the probability of a click."""
        return {"probability": jax.nn.sigmoid(self.logits(params, batch, shard))}

    def model_flops(self, batch: dict[str, Any]) -> float:
        """Returns the FLOPs of one update: 6 per weight of a layer, and of each dot
        product; lookups multiply nothing."""
        layers = num_weights(self.bottom_widths) + num_weights(self.top_widths)
        pairs = (self.top_widths[0] - self.width) * self.width
        return 6.0 * batch["ids"].shape[0] * (layers + pairs)

    def num_params(self) -> int:
        shapes = jax.eval_shape(lambda: self.init(jax.random.key(0)))
        return sum(leaf.size for leaf in jax.tree.leaves(shapes))


class Dlrm(nnx.Module):
    """Tables of shape [rows, width], and the layers before and after the products."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        c = self.config = config
        for i, rows in enumerate(c.table_rows):
            setattr(self, f"table_{i}", Table(rows, c.width, c.pad_rows_to, rngs))
        self.bottom = Perceptron(c.bottom_widths, rngs)
        self.top = Perceptron(c.top_widths, rngs)

    def logits(
        self, dense_BD: jax.Array, ids_BT: jax.Array, shard: Sharder
    ) -> jax.Array:
        dense_BK = self.bottom(dense_BD, shard)
        found = [
            getattr(self, f"table_{i}")(ids_BT[:, i], shard)
            for i in range(len(self.config.table_rows))
        ]
        x_BVK = shard(jnp.stack([dense_BK, *found], axis=1), ("batch", None, None))
        product_BVV = jnp.einsum("BVK,BWK->BVW", x_BVK, x_BVK)
        first, second = jnp.triu_indices(x_BVK.shape[1], k=1)
        pairs = product_BVV[:, first, second]
        y = jnp.concatenate([dense_BK, pairs], axis=1)
        return self.top(shard(y, ("batch", None)), shard)[:, 0]
