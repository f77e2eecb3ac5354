"""The closed form: what would a step of this config cost, in memory and time?

It needs shapes, rules and the model's `costs()`, and no compiler, so it can rank
thousands of candidates. What one compiled program costs is asked in compile/program.py.
"""

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from ...sharding import MeshSpec
from ...sharding.mesh import mesh_sizes
from ..program.hardware import Target, parse_target
from .memory import Memory, memory
from .roofline import Flops, Roofline, flops, roofline
from .scenario import Case, make_case
from .traffic import Transfer, by_axes, traffic

if TYPE_CHECKING:
    from ..run.train import Config
    from .choosing import Chosen


@dataclasses.dataclass(frozen=True)
class Forecast:
    """What a step of a config costs on each device of a target.

    Attributes:
      chosen: how what the config leaves open was filled, if it was.
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
        """The config as it was before open settings were chosen."""
        return self.chosen.given if self.chosen else self.config

    @property
    def choice(self) -> str:
        """What was chosen, in one line; empty if nothing was."""
        return self.chosen.line if self.chosen else ""

    @property
    def target(self) -> Target:
        return self.case.target

    @property
    def fits(self) -> bool:
        return self.memory.peak <= self.target.device.usable

    @property
    def mfu(self) -> float:
        """An upper bound of the model FLOPs utilization: everything overlaps."""
        return self.flops.model / self.target.device.flops / self.roofline.overlapped

    @property
    def seconds_an_example(self) -> float:
        """What forecasts are compared by."""
        return self.roofline.step / self.config.batch_size

    def next_limit(self) -> str:
        """Says what runs out first if the batch grows."""
        grown = self.config.batch_size
        while grown < MOST_GROWTH * self.config.batch_size:
            grown *= 2
            config = dataclasses.replace(self.config, batch_size=grown)
            bigger = Forecast(make_case(config, self.target))
            if not bigger.fits:
                largest = max(bigger.memory.parts, key=lambda part: part.bytes)
                share = bigger.memory.peak / self.target.device.usable
                return (
                    f"memory, at batch {grown}: {share:.0%} of it, most of that "
                    f"{largest.name} ({largest.detail or 'state'})"
                )
        slowest = max(self.roofline.parts.items(), key=lambda part: part[1])
        return f"nothing up to batch {grown}; most of the time goes to {slowest[0]}"

    def to_json(self) -> dict[str, Any]:
        """Returns all figures for json.dumps; bytes, FLOPs and seconds per device."""
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
                "moments": self.memory.at,
            },
            "flops": dataclasses.asdict(self.flops),
            "traffic": [dataclasses.asdict(t) for t in self.transfers],
            "traffic_by_axes": {
                ",".join(k): n for k, n in by_axes(self.transfers).items()
            },
            "seconds": {
                **self.roofline.parts,
                "overlapped": self.roofline.overlapped,
                "step": self.roofline.step,
                "serial": self.roofline.serial,
            },
            "mfu_overlapped": self.mfu,
        }


MOST_GROWTH = 64  # of the batch, in `next_limit`


def forecast(
    config: "Config",
    target: Target | str,
    *,
    mesh: MeshSpec | str | None = None,
    batch: int | None = None,
) -> Forecast:
    """Forecasts a config's step on devices that need not be here.

    Args:
      mesh: replaces the config's; an axis of -1 takes the devices left over.
      batch: replaces the config's batch_size.
    """
    if isinstance(target, str):
        target = parse_target(target)
    if isinstance(mesh, str):
        mesh = MeshSpec.parse(mesh)
    if mesh is not None:
        config = dataclasses.replace(config, mesh=mesh)
    if batch is not None:
        config = dataclasses.replace(config, batch_size=batch)
    from .choosing import choose  # which needs Forecast

    sizes = mesh_sizes(config.mesh.abstract(target.num_devices))
    chosen = choose(config, sizes, target)
    return Forecast(make_case(chosen.config, target), chosen)
