"""Low-rank adapters (LoRA) of a block's weights.

A weight W [in, out] computes x W; with an adapter A [in, rank], B [rank, out] it
computes x W + scale (x A) B. B starts as zeros, so training starts at W. The weights of
queries, keys and values are one array here and have one A.
"""

import dataclasses
import math
from typing import TYPE_CHECKING

from flax import nnx

if TYPE_CHECKING:
    from .transformer import Config

# Weight of a block -> how many of its first dimensions are contracted.
WEIGHTS = {"qkv": 1, "out": 2, "gate": 1, "up": 1, "down": 1}
DOWN, UP = "_adapter_in", "_adapter_out"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapters:
    """Which weights of each block have an adapter, and of what rank.

    Attributes:
      alpha: the scale is alpha / rank.
    """

    rank: int = 8
    alpha: float = 16.0
    weights: tuple[str, ...] = tuple(WEIGHTS)

    def __post_init__(self):
        if self.rank < 1:
            raise ValueError(f"rank must be positive, got {self.rank}")
        if not self.weights:
            raise ValueError(f"weights is empty; choose from {', '.join(WEIGHTS)}")
        if unknown := [name for name in self.weights if name not in WEIGHTS]:
            raise ValueError(
                f"weights: {unknown[0]!r} is not a weight of a block; choose from "
                f"{', '.join(WEIGHTS)}"
            )

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def adapt(module: nnx.Module, config: "Config", rngs: nnx.Rngs) -> None:
    """Adds an adapter to each weight of the module that the config names."""
    from .layers import constant, weight

    adapters = config.adapters
    if adapters is None:
        return
    for name in adapters.weights:
        if not hasattr(module, name):
            continue  # of the other half of the block, or of another kind of MLP
        variable, count = getattr(module, name), WEIGHTS[name]
        shape, axes = variable[...].shape, variable.get_metadata()["axes"]
        rank, scale = (adapters.rank,), 1 / math.sqrt(math.prod(shape[:count]))
        down = weight(
            config, rngs, shape[:count] + rank, (*axes[:count], None), scale=scale
        )
        up = constant(config, 0.0, rank + shape[count:], (None, *axes[count:]))
        setattr(module, name + DOWN, down)
        setattr(module, name + UP, up)
