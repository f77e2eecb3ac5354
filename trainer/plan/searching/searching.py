"""The best of all plans for a config on a target, by the closed form.

Memory is a hard limit; among the plans that fit, `Plan.seconds_an_example` decides.
A mesh on which the state alone is too much is passed over whole: that much is known
before any of its plans is made.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ...program.hardware import Target, parse_target
from ..memory import state_parts
from ..predict import Plan
from ..scenario import make_case
from .candidates import Choice, all_choices

if TYPE_CHECKING:
    from ...run.train import Config

Progress = Callable[[int, int], None]  # plans looked at, of which fit


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A choice and what became of it.

    Attributes:
      peak: bytes of a device; of a mesh that was passed over, those of the state alone.
      seconds: of an example; None where it does not fit.
      is_bound: whether `peak` is only what the plan needs at the least.
    """

    choice: Choice
    peak: int
    seconds: float | None
    is_bound: bool = False


@dataclasses.dataclass(frozen=True)
class Search:
    """All that was looked at; `took` is in seconds."""

    config: "Config"
    target: Target
    candidates: tuple[Candidate, ...]
    num_meshes: int
    took: float

    @functools.cached_property
    def fitting(self) -> tuple[Candidate, ...]:
        """Those that fit, the fastest first, and of equal ones that of least memory."""
        found = [c for c in self.candidates if c.seconds is not None]
        return tuple(sorted(found, key=lambda c: (c.seconds, c.peak)))

    @property
    def best(self) -> Candidate | None:
        return self.fitting[0] if self.fitting else None

    def finalists(self, num: int) -> list[Candidate]:
        """The best few, of each mesh the best one."""
        firsts: dict[str, Candidate] = {}
        for candidate in self.fitting:
            firsts.setdefault(str(candidate.choice.mesh), candidate)
        return list(firsts.values())[:num]

    def plan(self, candidate: Candidate) -> Plan:
        return Plan(make_case(candidate.choice.of(self.config), self.target))

    def leanest(self, candidates: Iterable[Candidate] | None = None) -> Plan:
        """The plan of least memory, of some candidates or of all.

        Of what was passed over only what it needs at the least is known, so the plans
        that could be the leanest are made, the likeliest first.
        """
        best: Plan | None = None
        if candidates is None:
            candidates = self.candidates
        for candidate in sorted(candidates, key=lambda c: c.peak):
            if best is not None and candidate.peak >= best.memory.peak:
                break
            plan = self.plan(candidate)
            if best is None or plan.memory.peak < best.memory.peak:
                best = plan
        assert best is not None
        return best


def search(
    config: "Config",
    target: Target | str,
    *,
    batch: int | None = None,
    progress: Progress | None = None,
) -> Search:
    """Looks at every way to lay a config out on a target.

    Args:
      batch: batch_size instead of the config's.
      progress: is called now and then.
    """
    if isinstance(target, str):
        target = parse_target(target)
    if batch is not None:
        config = dataclasses.replace(config, batch_size=batch)
    begin, num_meshes = time.perf_counter(), 0
    found: list[Candidate] = []
    num_fit = 0
    for case, choices in all_choices(config, target):
        num_meshes += 1
        state = sum(part.bytes for part in state_parts(case))
        if state > target.device.usable:
            found += [Candidate(c, state, None, is_bound=True) for c in choices]
        else:
            found += _tried(config, target, choices)
            num_fit += sum(c.seconds is not None for c in found[-len(choices) :])
        if progress is not None:
            progress(len(found), num_fit)
    took = time.perf_counter() - begin
    return Search(config, target, tuple(found), num_meshes, took)


def _tried(
    config: "Config", target: Target, choices: Iterable[Choice]
) -> list[Candidate]:
    found = []
    for choice in choices:
        plan = Plan(make_case(choice.of(config), target))
        seconds = plan.seconds_an_example if plan.fits else None
        found.append(Candidate(choice, plan.memory.peak, seconds))
    return found
