"""A decoder-only transformer that covers GPT-2, Llama 2 and 3, Mistral, Qwen 2 and 3.

Shape letters: B batch, L length, D width, V vocabulary (padded).
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx

from ..sharding import Sharder
from . import nnx_pure
from .adapters import Adapters
from .attention import Implementation
from .context import ContextAttention, arrange, in_order, notes, with_positions
from .context import choose as choose_form
from .cross_entropy import cross_entropy
from .head import STREAM, Head
from .layers import RESIDUAL, Block, Norm, weight
from .lookup import lookup
from .nnx_pure import Params
from .remat import Remat, rematerialize
from .rope_scaling import RopeScaling

DType = Literal["float32", "bfloat16"]
Norms = Literal["rms", "layer"]
Positions = Literal["rotary", "learned"]
Activation = Literal["swiglu", "gelu"]
CHOICES = {
    "norm": get_args(Norms),
    "positions": get_args(Positions),
    "mlp": get_args(Activation),
    "remat": get_args(Remat),
    "attention": get_args(Implementation),
    "context_attention": get_args(ContextAttention),
    "param_dtype": get_args(DType),
    "compute_dtype": get_args(DType),
}
SIZES = (
    "vocab_size",
    "num_layers",
    "d_model",
    "num_heads",
    "d_ff",
    "max_length",
    "num_kv_heads",
    "head_dim",
    "pad_vocab_to",
    "unroll",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A transformer language model; implements the trainer's model interface.

    Attributes:
      num_kv_heads: key-value heads shared by groups of query heads; default num_heads.
      head_dim: default d_model / num_heads.
      rope_scaling: of rotary positions, for long sequences.
      qkv_bias: biases of queries, keys and values alone; use_bias adds all.
      qk_norm: normalize queries and keys of each head, before rotary positions.
      adapters: low-rank adapters among the parameters; lora.Config trains them alone.
      pad_vocab_to: pad the vocabulary to a multiple of this, so that mesh axes divide
        it. Padded entries have no probability.
      logit_softcap: squeeze logits into (-cap, cap) with a tanh.
      z_loss: weight of log(Z)^2, which keeps logits from drifting.
      head_block: tokens of a device whose logits exist at once in a step; the loss of
        more is computed in blocks. 0 is for all of them. None is chosen by the trainer
        for the memory of the devices, and elsewhere means 0.
      context_attention: how devices exchange keys where positions are sharded; see
        context.py. "auto" says what it chose.
      unroll: layers per iteration of the loop over layers, outside of pipelines. With
        unroll=num_layers there is no loop, and compilation takes longer.
    """

    vocab_size: int
    num_layers: int
    d_model: int
    num_heads: int
    d_ff: int
    max_length: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    norm: Norms = "rms"
    norm_epsilon: float = 1e-5
    positions: Positions = "rotary"
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    mlp: Activation = "swiglu"
    use_bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    tied_head: bool = False
    adapters: Adapters | None = None
    pad_vocab_to: int = 1
    logit_softcap: float | None = None
    z_loss: float = 0.0
    head_block: int | None = None
    remat: Remat = "save-named"
    unroll: int = 1
    attention: Implementation = "auto"
    context_attention: ContextAttention = "auto"
    param_dtype: DType = "float32"
    compute_dtype: DType = "bfloat16"

    # Whether a position sees only those before it.
    causal: ClassVar[bool] = True
    # The field that sets the size of each logical axis, for error messages.
    axis_settings: ClassVar[Mapping[str, str]] = {
        "vocab": "pad_vocab_to",
        "embed": "d_model",
        "mlp": "d_ff",
        "heads": "num_heads",
        "kv_heads": "num_kv_heads",
    }

    def __post_init__(self):
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name} must be one of {', '.join(choices)}, got "
                    f"{getattr(self, name)!r}"
                )
        for name in SIZES:
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if (self.head_block or 0) < 0:
            raise ValueError(
                f"head_block must be >= 0, got {self.head_block}; 0 computes the "
                "logits of all tokens at once"
            )
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} must be a multiple of num_kv_heads "
                f"{self.kv_heads}"
            )
        if self.head_dim is None and self.d_model % self.num_heads:
            raise ValueError(
                f"d_model {self.d_model} must be a multiple of num_heads "
                f"{self.num_heads}; change one, or set head_dim"
            )
        if self.positions == "rotary" and self.head_width % 2:
            raise ValueError(
                f"rotary positions need an even head_dim, got {self.head_width}"
            )
        if self.rope_scaling is not None and self.positions != "rotary":
            raise ValueError(
                f"rope_scaling has no effect on {self.positions} positions; set it to "
                'None, or positions="rotary"'
            )
        if self.qk_norm and self.norm != "rms":
            raise ValueError(f'qk_norm needs norm="rms", got norm={self.norm!r}')

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def head_width(self) -> int:
        return self.head_dim or self.d_model // self.num_heads

    @property
    def padded_vocab(self) -> int:
        return -(-self.vocab_size // self.pad_vocab_to) * self.pad_vocab_to

    def init(self, key: jax.Array) -> Params:
        return nnx_pure.init(self.make, key)

    def axes(self) -> Params:
        return nnx_pure.axes(self.make)

    def batch_axes(self) -> dict[str, tuple[str, ...]]:
        """Returns the logical axes of every array that a batch may have."""
        names = ("inputs", "targets", "weights", "positions", "segments")
        return dict.fromkeys(names, ("batch", "length"))

    def check_batch(self, batch: dict[str, Any], facts: dict[str, Any]) -> None:
        """Raises ValueError if the data does not fit, before anything is compiled."""
        needed = facts.get("vocab_size", 0)
        if needed > self.vocab_size:
            raise ValueError(
                f"the data has a vocabulary of {needed}, but the model's vocab_size is "
                f"{self.vocab_size}. Raise vocab_size to {needed}."
            )
        for name in ("inputs", "targets", "weights"):
            if name not in batch:
                raise ValueError(
                    f"the model needs an array {name!r}, but the batch has only "
                    f"{', '.join(batch)}"
                )
        length = batch["inputs"].shape[1]
        if length > self.max_length:
            raise ValueError(
                f"the data's sequences have length {length}, but the model's "
                f"max_length is {self.max_length}. Raise max_length or shorten the "
                "data's length."
            )

    def loss(
        self, params: Params, batch: dict[str, jax.Array], shard: Sharder
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """Returns the loss sum, its weight, and other sums, over a batch's tokens."""
        batch = arrange(self, with_positions(batch), shard)
        return nnx_pure.bind(self.make, params).loss(batch, shard)

    def predict(
        self, params: Params, batch: dict[str, jax.Array], shard: Sharder
    ) -> dict[str, jax.Array]:
        """Returns each row's mean loss, and its share of tokens predicted right."""
        batch = arrange(self, with_positions(batch), shard)
        return nnx_pure.bind(self.make, params).predict(batch, shard)

    def block(
        self, params: Params, x_BLD: jax.Array, batch: dict[str, Any], shard: Sharder
    ) -> jax.Array:
        """Applies one block of the stack. The batch must have positions."""
        layer = nnx_pure.bind(functools.partial(Block, self), params)
        return layer(x_BLD, batch["positions"], batch.get("segments"), shard)

    def stack(self):
        """Returns the model as a meshloom.sharding.pipeline.Stack."""
        from .transformer_stack import TransformerStack

        return TransformerStack(self)

    def logits(self, params: Params, tokens_BL: jax.Array, shard: Sharder) -> jax.Array:
        model, shard = nnx_pure.bind(self.make, params), in_order(shard)
        return model.head_logits(model.hidden({"inputs": tokens_BL}, shard), shard)

    def notes(self, batch: dict[str, Any], shard: Sharder) -> list[str]:
        """Returns lines about what the model chooses on this mesh."""
        return notes(self, batch["inputs"].shape[1], shard)

    def generate(
        self, params: Params, prompt_BP: jax.Array, num_tokens: int, **options
    ) -> jax.Array:
        """Returns the prompt followed by `num_tokens` new ones; see decode.generate."""
        from .decode import generate

        model = nnx_pure.bind(self.make, params)
        return generate(model, prompt_BP, num_tokens, **options)

    def num_params(self) -> int:
        """Returns the number of parameters, without padding of the vocabulary."""
        config = dataclasses.replace(self, pad_vocab_to=1)
        shapes = jax.eval_shape(lambda: config.init(jax.random.key(0)))
        return sum(leaf.size for leaf in jax.tree.leaves(shapes))

    def model_flops(self, batch: dict[str, Any]) -> float:
        """Returns the FLOPs of one update on a batch, without recomputation.

        These are 6 per matmul weight and token (2 forward, 4 backward), plus causal
        attention, 6 * layers * length * heads * head_dim per token.
        """
        num_examples, length = batch["inputs"].shape
        c = self
        attention = c.d_model * c.head_width * 2 * (c.num_heads + c.kv_heads)
        mlp = c.d_model * c.d_ff * (3 if c.mlp == "swiglu" else 2)
        matmul = c.num_layers * (attention + mlp) + c.vocab_size * c.d_model
        causal = c.num_layers * length * c.num_heads * c.head_width
        return 6.0 * num_examples * length * (matmul + causal)

    def costs(
        self,
        rows: int,
        length: int,
        *,
        platform: str = "tpu",
        shard: Sharder = Sharder(),  # noqa: B008
    ):
        """Returns the costs of a step on `rows` examples, for `meshloom plan`."""
        from .attention import choose
        from .transformer_costs import costs

        size = 2 if self.compute_dtype == "bfloat16" else 4
        kernel = choose(self.attention, platform, size, length, self.head_width)
        return costs(self, rows, length, kernel, choose_form(self, length, shard))

    @property
    def make(self):
        """A function that makes the module from nnx.Rngs."""
        return functools.partial(Transformer, self)


class Transformer(nnx.Module):
    """Embedding, a stack of blocks with a leading layer dimension, and a head."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        c = self.config = config
        self.embedding = weight(
            c, rngs, (c.padded_vocab, c.d_model), ("vocab", "embed")
        )
        if c.positions == "learned":
            shape = (c.max_length, c.d_model)
            self.position = weight(c, rngs, shape, ("position", "embed"))
        self.blocks = nnx_pure.stack(self.make_block, self.num_stacked, rngs)
        self.final_norm = Norm(c, rngs)
        if not c.tied_head:
            shape = (c.d_model, c.padded_vocab)
            self.head = weight(c, rngs, shape, ("embed", "vocab"))

    @property
    def num_stacked(self) -> int:
        return self.config.num_layers

    @property
    def make_block(self):
        return functools.partial(Block, self.config)

    def embed(self, tokens_BL, positions_BL, shard: Sharder) -> jax.Array:
        c = self.config
        x_BLD = lookup(
            self.embedding[...],
            ("vocab", "embed"),
            tokens_BL,
            shard,
            c.compute_dtype,
            gather=c.tied_head,
        )
        if c.positions == "learned":
            axes = ("position", "embed")
            x_BLD = x_BLD + lookup(
                self.position[...], axes, positions_BL, shard, c.compute_dtype
            )
        return shard(x_BLD, RESIDUAL)

    def block_params(self) -> Params:
        """Returns the stacked blocks as a plain tree, each array [layer, ...]."""
        return nnx.to_pure_dict(nnx.state(self.blocks, nnx.Param))

    def decode(self, x_B1D, cache, position, shard: Sharder):
        """Passes one position through all blocks, and adds it to their cache."""

        def layer(x_B1D, inputs):
            params, cache = inputs
            block = nnx_pure.bind(self.make_block, params)
            return block.decode(x_B1D, cache, position, shard)

        return jax.lax.scan(layer, x_B1D, (self.block_params(), cache))

    def hidden(self, batch: dict[str, jax.Array], shard: Sharder) -> jax.Array:
        """Returns the residual stream after the last block."""
        batch = with_positions(batch)

        def block(x_BLD, params):
            return self.config.block(params, x_BLD, batch, shard), None

        x_BLD = self.embed(batch["inputs"], batch["positions"], shard)
        unroll = self.config.unroll
        body = rematerialize(block, self.config.remat, in_loop=unroll == 1)
        return jax.lax.scan(body, x_BLD, self.block_params(), unroll=unroll)[0]

    def head_logits(self, x_BLD: jax.Array, shard: Sharder) -> jax.Array:
        """Returns logits, with the vocabulary sharded by the rules and padding -1e9."""
        head, x_BLD, w = self.head_inputs(x_BLD, shard)
        return head.finish(head.products(x_BLD, w))

    def head_inputs(
        self, x_BLD: jax.Array, shard: Sharder
    ) -> tuple[Head, jax.Array, jax.Array]:
        c = self.config
        head = Head(c, shard)
        x_BLD = shard(self.final_norm(x_BLD, shard), STREAM)
        table = self.embedding if c.tied_head else self.head
        return head, x_BLD, shard.weight(table[...], head.axes, c.compute_dtype)

    def predict(
        self, batch: dict[str, jax.Array], shard: Sharder
    ) -> dict[str, jax.Array]:
        """Returns each row's mean loss, and its share of tokens predicted right."""
        logits_BLV = self.head_logits(self.hidden(batch, shard), shard)
        targets_BL = batch["targets"]
        nll_BL, _ = cross_entropy(logits_BLV, targets_BL, z_loss=0.0)
        right_BL = jnp.argmax(logits_BLV, axis=-1) == targets_BL
        weights_BL = batch["weights"].astype(jnp.float32)
        total_B = jnp.sum(weights_BL, axis=-1)
        loss_B = jnp.sum(nll_BL * weights_BL, axis=-1) / total_B
        return {
            "loss": loss_B,
            "accuracy": jnp.sum(right_BL * weights_BL, axis=-1) / total_B,
        }

    def loss(self, batch: dict[str, jax.Array], shard: Sharder):
        return self.head_loss(self.hidden(batch, shard), batch, shard)

    def head_loss(self, x_BLD, batch: dict[str, jax.Array], shard: Sharder):
        head, x_BLD, w = self.head_inputs(x_BLD, shard)
        loss, z = head.sums(x_BLD, w, batch)
        weight = jnp.sum(batch["weights"].astype(jnp.float32))
        return loss, weight, {"penalty": z} if self.config.z_loss else {}
