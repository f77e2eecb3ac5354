"""The forecast that `meshloom train` prints of its own step, and how right it was.

It is made for the devices at hand, before anything is compiled. It must never end a
run, so whatever prevents it is reported in its place. At the end of the run it is
compared with the memory and the step time that were measured.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...sharding.text import human_bytes, seconds_text, short_number
from ..program.hardware import CPU
from ..record import metrics
from .choosing import first_sentence
from .local_target import target_here
from .predict import Forecast, forecast

if TYPE_CHECKING:
    from ..run.prepare import Prepared

FILE = "forecast.json"
WIDEST_REASON = 200


@dataclasses.dataclass(frozen=True)
class RunForecast:
    """The forecast for the steps after `start`; if None, `reason` says why."""

    start: int
    forecast: Forecast | None
    reason: str = ""

    @property
    def seconds(self) -> float | None:
        """The modelled time of a step; None on CPUs.

        A roofline is built from peaks. On CPUs steps took 3 to 6 times as long,
        depending on how small the products are and what else the cores do.
        """
        assert self.forecast is not None
        is_cpu = self.forecast.target.device.platform == CPU
        return None if is_cpu else self.forecast.roofline.step

    def line(self) -> str:
        if self.forecast is None:
            return f"No forecast: {self.reason}"
        target, memory = self.forecast.target, self.forecast.memory.peak
        device = target.device
        share = f"{memory / device.usable:.0%} of its memory"
        words = (
            f"Forecast: {human_bytes(memory)} on a device, {share}"
            f"{'' if self.forecast.fits else ', too much'}"
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
        """Returns the forecast, and what was measured once that is known."""
        document: dict[str, Any] = {"start": self.start}
        if self.forecast is None:
            return document | {"reason": self.reason}
        document |= {"seconds": self.seconds, "plan": self.forecast.to_json()}
        if measured is not None:
            document["measured"] = dataclasses.asdict(measured)
        return document


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a run measured; None where it could not.

    Attributes:
      memory: the most bytes that any local device had in use.
      memory_of: where that figure comes from.
      seconds: the median of the step times that the run recorded.
    """

    memory: int | None
    memory_of: str
    seconds: float | None


def forecast_run(
    prepared: "Prepared", start: int, hosts: Sequence[str] = ()
) -> RunForecast:
    """Forecasts a run's steps after `start`, for its own devices."""
    try:
        devices = list(prepared.mesh.devices.flat)
        target = target_here(devices, prepared.matmul_dtype, hosts)
        found = RunForecast(start, forecast(prepared.chosen.config, target))
        found.line()  # what cannot be computed fails here
        return found
    except Exception as error:  # also from a user's model: a run must go on
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        return RunForecast(start, None, kind + first_sentence(error)[:WIDEST_REASON])


def measure(prepared: "Prepared", folder: Path, start: int) -> Measured:
    """Measures what the steps after `start` took."""
    rows = metrics.read(Path(folder) / metrics.FILES["train"])
    memory, whose = _memory(prepared)
    return Measured(memory, whose, metrics.median_step_seconds(rows, start))


def _memory(prepared: "Prepared") -> tuple[int | None, str]:
    """Returns the memory that was in use; a CPU does not say, so what is reserved."""
    stats = [device.memory_stats() for device in prepared.mesh.local_devices]
    used = [s["peak_bytes_in_use"] for s in stats if s and "peak_bytes_in_use" in s]
    if used:
        return max(used), "in use at most"
    found = prepared.compile().memory_analysis()
    if found is None:
        return None, "compiler's"
    # Not the compiler's peak: for CPUs that omits arrays that are alive at once.
    reserved = found.argument_size_in_bytes + found.temp_size_in_bytes
    return reserved, "compiler's"
