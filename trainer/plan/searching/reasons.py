"""Why other candidates of a search lost to the best one, in one line each.

Candidates are grouped by one setting: all with tensor=8, all with remat none. The
fastest of such a group stands for it, or the leanest if none fits. The reason is in its
own numbers: the part of the step that grew most against the best, or what fills its
memory.
"""

import collections
import dataclasses
from collections.abc import Iterable

from ....sharding.text import human_bytes
from ..predict import Forecast
from ..traffic import sum_by
from .candidates import Choice
from .searching import Candidate, Search

SHOWN_AXES = ("data", "tensor", "pipe")
# How many other values of a setting are shown, those that lose by least first.
SHOWN = 3


@dataclasses.dataclass(frozen=True)
class Reason:
    """One group of candidates that is not the best.

    Attributes:
      kind: what they have in common, such as "tensor=8".
      forecast: of the best of them.
      slower: its time relative to the best; None if it does not fit.
      why: the cause, in words.
    """

    kind: str
    forecast: Forecast
    slower: float | None
    why: str

    def __str__(self) -> str:
        best_of_kind = f"{self.why} ({self.forecast.case.spec})"
        if self.slower is None:
            return f"{self.kind} does not fit: {best_of_kind}"
        more = self.slower - 1
        if more < 0.0005:
            return f"{self.kind} is no faster: {best_of_kind}"
        return f"{self.kind} loses by {more:.1%}: {best_of_kind}"


def reasons(found: Search) -> list[Reason]:
    """Returns the reasons of the groups that come closest, for every setting."""
    best = found.best_forecast
    if found.best is None or best is None:
        return []
    first = found.best.choice
    own = kinds(first, first)
    groups: dict[str, dict[str, list[Candidate]]] = collections.defaultdict(dict)
    for candidate in found.candidates:
        for thing, kind in kinds(candidate.choice, first).items():
            if kind != own.get(thing, kind):
                groups[thing].setdefault(kind, []).append(candidate)
    result = []
    for by_kind in groups.values():
        each = [_reason(found, best, kind, group) for kind, group in by_kind.items()]
        result += sorted(each, key=_how_near)[:SHOWN]
    return result


def kinds(choice: Choice, best: Choice) -> dict[str, str]:
    """Names what a choice sets; microbatches only where all else is the best's."""
    mesh, num = choice.mesh, choice.num_microbatches
    found = {axis: f"{axis}={getattr(mesh, axis)}" for axis in SHOWN_AXES}
    found["remat"] = f"remat {choice.remat}"
    if choice.schedule:
        found["schedule"] = f"schedule {choice.schedule}"
    if dataclasses.replace(best, num_microbatches=num) == choice:
        found["microbatches"] = f"the best with num_microbatches={num}"
    return found


def _how_near(reason: Reason) -> tuple[bool, float]:
    if reason.slower is None:
        return True, reason.forecast.memory.peak
    return False, reason.slower


def _reason(
    found: Search, best: Forecast, kind: str, group: Iterable[Candidate]
) -> Reason:
    fitting = [c for c in group if c.seconds is not None]
    if not fitting:
        lean = found.leanest(group)
        return Reason(kind, lean, None, why_not(lean))
    one = found.forecast(min(fitting, key=lambda c: (c.seconds, c.peak)))
    slower = one.seconds_an_example / best.seconds_an_example
    return Reason(kind, one, slower, why_slower(one, best))


def why_not(forecast: Forecast) -> str:
    """Says how much too large a forecast is, and what is largest in it."""
    usable = forecast.target.device.usable
    share = forecast.memory.peak / usable
    if forecast.memory.arguments > usable:
        state = forecast.memory.arguments / usable
        return f"{share:.0%} of memory at the least, the state alone {state:.0%}"
    sizes = sum_by((part.name, part.bytes) for part in forecast.memory.parts)
    name, size = max(sizes.items(), key=lambda item: item[1])
    words = f"{share:.0%} of memory at the least, most of it {name}"
    return f"{words}, {human_bytes(size)}"


def causes(forecast: Forecast) -> dict[str, float]:
    """Returns where the seconds of a step go, bubbles apart."""
    parts = forecast.roofline.waits
    if forecast.case.pipeline is not None:
        blocks = forecast.flops.blocks / forecast.target.device.flops
        bubble = blocks * forecast.case.pipeline.simulation.bubble
        parts["compute"] -= bubble
        parts["bubble"] = bubble
    return parts


def why_slower(forecast: Forecast, best: Forecast) -> str:
    """Names the part of the step that grew most, in seconds per example."""
    mine, others = (
        {name: s / p.config.batch_size for name, s in causes(p).items()}
        for p in (forecast, best)
    )
    name = max(mine, key=lambda name: mine[name] - others.get(name, 0.0))
    share = mine[name] / forecast.seconds_an_example
    before = others.get(name, 0.0) / best.seconds_an_example
    if name == "compute":
        own, least = (p.flops.executed / p.flops.model for p in (forecast, best))
        return f"it executes {own:.2f} of the model's FLOPs, the best {least:.2f}"
    where = {"bubble": "bubble", "memory": "on the device's memory"}.get(
        name, f"on the {name.removeprefix('network, ')} axis"
    )
    return f"{share:.0%} of the step is {where}, {before:.0%} of the best's"
