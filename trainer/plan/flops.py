"""Floating-point operations of the matrix products of one step on one device.

A product runs once forward and usually twice backward (for both operands), and once
more where the remat policy recomputes it. In a pipeline every stage works at every
tick, even without a microbatch; a backward tick that did not keep everything begins
with a forward; and each stage computes 1/S of the head. Elementwise work is not
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
    """FLOPs of one device and step.

    Attributes:
      executed: all of them, with what is recomputed and what runs in bubbles.
      model: the device's share of what the update needs, nothing counted twice.
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
    """Counts passes through a chunk of layers, or the stack without a pipeline."""
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
    layers = case.chunk_layers
    if case.pipeline is not None and not costs.keeps_weights:
        backward += forward
        # A block's last product only adds to the stream: if a chunk is one block, the
        # compiler drops it from the backward pass.
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
