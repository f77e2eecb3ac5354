"""Norm, attention, MLP, and the block built from them. Weights name logical axes.

Shape letters: B batch, L length, D width, H heads, G key-value heads, K head width,
F hidden width.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ..sharding import Sharder
from .adapters import adapt
from .attention import attend, attend_cached, rotate
from .context import choose
from .linear import linear

if TYPE_CHECKING:
    from .transformer import Config

RESIDUAL = ("batch", "residual_length", "embed")
# Drops a part of what attention (0) or the MLP (1) adds to the residual stream.
Drop = Callable[[jax.Array, int], jax.Array]
INITIAL_SCALE = 0.02


def weight(config: "Config", rngs: nnx.Rngs, shape, axes, *, scale=INITIAL_SCALE):
    value = scale * jax.random.normal(rngs.params(), shape, config.param_dtype)
    return nnx.Param(value, axes=axes)


def constant(config: "Config", value: float, shape, axes):
    return nnx.Param(jnp.full(shape, value, config.param_dtype), axes=axes)


class Norm(nnx.Module):
    """RMSNorm, or LayerNorm with a bias if the config has biases, in float32.

    Args:
      width: of the last dimension of the input; default d_model.
    """

    def __init__(self, config: "Config", rngs: nnx.Rngs, width: int | None = None):
        self.config = config
        shape = (width or config.d_model,)
        self.scale = constant(config, 1.0, shape, ("norm",))
        if config.norm == "layer" and config.use_bias:
            self.bias = constant(config, 0.0, shape, ("norm",))

    def __call__(self, x_BLD: jax.Array, shard: Sharder) -> jax.Array:
        x, last = x_BLD.astype(jnp.float32), (1,) * (x_BLD.ndim - 1) + (-1,)
        if self.config.norm == "layer":
            x = x - jnp.mean(x, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        x = x * jax.lax.rsqrt(variance + self.config.norm_epsilon)
        x = x * shard.weight(self.scale[...], ("norm",)).reshape(last)
        if hasattr(self, "bias"):
            x = x + shard.weight(self.bias[...], ("norm",)).reshape(last)
        return x.astype(x_BLD.dtype)


class Attention(nnx.Module):
    """Grouped-query attention with optional rotary positions.

    The query, key and value projections are one weight [D, G, R + 2, K]: each key-value
    head with the R query heads that share it. This is one matmul, and if it is sharded
    by heads, one all-reduce in the backward pass instead of three.
    """

    def __init__(self, config: "Config", rngs: nnx.Rngs):
        c = self.config = config
        D, H, G, K = c.d_model, c.num_heads, c.kv_heads, c.head_width
        grouped = (G, H // G + 2, K)
        axes, out_axes = ("kv_heads", None, "head_dim"), ("heads", "head_dim", "embed")
        self.qkv = weight(c, rngs, (D, *grouped), ("embed", *axes))
        self.out = weight(c, rngs, (H, K, D), out_axes, scale=residual_scale(c))
        if c.use_bias or c.qkv_bias:
            self.qkv_bias = constant(c, 0.0, grouped, axes)
        if c.use_bias:
            self.out_bias = constant(c, 0.0, (D,), ("norm",))
        if c.qk_norm:
            self.q_norm, self.k_norm = Norm(c, rngs, K), Norm(c, rngs, K)
        adapt(self, c, rngs)

    def __call__(self, x_BLD, positions_BL, segments_BL, shard: Sharder) -> jax.Array:
        q, k, v = self.project(x_BLD, positions_BL, shard)
        out = attend(
            q,
            k,
            v,
            shard,
            segments_BL=segments_BL,
            causal=self.config.causal,
            implementation=self.config.attention,
            form=choose(self.config, x_BLD.shape[1], shard),
        )
        out = shard(out, ("batch", "length", "heads", "head_dim"))
        return linear(out, self, "out", 2, shard)

    def project(self, x_BLD, positions_BL, shard: Sharder):
        """Returns queries [B, L, H, K], and keys and values [B, L, G, K].

        Queries and keys are normalized if the config says so, then rotated.
        """
        c = self.config
        qkv = checkpoint_name(linear(x_BLD, self, "qkv", 1, shard), "qkv")
        q, k, v = jnp.split(qkv, (qkv.shape[3] - 2, qkv.shape[3] - 1), axis=3)
        q = q.reshape(*q.shape[:2], c.num_heads, c.head_width)
        k, v = k[..., 0, :], v[..., 0, :]
        if c.qk_norm:
            q, k = self.q_norm(q, shard), self.k_norm(k, shard)
        if c.positions == "rotary":
            q = rotate(q, positions_BL, c.rope_theta, c.rope_scaling)
            k = rotate(k, positions_BL, c.rope_theta, c.rope_scaling)
        kv_axes = ("batch", "length", "kv_heads", "head_dim")
        q = shard(q, ("batch", "length", "heads", "head_dim"))
        return q, shard(k, kv_axes), shard(v, kv_axes)

    def decode(self, x_B1D, cache, position, shard: Sharder):
        """Computes one position, and adds it to the cache (k, v), each [B, S, G, K]."""
        positions = jnp.full(x_B1D.shape[:2], position, jnp.int32)
        q, k, v = self.project(x_B1D, positions, shard)
        cache = tuple(
            jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), position, 1)
            for old, new in zip(cache, (k, v), strict=True)
        )
        out = attend_cached(q[:, 0], cache[0], cache[1], position)[:, None]
        return linear(out, self, "out", 2, shard), cache


class MLP(nnx.Module):
    """SwiGLU, or one hidden layer with GELU.

    Gate and up are separate weights. For a fused [D, 2, F], XLA for TPU relayouts the
    weight and its product, and all-reduces its gradient unsharded.
    """

    def __init__(self, config: "Config", rngs: nnx.Rngs):
        c = self.config = config
        D, F = c.d_model, c.d_ff
        if c.mlp == "swiglu":
            self.gate = weight(c, rngs, (D, F), ("embed", "mlp"))
        self.up = weight(c, rngs, (D, F), ("embed", "mlp"))
        self.down = weight(c, rngs, (F, D), ("mlp", "embed"), scale=residual_scale(c))
        if c.use_bias:
            if c.mlp == "swiglu":
                self.gate_bias = constant(c, 0.0, (F,), ("mlp",))
            self.up_bias = constant(c, 0.0, (F,), ("mlp",))
            self.down_bias = constant(c, 0.0, (D,), ("norm",))
        adapt(self, c, rngs)

    def __call__(self, x_BLD: jax.Array, shard: Sharder) -> jax.Array:
        up = checkpoint_name(linear(x_BLD, self, "up", 1, shard), "hidden")
        if self.config.mlp == "swiglu":
            gate = checkpoint_name(linear(x_BLD, self, "gate", 1, shard), "hidden")
            hidden = jax.nn.silu(gate) * up
        else:
            hidden = jax.nn.gelu(up)
        hidden = shard(hidden, ("batch", "length", "mlp"))
        return linear(hidden, self, "down", 1, shard)


class Block(nnx.Module):
    """Pre-norm attention and MLP on a residual stream."""

    def __init__(self, config: "Config", rngs: nnx.Rngs, make_mlp: Any = MLP):
        self.attention_norm = Norm(config, rngs)
        self.attention = Attention(config, rngs)
        self.mlp_norm = Norm(config, rngs)
        self.mlp: Any = make_mlp(config, rngs)

    def __call__(
        self,
        x_BLD,
        positions_BL,
        segments_BL,
        shard: Sharder,
        drop: Drop = lambda y, part: y,
    ) -> jax.Array:
        x_BLD = self.attend(x_BLD, positions_BL, segments_BL, shard, drop)
        y = self.mlp(self._gather_length(self.mlp_norm(x_BLD, shard), shard), shard)
        return x_BLD + shard(drop(y, 1), RESIDUAL)

    def attend(
        self,
        x_BLD,
        positions_BL,
        segments_BL,
        shard: Sharder,
        drop: Drop = lambda y, part: y,
    ) -> jax.Array:
        """Adds attention to the residual stream, the first half of the block."""
        y = self.attention(
            self._gather_length(self.attention_norm(x_BLD, shard), shard),
            positions_BL,
            segments_BL,
            shard,
        )
        return checkpoint_name(x_BLD + shard(drop(y, 0), RESIDUAL), "middle")

    def decode(self, x_B1D, cache, position, shard: Sharder):
        x_B1D, cache = self.attend_cached(x_B1D, cache, position, shard)
        return x_B1D + self.mlp(self.mlp_norm(x_B1D, shard), shard), cache

    def attend_cached(self, x_B1D, cache, position, shard: Sharder):
        y, cache = self.attention.decode(
            self.attention_norm(x_B1D, shard), cache, position, shard
        )
        return x_B1D + y, cache

    def _gather_length(self, x_BLD: jax.Array, shard: Sharder) -> jax.Array:
        """Gathers the positions that the residual stream has sharded."""
        return shard(x_BLD, ("batch", "length", "embed"))


def residual_scale(config: "Config") -> float:
    """Returns the initial scale of weights that add to the residual stream."""
    return INITIAL_SCALE / math.sqrt(2 * config.num_layers)
