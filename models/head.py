"""The head of a language model: logits, and their loss over blocks of tokens.

Logits of all tokens of a large vocabulary can take more memory than the rest of a step.
With blocks they never exist at once: a loop computes the logits of one block of a
device's tokens, its loss, and at once the gradients of that loss. The backward pass
only scales these.

Shape letters: B batch, L length, D width, V vocabulary (padded), T tokens of a block.
"""

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ..sharding import Sharder
from ..sharding.local import vary
from .cross_entropy import cross_entropy

if TYPE_CHECKING:
    from .transformer import Config

STREAM = ("batch", "length", "embed")
LOGITS = ("batch", "length", "vocab")
# By name: nll and z [B, L], and in training the gradients dx [B, L, D] and dw.
Found = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Head:
    """The head of a config on a mesh. Its inputs are normed, its weight gathered."""

    config: "Config"
    shard: Sharder

    @property
    def axes(self) -> tuple[str, str]:
        """The logical axes of the weight: of the table if the head is tied to it."""
        return ("vocab", "embed") if self.config.tied_head else ("embed", "vocab")

    def products(self, x_BLD: jax.Array, w: jax.Array) -> jax.Array:
        """Returns logits in the compute dtype, before the soft-cap."""
        weight = "VD" if self.config.tied_head else "DV"
        return self.shard(jnp.einsum(f"BLD,{weight}->BLV", x_BLD, w), LOGITS)

    def finish(self, logits_BLV: jax.Array) -> jax.Array:
        """Returns logits in float32, with the soft-cap, and padding at -1e9."""
        c, logits = self.config, logits_BLV.astype(jnp.float32)
        if c.logit_softcap is not None:
            logits = c.logit_softcap * jnp.tanh(logits / c.logit_softcap)
        if c.padded_vocab != c.vocab_size:
            index = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2)
            logits = jnp.where(index < c.vocab_size, logits, -1e9)
        return logits

    def gradients(
        self, x_BLD: jax.Array, w: jax.Array, d_BLV: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns those of `products`; that of the weight is summed in float32."""
        weight = "VD" if self.config.tied_head else "DV"
        dx_BLD = self.shard(jnp.einsum(f"BLV,{weight}->BLD", d_BLV, w), STREAM)
        inputs = (d_BLV, x_BLD) if self.config.tied_head else (x_BLD, d_BLV)
        letters = "BLV,BLD->VD" if self.config.tied_head else "BLD,BLV->DV"
        dw = jnp.einsum(letters, *inputs, preferred_element_type=jnp.float32)
        return dx_BLD, self.shard(dw, self.axes)

    def sums(
        self, x_BLD: jax.Array, w: jax.Array, batch: dict[str, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the loss and the part of it that is z-loss, summed over the batch.

        With blocks, only the first has a gradient.
        """
        targets_BL = batch["targets"]
        weights_BL = batch["weights"].astype(jnp.float32)
        if self.num_blocks(x_BLD.shape) > 1:
            sums: Any = _in_blocks(self, x_BLD, w, targets_BL, weights_BL)
            return sums[0], jax.lax.stop_gradient(sums[1])
        logits_BLV = self.finish(self.products(x_BLD, w))
        each = cross_entropy(logits_BLV, targets_BL, z_loss=self.config.z_loss)
        return _sums(*each, weights_BL)

    def num_blocks(self, shape: tuple[int, ...]) -> int:
        """Returns into how many blocks the tokens of a device are divided."""
        tokens = math.prod(self.shard.shard_shape(shape, STREAM)[:2])
        return math.ceil(tokens / (self.config.head_block or tokens))


def _sums(nll_BL, z_BL, weights_BL) -> tuple[jax.Array, jax.Array]:
    nll, z = jnp.sum(nll_BL * weights_BL), jnp.sum(z_BL * weights_BL)
    return nll + z, z


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_blocks(head: Head, x_BLD, w, targets_BL, weights_BL):
    """Returns what `Head.sums` returns; without a gradient none is computed."""
    run = functools.partial(_run, head, training=False)
    found = run(x_BLD, w, targets_BL, weights_BL)
    return _sums(found["nll"], found["z"], weights_BL)


def _forward(head: Head, x_BLD, w, targets_BL, weights_BL):
    run = functools.partial(_run, head, training=True)
    found = run(x_BLD, w, targets_BL, weights_BL)
    nll_BL, z_BL = found["nll"], found["z"]
    saved = found["dx"], found["dw"], nll_BL + z_BL
    return _sums(nll_BL, z_BL, weights_BL), saved


def _backward(head: Head, saved, g):
    dx_BLD, dw, loss_BL = saved
    dx_BLD, dw = ((g[0] * d).astype(d.dtype) for d in (dx_BLD, dw))
    return dx_BLD, dw, None, g[0] * loss_BL


_in_blocks.defvjp(_forward, _backward)


def _run(head: Head, *arrays: jax.Array, training: bool) -> Found:
    """Runs the loop on each device's tokens.

    The axes that shard tokens are manual in it. Each device thus adds up its own part
    of the weight's gradient, and devices add these up once, after the loop.
    """
    shard = head.shard
    rows, length = (*shard.spec(arrays[0].shape, STREAM), None, None)[:2]
    axes = _axes(rows) + _axes(length)
    if not axes:
        found = _loop(head, *arrays, training=training)
    else:

        def body(*arrays):
            mesh = jax.sharding.get_abstract_mesh()
            local = dataclasses.replace(head, shard=Sharder(mesh, shard.rules))
            found = _loop(local, *arrays, training=training)
            return {k: x[None] if k == "dw" else x for k, x in found.items()}

        spec = P(rows, length)
        specs = {"nll": spec, "z": spec}
        specs |= {"dx": spec, "dw": P(axes)} if training else {}
        found = jax.shard_map(
            body,
            mesh=shard.mesh,
            axis_names=set(axes),
            in_specs=(spec, P(), spec, spec),
            out_specs=specs,
        )(*arrays)
    if training:
        dw = found["dw"]
        if axes:  # in the compute dtype, like the gradient of any other weight
            dw = jax.lax.reduce(dw, jnp.zeros((), dw.dtype), jax.lax.add, (0,))
        found["dw"] = shard(dw, head.axes, role="optimizer")
        # The sum is done before the blocks run backward, and only its shard waits.
        found = jax.lax.optimization_barrier(found)
    return found


def _axes(entry: None | str | tuple[str, ...]) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else entry


def _loop(head: Head, x_BLD, w, targets_BL, weights_BL, *, training: bool) -> Found:
    """Returns losses of tokens, and the gradients of their weighted sum."""
    shape, num = x_BLD.shape, head.num_blocks(x_BLD.shape)
    tokens = shape[0] * shape[1]
    size = math.ceil(tokens / num)

    def divide(x):
        x = x.reshape(1, tokens, *x.shape[2:])
        pad = [(0, 0)] * x.ndim
        pad[1] = (0, num * size - tokens)  # tokens without weight
        return jnp.pad(x, pad).reshape(num, 1, size, *x.shape[2:])

    def block(dw, arrays):
        x_1TD, targets_1T, weights_1T = arrays

        def loss(logits_1TV):
            logits_1TV = head.finish(logits_1TV)
            z_loss = head.config.z_loss
            nll_1T, z_1T = cross_entropy(logits_1TV, targets_1T, z_loss=z_loss)
            return jnp.sum((nll_1T + z_1T) * weights_1T), {"nll": nll_1T, "z": z_1T}

        logits_1TV = head.products(x_1TD, w)
        if not training:
            return dw, loss(logits_1TV)[1]
        d_1TV, found = jax.grad(loss, has_aux=True)(logits_1TV)
        dx_1TD, more = head.gradients(x_1TD, w, d_1TV)
        return dw + more, found | {"dx": dx_1TD}

    start = None
    if training:
        start = vary(jnp.zeros(w.shape, jnp.float32), x_BLD, w, weights_BL)
    blocks = tuple(map(divide, (x_BLD, targets_BL, weights_BL)))
    dw, found = jax.lax.scan(block, start, blocks)

    def join(x):
        x = x.reshape(num * size, *x.shape[3:])
        return x[:tokens].reshape(*shape[:2], *x.shape[1:])

    found = {name: join(x) for name, x in found.items()}
    if training:
        # Without the barrier XLA for TPU casts in the loop, and sums in that type.
        found["dw"] = jax.lax.optimization_barrier(dw).astype(w.dtype)
    return found
