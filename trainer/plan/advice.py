"""Which changes would make a plan fit, the cheapest first.

Tried one at a time: what the backward pass recomputes, how many parts the batch is
computed in, other meshes of the same devices, and fewer examples; where these are too
few, each together with full remat and as many parts as there can be. Cheap is what adds
least time to an example by the roofline.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ...models.remat import Remat
from ...sharding import MeshSpec
from ...sharding.plans import BATCH_AXES
from .case import make_case
from .predict import Plan

if TYPE_CHECKING:
    from ..train import Config

# From what keeps most to what keeps least.
POLICIES: tuple[Remat, ...] = ("none", "save-named", "save-dots", "full")
MOVED = ("data", "fsdp", "tensor", "pipe")
Candidate = tuple[tuple[str, ...], "Config"]


@dataclasses.dataclass(frozen=True)
class Change:
    """What to set, as flags of the command line, and the plan that it makes."""

    flags: tuple[str, ...]
    plan: Plan
    slower: float  # time of an example against the plan as it is, 1 being equal

    def __str__(self) -> str:
        device = self.plan.target.device
        share = self.plan.memory.peak / device.usable
        more = self.slower - 1
        words = f"{more:+.0%} time an example" if abs(more) >= 0.005 else "no slower"
        return f"{' '.join(self.flags)}: {share:.0%} of memory, {words}"


def cheapest_changes(plan: Plan, num: int = 3) -> list[Change]:
    """The cheapest changes with which the plan fits; fewer where there are no more."""
    found = _cheapest_of_each_kind(_fitting(plan, _single(plan)))
    if len(found) < num:
        found += _cheapest_of_each_kind(_fitting(plan, _together(plan)))
    return found[:num]


def _together(plan: Plan) -> Iterator[Candidate]:
    """Other meshes and fewer examples, with least kept and most microbatches."""
    model: Any = plan.config.model
    remat = () if model.remat == POLICIES[-1] else _remat_flag(POLICIES[-1])
    least = dataclasses.replace(model, remat=POLICIES[-1])
    mesh = MeshSpec(**plan.case.sizes, dcn=plan.case.spec.dcn)
    base = dataclasses.replace(plan.config, model=least, mesh=mesh)
    yield from (((*remat, *flags), found) for flags, found in _microbatches(base, plan))
    for flags, config in (*_meshes(base, plan), *_fewer(base)):
        ways = math.prod(getattr(config.mesh, axis) for axis in BATCH_AXES)
        num = max(1, config.batch_size // ways)
        most = (f"--set num_microbatches={num}",)
        config = dataclasses.replace(config, num_microbatches=num)
        yield (*remat, *most, *flags), config


def _cheapest_of_each_kind(changes: list[Change]) -> list[Change]:
    firsts: dict[Any, Change] = {}
    for change in sorted(changes, key=lambda change: change.slower):
        kind = tuple(re.split("=| (?!model|num)", flag)[0] for flag in change.flags)
        firsts.setdefault(kind, change)
    return list(firsts.values())


def _remat_flag(remat: Remat) -> tuple[str, ...]:
    return (f"--set model.remat='\"{remat}\"'",)


def _fitting(plan: Plan, candidates: Iterable[Candidate]) -> list[Change]:
    found = []
    for flags, config in candidates:
        try:
            changed = Plan(make_case(config, plan.target))
        except ValueError:
            continue  # sizes that do not divide: no candidate
        if changed.fits:
            ratio = changed.seconds_an_example / plan.seconds_an_example
            found.append(Change(flags, changed, ratio))
    return found


def _single(plan: Plan) -> Iterator[Candidate]:
    config = plan.config
    model: Any = config.model
    for remat in POLICIES[POLICIES.index(model.remat) + 1 :]:
        changed = dataclasses.replace(model, remat=remat)
        yield _remat_flag(remat), dataclasses.replace(config, model=changed)
    yield from _microbatches(config, plan)
    yield from _meshes(config, plan)
    yield from _fewer(config)


def _microbatches(config: "Config", plan: Plan) -> Iterator[Candidate]:
    num = 2 * plan.case.num_microbatches
    while num <= config.batch_size:
        flags = (f"--set num_microbatches={num}",)
        yield flags, dataclasses.replace(config, num_microbatches=num)
        num *= 2


def _fewer(config: "Config") -> Iterator[Candidate]:
    rows = config.batch_size // 2
    while rows >= 1:
        yield (f"--batch {rows}",), dataclasses.replace(config, batch_size=rows)
        rows //= 2


def _meshes(config: "Config", plan: Plan) -> Iterator[Candidate]:
    """Meshes with a power of 2 moved from one axis to another."""
    spec, sizes = plan.case.spec, plan.case.sizes
    dcn, num_layers = spec.dcn or {}, config.model.num_layers  # type: ignore
    for source in MOVED:
        room = sizes[source] // dcn.get(source, 1)
        for power in range(1, int(math.log2(room)) + 1):
            if room % 2**power:
                break
            for goal in MOVED:
                moved = {
                    source: sizes[source] // 2**power,
                    goal: sizes[goal] * 2**power,
                }
                # A schedule takes long to lay out, so only stages of whole layers.
                if goal != source and not num_layers % moved.get("pipe", 1):
                    mesh = MeshSpec(**(sizes | moved), dcn=spec.dcn)
                    yield (f"--mesh {mesh}",), dataclasses.replace(config, mesh=mesh)
