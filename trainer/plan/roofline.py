"""What a device multiplies in a step, and how long it computes, moves and sends.

FLOPs are those of matrix products. A product runs once forward and usually twice
backward (for both operands), and once more where the remat policy recomputes it. In a
pipeline every stage works at every tick, even without a microbatch; a backward tick
that did not keep everything begins with a forward; and each stage computes 1/S of the
head. Elementwise work is not counted: on these devices it is bound by memory.

Compute is executed products at the device's peak. Memory is what passes through HBM in
operations that it bounds: norms and other elementwise work, what is kept for the
backward pass written and read, the state at the update, gradients added up; attention
that stores its scores, as far as that takes longer than its products. Network is what
each mesh axis sends over its links; `exposed` is the part of it that a step waits for.

How often arrays pass through HBM, and what XLA overlaps with products, is in fitted.py.
Rings of products and a pipeline's permutes are asynchronous, except on GPUs those
between several chunks of a stage. Gathers of weights overlap where fitted.py says so,
except for the first product of a block, and so does a share of the sums. All else is
waited for.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from .links import PERMUTE, collective_seconds, links
from .scenario import Case
from .sharded import FLOAT32
from .traffic import Transfer


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
class Roofline:
    """Seconds of one step.

    Attributes:
      memory: of operations that it bounds; products that memory bounds count by the
        part that is longer, so compute and memory add up.
      network: by mesh axes, joined with a comma; `exposed` is what is not hidden.
    """

    compute: float
    memory: float
    network: dict[str, float]
    exposed: dict[str, float]

    @property
    def parts(self) -> dict[str, float]:
        network = {f"network, {axes}": s for axes, s in self.network.items()}
        return {"compute": self.compute, "memory": self.memory, **network}

    @property
    def waits(self) -> dict[str, float]:
        """The parts of `step`: of the network, what is exposed."""
        return self.parts | {f"network, {axes}": s for axes, s in self.exposed.items()}

    @property
    def overlapped(self) -> float:
        """The longest part: the time if everything overlaps."""
        return max(self.compute, self.memory, sum(self.network.values()))

    @property
    def step(self) -> float:
        """The modelled time, by which forecasts are compared."""
        return self.compute + self.memory + sum(self.exposed.values())

    @property
    def serial(self) -> float:
        """The sum: the time if nothing overlaps."""
        return self.compute + self.memory + sum(self.network.values())


def flops(case: Case) -> Flops:
    costs, times = case.costs, case.ticks
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


def roofline(case: Case, flops: Flops, transfers: tuple[Transfer, ...]) -> Roofline:
    device = case.target.device
    compute, memory = flops.executed / device.flops, memory_seconds(case)
    found = links(case.target, case.sizes, case.spec.dcn)
    network: dict[str, float] = {}
    hidden: dict[str, float] = {}
    for transfer in transfers:
        axes, size = ",".join(transfer.axes), float(transfer.bytes)
        if transfer.kind == PERMUTE and device.torus:  # half goes each way round
            size /= 2
        seconds = collective_seconds(
            found, case.sizes, transfer.kind, transfer.axes, size
        )
        network[axes] = network.get(axes, 0.0) + seconds
        hidden[axes] = hidden.get(axes, 0.0) + seconds * _hidden_share(case, transfer)
    # No more is hidden than there is to hide behind.
    share = min(1.0, (compute + memory) / (sum(hidden.values()) or 1.0))
    exposed = {axes: s - share * hidden[axes] for axes, s in network.items()}
    return Roofline(compute, memory, network, exposed)


def _hidden_share(case: Case, transfer: Transfer) -> float:
    """Returns the share of a transfer that overlaps with products."""
    device = case.target.device
    if transfer.kind == PERMUTE:
        # On GPUs, stages of several chunks wait for each other's results.
        is_plain = case.pipeline is None or case.pipeline.schedule.num_chunks == 1
        return 1.0 if device.platform != "gpu" or is_plain else 0.0
    if transfer.kind == "all-reduce" and transfer.what == "sums":
        return case.fitted.hidden_sums
    is_gather = transfer.kind == "all-gather" and transfer.what == "weights"
    if not is_gather or case.pipeline or not case.fitted.overlaps_gathers(device.name):
        return 0.0
    uses = 1 if case.costs.keeps_weights else 2
    later = total = 0
    for path, weight in case.sharded.weights.items():
        is_block = case.is_block(path)
        size = weight.whole.bytes_per_device * (uses if is_block else 1)
        total += size
        later += size * (is_block and path != case.costs.products[0].weight)
    return later / total


def memory_seconds(case: Case) -> float:
    """Returns the time of operations bound by memory, for a device and step."""
    costs, times, fitted = case.costs, case.ticks, case.fitted
    layers, resident = case.chunk_layers, case.sharded.resident
    gradients = sum(resident("gradients", FLOAT32).values())
    state = sum(resident("params").values()) + sum(resident("opt_state").values())
    working = [a for w in costs.working for a in w.arrays if not a.unfused]
    kept = [array for array in costs.kept if not array.unfused]
    block = fitted.stream_passes * case.bytes(costs.residual)
    block += fitted.working_passes * sum(map(case.bytes, working))
    block += 2 * sum(map(case.bytes, kept))
    weights = sum(
        size
        for path, size in resident("compute", FLOAT32).items()
        if case.is_block(path)
    )
    weights /= case.layers  # in float32, gathered
    update = 2 * (state + gradients)
    if case.pipeline is None:
        uses = (1 if costs.keeps_weights else 2) * case.itemsize / FLOAT32
        block += fitted.gather_passes * weights * uses
        if case.num_microbatches > 1:
            update += 3 * case.num_microbatches * gradients
    elif case.config.pipeline.gather == "step":
        # Gathered once a microbatch, gradients are added where they are sharded.
        update += times.backwards * fitted.gradient_passes * layers * weights
    head = 3 * times.heads * case.bytes(costs.logits) / case.num_stages
    if case.head_blocks > 1:  # the gradient of its weight is added up block by block
        adds = times.heads * case.head_blocks
        head += 2 * adds * resident("compute", FLOAT32)[costs.head.weight]
    moved = layers * times.forwards * block + head + update
    attention = layers * times.forwards * _unfused_seconds(case)
    return moved / case.target.device.hbm_bandwidth + attention


def _unfused_seconds(case: Case) -> float:
    """Returns how much longer stored scores take than a block's attention products."""
    costs, device, fitted = case.costs, case.target.device, case.fitted
    alone = [product for product in costs.products if not product.weight]
    phases = (
        [a for a in phase.arrays if a.unfused and a.itemsize == FLOAT32]
        for phase in costs.working
    )
    stored = next(filter(None, phases), None)
    if stored is None:
        return 0.0
    count = sum(array.count for array in stored)
    # Where heads share keys, gradients of scores are stored in half the width.
    alive = sum(map(case.bytes, stored)) / count * (1 + count / 2)
    again = any(product.name in costs.recomputed for product in alone)
    passes = fitted.score_passes + fitted.repeated_score_passes * again
    products = sum(
        _device(case, product)
        * (1 + product.backward + (product.name in costs.recomputed))
        for product in alone
    )
    moved = alive * passes
    return max(0.0, moved / device.hbm_bandwidth - products / device.flops)
