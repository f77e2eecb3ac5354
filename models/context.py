"""Attention where the positions of a sequence are sharded over devices.

gather    every device gathers all keys and values
ulysses   an all-to-all gives each device all positions of some heads, another returns
          the result
ring      blocks of keys and values travel from device to device (ring.py)

Shape letters: B batch, L length, N positions of a device, H heads, G key-value heads,
K head width.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from ..sharding import Sharder
from ..sharding.text import human_bytes
from .ring import Gathered, Ring, attend_in_blocks
from .zigzag import axes_of, zigzag

if TYPE_CHECKING:
    from .transformer import Config

ContextAttention = Literal["auto", "gather", "ulysses", "ring"]
# The most that keys and values of one example may take, gathered, for "auto" to gather
# them: those of llama3_8b at 128k positions.
MOST_GATHERED = 512 * 2**20


@dataclasses.dataclass(frozen=True)
class Form:
    """How devices exchange what attention needs, and why so.

    Attributes:
      axes: the mesh axes that shard the positions, `num` ways.
      copies: how often Ulysses sends each key-value head, so that all devices get one.
      zigzag: whether positions are in zig-zag order.
    """

    name: Literal["gather", "ulysses", "ring"]
    reason: str
    axes: tuple[str, ...]
    num: int
    copies: int = 1
    zigzag: bool = False


def choose(config: "Config", length: int, shard: Sharder) -> Form | None:
    """Returns the form of attention; None where positions are not sharded.

    It does not depend on the batch, so that all parts of a program choose the same.
    """
    axes = axes_of(shard, length)
    if not axes:
        return None
    num = length // shard.shard_shape((length,), ("length",))[0]
    (heads,) = shard.shard_shape((config.num_heads,), ("heads",))
    (kv_heads,) = shard.shard_shape((config.kv_heads,), ("kv_heads",))
    copies = num // math.gcd(num, kv_heads)
    itemsize = jnp.dtype(config.compute_dtype).itemsize
    size = 2 * itemsize * length * kv_heads * config.head_width
    name, reason = _decide(config.context_attention, num, heads, copies, size)
    zigzag = config.causal and name != "ulysses"
    if zigzag and length % (2 * num):
        raise ValueError(
            f"length {length} cannot be divided into 2 x {num} chunks, which balance "
            f'causal attention "{name}" over {"x".join(axes)}={num}. Make the length a '
            f'multiple of {2 * num}, or set context_attention="ulysses".'
        )
    copies = copies if name == "ulysses" else 1
    if copies > 1:
        reason += f"; each key-value head is sent {copies} times"
    return Form(name, reason, axes, num, copies, zigzag)


def _decide(setting: ContextAttention, num: int, heads: int, copies: int, size: int):
    """Returns (form, reason), for `num` devices and `heads` on each.

    Args:
      copies: see Form.
      size: bytes of the keys and values of an example, gathered.
    """
    if setting == "ulysses" and heads % num:
        raise ValueError(
            f'context_attention "ulysses": {num} devices along the positions do not '
            f"divide the {heads} heads of a device. Use a context axis that does, or "
            'set context_attention="ring".'
        )
    if setting != "auto":
        return setting, "as set"
    takes = f"keys and values of an example take {human_bytes(size)} gathered"
    limit = f"{human_bytes(MOST_GATHERED)}"
    if size <= MOST_GATHERED:
        return "gather", f"{takes}, not more than {limit}"
    if copies == 1 and heads % num == 0:
        return "ulysses", f"{takes}, and {num} devices divide the key-value heads"
    return "ring", f"{takes}, and {num} devices do not divide the key-value heads"


def notes(config: "Config", length: int, shard: Sharder) -> list[str]:
    """Returns a line about the choice, none where there is nothing to choose."""
    form = choose(config, length, shard)
    if form is not None:
        order = "zig-zag" if form.zigzag else "natural"
        over = ",".join(form.axes)
        return [
            f"Attention over {over}: {form.name}, {order} order of positions "
            f"({form.reason})"
        ]
    if config.context_attention == "auto":
        return []
    return [
        f"context_attention={config.context_attention!r} has no effect: positions are "
        "not sharded"
    ]


def arrange(
    config: "Config", batch: Mapping[str, jax.Array], shard: Sharder
) -> dict[str, jax.Array]:
    """Returns the batch in the order of positions that its attention expects.

    The batch must have positions.
    """
    form = choose(config, batch["inputs"].shape[1], shard)
    return zigzag(batch, shard) if form and form.zigzag else dict(batch)


def attend_sharded(
    form: Form,
    arrays: list[jax.Array],
    specs: tuple[P, ...],
    shard: Sharder,
    *,
    causal: bool,
    whole: Callable[..., jax.Array],
) -> jax.Array:
    """Computes attention with positions sharded; the arrays are as those of `attend`.

    Args:
      whole: attention on one device to all positions of its heads.
    """
    local: Callable[..., Any]
    if form.name == "ulysses":
        local = functools.partial(_ulysses, form, whole)
    else:
        blocks = Ring(form.axes) if form.name == "ring" else Gathered(form.axes)
        local = functools.partial(attend_in_blocks, blocks, causal)
    return shard.local(local, specs, specs[0])(*arrays)


def _ulysses(form: Form, whole, q_BNHK, k_BNGK, v_BNGK, segments_BN=None) -> jax.Array:
    k_BNGK, v_BNGK = (jnp.repeat(x, form.copies, axis=2) for x in (k_BNGK, v_BNGK))

    def to_heads(x):
        return lax.all_to_all(x, form.axes, split_axis=2, concat_axis=1, tiled=True)

    arrays = [to_heads(x) for x in (q_BNHK, k_BNGK, v_BNGK)]
    if segments_BN is not None:
        arrays.append(lax.all_gather(segments_BN, form.axes, axis=1, tiled=True))
    out = whole(*arrays)
    return lax.all_to_all(out, form.axes, split_axis=1, concat_axis=2, tiled=True)


def with_positions(batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns the batch with positions, counted from 0 if it has none."""
    shape = batch["inputs"].shape
    return {"positions": jax.lax.broadcasted_iota(jnp.int32, shape, 1)} | batch


def in_order(shard: Sharder) -> Sharder:
    """Returns a Sharder for positions in their own order, which are not sharded."""
    rules = shard.rules.without("length", "residual_length")
    return dataclasses.replace(shard, rules=rules)
