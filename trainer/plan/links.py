"""The links that mesh axes have on a target, and how long a collective takes on them.

The last mesh axis (tensor) takes neighbours first. On a torus an axis that takes a
whole dimension sends both ways round a ring if that dimension wraps, and over a line
otherwise; one that takes several dimensions uses the links of all. What is left crosses
the network between slices or nodes.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from ..program.hardware import Target

PERMUTE = "collective-permute"


@dataclasses.dataclass(frozen=True)
class Link:
    """How one mesh axis is laid: `near` devices over `bandwidth`, `far` over DCN.

    Attributes:
      one_way: the bandwidth to one neighbour.
    """

    near: int
    bandwidth: float
    far: int = 1
    network: float = 1.0
    one_way: float = 1.0

    def seconds(self, sent: float) -> float:
        """Returns the time for bytes that leave a device, in a ring over all.

        Near devices share what goes far: each carries its part of it.
        """
        n = self.near * self.far
        whole = sent * n / (n - 1)
        near = whole * (self.near - 1) / self.near / self.bandwidth
        far = whole * (self.far - 1) / self.far / self.near / self.network
        return near + far

    def pass_on(self, sent: float) -> float:
        """Returns the time in which each device passes bytes on; the slowest counts."""
        return sent / (self.network if self.far > 1 else self.one_way)


def bytes_sent(kind: str, num_bytes: float, num_devices: int) -> float:
    """Returns the bytes that leave a device in a collective of this payload."""
    if kind == PERMUTE:
        return num_bytes
    share = (num_devices - 1) / num_devices
    return num_bytes * share * (2 if kind == "all-reduce" else 1)


def collective_seconds(
    links: Mapping[str, Link],
    sizes: Mapping[str, int],
    kind: str,
    axes: Sequence[str],
    num_bytes: float,
) -> float:
    """Returns the time of a collective; over several axes the slowest counts."""
    if kind == PERMUTE:
        return max(links[axis].pass_on(num_bytes) for axis in axes)
    sent = bytes_sent(kind, num_bytes, math.prod(sizes[axis] for axis in axes))
    return max(links[axis].seconds(sent) for axis in axes)


def links(
    target: Target, sizes: dict[str, int], dcn: Mapping[str, int] | None = None
) -> dict[str, Link]:
    """Returns the link of every mesh axis larger than 1.

    Args:
      sizes: of the mesh axes, the slowest network first.
      dcn: the part of each axis that crosses slices.
    """
    device, room, found = target.device, list(target.shape), {}
    for axis in reversed(sizes):
        size = sizes[axis]
        if size == 1:
            continue
        far = (dcn or {}).get(axis, 1)
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
        if not device.torus:  # a switch joins the node; what is left crosses nodes
            near, far = near // left, far * left
            bandwidth = device.link
        found[axis] = Link(
            near, bandwidth or device.link, far, device.network, device.link
        )
    return found
