"""How the best plan of a config scales with the number of devices.

strong  the same batch at every size: a step takes less time, until it is too small
weak    the same batch for each device as on the target: a step takes as long
"""

import dataclasses
import fractions
from typing import TYPE_CHECKING, Literal, get_args

from ...program.hardware import Target, parse_target, sizes_of
from ..predict import Plan
from .searching import Candidate, Progress, Search, search

if TYPE_CHECKING:
    from ...run.train import Config

Kind = Literal["strong", "weak"]
KINDS: tuple[Kind, ...] = get_args(Kind)
LEAST, MOST = 8, 4096


@dataclasses.dataclass(frozen=True)
class Point:
    """The search on one number of devices.

    Attributes:
      plan: the best; None where nothing fits.
      efficiency: examples a second of each device, against the smallest that fits.
    """

    found: Search
    best: Candidate | None
    plan: Plan | None
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
      batch: batch_size instead of the config's; for "weak" that of the target.
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
    plan = found.plan(found.best)
    first = next((p.plan for p in before if p.plan is not None), plan)
    return Point(found, found.best, plan, device_rate(plan) / device_rate(first))


def device_rate(plan: Plan) -> float:
    """Examples a second for each device."""
    return 1 / plan.seconds_an_example / plan.target.num_devices
