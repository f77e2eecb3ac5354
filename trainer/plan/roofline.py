"""How long a step takes at the least, by what it must compute, move and send.

Compute is executed products at the device's peak. Memory is what must pass through HBM
if every fusion is perfect: the state once in and out, weights at each use, what is kept
written and read, scores and logits likewise. Network is what each mesh axis sends over
the links it has. If all three overlap perfectly a step takes as long as the longest; if
nothing overlaps, their sum. A real step is between the two.

Which links an axis has: the last mesh axis (tensor) takes neighbours first. On a torus
an axis that takes a whole dimension sends both ways round a ring if that dimension
closes to one, and over a line otherwise; one that takes several uses the links of all.
What is left crosses the network between slices or nodes.
"""

import dataclasses
import math
from collections.abc import Mapping

from .case import FLOAT32, Case
from .flops import BACKWARD, Flops, ticks
from .hardware import Target
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
      network: by mesh axes, joined with a comma.
    """

    compute: float
    memory: float
    network: dict[str, float]

    @property
    def parts(self) -> dict[str, float]:
        network = {f"network, {axes}": s for axes, s in self.network.items()}
        return {"compute": self.compute, "memory": self.memory, **network}

    @property
    def overlapped(self) -> float:
        return max(self.compute, self.memory, sum(self.network.values()))

    @property
    def serial(self) -> float:
        return self.compute + self.memory + sum(self.network.values())


def roofline(case: Case, flops: Flops, transfers: tuple[Transfer, ...]) -> Roofline:
    device = case.target.device
    found = links(case.target, case.sizes, case.spec.dcn)
    network: dict[str, float] = {}
    for transfer in transfers:
        # Over several axes the slowest one sets the pace.
        axes = ",".join(transfer.axes)
        sent = transfer.sent(case.sizes)
        seconds = max(found[axis].seconds(sent) for axis in transfer.axes)
        network[axes] = network.get(axes, 0.0) + seconds
    moved = hbm_bytes(case)
    return Roofline(
        flops.executed / device.flops, moved / device.hbm_bandwidth, network
    )


def hbm_bytes(case: Case) -> float:
    """What passes through a device's memory in a step, at the least."""
    costs, times = case.costs, ticks(case)
    layers = case.layers
    if case.pipeline is not None:
        layers //= case.pipeline.schedule.num_chunks
    state = sum(case.resident(case.params).values())
    state += sum(case.resident(case.opt_state).values())
    gradients = sum(case.resident(case.gradients, FLOAT32).values())
    gathered = case.resident(case.compute, case.itemsize)
    block = sum(b for p, b in gathered.items() if case.is_block(p)) / case.layers
    kept, working = (
        sum(case.bytes(array) for array in arrays)
        for arrays in (costs.kept, (*costs.attention, *costs.mlp))
    )
    forward = block + kept + working / 2
    backward = (BACKWARD + 1) * block + kept + 2 * working
    head = (
        3 * case.bytes(costs.logits) / case.num_stages + 3 * gathered[costs.head.weight]
    )
    return (
        2 * (state + gradients)
        + layers * (times.forwards * forward + times.backwards * backward)
        + times.heads * head
    )


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
            whole = taken == target.shape[i]
            rings = bool(device.wraps) and whole and taken % device.wraps == 0
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
