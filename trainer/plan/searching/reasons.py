"""Why other plans of a search lost to the best one, in one line each.

Plans are put together by one thing that they set: all with tensor=8, all with remat
none. The fastest of such a kind stands for it, or where none fits, the leanest. Its
reason is what its own numbers say: the part of the step that grew most against the
best, or what fills its memory.
"""

import collections
import dataclasses
from collections.abc import Iterable

from ....sharding.text import human_bytes
from ..predict import Plan
from .candidates import Choice
from .searching import Candidate, Search

# Of each thing, so many other values are shown, those that lose by least first.
SHOWN = 3


@dataclasses.dataclass(frozen=True)
class Reason:
    """One kind of plan that is not the best.

    Attributes:
      kind: what its plans have in common, such as "tensor=8".
      plan: the best of them.
      slower: its time against the best's, 1 being equal; None where it does not fit.
      why: the cause, in words.
    """

    kind: str
    plan: Plan
    slower: float | None
    why: str

    def __str__(self) -> str:
        best_of_kind = f"{self.why} ({self.plan.case.spec})"
        if self.slower is None:
            return f"{self.kind} does not fit: {best_of_kind}"
        more = self.slower - 1
        if more < 0.0005:
            return f"{self.kind} is no faster: {best_of_kind}"
        return f"{self.kind} loses by {more:.1%}: {best_of_kind}"


def reasons(found: Search) -> list[Reason]:
    """Of every kind that is not the best's, the likeliest ones."""
    if found.best is None:
        return []
    first = found.best.choice
    best, own = found.plan(found.best), kinds(first, first)
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
    """What a choice sets, in the words of a reason; microbatches on the best's mesh."""
    mesh, num = choice.mesh, choice.num_microbatches
    found = {
        axis: f"{axis}={getattr(mesh, axis)}" for axis in ("data", "tensor", "pipe")
    }
    found["remat"] = f"remat {choice.remat}"
    if choice.schedule:
        found["schedule"] = f"schedule {choice.schedule}"
    if dataclasses.replace(best, num_microbatches=num) == choice:
        found["microbatches"] = f"the best with num_microbatches={num}"
    return found


def _how_near(reason: Reason) -> tuple[bool, float]:
    if reason.slower is None:
        return True, reason.plan.memory.peak
    return False, reason.slower


def _reason(found: Search, best: Plan, kind: str, group: Iterable[Candidate]) -> Reason:
    fitting = [c for c in group if c.seconds is not None]
    if not fitting:
        plan = found.leanest(group)
        return Reason(kind, plan, None, why_not(plan))
    plan = found.plan(min(fitting, key=lambda c: (c.seconds, c.peak)))
    slower = plan.seconds_an_example / best.seconds_an_example
    return Reason(kind, plan, slower, why_slower(plan, best))


def why_not(plan: Plan) -> str:
    """How much too large a plan is, and what is largest in it."""
    usable = plan.target.device.usable
    share = plan.memory.peak / usable
    if plan.memory.arguments > usable:
        state = plan.memory.arguments / usable
        return f"{share:.0%} of memory at the least, the state alone {state:.0%}"
    sizes: dict[str, int] = collections.Counter()
    for part in plan.memory.parts:
        sizes[part.name] += part.bytes
    name = max(sizes, key=lambda name: sizes[name])
    return (
        f"{share:.0%} of memory at the least, most of it {name}, "
        f"{human_bytes(sizes[name])}"
    )


def causes(plan: Plan) -> dict[str, float]:
    """Where the seconds of a step go, those of bubbles apart."""
    parts = plan.roofline.waits
    if plan.case.pipeline is not None:
        blocks = plan.flops.blocks / plan.target.device.flops
        bubble = blocks * plan.case.pipeline.simulation.bubble
        parts["compute"] -= bubble
        parts["bubble"] = bubble
    return parts


def why_slower(plan: Plan, best: Plan) -> str:
    """The part of the step that grew most, in seconds of an example."""
    mine, others = (
        {name: s / p.config.batch_size for name, s in causes(p).items()}
        for p in (plan, best)
    )
    name = max(mine, key=lambda name: mine[name] - others.get(name, 0.0))
    share = mine[name] / plan.seconds_an_example
    before = others.get(name, 0.0) / best.seconds_an_example
    if name == "compute":
        ratios = [p.flops.executed / p.flops.model for p in (plan, best)]
        return "it executes {:.2f} of the model's FLOPs, the best {:.2f}".format(
            *ratios
        )
    where = {
        "bubble": "is bubble",
        "memory": "is on the device's memory",
    }.get(name, f"is on the {name.removeprefix('network, ')} axis")
    return f"{share:.0%} of the step {where}, {before:.0%} of the best's"
