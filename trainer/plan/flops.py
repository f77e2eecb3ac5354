"""Floating-point operations of one step on one device, of matrix products.

A product is done once forward and usually twice backward (for both operands), once
more where its policy recomputes it. In a pipeline every stage works at every tick, also
where it has no microbatch of its own; a backward that does not keep everything begins
with a forward of its own; and each stage does 1/S of the head. Elementwise work is not
counted: on these devices it is bound by memory.
"""

import collections
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from ...sharding.pipeline import Schedule
from ...sharding.pipeline import loops as loops_lib
from .scenario import Case


@dataclasses.dataclass(frozen=True)
class Flops:
    """Of one device and step.

    Attributes:
      executed: all that it multiplies, with what is done again and in bubbles.
      model: its share of what the model's update needs, none counted twice.
      blocks, head: the parts of `executed`.
    """

    executed: float
    model: float
    blocks: float
    head: float


@dataclasses.dataclass(frozen=True)
class Ticks:
    """How often a device does each kind of work in one step."""

    forwards: int
    backwards: int
    heads: int
    exchanges: int = 0
    embeds: int = 0
    embed_backwards: int = 0


def ticks(case: Case) -> Ticks:
    """Of chunks of layers in a pipeline, of the whole stack without one."""
    if case.pipeline is None:
        num = case.num_microbatches
        return Ticks(num, num, num)
    return _pipeline_ticks(case.pipeline.schedule)


@functools.lru_cache(maxsize=256)
def _pipeline_ticks(schedule: Schedule) -> Ticks:
    rows = loops_lib.rows(schedule, training=True)
    found = collections.Counter()
    for loop in loops_lib.loops(rows):
        for kind, length in loop.runs:
            count = loop.times * length
            found["forwards"] += count * kind.forward
            found["backwards"] += count * kind.backward
            found["heads"] += count * kind.head
            found["embeds"] += count * kind.embed
            found["embed_backwards"] += count * kind.embed_backward
            scatters = kind.embed_backward or kind.head
            found["exchanges"] += count * (scatters + (kind.embed or kind.head))
    return Ticks(**found)


def flops(case: Case) -> Flops:
    costs, times = case.costs, ticks(case)
    each = {p.name: _device(case, p) for p in costs.products}
    forward = sum(each.values())
    again = sum(each[name] for name in each if name in costs.recomputed)
    backward = sum(p.backward * each[p.name] for p in costs.products) + again
    layers = case.layers
    if case.pipeline is not None:
        layers //= case.pipeline.schedule.num_chunks
        if not costs.keeps_weights:
            backward += forward
            # A block's last product only adds to the stream; where a chunk is one
            # block, the compiler sees that its backward pass does not need it.
            backward -= each[costs.products[-1].name] if layers == 1 else 0
    blocks = layers * (times.forwards * forward + times.backwards * backward)
    head = times.heads * (1 + costs.head.backward) * _device(case, costs.head)
    head /= case.num_stages
    shape = (case.config.batch_size, case.length)
    counted: Any = case.config.model
    model = counted.model_flops({"inputs": jax.ShapeDtypeStruct(shape, jnp.int32)})
    return Flops(blocks + head, model / math.prod(case.sizes.values()), blocks, head)


def _device(case: Case, product: Any) -> float:
    return product.flops / case.ways(product.axes, product.shape)
