"""Which changes would make a config fit, the cheapest first.

Changes are all that a search looks at on the same devices, and smaller batches. Those
of fewer settings come first, then those that add the least time per example.
"""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ...sharding import MeshSpec
from ...sharding.plans import AUTO
from ..program.pipelining import Pipelining
from .predict import Forecast, forecast
from .searching.candidates import ONE_CHUNK, Choice
from .searching.searching import search

if TYPE_CHECKING:
    from ..run.train import Config

Flags = dict[str, str]  # what is changed, and the flag for it


@dataclasses.dataclass(frozen=True)
class Change:
    """What to set, as flags of the command line, and the forecast with it."""

    flags: tuple[str, ...]
    forecast: Forecast
    slower: float  # time per example relative to the config as it is

    def __str__(self) -> str:
        share = self.forecast.memory.peak / self.forecast.target.device.usable
        more = self.slower - 1
        words = f"{more:+.0%} time an example" if abs(more) >= 0.005 else "no slower"
        return f"{' '.join(self.flags)}: {share:.0%} of memory, {words}"


def cheapest_changes(given: Forecast, num: int = 3) -> list[Change]:
    """Returns up to `num` of the cheapest changes with which a config fits.

    Each changes other settings. One that changes more settings than another is listed
    only if it is faster.
    """
    firsts: dict[frozenset[str], tuple[float, Flags, Config]] = {}
    for seconds, flags, config in (*_searched(given), *_fewer(given)):
        things = frozenset(flags)
        if things not in firsts or seconds < firsts[things][0]:
            firsts[things] = seconds, flags, config
    found: dict[frozenset[str], float] = {}
    result = []
    for things in sorted(firsts, key=lambda t: (len(t), firsts[t][0])):
        seconds, flags, config = firsts[things]
        if any(less <= things and found[less] <= seconds for less in found):
            continue
        changed = forecast(config, given.target)
        if not changed.fits:  # open settings were not chosen as in the search
            continue
        found[things] = seconds
        slower = changed.seconds_an_example / given.seconds_an_example
        result.append(Change(tuple(flags.values()), changed, slower))
    return result[:num]


def _searched(given: Forecast) -> Iterator[tuple[float, Flags, "Config"]]:
    for candidate in search(given.given, given.target).fitting:
        flags, config = _changed(candidate.choice, given)
        assert candidate.seconds is not None
        if flags:
            yield candidate.seconds, flags, config


def _changed(choice: Choice, forecast: Forecast) -> tuple[Flags, "Config"]:
    """Returns the flags for what a choice changes, and the config with them.

    What the config leaves open needs no flag: it is chosen again.
    """
    given, case = forecast.given, forecast.case
    found: Flags = {}
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
    return found, dataclasses.replace(given, **changed)


def _fewer(given: Forecast) -> Iterator[tuple[float, Flags, "Config"]]:
    """Yields half of the examples, a quarter and so on, as far as they divide."""
    config = given.given
    parts = given.case.ways(("batch",), (config.batch_size,))
    parts *= config.num_microbatches or 1
    rows = config.batch_size // 2
    while rows >= parts and not rows % parts:
        fewer = dataclasses.replace(config, batch_size=rows)
        changed = forecast(fewer, given.target)
        if changed.fits:
            yield changed.seconds_an_example, {"batch": f"--batch {rows}"}, fewer
        rows //= 2
