"""What `meshloom train` says of its own step: a forecast, and how right it was.

The forecast is `plan` for the devices that are here, before anything is compiled. It
must never end a run, so whatever keeps it from being made is said in its place. At the
end it is compared with the memory and the step time that were found.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...sharding.text import human_bytes, short_number
from ..program.hardware import CPU
from ..record import metrics
from .local_target import target_here
from .predict import Plan, plan
from .text import seconds_text

if TYPE_CHECKING:
    from ..run.prepare import Prepared

FILE = "forecast.json"
WIDEST_REASON = 200


@dataclasses.dataclass(frozen=True)
class Forecast:
    """Of the steps after `start`; where there is none, `reason` says why."""

    start: int
    plan: Plan | None
    reason: str = ""

    @property
    def seconds(self) -> float | None:
        """Of a step, as it is modelled; None on CPUs.

        A roofline is made of peaks. On CPUs steps took 3 to 6 times as long, by how
        small the products are and what else the cores do: that is no forecast.
        """
        assert self.plan is not None
        is_cpu = self.plan.target.device.platform == CPU
        return None if is_cpu else self.plan.roofline.step

    def line(self) -> str:
        if self.plan is None:
            return f"No forecast: {self.reason}"
        target, memory = self.plan.target, self.plan.memory.peak
        device = target.device
        share = f"{memory / device.usable:.0%} of its memory"
        words = (
            f"Forecast: {human_bytes(memory)} on a device, {share}"
            f"{'' if self.plan.fits else ', too much'}"
        )
        if self.seconds is None:
            return words
        return (
            f"{words}; {seconds_text(self.seconds)} a step, for {target.name} with "
            f"{short_number(device.flops, 3, fixed=True)}FLOP/s and "
            f"{short_number(device.hbm_bandwidth, 3, fixed=True)}B/s a device, "
            "published"
        )

    def to_json(self, measured: "Measured | None" = None) -> dict[str, Any]:
        """The plan, and what was measured once that is known."""
        document: dict[str, Any] = {"start": self.start}
        if self.plan is None:
            return document | {"reason": self.reason}
        document |= {"seconds": self.seconds, "plan": self.plan.to_json()}
        if measured is not None:
            document["measured"] = dataclasses.asdict(measured)
        return document


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a run found; None where it could not.

    Attributes:
      memory: bytes of the device of this process that had most.
      memory_of: whose figure that is.
      seconds: the median of the step times that the run recorded.
    """

    memory: int | None
    memory_of: str
    seconds: float | None


def foretell(prepared: "Prepared", start: int, hosts: Sequence[str] = ()) -> Forecast:
    """The forecast of a run's steps after `start`, for its own devices."""
    try:
        devices = list(prepared.mesh.devices.flat)
        target = target_here(devices, prepared.matmul_dtype, hosts)
        found = plan(prepared.chosen.config, target)
        forecast = Forecast(start, found)
        forecast.line()  # what cannot be computed fails here
        return forecast
    except Exception as error:  # of a user's model too: no forecast is worth a run
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        first = str(error).split("\n")[0].split(". ")[0]
        return Forecast(start, None, kind + first[:WIDEST_REASON])


def measure(prepared: "Prepared", folder: Path, start: int) -> Measured:
    """What the steps after `start` took, when they are done."""
    rows = metrics.read(Path(folder) / metrics.FILES["train"])
    memory, whose = _memory(prepared)
    return Measured(memory, whose, metrics.median_step_seconds(rows, start))


def _memory(prepared: "Prepared") -> tuple[int | None, str]:
    """What devices have had in use; a CPU does not say, so what is reserved there."""
    stats = [device.memory_stats() for device in prepared.mesh.local_devices]
    used = [s["peak_bytes_in_use"] for s in stats if s and "peak_bytes_in_use" in s]
    if used:
        return max(used), "in use at most"
    found = prepared.compile().memory_analysis()
    if found is None:
        return None, "compiler's"
    # Not its peak: for CPUs that leaves out what is alive at once.
    reserved = found.argument_size_in_bytes + found.temp_size_in_bytes
    return reserved, "compiler's"
