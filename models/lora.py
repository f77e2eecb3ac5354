"""A transformer of which only low-rank adapters (LoRA) are trained.

The adapters are the parameters; the weights of the transformer are variables, which no
step changes. So only adapters have gradients and state of the optimizer.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import jax

from ..sharding import Sharder
from .adapters import DOWN, UP, Adapters
from .nnx_pure import Params
from .transformer import Config as Transformer

Batch = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A transformer with trained adapters; implements the trainer's model interface.

    Attributes:
      base: the transformer, whose parameters `init_from` takes from a run or an import.
      adapters: the weights that have one, and their rank.
    """

    base: Transformer
    adapters: Adapters = Adapters()

    axis_settings: ClassVar[Mapping[str, str]] = Transformer.axis_settings

    def __post_init__(self):
        if self.base.adapters is not None:
            raise ValueError("base.adapters must be None: the adapters are set beside")
        if self.base.mlp != "swiglu" and self.adapters.weights == ("gate",):
            raise ValueError(f"an MLP with {self.base.mlp} has no weight 'gate'")

    @property
    def compute_dtype(self) -> str:
        return self.base.compute_dtype

    @functools.cached_property
    def adapted(self) -> Transformer:
        """The transformer whose parameters are those of base and adapters."""
        return dataclasses.replace(self.base, adapters=self.adapters)

    def init(self, key: jax.Array) -> Params:
        return _adapters_of(self.adapted.init(key))

    def axes(self) -> Params:
        return _adapters_of(self.adapted.axes())

    def init_variables(self, key: jax.Array) -> Params:
        return self.base.init(key)

    def variable_axes(self) -> Params:
        return self.base.axes()

    def update_variables(self, variables: Params, sums: Any) -> Params:
        del sums
        return variables

    def batch_axes(self) -> dict[str, tuple[str, ...]]:
        return self.base.batch_axes()

    def check_batch(self, batch: dict[str, Any], facts: dict[str, Any]) -> None:
        self.base.check_batch(batch, facts)

    def loss(self, params: Params, batch: Batch, shard: Sharder, *, variables: Params):
        full = joined(variables, params)
        return *self.adapted.loss(full, batch, shard), {}

    def predict(
        self, params: Params, batch: Batch, shard: Sharder, *, variables: Params
    ) -> Batch:
        return self.adapted.predict(joined(variables, params), batch, shard)

    def logits(
        self, params: Params, tokens_BL: jax.Array, shard: Sharder, *, variables: Params
    ) -> jax.Array:
        return self.adapted.logits(joined(variables, params), tokens_BL, shard)

    def generate(
        self,
        params: Params,
        prompt_BP: jax.Array,
        num_tokens: int,
        *,
        variables: Params,
        **options,
    ) -> jax.Array:
        full = joined(variables, params)
        return self.adapted.generate(full, prompt_BP, num_tokens, **options)

    def model_flops(self, batch: dict[str, Any]) -> float:
        """Returns the FLOPs of one update: those of base without weight gradients.

        Weights take 4 FLOPs a token instead of 6, attention as many as before. The
        products of the adapters, rank / width of them, are not counted.
        """
        c, (num_examples, length) = self.base, batch["inputs"].shape
        causal = c.num_layers * length * c.num_heads * c.head_width
        return (2 * c.model_flops(batch) + 6.0 * num_examples * length * causal) / 3


def joined(variables: Params, params: Params) -> Params:
    """Returns the leaves of both trees as one; no path is in both."""
    result = dict(variables)
    for name, value in params.items():
        result[name] = joined(result[name], value) if name in result else value
    return result


def _adapters_of(tree: Params) -> Params:
    """Returns the part of a tree that belongs to adapters."""
    found = {}
    for name, value in tree.items():
        if name.endswith((DOWN, UP)):
            found[name] = value
        elif isinstance(value, dict) and (below := _adapters_of(value)):
            found[name] = below
    return found
