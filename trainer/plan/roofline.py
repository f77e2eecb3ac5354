"""How long a step takes, by what it must compute, move and send.

Compute is executed products at the device's peak. Memory is what passes through HBM
in operations that it bounds: norms and other elementwise work, what is kept for the
backward pass written and read, the state at the update, gradients added up; attention
that stores its scores, as far as that takes longer than its products. Network is what
each mesh axis sends over the links it has; `exposed` of it is what a step waits for.

How often an array passes through HBM, and what XLA runs beside products, was read off
compiled programs (compile/program.py models their time; docs/plan.md compares). Rings
of products and a pipeline's permutes are asynchronous, but on GPUs those between
several chunks of a stage are waited for. Gathers of weights are asynchronous on v5e and
on GPUs, but for the first product of a block, which has nothing to hide behind. Sums
and scatters are waited for, but for a part of the sums on GPUs.

Which links an axis has: the last mesh axis (tensor) takes neighbours first. On a torus
an axis that takes a whole dimension sends both ways round a ring if that dimension
closes to one, and over a line otherwise; one that takes several uses the links of all.
What is left crosses the network between slices or nodes.
"""

import dataclasses
import math
from collections.abc import Mapping

from ..program.hardware import CARRIES_GATHERS, Target
from .cutting import FLOAT32
from .flops import Flops, ticks
from .scenario import Case
from .traffic import Transfer


@dataclasses.dataclass(frozen=True)
class Link:
    """How one mesh axis is laid: `near` devices over `bandwidth`, `far` over DCN.

    Attributes:
      one_way: of what a device passes to its neighbour alone, in one direction.
    """

    near: int
    bandwidth: float
    far: int = 1
    network: float = 1.0
    one_way: float = 1.0

    def seconds(self, sent: float) -> float:
        """Of bytes that leave a device, in a ring over all near and far.

        Near devices share what goes far: each carries its part of it.
        """
        n = self.near * self.far
        whole = sent * n / (n - 1)
        near = whole * (self.near - 1) / self.near / self.bandwidth
        far = whole * (self.far - 1) / self.far / self.near / self.network
        return near + far

    def pass_on(self, sent: float) -> float:
        """Of bytes that every device passes to the next one; the slowest counts."""
        return sent / (self.network if self.far > 1 else self.one_way)


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Seconds of one step.

    Attributes:
      memory: of operations bound by it; products that memory bounds count by the part
        that is longer, so compute and memory add up.
      network: by mesh axes, joined with a comma; `exposed` is the part of it that
        nothing hides.
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
        """The parts of `step`: of the network, what nothing hides."""
        return self.parts | {f"network, {axes}": s for axes, s in self.exposed.items()}

    @property
    def overlapped(self) -> float:
        """If all overlaps perfectly: as long as the longest part."""
        return max(self.compute, self.memory, sum(self.network.values()))

    @property
    def step(self) -> float:
        """With what XLA runs beside products hidden: what plans are compared by."""
        return self.compute + self.memory + sum(self.exposed.values())

    @property
    def serial(self) -> float:
        """If nothing overlaps: the sum."""
        return self.compute + self.memory + sum(self.network.values())


def roofline(case: Case, flops: Flops, transfers: tuple[Transfer, ...]) -> Roofline:
    device = case.target.device
    compute, memory = flops.executed / device.flops, memory_seconds(case)
    found = links(case.target, case.sizes, case.spec.dcn)
    network: dict[str, float] = {}
    beside: dict[str, float] = {}
    for transfer in transfers:
        # Over several axes the slowest one sets the pace.
        axes, sent = ",".join(transfer.axes), transfer.sent(case.sizes)
        if transfer.kind == "collective-permute":  # around a torus half goes each way
            size = transfer.bytes / (2 if device.torus else 1)
            each = (found[axis].pass_on(size) for axis in transfer.axes)
        else:
            each = (found[axis].seconds(sent) for axis in transfer.axes)
        seconds = max(each)
        network[axes] = network.get(axes, 0.0) + seconds
        beside[axes] = beside.get(axes, 0.0) + seconds * _beside(case, transfer)
    # No more is hidden than there is to hide behind.
    share = min(1.0, (compute + memory) / (sum(beside.values()) or 1.0))
    exposed = {axes: s - share * beside[axes] for axes, s in network.items()}
    return Roofline(compute, memory, network, exposed)


def _beside(case: Case, transfer: Transfer) -> float:
    """The share of a transfer that runs beside products."""
    device = case.target.device
    if transfer.kind == "collective-permute":
        # On GPUs, stages of several chunks wait for each other's results.
        is_plain = case.pipeline is None or case.pipeline.schedule.num_chunks == 1
        return 1.0 if device.platform != "gpu" or is_plain else 0.0
    is_gather = transfer.kind == "all-gather" and transfer.what == "weights"
    if device.platform == "gpu" and transfer.kind == "all-reduce":
        return SUMS_BESIDE if transfer.what == "sums" else 0.0
    carries = not device.torus or device.name == CARRIES_GATHERS
    if not is_gather or case.pipeline or not carries:
        return 0.0
    uses = 1 if case.costs.keeps_weights else 2
    later = total = 0
    for array in case.compute.arrays:
        is_block = case.is_block(array.path)
        size = array.bytes_per_device * (uses if is_block else 1)
        total += size
        later += size * (is_block and array.path != case.costs.products[0].weight)
    return later / total


# Of sums of activations XLA for GPUs runs one of a block beside products: 21 to 26 % of
# their time in five programs.
SUMS_BESIDE = 0.22
SCORES, SCORES_AGAIN = 5, 2  # passes of scores in the backward pass; where done again


@dataclasses.dataclass(frozen=True)
class Passes:
    """How often arrays pass through HBM, read off compiled programs.

    Attributes:
      residuals: the stream, in norms and sums of a block, forward and backward.
      elementwise: what a block's backward pass has alive beside scores.
      gathered: weights that were gathered, to be put into order.
      stage_gradients: a stage's weights in float32, each time its gradient is added.
    """

    residuals: float = 16
    elementwise: float = 2
    gathered: float = 0
    stage_gradients: float = 4


ON_TPU, ON_GPU = Passes(), Passes(36, 0.8, 2, 12)


def memory_seconds(case: Case) -> float:
    """Of operations that are bound by memory, for a device and step."""
    costs, times, device = case.costs, ticks(case), case.target.device
    layers = case.layers
    if case.pipeline is not None:
        layers //= case.pipeline.schedule.num_chunks
    state, gradients = (
        sum(case.resident(case.params).values())
        + sum(case.resident(case.opt_state).values()),
        sum(case.resident(case.gradients, FLOAT32).values()),
    )
    working = [a for w in costs.working for a in w.arrays if not a.unfused]
    kept = [array for array in costs.kept if not array.unfused]
    passes = ON_GPU if device.platform == "gpu" else ON_TPU
    block = passes.residuals * case.bytes(costs.residual)
    block += passes.elementwise * sum(map(case.bytes, working))
    block += 2 * sum(map(case.bytes, kept))
    if case.pipeline is None:
        weights = _block_weights(case) * case.itemsize / FLOAT32
        block += passes.gathered * weights * (1 if costs.keeps_weights else 2)
    attention = layers * times.forwards * _unfused(case)
    head = 3 * times.heads * case.bytes(costs.logits) / case.num_stages
    update = 2 * (state + gradients)
    if case.pipeline is not None:
        # Gathered once a microbatch, they are added where they are cut.
        if case.config.pipeline.gather == "step":
            stage = layers * _block_weights(case)
            update += times.backwards * passes.stage_gradients * stage
    elif case.num_microbatches > 1:
        update += 3 * case.num_microbatches * gradients
    moved = layers * times.forwards * block + head + update
    return moved / device.hbm_bandwidth + attention


def _unfused(case: Case) -> float:
    """Seconds that a block's attention takes longer than its products, for scores."""
    costs, device = case.costs, case.target.device
    alone = [product for product in costs.products if not product.weight]
    stored = [a for a in costs.working[0].arrays if a.unfused and a.itemsize == FLOAT32]
    if not stored:
        return 0.0
    one = sum(map(case.bytes, stored)) / sum(array.count for array in stored)
    # Where heads share keys, gradients of scores are stored in half the width.
    alive = one * (1 + sum(array.count for array in stored) / 2)
    again = any(product.name in costs.recomputed for product in alone)
    moved = alive * (SCORES + SCORES_AGAIN * again)
    products = sum(
        product.flops
        / case.ways(product.axes, product.shape)
        * (1 + product.backward + (product.name in costs.recomputed))
        for product in alone
    )
    return max(0.0, moved / device.hbm_bandwidth - products / device.flops)


def _block_weights(case: Case) -> float:
    """Bytes of a block's weights in float32, as whole as a device computes with."""
    sizes = case.resident(case.compute, FLOAT32)
    return sum(b for path, b in sizes.items() if case.is_block(path)) / case.layers


def links(
    target: Target, sizes: dict[str, int], dcn: Mapping[str, int] | None = None
) -> dict[str, Link]:
    """The links of every mesh axis larger than 1; `sizes` has the slowest first."""
    dcn = dcn or {}
    device, room = target.device, list(target.shape)
    found = {}
    for axis in reversed(sizes):
        size = sizes[axis]
        if size == 1:
            continue
        far = dcn.get(axis, 1)
        near, bandwidth = size // far, 0.0
        left = near
        for i in sorted(range(len(room)), key=lambda i: -room[i]):
            taken = math.gcd(left, room[i])
            if taken == 1:
                continue
            rings = taken == target.shape[i] and target.wrap[i]
            bandwidth += device.link * (2 if rings else 1)
            room[i] //= taken
            left //= taken
        if not device.torus:  # a switch joins the node, and what is left goes out
            near, far = near // left, far * left
            bandwidth = device.link
        found[axis] = Link(
            near, bandwidth or device.link, far, device.network, device.link
        )
    return found
