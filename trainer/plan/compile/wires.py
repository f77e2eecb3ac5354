"""Which links a collective of a compiled program takes, and for how long."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ....sharding.hlo.collectives import UNKNOWN_AXES, CollectiveOp, mesh_axes
from ...program.hardware import Target
from ..links import PERMUTE, bytes_sent, collective_seconds, links


class Taken(NamedTuple):
    """Seconds of one run, and the links of some axes, each in one direction."""

    seconds: float
    links: tuple[str, ...]
    axes: tuple[str, ...]

    @property
    def part(self) -> str:
        return f"network, {','.join(self.axes)}"


class Wires:
    """The links of a mesh on a target.

    Args:
      sizes: of the axes of the mesh, the slowest network first.
      dcn: the part of each axis that crosses slices.
    """

    def __init__(
        self,
        target: Target,
        sizes: dict[str, int],
        dcn: Mapping[str, int] | None = None,
    ):
        self.sizes = sizes
        self._links = links(target, sizes, dcn)

    def take(self, found: CollectiveOp) -> Taken:
        axes = mesh_axes(found, tuple(self.sizes), tuple(self.sizes.values()))
        if not axes:
            return Taken(0.0, (), axes)
        num_bytes = sum(array.num_bytes for array in found.payload)
        if axes == UNKNOWN_AXES:
            return self._anywhere(found, num_bytes)
        ways = self._directions(found, axes) if found.kind == PERMUTE else "<>"
        seconds = collective_seconds(
            self._links, self.sizes, found.kind, axes, num_bytes
        )
        return Taken(seconds, tuple(f"{a}{way}" for a in axes for way in ways), axes)

    def _anywhere(self, found: CollectiveOp, num_bytes: int) -> Taken:
        """Groups that are not rows of the mesh: over the slowest links, taking all."""
        slowest = min(self._links.values(), key=lambda link: link.bandwidth)
        sent = bytes_sent(found.kind, num_bytes, max(map(len, found.groups)))
        every = tuple(f"{axis}{way}" for axis in self._links for way in "<>")
        return Taken(slowest.seconds(sent), every, UNKNOWN_AXES)

    def _directions(self, found: CollectiveOp, axes: tuple[str, ...]) -> str:
        """Returns which way a permute goes round: >, <, or both if not a ring."""
        size = self.sizes[axes[0]]
        if len(axes) != 1 or size == 2:
            return "<>"
        axis = list(self.sizes).index(axes[0])
        shape = tuple(self.sizes.values())
        places = np.unravel_index(np.array(found.groups), shape)[axis]
        steps = set(((places[:, 1] - places[:, 0]) % size).tolist())
        return (
            {1: ">", size - 1: "<"}.get(steps.pop(), "<>") if len(steps) == 1 else "<>"
        )
