"""A transformer with a mixture of experts: Mixtral, Qwen3-MoE, DeepSeekMoE.

Shape letters: B batch, L length, D width, E experts.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, ClassVar, get_args

import jax
import jax.numpy as jnp
from flax import nnx

from ..sharding import Sharder
from . import nnx_pure, transformer
from .context import arrange, in_order, with_positions
from .layers import Block
from .moe_layers import STATISTICS, ExpertBlock, Period, RouterBias, Sums
from .nnx_pure import Params
from .remat import rematerialize
from .routing import Scores
from .transformer import Transformer

# Methods that a model has for the trainer if it has variables, and how they are called
# here.
WITH_BIAS = {
    "init_variables": "_init_bias",
    "variable_axes": "_bias_axes",
    "update_variables": "_update_bias",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(transformer.Config):
    """A transformer in which a router chooses experts for each token.

    Attributes:
      num_experts: routed experts of a layer.
      experts_per_token: how many of them compute each token.
      d_expert: hidden width of an expert; default d_ff, which dense layers have.
      num_shared_experts: experts of that width that compute every token.
      first_dense: layers before the first with experts, which have an MLP instead.
      moe_every: of the layers after these, every so manieth has experts.
      scores: of the router, softmax or sigmoid.
      normalize_weights: divide the weights of a token's experts by their sum.
      weight_scale: multiplies these weights.
      capacity_factor: tokens of an example that an expert takes, over the mean; tokens
        beyond are dropped. None computes all ("dropless").
      balance_loss: weight of each layer's load-balance loss.
      router_z_loss: weight of each layer's log(Z)^2 of the router.
      bias_rate: how much a step changes the bias by which experts with few tokens are
        preferred; 0 for none. It balances without a loss.
    """

    num_experts: int
    experts_per_token: int
    d_expert: int | None = None
    num_shared_experts: int = 0
    first_dense: int = 0
    moe_every: int = 1
    scores: Scores = "softmax"
    normalize_weights: bool = True
    weight_scale: float = 1.0
    capacity_factor: float | None = None
    balance_loss: float = 0.0
    router_z_loss: float = 0.0
    bias_rate: float = 0.0

    axis_settings: ClassVar[Mapping[str, str]] = {
        **transformer.Config.axis_settings,
        "mlp": "d_ff and d_expert",
        "experts": "num_experts",
    }

    def __post_init__(self):
        super().__post_init__()
        if self.scores not in get_args(Scores):
            raise ValueError(
                f"scores must be one of {', '.join(get_args(Scores))}, got "
                f"{self.scores!r}"
            )
        for name in ("num_experts", "experts_per_token", "moe_every", "d_expert"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be positive, got {value}")
        names = ("num_shared_experts", "first_dense", "balance_loss", "router_z_loss")
        for name in (*names, "bias_rate"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token {self.experts_per_token} must not be larger than "
                f"num_experts {self.num_experts}"
            )
        rest = self.num_layers - self.first_dense
        if rest < 1 or rest % self.moe_every:
            raise ValueError(
                f"num_layers {self.num_layers} without the first_dense "
                f"{self.first_dense} leaves {rest}, which must be a positive multiple "
                f"of moe_every {self.moe_every}"
            )
        if self.capacity_factor is not None and self.capacity_factor <= 0:
            raise ValueError(
                f"capacity_factor must be positive, or None to drop no token, got "
                f"{self.capacity_factor}"
            )

    @property
    def expert_width(self) -> int:
        return self.d_expert or self.d_ff

    @property
    def num_moe_layers(self) -> int:
        """Layers with experts."""
        return (self.num_layers - self.first_dense) // self.moe_every

    @property
    def num_stacked(self) -> int:
        """Entries of the stack, which a pipeline divides among its stages."""
        return self.num_moe_layers

    def capacity(self, length: int) -> int:
        """Returns how many tokens of an example an expert takes."""
        assert self.capacity_factor is not None
        mean = length * self.experts_per_token / self.num_experts
        return max(1, min(length, math.ceil(self.capacity_factor * mean)))

    def __getattr__(self, name: str) -> Any:
        # Only asked for what is not there otherwise: a model has these methods if it
        # has variables (trainer/program/contract.py).
        if name in WITH_BIAS and self.bias_rate:
            return getattr(self, WITH_BIAS[name])
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    def _init_bias(self, key: jax.Array) -> Params:
        return nnx_pure.init(self.make, key, RouterBias)

    def _bias_axes(self) -> Params:
        return nnx_pure.axes(self.make, RouterBias)

    def _update_bias(self, variables: Params, counts_NE: jax.Array) -> Params:
        """Raises the bias of experts that had fewer tokens than the mean, in a step."""
        mean_N1 = jnp.mean(counts_NE, axis=-1, keepdims=True)
        change_NE = self.bias_rate * jnp.sign(mean_N1 - counts_NE)
        return jax.tree.map(lambda bias_NE: bias_NE + change_NE, variables)

    @property
    def loss(self):  # type: ignore
        """The sums of a batch, with a fourth value if there are biases to update."""
        return self._loss_with_bias if self.bias_rate else self._loss

    def _loss(self, params: Params, batch: dict[str, jax.Array], shard: Sharder):
        batch = arrange(self, with_positions(batch), shard)
        return nnx_pure.bind(self.make, params).sums(batch, shard)[0]

    def _loss_with_bias(
        self,
        params: Params,
        batch: dict[str, jax.Array],
        shard: Sharder,
        *,
        variables: Params,
    ):
        batch = arrange(self, with_positions(batch), shard)
        sums, counts_NE = nnx_pure.bind(self.make, params, variables).sums(batch, shard)
        return *sums, counts_NE

    def predict(
        self,
        params: Params,
        batch: dict[str, jax.Array],
        shard: Sharder,
        variables: Params | None = None,
    ) -> dict[str, jax.Array]:
        """Returns each row's mean loss, and its share of tokens predicted right."""
        batch = arrange(self, with_positions(batch), shard)
        return nnx_pure.bind(self.make, params, variables).predict(batch, shard)

    def logits(  # type: ignore
        self,
        params: Params,
        tokens_BL: jax.Array,
        shard: Sharder,
        variables: Params | None = None,
    ) -> jax.Array:
        model, shard = nnx_pure.bind(self.make, params, variables), in_order(shard)
        return model.head_logits(model.hidden({"inputs": tokens_BL}, shard), shard)

    def generate(
        self,
        params: Params,
        prompt_BP: jax.Array,
        num_tokens: int,
        *,
        variables: Params | None = None,
        **options,
    ) -> jax.Array:
        """Returns the prompt followed by `num_tokens` new ones; see decode.generate."""
        from .decode import generate

        model = nnx_pure.bind(self.make, params, variables)
        return generate(model, prompt_BP, num_tokens, **options)

    def extra_loss(self, sums: Sums) -> jax.Array:
        """Returns what the sums of a layer add to the loss."""
        return (
            self.balance_loss * sums["balance_loss"]
            + self.router_z_loss * sums["router_z_loss"]
        )

    def stack(self):
        """Returns the model as a meshloom.sharding.pipeline.Stack."""
        from .moe_stack import MoEStack

        return MoEStack(self)

    def model_flops(self, batch: dict[str, Any]) -> float:
        """Returns the FLOPs of one update, of the experts that compute each token."""
        num_examples, length = batch["inputs"].shape
        matrices = 3 if self.mlp == "swiglu" else 2
        active = self.experts_per_token + self.num_shared_experts
        experts = self.d_model * (
            matrices * self.expert_width * active + self.num_experts
        )
        dense = self.d_model * matrices * self.d_ff
        more = self.num_moe_layers * (experts - dense)
        return super().model_flops(batch) + 6.0 * num_examples * length * more

    def costs(
        self,
        rows: int,
        length: int,
        *,
        platform: str = "tpu",
        shard: Sharder = Sharder(),  # noqa: B008
    ):
        """Returns the costs of a step on `rows` examples, for `meshloom plan`."""
        from .moe_costs import costs

        dense = super().costs(rows, length, platform=platform, shard=shard)
        return costs(self, dense, rows, length, platform)

    @property
    def make(self):
        """A function that makes the module from nnx.Rngs."""
        return functools.partial(MoETransformer, self)

    @property
    def make_block(self):
        """A function that makes one entry of the stack."""
        kind = ExpertBlock if self.moe_every == 1 else Period
        return functools.partial(kind, self)


class MoETransformer(Transformer):
    """A transformer whose stack has experts, perhaps after some dense layers."""

    config: Config

    def __init__(self, config: Config, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        if config.first_dense:
            make = functools.partial(Block, config)
            self.dense_blocks = nnx_pure.stack(make, config.first_dense, rngs, None)

    @property
    def num_stacked(self) -> int:
        return self.config.num_moe_layers

    @property
    def make_block(self):
        return self.config.make_block

    def dense(self, x_BLD, batch: dict[str, Any], shard: Sharder) -> jax.Array:
        """Passes the residual stream through the dense layers before the stack."""
        c = self.config
        if not c.first_dense:
            return x_BLD
        positions, segments = batch["positions"], batch.get("segments")

        def block(x_BLD, params):
            layer = nnx_pure.bind(functools.partial(Block, c), params)
            return layer(x_BLD, positions, segments, shard), None

        body = rematerialize(block, c.remat)
        return jax.lax.scan(body, x_BLD, self._params(self.dense_blocks))[0]

    def hidden_and_sums(self, batch: dict[str, jax.Array], shard: Sharder):
        """Returns the residual stream, sums and counts [N, E] of all layers."""
        c, batch = self.config, with_positions(batch)

        def block(x_BLD, inputs):
            params, variables = inputs
            layer = nnx_pure.bind(self.make_block, params, variables)
            x_BLD, sums, counts_E = layer(x_BLD, batch, shard)
            return x_BLD, (sums, counts_E)

        x_BLD = self.embed(batch["inputs"], batch["positions"], shard)
        x_BLD = self.dense(x_BLD, batch, shard)
        body = rematerialize(block, c.remat, in_loop=c.unroll == 1)
        stacked = self.block_params(), self._params(self.blocks, RouterBias)
        x_BLD, (sums, counts_NE) = jax.lax.scan(body, x_BLD, stacked, unroll=c.unroll)
        return x_BLD, {name: jnp.sum(x) for name, x in sums.items()}, counts_NE

    def hidden(self, batch: dict[str, jax.Array], shard: Sharder) -> jax.Array:
        return self.hidden_and_sums(batch, shard)[0]

    def sums(self, batch: dict[str, jax.Array], shard: Sharder):
        """Returns what a loss returns, and the tokens [N, E] of each expert."""
        x_BLD, sums, counts_NE = self.hidden_and_sums(batch, shard)
        total, weight, others = self.head_loss(x_BLD, batch, shard)
        means = {name: sums[name] / self.config.num_moe_layers for name in STATISTICS}
        total = total + self.config.extra_loss(sums)
        return (total, weight, others | means), counts_NE

    def decode(self, x_B1D, cache, position, shard: Sharder):
        """Passes one position through all blocks, and adds it to their cache."""
        c, first = self.config, self.config.first_dense
        caches = [jax.tree.map(lambda x: x[:first], cache)]
        rest = (c.num_moe_layers, c.moe_every)

        def layer(x_B1D, inputs, make):
            params, variables, cache = inputs
            block = nnx_pure.bind(make, params, variables)
            return block.decode(x_B1D, cache, position, shard)

        if first:
            step = functools.partial(layer, make=functools.partial(Block, c))
            inputs = self._params(self.dense_blocks), {}, caches[0]
            x_B1D, caches[0] = jax.lax.scan(step, x_B1D, inputs)
        if c.moe_every == 1:
            rest = rest[:1]
        stacked = jax.tree.map(lambda x: x[first:].reshape(*rest, *x.shape[1:]), cache)
        step = functools.partial(layer, make=self.make_block)
        inputs = self.block_params(), self._params(self.blocks, RouterBias), stacked
        x_B1D, stacked = jax.lax.scan(step, x_B1D, inputs)
        caches.append(
            jax.tree.map(lambda x, old: x.reshape(-1, *old.shape[1:]), stacked, cache)
        )
        return x_B1D, jax.tree.map(lambda a, b: jnp.concatenate([a, b]), *caches)

    def _params(self, module: nnx.Module, kind: Any = nnx.Param) -> Params:
        return nnx.to_pure_dict(nnx.state(module, kind))
