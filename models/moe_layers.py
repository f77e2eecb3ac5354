"""A layer of experts in place of an MLP, and the blocks that have one.

Shape letters: B batch, L length, D width, E experts, K experts of a token, F hidden
width of an expert, S the sums of STATISTICS.
"""

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from ..sharding import Sharder
from ..sharding.manual import axes_of_name, enter, leave, manual
from . import routing
from .experts import RAGGED_PLATFORMS, Ways, dropless, grouped, with_capacity
from .layers import MLP, RESIDUAL, Block, residual_scale, weight

if TYPE_CHECKING:
    from .moe import Config

# Sums over tokens, of one layer of experts; docs/moe.md says what they mean.
STATISTICS = (
    "balance_loss",
    "router_z_loss",
    "router_entropy",
    "dropped",
    "expert_imbalance",
    "device_imbalance",
)
Sums = dict[str, jax.Array]


class RouterBias(nnx.Variable):
    """Added to the scores for the choice of experts; changed by counts, not trained."""


class Experts(nnx.Module):
    """Routed experts, and shared ones that every token passes through."""

    def __init__(self, config: "Config", rngs: nnx.Rngs):
        c = self.config = config
        E, D, F = c.num_experts, c.d_model, c.expert_width
        into, out = ("experts", "embed", "mlp"), ("experts", "mlp", "embed")
        self.router = weight(c, rngs, (D, E), ("embed", None))
        if c.mlp == "swiglu":
            self.gate = weight(c, rngs, (E, D, F), into)
        self.up = weight(c, rngs, (E, D, F), into)
        self.down = weight(c, rngs, (E, F, D), out, scale=residual_scale(c))
        if c.bias_rate:
            self.bias = RouterBias(jnp.zeros(E), axes=(None,))
        if c.num_shared_experts:
            width = c.num_shared_experts * F
            self.shared = MLP(dataclasses.replace(c, d_ff=width), rngs)

    def __call__(
        self, x_BLD: jax.Array, weights_BL: jax.Array, shard: Sharder
    ) -> tuple[jax.Array, Sums, jax.Array]:
        """Returns the result, sums over tokens, and the tokens of each expert [E].

        Args:
          weights_BL: how much each token counts in the sums.
        """
        c, (B, L, D) = self.config, x_BLD.shape
        tokens = ("batch", "length")
        weights = {"router": shard.weight(self.router[...], ("embed", None))}
        axes: list[Any] = [(*tokens, "embed"), tokens, (None, None)]
        if c.bias_rate:
            weights["bias"] = self.bias[...]
            axes.append((None,))
        for name in ("gate", "up", "down"):
            if hasattr(self, name):
                variable = getattr(self, name)
                axes.append(variable.get_metadata()["axes"])
                weights[name] = shard.weight(variable[...], axes[-1], x_BLD.dtype)
        device = _Device(c, shard, B, L, tuple(weights))
        S, E = len(STATISTICS), c.num_experts
        run = manual(
            device,
            shard,
            axes,
            [(*tokens, "embed"), ("batch", None), ("batch", None)],
            [(B, L, D), (B, S), (B, E)],
        )
        y_BLD, sums_BS, counts_BE = run(x_BLD, weights_BL, *weights.values())
        if c.num_shared_experts:
            y_BLD = y_BLD + self.shared(x_BLD, shard)
        sums = jnp.sum(sums_BS, axis=0)
        return y_BLD, dict(zip(STATISTICS, sums, strict=True)), counts_BE.sum(axis=0)


class _Device:
    """What one device does, with its tokens and its shard of the experts."""

    def __init__(self, config: "Config", shard: Sharder, B: int, L: int, names):
        self.config, self.shard, self.names = config, shard, names
        E = config.num_experts
        found = axes_of_name(shard, "experts", E)
        self.ways = Ways(
            tuple(found),
            math.prod(found.values()),
            ragged=shard.platform in RAGGED_PLATFORMS,
            replicated=_has_all_tokens(shard, found, B),
        )
        self.split = tuple(axes_of_name(shard, "mlp", config.expert_width))
        self.lengths = tuple(axes_of_name(shard, "length", L))
        self.summed = (*self.split, *(found if self.ways.replicated else ()))
        _check(config, shard)

    def __call__(self, x_BLD, weights_BL, *values):
        # With positions on several devices, each has a part of the weights' gradients.
        values = [enter(value, self.lengths, self.shard) for value in values]
        w = dict(zip(self.names, values, strict=True))
        c, (B, L, D) = self.config, x_BLD.shape
        logits_BLE = jnp.einsum(
            "BLD,DE->BLE", x_BLD.astype(jnp.float32), w["router"].astype(jnp.float32)
        )
        routed = routing.route(logits_BLE, w.get("bias"), c)
        # Each device has a part of every hidden layer; results are summed at the end.
        x_BLD = enter(x_BLD, self.summed, self.shard)
        if c.capacity_factor is None or L == 1:  # one token drops nothing
            y, kept, received = dropless(
                x_BLD.reshape(B * L, D),
                routed.experts_BLK.reshape(B * L, -1),
                c.num_experts,
                self.ways,
                functools.partial(grouped, hidden=functools.partial(self._ffn, w)),
            )
        else:
            if self.lengths:
                raise ValueError(
                    "capacity_factor: each expert takes a number of tokens of an "
                    f"example, but its positions are sharded over {self.lengths}. Use "
                    "capacity_factor=None (dropless), or do not shard `length`."
                )
            y, kept, received = with_capacity(
                x_BLD,
                routed.experts_BLK,
                c.num_experts,
                c.capacity(L),
                self.ways,
                lambda x: self._ffn(
                    w, x, functools.partial(jnp.einsum, "ERD,EDF->ERF")
                ),
            )
        y_BLKD = y.reshape(B, L, -1, D)
        mixing = enter(routed.weights_BLK.astype(y.dtype), self.summed, self.shard)
        y_BLD = jnp.einsum("BLKD,BLK->BLD", y_BLKD, mixing)
        y_BLD = leave(y_BLD, self.summed, self.shard)
        kept_BLK = kept.reshape(routed.experts_BLK.shape)
        return y_BLD, *self._statistics(routed, weights_BL, kept_BLK, received)

    def _ffn(self, w, rows, product) -> jax.Array:
        up = product(rows, w["up"])
        if "gate" in w:
            hidden = jax.nn.silu(product(rows, w["gate"])) * up
        else:
            hidden = jax.nn.gelu(up)
        return product(hidden, w["down"])

    def _statistics(self, routed, weights_BL, kept_BLK, received):
        """Returns the sums of STATISTICS [B, S] and the counts [B, E] of each row."""
        counts_BE = routing.counts(routed, weights_BL, self.config.num_experts)
        shares_BE = jnp.einsum("BLE,BL->BE", routed.shares_BLE, weights_BL)
        lost_BL = jnp.mean(1.0 - kept_BLK, axis=-1)
        each_BL = (
            jnp.square(routed.log_z_BL),
            routing.entropy(routed.shares_BLE),
            lost_BL,
            jnp.ones_like(weights_BL),
            jnp.ones_like(weights_BL) * self._device_imbalance(received),
        )
        sums = [counts_BE, shares_BE, *(jnp.sum(x * weights_BL, 1) for x in each_BL)]
        sums = [leave(x, self.lengths, self.shard) for x in sums]
        counts_BE, shares_BE, z_B, entropy_B, lost_B, tokens_B, devices_B = sums
        statistics = (
            routing.balance(counts_BE, shares_BE, tokens_B),
            z_B,
            entropy_B,
            lost_B,
            routing.imbalance(counts_BE, tokens_B),
            devices_B,
        )
        return jnp.stack(statistics, axis=1), counts_BE

    def _device_imbalance(self, received) -> jax.Array:
        """Returns the most rows of a device over the mean, of those with all experts.

        It differs between groups of devices and is counted by each for its own tokens.
        """
        if self.ways.size == 1 or self.ways.replicated:
            return jnp.float32(1.0)
        rows = received.astype(jnp.float32)
        axes = self.ways.axes
        mean = lax.psum(rows, axes) / self.ways.size
        return lax.pmax(rows, axes) / jnp.maximum(mean, 1.0)


def _has_all_tokens(shard: Sharder, experts: Any, B: int) -> bool:
    """Returns whether the devices that share the experts all have the same tokens.

    Then there is nothing to send, as in generation of a single text.
    """
    if shard.mesh is None or not experts:
        return False
    rows = set(shard.mesh.manual_axes) or set(axes_of_name(shard, "batch", B))
    if rows.isdisjoint(experts):
        return True
    if other := [axis for axis in experts if axis not in rows]:
        raise ValueError(
            f"the rules shard `experts` over {', '.join(experts)}, of which "
            f"{', '.join(other)} does not shard the batch; devices exchange tokens "
            "along axes that do both. Shard `batch` over it too, or `experts` over "
            "another axis."
        )
    return False


def _check(config: "Config", shard: Sharder) -> None:
    if axes := axes_of_name(shard, "embed", config.d_model):
        raise ValueError(
            f"the plan shards `embed` over {', '.join(axes)} in computation, as "
            "tensor2d does, but experts need the width of a token unsharded. Use the "
            "plan data+fsdp+tensor."
        )


class ExpertBlock(Block):
    """A block of a transformer with experts in place of the MLP."""

    def __init__(self, config: "Config", rngs: nnx.Rngs):
        super().__init__(config, rngs, make_mlp=Experts)

    def __call__(self, x_BLD, batch: dict[str, Any], shard: Sharder):  # type: ignore
        """Returns the residual stream, and the sums and counts of the experts."""
        x_BLD = self.attend(x_BLD, batch["positions"], batch.get("segments"), shard)
        inside = self._gather_length(self.mlp_norm(x_BLD, shard), shard)
        weights_BL = batch.get("weights", jnp.ones(x_BLD.shape[:2]))
        y, sums, counts_E = self.mlp(inside, weights_BL.astype(jnp.float32), shard)
        return x_BLD + shard(y, RESIDUAL), sums, counts_E

    def decode(self, x_B1D, cache, position, shard: Sharder):
        x_B1D, cache = self.attend_cached(x_B1D, cache, position, shard)
        weights_B1 = jnp.ones(x_B1D.shape[:2])
        return x_B1D + self.mlp(self.mlp_norm(x_B1D, shard), weights_B1, shard)[
            0
        ], cache


class Period(nnx.Module):
    """Dense blocks and then one with experts: an entry of the stack."""

    def __init__(self, config: "Config", rngs: nnx.Rngs):
        self.names = [f"dense_{i}" for i in range(config.moe_every - 1)]
        for name in self.names:
            setattr(self, name, Block(config, rngs))
        self.last = ExpertBlock(config, rngs)

    def __call__(self, x_BLD, batch: dict[str, Any], shard: Sharder):
        for name in self.names:
            block = getattr(self, name)
            x_BLD = block(x_BLD, batch["positions"], batch.get("segments"), shard)
        return self.last(x_BLD, batch, shard)

    def decode(self, x_B1D, cache, position, shard: Sharder):
        new = []
        for i, name in enumerate([*self.names, "last"]):
            part = jax.tree.map(lambda x, i=i: x[i], cache)
            x_B1D, part = getattr(self, name).decode(x_B1D, part, position, shard)
            new.append(part)
        return x_B1D, jax.tree.map(lambda *parts: jnp.stack(parts), *new)
