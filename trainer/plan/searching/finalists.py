"""The best plans of a search, compiled one after the other for the target."""

import dataclasses
from collections.abc import Sequence

from ....sharding.text import align, human_bytes
from ..compile.compiled import Compiled, Refused, compile_step
from ..predict import Plan
from ..text import seconds_text


@dataclasses.dataclass(frozen=True)
class Finalist:
    """A plan and its program; None where the compiler `refused`, and why."""

    plan: Plan
    compiled: Compiled | None
    refused: str = ""

    @property
    def fits(self) -> bool:
        peak = self.compiled.peak if self.compiled else None
        return peak is not None and peak <= self.plan.target.device.usable

    @property
    def seconds(self) -> float | None:
        """Of a step, modelled from the compiled program; None: there is no model."""
        modelled = self.compiled and self.compiled.modelled
        return modelled["seconds"] if modelled else None


def compile_finalist(plan: Plan) -> Finalist:
    """A plan that the compiler refuses is a finalist too: others may still do."""
    try:
        return Finalist(plan, compile_step(plan))
    except Refused as error:
        return Finalist(plan, None, str(error))


def table(finalists: Sequence[Finalist]) -> str:
    """Predicted against compiled, and whether the order holds."""
    is_timed = any(f.seconds is not None for f in finalists)
    head = ["compiled", "peak", "predicted", "ratio", "FLOPs", "traffic", "fits"]
    rows = [[*head, "step", "predicted"] if is_timed else head]
    for number, finalist in enumerate(finalists, 1):
        row = [f"  {number}", *_row(finalist)]
        if is_timed:
            step = seconds_text(finalist.plan.roofline.step)
            seconds = finalist.seconds
            row += ["-" if seconds is None else seconds_text(seconds), step]
        rows.append(row)
    lines = [align(rows, right=range(1, len(rows[0])))]
    lines += [f"  {n}: {f.refused}" for n, f in enumerate(finalists, 1) if f.refused]
    if is_timed:
        lines.append(f"  {order(finalists)}")
    return "\n".join(lines)


def _row(finalist: Finalist) -> list[str]:
    plan, compiled = finalist.plan, finalist.compiled
    if compiled is None:
        return ["-", human_bytes(plan.memory.peak), "-", "-", "-", "no"]
    planned = sum(t.bytes for t in plan.transfers)
    sent = sum(count for *_, count in compiled.collectives)
    return [
        human_bytes(compiled.peak),
        human_bytes(plan.memory.peak),
        f"{plan.memory.peak / compiled.peak:.3f}",
        f"{plan.flops.executed / compiled.flops:.3f}",
        f"{planned / sent:.3f}" if sent else "-",
        "yes" if finalist.fits else "no",
    ]


def order(finalists: Sequence[Finalist]) -> str:
    """Whether the compiled programs rank as the plans do."""
    timed = {n: f.seconds for n, f in enumerate(finalists, 1) if f.seconds is not None}
    by = sorted(timed, key=lambda n: timed[n])
    if by == list(timed):
        return "The order holds."
    return f"It does not hold: by the compiled step it is {', '.join(map(str, by))}."
