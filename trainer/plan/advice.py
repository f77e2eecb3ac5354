"""Which changes would make a plan fit, the cheapest first.

All that a search looks at on the same devices is a change, and so is a smaller batch.
Few settings go before many, and among as many those that add least time to an example.
"""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ...sharding import MeshSpec
from ...sharding.plans import AUTO
from ..program.pipelining import Pipelining
from . import predict
from .predict import Plan
from .searching.candidates import ONE_CHUNK, Choice
from .searching.searching import search

if TYPE_CHECKING:
    from ..run.train import Config

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
        changed = predict.plan(config, plan.target)
        if not changed.fits:  # what is open was chosen otherwise than the search did
            continue
        found[things] = seconds
        slower = changed.seconds_an_example / plan.seconds_an_example
        result.append(Change(tuple(flag for _, flag in flags), changed, slower))
    return result[:num]


def _searched(plan: Plan) -> Iterator[tuple[float, Flags, "Config"]]:
    for candidate in search(plan.given, plan.target).fitting:
        flags, config = _changed(candidate.choice, plan)
        assert candidate.seconds is not None
        if flags:
            yield candidate.seconds, flags, config


def _changed(choice: Choice, plan: Plan) -> tuple[Flags, "Config"]:
    """What a choice sets otherwise than the config, and the config with that.

    What the config leaves open it need not set: that is chosen again.
    """
    given, case, found = plan.given, plan.case, {}
    changed: dict[str, Any] = {}
    if str(choice.mesh) != str(MeshSpec(**case.sizes, dcn=case.spec.dcn)):
        found["mesh"], changed["mesh"] = f"--mesh {choice.mesh}", choice.mesh
    model: Any = given.model
    if choice.remat is not None and choice.remat != getattr(model, "remat", None):
        found["remat"] = f"--set model.remat='\"{choice.remat}\"'"
        changed["model"] = dataclasses.replace(model, remat=choice.remat)
    pipeline, flags = given.pipeline, []
    if choice.schedule and pipeline.schedule not in (AUTO, choice.schedule):
        flags.append(f"--set pipeline.schedule='\"{choice.schedule}\"'")
        pipeline = Pipelining(schedule=choice.schedule, gather=pipeline.gather)
    if choice.schedule and choice.schedule not in ONE_CHUNK:
        if given.pipeline.num_chunks not in (None, choice.num_chunks):
            flags.append(f"--set pipeline.num_chunks={choice.num_chunks}")
            pipeline = dataclasses.replace(pipeline, num_chunks=choice.num_chunks)
    if flags:
        found["schedule"], changed["pipeline"] = " ".join(flags), pipeline
    if given.num_microbatches not in (None, choice.num_microbatches):
        found["microbatches"] = f"--set num_microbatches={choice.num_microbatches}"
        changed["num_microbatches"] = choice.num_microbatches
    return tuple(found.items()), dataclasses.replace(given, **changed)


def _fewer(plan: Plan) -> Iterator[tuple[float, Flags, "Config"]]:
    """Half of the examples, a quarter and so on, as far as they divide."""
    config = plan.given
    parts = plan.case.ways(("batch",), (config.batch_size,))
    parts *= config.num_microbatches or 1
    rows = config.batch_size // 2
    while rows >= parts and not rows % parts:
        fewer = dataclasses.replace(config, batch_size=rows)
        changed = predict.plan(fewer, plan.target)
        if changed.fits:
            yield changed.seconds_an_example, (("batch", f"--batch {rows}"),), fewer
        rows //= 2
