"""Searches for the best way to lay a config out on a target, by the closed form.

Memory is a hard limit; among candidates that fit, `Forecast.seconds_an_example`
decides. A mesh on which the state alone is too large is skipped as a whole: that is
known before any forecast is made.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ...program.hardware import Target, parse_target
from ..memory import state_parts
from ..predict import Forecast
from ..scenario import make_case
from .candidates import Choice, all_choices

if TYPE_CHECKING:
    from ...run.train import Config

Progress = Callable[[int, int], None]  # candidates looked at, of which fit


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A choice and its cost.

    Attributes:
      peak: bytes on a device; on a mesh that was skipped, those of the state alone.
      seconds: per example; None if it does not fit.
      is_bound: whether `peak` is only a lower bound.
    """

    choice: Choice
    peak: int
    seconds: float | None
    is_bound: bool = False


@dataclasses.dataclass(frozen=True)
class Search:
    """Everything that was looked at; `took` is in seconds."""

    config: "Config"
    target: Target
    candidates: tuple[Candidate, ...]
    num_meshes: int
    took: float

    @functools.cached_property
    def fitting(self) -> tuple[Candidate, ...]:
        """Candidates that fit, the fastest first, then those of least memory."""
        found = [c for c in self.candidates if c.seconds is not None]
        return tuple(sorted(found, key=lambda c: (c.seconds, c.peak)))

    @property
    def best(self) -> Candidate | None:
        return self.fitting[0] if self.fitting else None

    def finalists(self, num: int) -> list[Candidate]:
        """Returns the best few, one for each mesh."""
        firsts: dict[str, Candidate] = {}
        for candidate in self.fitting:
            firsts.setdefault(str(candidate.choice.mesh), candidate)
        return list(firsts.values())[:num]

    def forecast(self, candidate: Candidate) -> Forecast:
        return Forecast(make_case(candidate.choice.of(self.config), self.target))

    def leanest(self, candidates: Iterable[Candidate] | None = None) -> Forecast:
        """Returns the forecast of least memory, of some candidates or of all.

        Of what was skipped only a lower bound is known, so those that could be the
        leanest are forecast, the likeliest first.
        """
        best: Forecast | None = None
        if candidates is None:
            candidates = self.candidates
        for candidate in sorted(candidates, key=lambda c: c.peak):
            if best is not None and candidate.peak >= best.memory.peak:
                break
            found = self.forecast(candidate)
            if best is None or found.memory.peak < best.memory.peak:
                best = found
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
      batch: replaces the config's batch_size.
      progress: is called after every mesh.
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
        one = Forecast(make_case(choice.of(config), target))
        seconds = one.seconds_an_example if one.fits else None
        found.append(Candidate(choice, one.memory.peak, seconds))
    return found
