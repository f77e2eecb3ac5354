"""The best candidates of a search, compiled one after the other for the target."""

import dataclasses
from collections.abc import Sequence

from ....sharding.text import align, human_bytes, seconds_text
from ..compile.compiled import Compiled, Refused, compile_step
from ..predict import Forecast


@dataclasses.dataclass(frozen=True)
class Finalist:
    """A forecast and its program; None if the compiler refused, and `refused` why."""

    forecast: Forecast
    compiled: Compiled | None
    refused: str = ""

    @property
    def fits(self) -> bool:
        peak = self.compiled.peak if self.compiled else None
        return peak is not None and peak <= self.forecast.target.device.usable

    @property
    def seconds(self) -> float | None:
        """The modelled time of the compiled program; None if it has none."""
        modelled = self.compiled and self.compiled.modelled
        return modelled["seconds"] if modelled else None


def compile_finalist(forecast: Forecast) -> Finalist:
    """Compiles a forecast's step; one that the compiler refuses is a finalist too."""
    try:
        return Finalist(forecast, compile_step(forecast))
    except Refused as error:
        return Finalist(forecast, None, str(error))


def table(finalists: Sequence[Finalist]) -> str:
    """Compares predicted with compiled, and says whether the order holds."""
    is_timed = any(f.seconds is not None for f in finalists)
    head = ["compiled", "peak", "predicted", "ratio", "FLOPs", "traffic", "fits"]
    rows = [[*head, "step", "predicted"] if is_timed else head]
    for number, finalist in enumerate(finalists, 1):
        row = [f"  {number}", *_row(finalist)]
        if is_timed:
            step = seconds_text(finalist.forecast.roofline.step)
            seconds = finalist.seconds
            row += ["-" if seconds is None else seconds_text(seconds), step]
        rows.append(row)
    lines = [align(rows, right=range(1, len(rows[0])))]
    lines += [f"  {n}: {f.refused}" for n, f in enumerate(finalists, 1) if f.refused]
    if is_timed:
        lines.append(f"  {order(finalists)}")
    return "\n".join(lines)


def _row(finalist: Finalist) -> list[str]:
    forecast, compiled = finalist.forecast, finalist.compiled
    peak = forecast.memory.peak
    if compiled is None:
        return ["-", human_bytes(peak), "-", "-", "-", "no"]
    expected = sum(t.bytes for t in forecast.transfers)
    sent = sum(count for *_, count in compiled.collectives)
    return [
        human_bytes(compiled.peak),
        human_bytes(peak),
        f"{peak / compiled.peak:.3f}",
        f"{forecast.flops.executed / compiled.flops:.3f}",
        f"{expected / sent:.3f}" if sent else "-",
        "yes" if finalist.fits else "no",
    ]


def order(finalists: Sequence[Finalist]) -> str:
    """Says whether the compiled programs rank as their forecasts do."""
    timed = {n: f.seconds for n, f in enumerate(finalists, 1) if f.seconds is not None}
    by = sorted(timed, key=lambda n: timed[n])
    if by == list(timed):
        return "The order holds."
    return f"It does not hold: by the compiled step it is {', '.join(map(str, by))}."
