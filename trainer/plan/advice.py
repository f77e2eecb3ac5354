"""Which changes would make a plan fit, the cheapest first.

All that a search looks at on the same devices is a change, and so is a smaller batch.
Few settings go before many, and among as many those that add least time to an example.
"""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...sharding import MeshSpec
from .case import make_case
from .predict import Plan
from .searching.candidates import ONE_CHUNK, Choice
from .searching.searching import search

if TYPE_CHECKING:
    from ..train import Config

Flags = tuple[tuple[str, str], ...]  # (what is changed, the flag), each once


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
    """The cheapest changes with which the plan fits; fewer where there are no more.

    Each changes other settings. One that changes more than another is worth a line only
    if it is faster.
    """
    firsts: dict[frozenset[str], tuple[float, Flags, Config]] = {}
    for seconds, flags, config in (*_searched(plan), *_fewer(plan)):
        things = frozenset(thing for thing, _ in flags)
        if things not in firsts or seconds < firsts[things][0]:
            firsts[things] = seconds, flags, config
    found: dict[frozenset[str], float] = {}
    result = []
    for things in sorted(firsts, key=lambda t: (len(t), firsts[t][0])):
        seconds, flags, config = firsts[things]
        if any(less <= things and found[less] <= seconds for less in found):
            continue
        found[things] = seconds
        changed = Plan(make_case(config, plan.target))
        slower = seconds / plan.seconds_an_example
        result.append(Change(tuple(flag for _, flag in flags), changed, slower))
    return result[:num]


def _searched(plan: Plan) -> Iterator[tuple[float, Flags, "Config"]]:
    derived: dict[Choice, int] = {}
    for candidate in search(plan.config, plan.target).fitting:
        choice = candidate.choice
        flags = _flags(choice, plan, derived)
        assert candidate.seconds is not None
        yield candidate.seconds, flags, choice.of(plan.config)


def _flags(choice: Choice, plan: Plan, derived: dict[Choice, int]) -> Flags:
    """What a choice sets otherwise than the plan."""
    config, case, found = plan.config, plan.case, {}
    if str(choice.mesh) != str(MeshSpec(**case.sizes, dcn=case.spec.dcn)):
        found["mesh"] = f"--mesh {choice.mesh}"
    if choice.remat is not None and choice.remat != getattr(
        config.model, "remat", None
    ):
        found["remat"] = f"--set model.remat='\"{choice.remat}\"'"
    if choice.schedule and choice.schedule != config.pipeline.schedule:
        found["schedule"] = f"--set pipeline.schedule='\"{choice.schedule}\"'"
    # Of interleaved, 2 chunks are what it has by itself.
    if choice.schedule and choice.schedule not in ONE_CHUNK:
        if choice.num_chunks != (config.pipeline.num_chunks or 2):
            found["schedule"] = (
                f"{found.get('schedule', '')} --set "
                f"pipeline.num_chunks={choice.num_chunks}"
            ).strip()
    if choice.num_microbatches != _num_microbatches(choice, plan, derived):
        found["microbatches"] = f"--set num_microbatches={choice.num_microbatches}"
    return tuple(found.items())


def _num_microbatches(choice: Choice, plan: Plan, derived: dict[Choice, int]) -> int:
    """What a run takes with all of a choice but its microbatches."""
    config = plan.config
    if config.num_microbatches is not None or not choice.schedule:
        return config.num_microbatches or 1
    key = dataclasses.replace(choice, remat=None, num_microbatches=1)
    if key not in derived:
        free = dataclasses.replace(key.of(config), num_microbatches=None)
        derived[key] = make_case(free, plan.target).num_microbatches
    return derived[key]


def _fewer(plan: Plan) -> Iterator[tuple[float, Flags, "Config"]]:
    """Half of the examples, a quarter and so on, as far as they divide."""
    config = plan.config
    parts = plan.case.ways(("batch",), (config.batch_size,))
    parts *= config.num_microbatches or 1
    rows = config.batch_size // 2
    while rows >= parts and not rows % parts:
        fewer = dataclasses.replace(config, batch_size=rows)
        changed = Plan(make_case(fewer, plan.target))
        if changed.fits:
            yield changed.seconds_an_example, (("batch", f"--batch {rows}"),), fewer
        rows //= 2
