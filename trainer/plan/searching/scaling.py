"""On how many devices a config trains: the fewest, and how the best candidate scales.

strong  the same batch at every size: a step takes less time, until it is too small
weak    the same batch for each device as on the target: a step takes as long
"""

import dataclasses
import fractions
from typing import TYPE_CHECKING, Literal, get_args

from ...program.hardware import Target, parse_target, sizes_of
from ..predict import Forecast
from .searching import Candidate, Progress, Search, search

if TYPE_CHECKING:
    from ...run.train import Config

Kind = Literal["strong", "weak"]
KINDS: tuple[Kind, ...] = get_args(Kind)
LEAST, MOST = 8, 4096


def smallest(
    config: "Config",
    target: Target,
    *,
    batch: int | None = None,
    more_than: int = 0,
    progress: Progress | None = None,
) -> Search | None:
    """Searches one usual size after the other; None if the largest is too small.

    Args:
      target: any number of devices of the kind.
      batch: replaces the config's batch_size; it is the same at every size.
      more_than: sizes up to this are known to be too small.
    """
    for size in sizes_of(target):
        if size.num_devices > more_than:
            found = search(config, size, batch=batch, progress=progress)
            if found.best is not None:
                return found
    return None


def in_words(found: Search | None, target: Target) -> str:
    if found is None:
        return f"It fits on no usual number of {target.device.name}."
    num = found.target.num_devices
    devices = f"{num} device{'s' if num > 1 else ''}"
    return f"The smallest on which it trains is {found.target.name}: {devices}."


@dataclasses.dataclass(frozen=True)
class Point:
    """The search on one number of devices.

    Attributes:
      forecast: of the best candidate; None where nothing fits.
      efficiency: examples per second and device, relative to the smallest that fits.
    """

    found: Search
    best: Candidate | None
    forecast: Forecast | None
    efficiency: float | None

    @property
    def num_devices(self) -> int:
        return self.found.target.num_devices

    @property
    def batch(self) -> int:
        return self.found.config.batch_size


def scaling(
    config: "Config",
    target: Target | str,
    kind: Kind,
    *,
    batch: int | None = None,
    least: int = LEAST,
    most: int = MOST,
    progress: Progress | None = None,
) -> list[Point]:
    """Searches at every usual size of the target's kind of device.

    Args:
      batch: replaces the config's batch_size; for "weak" that of the target.
    """
    if isinstance(target, str):
        target = parse_target(target)
    total = config.batch_size if batch is None else batch
    each = fractions.Fraction(total, target.num_devices)
    points: list[Point] = []
    for size in sizes_of(target, most):
        rows = total if kind == "strong" else each * size.num_devices
        if size.num_devices < least or int(rows) != rows:
            continue
        found = search(config, size, batch=int(rows), progress=progress)
        points.append(_point(found, points))
    return points


def _point(found: Search, before: list[Point]) -> Point:
    if found.best is None:
        return Point(found, None, None, None)
    best = found.forecast(found.best)
    first = next((p.forecast for p in before if p.forecast is not None), best)
    return Point(found, found.best, best, device_rate(best) / device_rate(first))


def device_rate(found: Forecast) -> float:
    """Returns examples per second and device."""
    return 1 / found.seconds_an_example / found.target.num_devices
