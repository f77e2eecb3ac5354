"""What classifiers of images share: their batches, and the loss with its smoothing.

Shape letters: B batch, K classes.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from . import nnx_pure
from .nnx_pure import Make, Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageClassifier:
    """A classifier of square images, without its layers.

    Batches have `image` [B, size, size, channels], `label` [B] and `weights` [B].

    Attributes:
      size: pixels on each side of an image.
      channels: of an image, 1 for gray levels.
      label_smoothing: the share of each label that training spreads evenly over all
        classes. What this adds to the loss is the metric `penalty`, and evaluation
        leaves it out.
    """

    num_classes: int
    size: int
    channels: int = 1
    label_smoothing: float = 0.0

    def __post_init__(self):
        check_counts(self, "num_classes", "size", "channels")
        check_rate(self, "label_smoothing")

    @property
    def make(self) -> Make:
        """A function that makes the module from nnx.Rngs."""
        raise NotImplementedError

    def init(self, key: jax.Array) -> Params:
        return nnx_pure.init(self.make, key)

    def axes(self) -> Params:
        return nnx_pure.axes(self.make)

    def batch_axes(self) -> dict[str, tuple[str | None, ...]]:
        image = ("batch", None, None, None)
        return {"image": image, "label": ("batch",), "weights": ("batch",)}

    def check_batch(self, batch: dict[str, Any], facts: dict[str, Any]) -> None:
        """Raises ValueError if the data does not fit, before anything is compiled."""
        for name in ("image", "label"):
            if name not in batch:
                raise ValueError(
                    f"the model needs an array {name!r}, but the batch has only "
                    f"{', '.join(batch)}"
                )
        expected = (self.size, self.size, self.channels)
        if (found := tuple(batch["image"].shape[1:])) != expected:
            raise ValueError(
                f"the data's images have shape {found}, but the model expects "
                f"{expected}. Set size and channels to those of the data."
            )
        needed = facts.get("num_classes", 0)
        if needed > self.num_classes:
            raise ValueError(
                f"the data has {needed} classes, but the model's num_classes is "
                f"{self.num_classes}. Raise num_classes to {needed}."
            )

    def sums(
        self, logits_BK: jax.Array, batch: dict[str, jax.Array]
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """Returns the loss sum, its weight, and the number of correct predictions."""
        weights_B = batch["weights"].astype(jnp.float32)
        log_p_BK = jax.nn.log_softmax(logits_BK.astype(jnp.float32))
        right_BK = jax.nn.one_hot(batch["label"], self.num_classes)
        nll_B = -jnp.sum(right_BK * log_p_BK, axis=-1)
        is_right_B = jnp.argmax(logits_BK, axis=-1) == batch["label"]
        nll = jnp.sum(weights_B * nll_B)
        others = {"accuracy": jnp.sum(weights_B * is_right_B)}
        if not self.label_smoothing:
            return nll, jnp.sum(weights_B), others
        more_B = -jnp.mean(log_p_BK, axis=-1) - nll_B
        penalty = self.label_smoothing * jnp.sum(weights_B * more_B)
        return nll + penalty, jnp.sum(weights_B), {**others, "penalty": penalty}

    def likeliest(self, logits_BK: jax.Array) -> dict[str, jax.Array]:
        """Returns the likeliest class of each image and its probability."""
        probability_B = jnp.max(jax.nn.softmax(logits_BK), axis=-1)
        return {"class": jnp.argmax(logits_BK, axis=-1), "probability": probability_B}

    def num_params(self) -> int:
        shapes = jax.eval_shape(lambda: self.init(jax.random.key(0)))
        return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def check_counts(config: Any, *names: str) -> None:
    """Raises ValueError unless these fields, also each entry of a tuple, are >= 1."""
    for name in names:
        value = getattr(config, name)
        counts = {name: value}
        if isinstance(value, tuple):
            counts = {f"{name}[{i}]": one for i, one in enumerate(value)}
        for what, count in counts.items():
            if count < 1:
                raise ValueError(f"{what} must be >= 1, got {count}")


def check_rate(config: Any, *names: str) -> None:
    """Raises ValueError unless these fields are fractions."""
    for name in names:
        if not 0 <= getattr(config, name) < 1:
            raise ValueError(
                f"{name} must be >= 0 and < 1, got {getattr(config, name)}"
            )
