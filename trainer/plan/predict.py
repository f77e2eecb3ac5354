"""`plan(config, target)`: memory, FLOPs, traffic and time of a step, by closed form."""

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from ...sharding import MeshSpec
from ...sharding.mesh import mesh_sizes
from ..program.hardware import Target, parse_target
from .flops import Flops, flops
from .memory import Memory, memory
from .roofline import Roofline, roofline
from .scenario import Case, make_case
from .traffic import Transfer, by_axes, traffic

if TYPE_CHECKING:
    from ..run.train import Config
    from .choosing import Chosen


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a step of a config costs on each device of a target.

    Attributes:
      chosen: how what was left open in the config was filled, if it was asked.
    """

    case: Case
    chosen: "Chosen | None" = None

    @functools.cached_property
    def memory(self) -> Memory:
        return memory(self.case)

    @functools.cached_property
    def flops(self) -> Flops:
        return flops(self.case)

    @functools.cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        return traffic(self.case)

    @functools.cached_property
    def roofline(self) -> Roofline:
        return roofline(self.case, self.flops, self.transfers)

    @property
    def config(self) -> "Config":
        return self.case.config

    @property
    def given(self) -> "Config":
        """The config before what it leaves open was chosen."""
        return self.chosen.given if self.chosen else self.config

    @property
    def choice(self) -> str:
        """What was chosen, in a line; empty where nothing was."""
        return self.chosen.line if self.chosen else ""

    @property
    def target(self) -> Target:
        return self.case.target

    @property
    def fits(self) -> bool:
        return self.memory.peak <= self.target.device.usable

    @property
    def mfu(self) -> float:
        """Model FLOPs at the peak over the step's time, if all overlaps perfectly."""
        return self.flops.model / self.target.device.flops / self.roofline.overlapped

    @property
    def seconds_an_example(self) -> float:
        """What plans are compared by."""
        return self.roofline.step / self.config.batch_size

    def next_limit(self) -> str:
        """What runs out first if the batch grows."""
        times = 1
        while times < MOST_ROWS:
            grown = 2 * times * self.config.batch_size
            bigger = Plan(
                make_case(
                    dataclasses.replace(self.config, batch_size=grown), self.target
                )
            )
            if not bigger.fits:
                largest = max(bigger.memory.parts, key=lambda part: part.bytes)
                share = bigger.memory.peak / self.target.device.usable
                return (
                    f"memory, at batch {grown}: {share:.0%} of it, most of that "
                    f"{largest.name} ({largest.detail or 'state'})"
                )
            times *= 2
        slowest = max(self.roofline.parts.items(), key=lambda part: part[1])
        return f"nothing up to batch {grown}; most of the time goes to {slowest[0]}"

    def to_json(self) -> dict[str, Any]:
        """All figures, for json.dumps; bytes, FLOPs and seconds of one device."""
        case, device = self.case, self.target.device
        return {
            "target": {
                **dataclasses.asdict(device),
                "name": self.target.name,
                "device": device.name,
                "devices": self.target.num_devices,
            },
            "mesh": case.sizes,
            "plan": self.config.plan,
            "chosen": self.choice,
            "batch_size": self.config.batch_size,
            "num_microbatches": case.num_microbatches,
            "remat": getattr(self.config.model, "remat", None),
            "fits": self.fits,
            "memory": {
                "peak": self.memory.peak,
                "arguments": self.memory.arguments,
                "temporaries": self.memory.temporaries,
                "moment": self.memory.peak_moment,
                "parts": [
                    {"name": part.name, "bytes": part.bytes, "detail": part.detail}
                    for part in self.memory.parts
                ],
                "moments": {
                    name: sum(part.bytes for part in parts) + self.memory.arguments
                    for name, parts in self.memory.moments.items()
                },
            },
            "flops": dataclasses.asdict(self.flops),
            "traffic": [dataclasses.asdict(t) for t in self.transfers],
            "traffic_by_axes": {
                ",".join(axes): count for axes, count in by_axes(self.transfers).items()
            },
            "seconds": {
                **self.roofline.parts,
                "overlapped": self.roofline.overlapped,
                "step": self.roofline.step,
                "serial": self.roofline.serial,
            },
            "mfu_overlapped": self.mfu,
        }


# Times the batch, when looking for what runs out first.
MOST_ROWS = 64


def plan(
    config: "Config",
    target: Target | str,
    *,
    mesh: MeshSpec | str | None = None,
    batch: int | None = None,
) -> Plan:
    """The plan of a config for devices that need not be here.

    Args:
      mesh: instead of the config's; an axis of -1 takes the devices left over.
      batch: batch_size instead of the config's.
    """
    if isinstance(target, str):
        target = parse_target(target)
    if isinstance(mesh, str):
        mesh = MeshSpec.parse(mesh)
    if mesh is not None:
        config = dataclasses.replace(config, mesh=mesh)
    if batch is not None:
        config = dataclasses.replace(config, batch_size=batch)
    from .choosing import choose  # which needs Plan

    sizes = mesh_sizes(config.mesh.abstract(target.num_devices))
    chosen = choose(config, sizes, target)
    return Plan(make_case(chosen.config, target), chosen)
