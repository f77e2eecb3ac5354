"""Searches for the best way to lay a config out, on one target or on its usual sizes.

Memory is a hard limit; among candidates that fit, `Forecast.seconds_an_example` of the
closed form decides. A mesh on which the state alone is too large is skipped as a whole:
that is known before any forecast is made.

How the best candidate scales is one of two questions:

  strong  the same batch at every size: a step takes less time, until it is too small
  weak    the same batch for each device as on the target: a step takes as long
"""

import dataclasses
import fractions
import functools
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Literal, get_args

from ....sharding.text import counted
from ...program.hardware import Target, parse_target, sizes_of
from ..memory import state_parts
from ..predict import Forecast
from ..scenario import make_case
from .candidates import Choice, all_choices, in_fitting_blocks

if TYPE_CHECKING:
    from ...run.train import Config

Progress = Callable[[int, int], None]  # candidates looked at, of which fit
Kind = Literal["strong", "weak"]
KINDS: tuple[Kind, ...] = get_args(Kind)
LEAST, MOST = 8, 4096  # devices of which scaling is shown


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
    """Everything that was looked at; `took` is in seconds.

    Attributes:
      efficiency: in `scaling`, examples per second and device of the best, relative to
        the smallest number of devices on which anything fits; None where nothing does.
    """

    config: "Config"
    target: Target
    candidates: tuple[Candidate, ...]
    num_meshes: int
    took: float
    efficiency: float | None = None

    @functools.cached_property
    def fitting(self) -> tuple[Candidate, ...]:
        """Candidates that fit, the fastest first, then those of least memory."""
        found = [c for c in self.candidates if c.seconds is not None]
        return tuple(sorted(found, key=lambda c: (c.seconds, c.peak)))

    @property
    def best(self) -> Candidate | None:
        return self.fitting[0] if self.fitting else None

    @functools.cached_property
    def best_forecast(self) -> Forecast | None:
        return self.forecast(self.best) if self.best else None

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
    begin, num_meshes, num_fit = time.perf_counter(), 0, 0
    found: list[Candidate] = []
    for case, choices in all_choices(config, target):
        num_meshes += 1
        state = sum(part.bytes for part in state_parts(case))
        for choice in choices:
            if state > target.device.usable:
                found.append(Candidate(choice, state, None, is_bound=True))
                continue
            one = Forecast(make_case(choice.of(config), target))
            choice, one = in_fitting_blocks(choice, one)
            seconds = one.seconds_an_example if one.fits else None
            found.append(Candidate(choice, one.memory.peak, seconds))
            num_fit += one.fits
        if progress is not None:
            progress(len(found), num_fit)
    took = time.perf_counter() - begin
    return Search(config, target, tuple(found), num_meshes, took)


def smallest(
    config: "Config",
    target: Target,
    *,
    more_than: int = 0,
    progress: Progress | None = None,
) -> Search | None:
    """Searches one usual size after the other; None if the largest is too small.

    Args:
      target: any number of devices of the kind.
      more_than: sizes up to this are known to be too small.
    """
    for size in sizes_of(target):
        if size.num_devices > more_than:
            found = search(config, size, progress=progress)
            if found.best is not None:
                return found
    return None


def in_words(found: Search | None, target: Target) -> str:
    if found is None:
        return f"It fits on no usual number of {target.device.name}."
    devices = counted(found.target.num_devices, "device")
    return f"The smallest on which it trains is {found.target.name}: {devices}."


def scaling(
    config: "Config",
    target: Target,
    kind: Kind,
    *,
    least: int = LEAST,
    most: int = MOST,
    progress: Progress | None = None,
) -> list[Search]:
    """Searches at every usual size of the target's kind of device."""
    each = fractions.Fraction(config.batch_size, target.num_devices)
    points: list[Search] = []
    first: Forecast | None = None
    for size in sizes_of(target, most):
        rows = config.batch_size if kind == "strong" else each * size.num_devices
        if size.num_devices < least or int(rows) != rows:
            continue
        found = search(config, size, batch=int(rows), progress=progress)
        if best := found.best_forecast:
            first = first or best
            efficiency = device_rate(best) / device_rate(first)
            found = dataclasses.replace(found, efficiency=efficiency)
        points.append(found)
    return points


def device_rate(found: Forecast) -> float:
    """Returns examples per second and device."""
    return 1 / found.seconds_an_example / found.target.num_devices
